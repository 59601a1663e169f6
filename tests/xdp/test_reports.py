"""What a node makes of the program's reports, whenever it comes to read them."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from inanet.proto.common.plan import (
    Child,
    ExponentMode,
    Fold,
    NodePlan,
    Parent,
    Part,
    Placement,
    Shard,
    TensorLayout,
)
from inanet.proto.tree.node import Node
from inanet.proto.tree.slots import ShardColumn
from inanet.wire.batch import PacketBatch
from inanet.wire.xagg import Flag, Kind
from inanet.xdp.memory import KernelCount, SharedMemory
from inanet.xdp.slots import KernelSlots
from tests.proto.tree.test_rounds import spec_of
from tests.xdp.conftest import CHILDREN, DROP, PARENT, PASS, frame
from tests.xdp.test_golden import JOB, KEY
from tests.xdp.test_leaving import contribution

pytestmark = pytest.mark.privileged("loads BPF programs")

FRAGMENTS = 60
WINDOW = 16
#: more than the ring holds
REPORTS = 7000


class Rig:
    """An aggregator with two children and the first tensor of its job, between rounds."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.node = Node("a", KernelSlots(memory))
        children = tuple(Child(f"w{number}", CHILDREN[number], 1 << number, 0, WINDOW) for number in (0, 1))
        place = Placement(0, Parent("ps", PARENT, 8, 512), children)
        self.node.apply(NodePlan(JOB, 5, KEY, 2, (place,), WINDOW), 0.0)
        self.add(0, FRAGMENTS)

    def add(self, tensor: int, fragments: int) -> None:
        """A tensor whose only shard has the number that :func:`contribution` gives to all packets."""
        spec = spec_of(fragments * 256, mode=ExponentMode.FIXED)
        shard = Shard(2, tensor, 0, Part.DATA, Fold.SUM, 0, fragments)
        self.node.add_layout(JOB, TensorLayout(tensor, spec, (shard,)), last_round=40)

    def row(self) -> int:
        """Of the shard."""
        return int(self.memory.shard_row[self.memory.job_row[JOB], 2])

    def send(self, child: int, fragment: int, **other: object) -> int:
        """Show a child's packet to the program; returns its verdict."""
        packet = contribution(child, fragment, 1, **other)
        return self.memory.program("native").test_run(frame(packet, CHILDREN[child]))[0]

    def said(self, kind: Kind) -> int:
        """Control packets of a kind that the node has to send now."""
        return sum(
            transmission.arena[offset + 1] & 0xF == kind
            for transmission in self.node.transmit(1.0)
            for offset in transmission.offsets.tolist()
        )


@pytest.fixture
def rig(shared: Callable[..., SharedMemory]) -> Iterator[Rig]:
    """Freed after the test."""
    made = Rig(shared(200, "native"))
    yield made
    made.node.slots.close()


@pytest.mark.parametrize("occasion", ["timer", "packets"])
def test_work_that_something_else_has_done_is_reported_again(rig: Rig, occasion: str) -> None:
    """The report of work may be read before its descriptor has been seen to be readable, and is the last one then."""
    for fragment in range(WINDOW):
        assert rig.send(0, fragment) == DROP
    assert rig.memory.tables["woken"][0] == 1
    if occasion == "timer":
        rig.node.on_timer(1.0)
    else:
        rig.node.receive(
            PacketBatch(
                np.zeros(4, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint64)
            ),
            1.0,
        )
    assert rig.said(Kind.CREDIT) == 1
    assert rig.memory.tables["woken"][0] == 0


def test_reports_of_a_tensor_that_is_gone_are_not_those_of_the_next(rig: Rig) -> None:
    before = rig.row()
    assert rig.send(0, 0, round=44) == DROP
    rig.node.drop_layout(JOB, 0)
    rig.add(1, 20)
    assert rig.row() == before
    rig.node.attend(1.0)
    state = rig.node.state.by_row[before]
    assert state.round is None
    assert rig.memory.shards[before, ShardColumn.COMMITTED] == 1
    # and what comes now opens it
    assert rig.send(0, 0, round=41) == DROP
    rig.node.attend(1.0)
    assert state.round == 41


def test_a_round_of_which_nothing_can_be_reported_is_user_spaces_to_open(rig: Rig) -> None:
    """The ring of reports is full when a round's first packet comes."""
    ended = frame(contribution(0, 0, 1, flags=Flag.GROUP_END), CHILDREN[0])
    rig.memory.program("native").test_run(ended, REPORTS)
    assert rig.memory.kernel_counts()[KernelCount.UNREPORTED] > 0
    rig.memory.shards[rig.row(), ShardColumn.COMMITTED] = 1
    assert rig.send(0, 0, round=42) == PASS
    assert rig.memory.shards[rig.row(), [ShardColumn.ACTIVE, ShardColumn.COMMITTED]].tolist() == [41, 1]
    rig.node.attend(1.0)
    assert rig.send(0, 0, round=42) == DROP
    rig.node.attend(1.0)
    assert rig.node.state.by_row[rig.row()].round == 42


def test_an_entry_that_comes_too_late_is_not_the_next_rounds(rig: Rig) -> None:
    """The program cannot lock a log, and says so; its round is over before anybody has listened."""
    locks, row = rig.memory.object.map("shard_locks"), rig.row()
    rig.memory.tables["woken"] = 1
    shard = rig.memory.shards[row]
    for round_, logged in ((41, 1), (42, 0)):
        assert rig.send(0, 7, round=round_) == DROP
        rig.node.attend(1.0)
        locks.put(row.to_bytes(4, "little"), (1).to_bytes(8, "little"))
        assert rig.send(1, 7, round=round_) == DROP
        locks.put(row.to_bytes(4, "little"), bytes(8))
        assert shard[ShardColumn.UP_LOGGED] == 0
        if not logged:
            shard[ShardColumn.COMMITTED] = 1
            assert rig.send(0, 3, round=43) == DROP
        rig.node.attend(1.0)
        assert shard[ShardColumn.UP_LOGGED] == logged
        shard[ShardColumn.COMMITTED] = 1
    assert rig.memory.up_log[shard[ShardColumn.SLOT0]] == 7
