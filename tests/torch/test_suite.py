"""A part of PyTorch's own distributed tests over the process group and with the hook; :mod:`tests.torch.conformance` runs the
whole."""

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


#: which kind of cases goes which way; the whole suite has all kinds by all ways
PARTS = (
    ("cpu", "gloo"),
    ("cpu", "fabric"),
    ("cpu", "one host"),
    ("cpu", "no agent"),
    *((kind, "fabric") for kind in ("cuda", "nccl", "hook")),
)


@pytest.mark.parametrize(("kind", "way"), PARTS, ids=[", ".join(part) for part in PARTS])
def test_torchs_own_tests_pass(tmp_path: Path, kind: str, way: str) -> None:
    outcomes = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "tests.torch.conformance", "--quick", "--kind", kind, "--way", way]
    done = subprocess.run(
        [*command, "--outcomes", str(outcomes)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert json.loads(outcomes.read_text()) == {name: ["passed", ""] for name in QUICK[kind]}
