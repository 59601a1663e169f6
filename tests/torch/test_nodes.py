"""torchrun on several hosts: the script of docs/pytorch.md, on every host of a lab."""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")
pytest.importorskip("pyroute2", reason="pyroute2 is not installed: pip install 'inanet[net]'")

from inanet.lab import namespaces, remains
from inanet.launch.process import python, python_environment

pytestmark = [pytest.mark.processes, pytest.mark.privileged("network namespaces"), pytest.mark.timeout(240)]

DOCUMENT = Path(__file__).parents[2] / "docs/pytorch.md"

TRAIN = """
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import inanet.torch

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(10, 1))
state, hook = inanet.torch.hook(require_ina=True)
model.register_comm_hook(state, hook)
model(torch.full((4, 10), float(rank))).sum().backward()
with open(os.environ["TRAINED"] + f".{rank}", "w") as out:
    print(os.environ["INA_LAB_HOST"], dist.get_world_size(), model.module.weight.grad[0, 0].item(), file=out)
"""


@pytest.fixture
def lab() -> Iterator[str]:
    """A name for a lab; what is left of it is removed."""
    name = f"test-{secrets.token_hex(4)}"
    yield name
    remains.dismantle(namespaces.labs().get(name, []), 0.0)


def node_script(nodes: int) -> str:
    """The script that every host runs, as the document has it, for another number of hosts."""
    found = re.search(
        r"^```bash\n(#!/bin/bash\n# node.sh.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None, "docs/pytorch.md has no node.sh"
    text, changed = re.subn(r"--nnodes \d+", f"--nnodes {nodes}", found[1])
    assert changed == 1
    return text


def test_two_hosts_meet_through_torchrun_and_train_through_the_fabric(tmp_path: Path, lab: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "node.sh").write_text(node_script(2))
    trained = tmp_path / "trained"
    environment = python_environment() | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRAINED": str(trained),
        "OMP_NUM_THREADS": "1",
    }
    command = ["lab", "run", "--name", lab, "star2", "--", "bash", "node.sh"]
    done = subprocess.run(
        [*python("inanet.cli.main"), *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # four rows of zeros on one rank and of ones on the other: the mean of 0 and 4
    lines = sorted(Path(f"{trained}.{rank}").read_text().split() for rank in range(2))
    assert lines == [["w0", "2", "2.0"], ["w1", "2", "2.0"]]
    assert lab not in namespaces.labs()
