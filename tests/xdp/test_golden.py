"""One golden set of packets through the user-space engine and through the kernel program: the same memory after it."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.proto.common.plan import Fold
from inanet.proto.tree import engine
from inanet.proto.tree.engine import Count, Event, tables_of
from inanet.proto.tree.slots import ShardColumn, SlotMemory, TreeColumn
from inanet.proto.tree.xagg import policy, slotwork
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.xagg import ROW_BYTES, Flag, Kind, Packet
from inanet.xdp.libbpf import RingBuffer
from inanet.xdp.memory import EVENT, KernelEvent, Mode, SharedMemory
from tests.xdp.conftest import CHILDREN, DROP, OWN, OWN_MAC, PARENT, PASS, PEER_MAC, REDIRECT, TX, frame

pytestmark = pytest.mark.privileged("loads BPF programs")

KEY = 0x0123456789ABCDEF
JOB = 7
#: fragments of the shard: more than one group
COUNT_ = 1500
COMPARED = (
    *("rows", "bitmap", "round", "state", "attempt", "exponent", "misfit", "announced", "logged"),
    *("up_log", "down_log", "up_left", "down_left", "shards", "trees", "taken"),
)


class Side:
    """A node's memory with one job in it, and the engine of :mod:`inanet.proto` on it."""

    def __init__(self, memory: SlotMemory, *, root: bool) -> None:
        self.memory = memory
        self.tables = tables_of(memory)
        self.drops = np.zeros(DROP_CODES, np.int64)
        self.counts = np.zeros(len(Count), np.int64)
        self.events: list[tuple[int, ...]] = []
        job_row = memory.add_job(JOB, 5, KEY)
        tree = memory.add_tree(job_row)
        memory.trees[tree, TreeColumn.LIVE] = 0b10011
        memory.trees[tree, TreeColumn.RETIRED] = 0b00100
        memory.mask[tree, 2] = 0b10000
        memory.trees[tree, TreeColumn.BIT] = 0 if root else 8
        memory.trees[tree, TreeColumn.IS_ROOT] = root
        memory.trees[tree, TreeColumn.PARENT_ENDPOINT] = -1 if root else PARENT
        for child, source in enumerate(CHILDREN):
            memory.child_endpoint[tree, child] = source
            memory.since[tree, child] = 3
        self.row = memory.add_shard(JOB, 2, tree, int(Fold.SUM), COUNT_, 40)
        self.exponents = memory.add_shard(JOB, 3, tree, int(Fold.MAX8), 2, 40)
        for row in (self.row, self.exponents):
            engine.open_round(self.tables, row, 41)

    def ingest(self, packet: bytes, source: int) -> None:
        """One packet through the engine in user space."""
        arena = np.zeros(-(-max(len(packet), 4) // 4) * 4, np.uint8)
        arena[: len(packet)] = np.frombuffer(packet, np.uint8)
        events, used = np.zeros((20, 4), np.int64), np.zeros(1, np.int64)
        policy.ingest(
            self.tables,
            arena.view(np.int32),
            np.zeros(1, np.int64),
            np.array([len(packet)], np.int64),
            np.array([source], np.uint64),
            events,
            used,
            self.counts,
            self.drops,
        )
        self.events += [tuple(event) for event in events[: used[0]].tolist() if event[0] != Event.CONTROL]


class Script:
    """Packets with their sources, in the order in which they come; payloads differ."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(11)
        self.packets: list[tuple[bytes, int]] = []

    def add(self, child: int, fragment: int, **other: object) -> None:
        """One of a child's; ``other`` replaces fields of the header, ``source``, ``key`` or the payload's ``values``."""
        values = other.pop("values", None)
        payload = (
            self._rng.integers(-(2**31), 2**31, 256, np.int32).tobytes() if values is None else bytes(values)  # type: ignore[arg-type]
        )
        fields = {"kind": Kind.DATA, "job": JOB, "host": 1 << child, "gradient": fragment, "round": 41}
        fields |= {"shard": 2, "plan": 5, "attempt": 0, "payload": payload}
        source = int(other.pop("source", CHILDREN[child]))  # type: ignore[call-overload]
        key = int(other.pop("key", KEY))  # type: ignore[call-overload]
        self.packets.append((Packet(**(fields | other)).encode(key), source))  # type: ignore[arg-type]

    def contributions(self) -> None:
        """Of all children, each in another order, some of them twice."""
        fragments = [0, 1, 2, 3, 1023, 1024, 1499]
        for child in (0, 1, 4):
            for fragment in self._rng.permutation(fragments).tolist():
                self.add(child, fragment, flags=Flag.GROUP_END if fragment == 1023 else Flag.NONE)
                if fragment % 2:
                    self.add(child, fragment)

    def damage(self) -> None:
        """On the way to a slot that is empty, that holds something, and that it would complete; then as it was sent. And
        all that can be wrong with a packet's form.
        """
        for child in (0, 1, 4):
            self.add(child, 20)
            sound, source = self.packets.pop()
            for at in (30, 600, len(sound) - 2):
                self.packets.append((sound[:at] + bytes([sound[at] ^ 32]) + sound[at + 1 :], source))
            self.packets.append((sound, source))
        whole = self.packets[0][0]
        for mutation in (
            b"",
            whole[:35],
            whole[:40],
            whole[:-4],
            whole + bytes(4),
            b"\xa1" + whole[1:],
            b"\xa2\x00" + whole[2:],
            b"\xa2\x0f" + whole[2:],
            whole[:20] + b"\x00\x00\x00\x00" + whole[24:],
            whole[:500] + bytes([whole[500] ^ 4]) + whole[501:],
            whole[:-1] + bytes([whole[-1] ^ 128]),
        ):
            self.packets.append((mutation, CHILDREN[0]))

    def strangers(self) -> None:
        """Packets of other jobs, keys, shards, hosts, places, plans, rounds and attempts."""
        for other in ({"job": 9}, {"key": KEY ^ 1}, {"shard": 4}, {"shard": 60_000}):
            self.add(0, 5, **other)
        self.add(0, COUNT_)
        self.add(0, 2**32 - 1)
        self.add(0, 5, host=0)
        self.add(0, 5, host=3)
        self.add(3, 5)
        # a retired child's
        self.add(2, 5)
        self.add(0, 5, source=CHILDREN[1])
        for plan in (2, 6, 250):
            self.add(0, 5, plan=plan)
        for round_ in (40, 42, 41 + 2**31 - 1):
            self.add(0, 5, round=round_)
        self.add(0, 6, attempt=1)
        self.add(0, 6, attempt=255)

    def exponents(self) -> None:
        """A child that says which exponent it needs, later data for that slot; and block exponents: maxima, not sums."""
        self.add(0, 7, kind=Kind.EXPONENT, values=b"\x80" + bytes(1023))
        self.add(1, 7)
        self.add(4, 7)
        self.add(0, 0, shard=3)
        self.add(1, 0, shard=3)

    def needs(self) -> None:
        """What blocks need, and whether that is enough for somebody: it is; it is not, so a root starts again; zeros. And a
        packet whose marks must not stay when its payload turns out to be damaged.
        """
        for fragment, marks in (
            (30, ((130, Flag.LARGE), (120, Flag.NONE), (131, Flag.NONE))),
            (31, ((0, Flag.NONE), (120, Flag.NONE), (119, Flag.NONE))),
            (32, ((0, Flag.NONE), (0, Flag.NONE), (0, Flag.NONE))),
            (33, ((99, Flag.LARGE), (98, Flag.LARGE), (98, Flag.LARGE))),
        ):
            for child, (need, flags) in zip((0, 1, 4), marks, strict=True):
                self.add(child, fragment | need << 24, flags=flags)
        for child in (0, 1, 4):
            self.add(child, 34 | 77 << 24, flags=Flag.LARGE)
            sound, source = self.packets.pop()
            self.add(child, 34 | 200 << 24)
            damaged, _ = self.packets.pop()
            self.packets.append((damaged[:-1] + bytes([damaged[-1] ^ 1]), source))
            self.packets.append((sound, source))

    def results(self) -> None:
        """From the parent, and what is not from there or not for now."""

        def result(fragment: int, **other: object) -> None:
            self.add(0, fragment, **({"kind": Kind.RESULT, "host": 0, "source": PARENT} | other))

        for fragment in (0, 8, 8, 1023):
            result(fragment, flags=Flag.GROUP_END)
        result(35 | 123 << 24)
        result(9, source=CHILDREN[0])
        result(9, round=40)
        result(9, round=42)
        result(9, attempt=2)
        result(10, attempt=1)


def golden(*, root: bool) -> list[tuple[bytes, int]]:
    """Packets with their sources: contributions in disorder, and every reason to refuse one."""
    script = Script()
    script.contributions()
    script.damage()
    script.strangers()
    script.exponents()
    script.needs()
    if not root:
        script.results()
    # what is answered, and a child that knows a result already
    script.add(0, 0, flags=Flag.GROUP_END)
    script.add(1, 11, kind=Kind.RESULT)
    script.add(0, 11)
    return script.packets


def prepare(side: Side) -> None:
    """Slots that are in the middle of something when the packets come."""
    fragments = np.array([10, 12], np.int64)
    attempts, exponents = np.array([3, 3], np.uint8), np.array([0x81, 0], np.uint8)
    slotwork.restart(side.tables, side.row, fragments, attempts, exponents)
    # child 2 retired after its packet: what it sent stands for child 4
    side.memory.bitmap[int(side.memory.shards[side.row, 0]) + 13] = 0b00100
    side.memory.state[int(side.memory.shards[side.row, 0]) + 13] = 1
    side.memory.round[int(side.memory.shards[side.row, 0]) + 13] = 41


def totals(side: Side, kernel: SharedMemory | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Drops by reason and counters, of both paths together."""
    if kernel is None:
        return side.drops, side.counts
    return (
        side.drops + kernel.kernel_drops()[:DROP_CODES],
        side.counts + kernel.kernel_counts()[: len(Count)],
    )


@pytest.mark.parametrize("mode", ["native", "generic"])
@pytest.mark.parametrize("root", [False, True], ids=["aggregator", "root"])
def test_same_packets_same_memory(shared: Callable[..., SharedMemory], mode: Mode, root: bool) -> None:
    capacity = COUNT_ + 100
    memory = shared(capacity, mode)
    mixed, alone = Side(memory, root=root), Side(SlotMemory(capacity), root=root)
    for side in (mixed, alone):
        prepare(side)
    memory.tables["routes"][0, 0]["stands_for"][2] = 0b10000
    memory.tables["routes"][0]["credit_mask"] = (1 << 63) - 1
    reports: list[bytes] = []
    ring = RingBuffer(memory.object.map("events"), reports.append)
    handled = passed = answered = 0
    packets = golden(root=root)
    assert len(packets) > 60
    for packet, source in packets:
        verdict, out, _ = memory.program(mode).test_run(frame(packet, source))
        handled += verdict != PASS
        passed += verdict == PASS
        if verdict == PASS:
            mixed.ingest(packet, source)
        alone.ingest(packet, source)
        ring.consume()
        said = [np.frombuffer(report, EVENT)[0].item() for report in reports] + mixed.events
        expected, alone.events = alone.events, []
        reports.clear()
        mixed.events = []
        answers = [event for event in expected if event[0] == Event.ANSWER]
        if verdict in (TX, REDIRECT):
            expected = [event for event in expected if event[0] != Event.ANSWER]
        # but for where its neighbours are, and that there is work
        assert [event for event in said if event[0] < KernelEvent.WORK] == expected, packet[:24]
        if verdict in (TX, REDIRECT):
            # what user space would send again from the slot is on its way
            (fragment,) = (event[2] for event in answers)
            slot = int(alone.memory.shards[alone.row, 0]) + fragment
            assert out == frame(alone.memory.rows[slot].tobytes(), OWN, source, macs=(OWN_MAC, PEER_MAC))
            answered += 1
        else:
            assert verdict in (DROP, PASS)
            assert verdict == PASS or not answers
        for name in COMPARED:
            assert np.array_equal(getattr(memory, name), getattr(alone.memory, name)), (name, packet[:24])
        for ours, reference in zip(totals(mixed, memory), totals(alone, None), strict=True):
            assert ours.tolist() == reference.tolist(), packet[:24]
    # the round is over, and a packet of a later one opens the slots for it (confirmed rounds)
    for side in (mixed, alone):
        side.memory.shards[side.row, ShardColumn.COMMITTED] = 1
    for round_, damage in ((41, 0), (43, 1), (43, 0), (43, 0), (41, 0), (42, 0), (44, 0)):
        payload = np.full(256, round_, np.int32).tobytes()
        packet = Packet(Kind.DATA, JOB, 1, 1024, round_, 2, 5, 0, payload).encode(KEY)
        packet = packet[:-1] + bytes([packet[-1] ^ damage])
        verdict, _, _ = memory.program(mode).test_run(frame(packet, CHILDREN[0]))
        assert verdict == DROP
        alone.ingest(packet, CHILDREN[0])
        for name in COMPARED:
            assert np.array_equal(getattr(memory, name), getattr(alone.memory, name)), (name, round_)
    assert totals(mixed, memory)[0].tolist() == totals(alone, None)[0].tolist()
    assert memory.shards[mixed.row, ShardColumn.ACTIVE] == 43
    # most of the work is the kernel's
    assert handled > 2 * passed
    assert answered > 0
    seen = {Drop(code) for code in np.flatnonzero(alone.drops)}
    expected = {
        *(Drop.OK, Drop.SHORT, Drop.OVERSIZED, Drop.BAD_MAGIC, Drop.BAD_TYPE, Drop.FOREIGN_JOB, Drop.BAD_TAG),
        *(Drop.BAD_CHECKSUM, Drop.UNKNOWN_SHARD, Drop.BAD_FRAGMENT, Drop.FOREIGN_HOST, Drop.STALE_PLAN),
        *(Drop.FUTURE_PLAN, Drop.STALE_ROUND, Drop.NOT_OPEN, Drop.STALE_ATTEMPT, Drop.FUTURE_ATTEMPT),
        Drop.DUPLICATE,
    }
    assert expected <= seen
    assert ROW_BYTES == 1052
