"""A part of PyTorch's own distributed tests over the process group; :mod:`tests.torch.conformance` runs the whole."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

from tests.torch.conformance import QUICK

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("expecttest") is None,
        reason="expecttest, which torch's tests need, is not installed",
    ),
]


def test_torchs_own_tests_pass_through_the_fabric(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.conformance", "--quick", "--outcomes", str(outcomes)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(outcomes.read_text())
    assert set(found) == set(QUICK)
    assert set(found.values()) == {"passed"}
