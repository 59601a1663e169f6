"""Real daemons in namespaces, the aggregator in one of its own with its slots in the kernel."""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import inanet
from inanet.launch import child
from inanet.launch import fabric as demo
from inanet.launch.fabric import Fabric, daemon_command
from inanet.launch.topology import NodeSpec
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.xdp.libbpf import attached_program
from inanet.xdp.slots import PROBATION
from tests.client.agent import run_all
from tests.phy.spaces import Space, cable, open_spaces

pytestmark = [
    pytest.mark.privileged("makes network namespaces, loads BPF programs"),
    pytest.mark.processes,
    pytest.mark.timeout(300),
]

HOSTS = 2
PATIENCE = 60.0
COUNT = 256 * 6000 + 5
Build = Callable[..., Fabric]


@pytest.fixture
def spaces(root_needed: None) -> Iterator[tuple[Space, Space]]:
    """Of the aggregator, 10.9.0.1, and of everybody else, 10.9.0.2."""
    with ExitStack() as stack:
        one, other = open_spaces(stack, 2)
        cable(one, "left", other, "right", "10.9.0.1", "10.9.0.2")
        yield one, other


@pytest.fixture
def build(spaces: tuple[Space, Space], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Build]:
    """Starts a fabric of two workers, an aggregator with this ``xdp``, and a PS; the first worker may have a program too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plain = demo.configurations

    def command(node: NodeSpec, config: Path) -> Sequence[str]:
        space = spaces[0] if node.role == "agg" else spaces[1]
        where = f"/proc/{os.getpid()}/fd/{space.fd}"
        inside = [sys.executable, "-I", "-S", str(child.__file__), str(os.getpid()), where]
        return [*inside, *daemon_command(node, config)]

    with ExitStack() as stack:

        def make(xdp: str, impair: float = 0.0, worker: str = "off") -> Fabric:
            def configurations(directory: Path, nodes: Any, share: float, *arguments: Any) -> dict[str, str]:
                nodes = list(nodes)
                texts = plain(directory, nodes, share, *arguments)
                # the kernel cannot be impaired: everybody else is, so every hop is in one direction
                text = plain(directory, nodes, 0.0, *arguments)["agg0"]
                texts["agg0"] = re.sub(r"(?m)^memory = .*$", "memory = 33554432", text)
                for name, mode in (("agg0", xdp), ("worker0", worker)):
                    texts[name] = re.sub(r"(?m)^xdp = .*$", f'xdp = "{mode}"', texts[name])
                own = {name: "10.9.0.1:0" if name == "agg0" else "10.9.0.2:0" for name in texts}
                return {name: text.replace("127.0.0.1:0", own[name]) for name, text in texts.items()}

            monkeypatch.setattr(demo, "configurations", configurations)
            return stack.enter_context(Fabric(HOSTS, 1, impair=impair, seed=5, command=command))

        yield make


def join(fabric: Fabric, stack: ExitStack) -> list[inanet.Job]:
    """A job with a rank at each host."""

    def connect(rank: int) -> inanet.Job:
        return inanet.connect(
            "train",
            rank=rank,
            world=HOSTS,
            local_world=1,
            socket=fabric.worker_socket(rank),
            timeout=PATIENCE,
        )

    return [stack.enter_context(joined) for joined in run_all(connect, HOSTS)]


def values(seed: int) -> list[NDArray[np.float32]]:
    """Of both ranks."""
    return [np.random.default_rng((seed, rank)).standard_normal(COUNT, np.float32) for rank in range(HOSTS)]


class Expected:
    """What one host would make of the rounds."""

    def __init__(self) -> None:
        self.tensor = LocalTensor(TensorSpec("", "f32", (COUNT,), "sum", ExponentMode.CARRIED), HOSTS)

    def after(self, arrays: Sequence[NDArray[Any]]) -> bytes:
        """Bytes of the result of the next round."""
        copies = [array.copy() for array in arrays]
        assert self.tensor.reduce(copies) is None
        return copies[0].tobytes()


def reduce(jobs: list[inanet.Job], arrays: list[NDArray[Any]]) -> set[bytes]:
    """One round; results of all ranks."""
    handles = [
        job.all_reduce_async(array, name="t", mode="carried") for job, array in zip(jobs, arrays, strict=True)
    ]
    for handle in handles:
        handle.wait()
    return {array.tobytes() for array in arrays}


def attached(space: Space, interface: str = "left") -> int:
    """The program on the aggregator's interface, or another one."""
    return space.run(lambda: attached_program(socket.if_nametoindex(interface)))


@pytest.mark.parametrize(("xdp", "impair"), [("auto", 0.05), ("native", 0.0)])
def test_bits_and_who_did_the_work(
    build: Build, spaces: tuple[Space, Space], xdp: str, impair: float
) -> None:
    fabric = build(xdp, impair)
    assert attached(spaces[0]) != 0
    expected = Expected()
    with ExitStack() as stack:
        jobs = join(fabric, stack)
        for round_ in range(3):
            arrays = values(round_)
            wanted = expected.after(arrays)
            assert reduce(jobs, arrays) == {wanted}
    fabric.shutdown()
    assert attached(spaces[0]) == 0
    (stats,) = (json.loads(path.read_text()) for path in fabric.directory.glob("agg0.*.stats"))
    assert stats["xdp_contributions_in"] > 0.5 * stats["contributions_in"], stats
    assert stats["xdp_forwarded"] > 0, stats
    if xdp == "auto":
        # it is trusted; how much of it then leaves by the kernel is a matter of time, and of tests in virtual time
        assert stats["xdp_forwarded"] > 4 * PROBATION, stats
    else:
        # where the other end of the cable merges no packets, what the driver sends vanishes: noticed within a round
        vanished = stats["xdp_forwarded"] <= PROBATION
        assert vanished or stats["retransmissions"] < 0.1 * stats["xdp_forwarded"], stats


def test_a_killed_aggregator_leaves_nothing_and_changes_no_bit(
    build: Build, spaces: tuple[Space, Space]
) -> None:
    """With losses, and with the results of one of the workers through its own program."""
    fabric = build("generic", 0.05, "generic")
    assert attached(spaces[1], "right") != 0
    expected = Expected()
    with ExitStack() as stack:
        jobs = join(fabric, stack)
        arrays = values(0)
        wanted = expected.after(arrays)
        assert reduce(jobs, arrays) == {wanted}
        arrays = values(1)
        wanted = expected.after(arrays)
        handles = [
            job.all_reduce_async(array, name="t", mode="carried")
            for job, array in zip(jobs, arrays, strict=True)
        ]
        fabric.processes["agg0"].kill()
        for handle in handles:
            handle.wait()
        assert {array.tobytes() for array in arrays} == {wanted}
        assert attached(spaces[0]) == 0
    fabric.shutdown()
    assert attached(spaces[1], "right") == 0
    (stats,) = (json.loads(path.read_text()) for path in fabric.directory.glob("worker0.*.stats"))
    # of the first round all, also what the impairment drops afterwards; then the PS, on the same host, is its parent
    assert stats["xdp_taken"] > 0.95 * COUNT / 256, stats
    assert stats["xdp_frames"] < stats["xdp_taken"], stats
