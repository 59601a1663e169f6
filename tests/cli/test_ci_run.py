"""``.ci/run``: it takes the commands from the README, so that what the README says is what is tested."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"

pytestmark = pytest.mark.skipif(
    not SCRIPT.exists(), reason="CI's script is part of the repository, not of the sdist"
)


def shown(readme: Path) -> subprocess.CompletedProcess[str]:
    """What the script takes from a README."""
    environ = {**os.environ, "README": str(readme)}
    return subprocess.run(
        ["bash", str(SCRIPT), "--show"], env=environ, capture_output=True, text=True, timeout=60
    )


def test_the_block_after_the_marker_is_taken(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(
        "<!-- run -->\n```\nina demo\n```\n\n<!-- test -->\n\n```sh\npip install . &&\\\n  "
        "pytest\n\necho\n```\n```sh\nother\n```\n"
    )
    assert shown(readme).stdout == "pip install . &&\\\n  pytest\n\necho\n"


@pytest.mark.parametrize(
    "text", ["", "<!-- test -->\n", "<!-- test -->\nprose\n```\nx\n```\n", "```\nx\n```\n"]
)
def test_a_readme_without_the_block_is_an_error(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    done = shown(readme)
    assert done.returncode == 2
    assert "has no fenced block after a line '<!-- test -->'" in done.stderr


def test_our_readme_has_it() -> None:
    done = shown(ROOT / "README.md")
    assert done.returncode == 0
    assert "pytest" in done.stdout
