"""Negotiated rates and a chosen plan through real daemons: everybody follows grants, sums stay what they are."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import inanet
from inanet.launch.fabric import Fabric, daemon_command
from inanet.launch.topology import NodeSpec
from tests.client.agent import run_all

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

KEYS = "rate_negotiation = true\nrate = '1 Gbit/s'\n"


def negotiating(node: NodeSpec, config: Path) -> Sequence[str]:
    """The daemon with rate negotiation, and the PS with a plan, which a fabric does not write by itself."""
    text = config.read_text()
    assert text.count("[node]\n") == 1
    if KEYS not in text:
        kept = [line for line in text.splitlines() if not line.startswith(("rate_negotiation", "rate "))]
        text = "\n".join(kept).replace("[node]\n", f"[node]\n{KEYS}")
        if node.role == "ps":
            kept = [line for line in text.splitlines() if not line.startswith("plan =")]
            text = "\n".join(kept).replace("[topology]\n", "[topology]\nplan = 'sharded'\n")
        config.write_text(text)
    return daemon_command(node, config)


def test_everybody_follows_grants_and_sums_are_exact() -> None:
    with Fabric(2, 1, command=negotiating) as fabric:

        def rank(number: int) -> None:
            job = inanet.connect(
                "paced", rank=number, world=2, local_world=1, socket=fabric.worker_socket(number), timeout=60
            )
            with job:
                for round_ in range(3):
                    array = np.full(1 << 19, number + round_, np.int32)
                    job.all_reduce(array, name="g")
                    assert set(array.tolist()) == {1 + 2 * round_}

        run_all(rank, 2)
        fabric.shutdown()
        log = (fabric.directory / "ps.log").read_text()
        figures = {
            file.name.split(".")[0]: json.loads(file.read_text()) for file in fabric.directory.glob("*.stats")
        }
    assert set(figures) == {"ps", "agg0", "worker0", "worker1"}
    for name, counted in figures.items():
        assert counted["grants"] > 0, name
    # the aggregator is a root like the PS: it sums half of every tensor
    assert "plan chosen" in log
    assert "2 shards on servers, unicast" in log
    halves = [figures[name]["contributions_in"] for name in ("ps", "agg0")]
    assert halves[0] == halves[1] > 0
    # a worker's link carries what two tensors take at its share of it: it had to wait for tokens
    assert all(figures[name]["paced"] > 0 for name in ("worker0", "worker1"))
