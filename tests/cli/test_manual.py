"""Manual pages, completion and examples follow the commands."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from inanet.cli.main import cli
from inanet.cli.manual import EXAMPLES, commands, completions, pages
from inanet.config.daemons import PROGRAMS

LEAVES = {" ".join(path): command for path, command in commands(cli) if not isinstance(command, click.Group)}


def test_every_command_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(LEAVES)


@pytest.mark.parametrize("name", LEAVES)
def test_an_example_is_a_command_line_that_the_command_takes(name: str) -> None:
    words = shlex.split(EXAMPLES[name])
    path = name.split()
    assert words[: len(path) + 1] == ["ina", *path]
    # unknown options are errors here, missing files are not
    LEAVES[name].make_context(name, words[len(path) + 1 :], resilient_parsing=True)
    with click.Context(LEAVES[name], info_name=name) as context:
        assert f"Example: {EXAMPLES[name]}" in " ".join(LEAVES[name].get_help(context).split())


def test_pages_say_what_commands_take() -> None:
    found = pages(cli)
    assert {path.name for path in found if path.parent.name == "man8"} == {
        f"{name}.8" for name in PROGRAMS.values()
    }
    keys = found[Path("man/man1/ina-keys.1")]
    assert "\n.SH REVOKE\n" in keys
    assert ".B \\-\\-coordinator\n" in keys
    assert "\n.SH EXAMPLES\n" in keys
    assert "/etc/inanet/agg.toml" in found[Path("man/man8/ina-agg.8")]
    assert ".BR ina\\-status (1)\n" in found[Path("man/man1/ina.1")]


def test_groff_takes_every_page() -> None:
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("groff is not installed")
    text = "".join(pages(cli).values())
    done = subprocess.run([groff, "-man", "-Tutf8", "-ww", "-z"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_takes_the_completion_and_the_program_answers_it() -> None:
    for path, text in completions(cli).items():
        if path.parts[0] == "bash-completion":
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
    program = "import sys; from inanet.cli.main import main; sys.exit(main())"
    asked = {"_INA_COMPLETE": "bash_complete", "COMP_WORDS": "ina sta", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert done.stdout == "plain,status\n"
