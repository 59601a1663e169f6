"""What leaves without user space: completed fragments to the parent, results to the group, parts of super-frames."""

from collections.abc import Callable

import numpy as np
import pytest

from inanet.proto.tree.slots import LEFT_DOWN, LEFT_UP, ShardColumn
from inanet.proto.tree.xagg import slotwork
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import ROW_BYTES, Flag, Kind, Packet, decode
from inanet.xdp.libbpf import RingBuffer
from inanet.xdp.memory import EVENT, Held, KernelCount, KernelEvent, Mode, SharedMemory
from tests.xdp.conftest import CHILDREN, DROP, OWN, OWN_MAC, PARENT, PASS, REDIRECT, TX, frame
from tests.xdp.test_golden import JOB, KEY, Side

pytestmark = pytest.mark.privileged("loads BPF programs")

PARENT_MAC = bytes.fromhex("020000000009")
GROUP = endpoint("239.1.2.3", 7001)
#: of the network interface that test runs pretend to
LO = 1
LIVE = (0, 1, 4)


def contribution(child: int, fragment: int, value: int, **other: object) -> bytes:
    """A packet of a child, all values equal."""
    fields = {
        "kind": Kind.DATA,
        "job": JOB,
        "host": 1 << child,
        "gradient": fragment,
        "round": 41,
        "shard": 2,
    }
    fields |= {"plan": 5, "attempt": 0, "payload": np.full(256, value, "<i4").tobytes()}
    return Packet(**(fields | other)).encode(KEY)  # type: ignore[arg-type]


class Rig:
    """A node with its program, at an aggregator with a known parent or at a root with a group."""

    def __init__(
        self, memory: SharedMemory, mode: Mode, *, root: bool = False, window: int = 1 << 40
    ) -> None:
        self.memory = memory
        self.side = Side(memory, root=root)
        self.program = memory.program(mode)
        self.route = memory.tables["routes"][0][:1]
        self.route["credit_mask"] = (1 << 63) - 1
        self.route["up_limit"] = self.route["down_limit"] = window
        self.events: list[tuple[int, ...]] = []
        self.ring = RingBuffer(
            memory.object.map("events"), lambda data: self.events.append(np.frombuffer(data, EVENT)[0].item())
        )
        if root:
            self.route["group"] = GROUP
        else:
            self.route["parent_ifindex"] = LO
            self.route["parent_mac"][0, :6] = np.frombuffer(PARENT_MAC, np.uint8)

    def send(self, payload: bytes, source: int, *, partial: bool = False) -> tuple[int, bytes]:
        """One frame: verdict, and the frame as it leaves."""
        verdict, out, _ = self.program.test_run(frame(payload, source, partial=partial))
        self.ring.consume()
        return verdict, out

    def slot(self, fragment: int) -> int:
        """Index of a fragment's slot."""
        return int(self.memory.shards[self.side.row, ShardColumn.SLOT0]) + fragment


@pytest.mark.parametrize("mode", ["native", "generic"])
def test_the_last_contribution_leaves_as_the_sum(shared: Callable[..., SharedMemory], mode: Mode) -> None:
    rig = Rig(shared(1600, mode), mode)
    for child in LIVE[:-1]:
        assert rig.send(contribution(child, 3, child + 1), CHILDREN[child])[0] == DROP
    verdict, out = rig.send(contribution(4, 3, 5), CHILDREN[4])
    assert verdict == (REDIRECT if mode == "native" else TX)
    row = rig.memory.rows[rig.slot(3)].tobytes()
    assert out == frame(row, OWN, PARENT, macs=(OWN_MAC, PARENT_MAC))
    packet = decode(row, KEY)
    assert (packet.kind, packet.host, packet.gradient) == (Kind.DATA, 8, 3)
    assert np.frombuffer(packet.payload, "<i4").tolist() == [8] * 256
    assert rig.memory.logged[rig.slot(3)] & LEFT_UP
    assert rig.memory.shards[rig.side.row, ShardColumn.UP_LOGGED] == 1
    assert int(rig.route["up_sent"][0]) == 1
    assert rig.memory.kernel_counts()[KernelCount.FORWARDED] == 1
    # user space was not needed, and not woken
    assert rig.events == []


def test_without_window_or_address_user_space_sends(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "native"), "native", window=0)
    for _ in range(2):
        for child in LIVE:
            assert rig.send(contribution(child, 3, 1), CHILDREN[child])[0] == DROP
        assert not rig.memory.logged[rig.slot(3)] & LEFT_UP
    assert rig.memory.shards[rig.side.row, ShardColumn.UP_LOGGED] == 1
    assert [event[0] for event in rig.events] == [KernelEvent.WORK]
    rig.route["up_limit"] = 10
    rig.route["parent_ifindex"] = 0
    for child in LIVE:
        assert rig.send(contribution(child, 4, 1), CHILDREN[child])[0] == DROP
    # woken once until it has looked
    assert [event[0] for event in rig.events] == [KernelEvent.WORK]
    rig.memory.tables["woken"] = 0
    for child in LIVE:
        rig.send(contribution(child, 5, 1), CHILDREN[child])
    assert len(rig.events) == 2


def test_the_end_of_a_group_waits_for_what_user_space_has_to_send(
    shared: Callable[..., SharedMemory],
) -> None:
    rig = Rig(shared(1600, "native"), "native")
    rig.route["group"] = GROUP
    group = int(rig.memory.shards[rig.side.row, ShardColumn.GROUP0])
    rig.memory.up_left[group] = rig.memory.down_left[group] = 2
    rig.route["ends_held"] = Held.HELD_UP
    for fragment, verdict in ((3, REDIRECT), (4, DROP)):
        for child in LIVE:
            last, _ = rig.send(contribution(child, fragment, 1), CHILDREN[child])
        assert last == verdict
        assert bool(rig.memory.logged[rig.slot(fragment)] & LEFT_UP) == (verdict == REDIRECT)
        ends = decode(rig.memory.rows[rig.slot(fragment)].tobytes(), KEY).flags
        assert ends == (Flag.NONE if verdict == REDIRECT else Flag.GROUP_END)
    rig.route["ends_held"] = Held.HELD_DOWN
    for fragment, verdict in ((5, REDIRECT), (6, DROP)):
        assert rig.send(contribution(0, fragment, 6, kind=Kind.RESULT, host=0), PARENT)[0] == verdict
        assert bool(rig.memory.logged[rig.slot(fragment)] & LEFT_DOWN) == (verdict == REDIRECT)


def test_a_fragment_that_is_complete_again_leaves_again(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "native"), "native")
    for value in (1, 2):
        for child in LIVE:
            verdict, out = rig.send(contribution(child, 3, value, attempt=value - 1), CHILDREN[child])
        assert verdict == REDIRECT
        assert np.frombuffer(decode(out[42:], KEY).payload, "<i4").tolist() == [3 * value] * 256
        slotwork.restart(
            rig.side.tables, rig.side.row, np.array([3]), np.array([1], np.uint8), np.array([0], np.uint8)
        )
    assert rig.memory.shards[rig.side.row, ShardColumn.UP_LOGGED] == 1
    assert rig.events == []


def test_a_root_sends_the_result_to_the_group(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "native"), "native", root=True)
    for child in LIVE:
        verdict, out = rig.send(contribution(child, 0, 2), CHILDREN[child])
    assert verdict == REDIRECT
    row = rig.memory.rows[rig.slot(0)].tobytes()
    sent = frame(row, OWN, GROUP, macs=(OWN_MAC, bytes.fromhex("01005e010203")))
    assert out[:14] == sent[:14]
    assert out[26:] == sent[26:]
    # it does not leave the segment
    assert out[22] == 1
    assert decode(row, KEY).kind == Kind.RESULT
    assert rig.memory.logged[rig.slot(0)] & LEFT_DOWN


def test_several_interfaces_broadcast(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "native", ports=2), "native", root=True)
    rig.memory.object.map("ports").put((1).to_bytes(4, "little"), LO.to_bytes(4, "little"))
    for child in LIVE:
        verdict, _ = rig.send(contribution(child, 0, 2), CHILDREN[child])
    assert verdict == REDIRECT
    assert rig.memory.kernel_counts()[KernelCount.BROADCAST] == 1


def test_a_result_of_the_parent_goes_on_to_the_group(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "native"), "native")
    rig.route["group"] = GROUP
    packet = contribution(0, 9, 6, kind=Kind.RESULT, host=0)
    verdict, out = rig.send(packet, PARENT)
    assert verdict == REDIRECT
    assert out[42:] == rig.memory.rows[rig.slot(9)].tobytes() == packet
    assert rig.send(packet, PARENT)[0] == DROP


def test_a_super_frame_leaves_as_far_as_it_is_complete(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "generic"), "generic")
    for child in LIVE[:-1]:
        # fragment 1 is owed by a child: the middle one of the three stays
        rows = b"".join(contribution(child, fragment, 1) for fragment in (0, 2))
        assert rig.send(rows, CHILDREN[child], partial=True)[0] == DROP
    rows = b"".join(contribution(4, fragment, 7) for fragment in (0, 1, 2))
    verdict, out = rig.send(rows, CHILDREN[4], partial=True)
    assert verdict == TX
    left = rig.memory.rows[rig.slot(0)].tobytes() + rig.memory.rows[rig.slot(2)].tobytes()
    assert out == frame(left, OWN, PARENT, partial=True, macs=(OWN_MAC, PARENT_MAC))
    assert [decode(left[at : at + ROW_BYTES], KEY).gradient for at in (0, ROW_BYTES)] == [0, 2]
    assert rig.memory.bitmap[rig.slot(1)] == 0b10000


def test_what_a_super_frame_holds_for_user_space_passes(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "generic"), "generic")
    asks = contribution(4, 1, 0, kind=Kind.EXPONENT)
    verdict, out = rig.send(contribution(4, 0, 7) + asks + contribution(4, 2, 7), CHILDREN[4], partial=True)
    assert verdict == PASS
    assert out == frame(asks, CHILDREN[4], partial=True)
    assert rig.memory.bitmap[rig.slot(0)] == rig.memory.bitmap[rig.slot(2)] == 0b10000
    assert rig.memory.bitmap[rig.slot(1)] == 0


@pytest.mark.parametrize(("kind", "body"), [(Kind.SENT, 8), (Kind.LOST, 128)])
def test_a_short_last_packet_passes(shared: Callable[..., SharedMemory], kind: Kind, body: int) -> None:
    rig = Rig(shared(1600, "generic"), "generic")
    last = contribution(4, 0, 0, kind=kind, payload=bytes(range(body)))
    verdict, out = rig.send(contribution(4, 0, 7) + contribution(4, 1, 7) + last, CHILDREN[4], partial=True)
    assert verdict == PASS
    assert out == frame(last, CHILDREN[4], partial=True)
    assert rig.memory.bitmap[rig.slot(1)] == 0b10000


def test_closed_means_that_everything_passes(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "native"), "native")
    rig.memory.tables["closed"] = 1
    packet = contribution(0, 0, 1)
    assert rig.send(packet, CHILDREN[0]) == (PASS, frame(packet, CHILDREN[0]))
    assert rig.memory.bitmap[rig.slot(0)] == 0
    assert not rig.memory.tables["busy"]["inside"].any()
    rig.memory.tables["closed"] = 0
    assert rig.send(packet, CHILDREN[0])[0] == DROP


def test_addresses_are_learned_from_who_knows_the_key(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "native"), "native")
    said = contribution(0, 0, 0, kind=Kind.OPEN, payload=bytes(8))
    forged = Packet(Kind.OPEN, JOB, 0, 0, 41, 2, 5, 0, bytes(8)).encode(KEY ^ 1)
    hops = rig.memory.object.map("hops")
    assert rig.send(forged, PARENT)[0] == PASS
    assert hops.get(PARENT.to_bytes(8, "little"), 12) is None
    assert rig.send(said, PARENT)[0] == PASS
    assert rig.send(said, PARENT)[0] == PASS
    assert hops.get(PARENT.to_bytes(8, "little"), 12) == LO.to_bytes(4, "little") + bytes.fromhex(
        "0200000000020000"
    )
    assert [event[0] for event in rig.events] == [KernelEvent.HOP]
    assert rig.events[0][2] == PARENT


def test_ends_of_groups_reach_the_check_queue(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared(1600, "native"), "native")
    rig.send(contribution(1, 1023, 1, flags=Flag.GROUP_END), CHILDREN[1])
    rig.send(contribution(1, 1023, 1, flags=Flag.GROUP_END), CHILDREN[1])
    # the second time, its sender waits
    assert rig.events == [(1, rig.side.row, 1, 0), (1, rig.side.row, 1, -1)]


def test_memory_beyond_one_bank(shared: Callable[..., SharedMemory]) -> None:
    rig = Rig(shared((1 << 17) + 2000, "native"), "native")
    row = rig.memory.add_shard(JOB, 9, 0, 0, (1 << 17) - 1000, 40)
    rig.memory.shards[row, ShardColumn.ACTIVE], rig.memory.shards[row, ShardColumn.COMMITTED] = 41, 0
    fragment = (1 << 17) - 1001
    slot = int(rig.memory.shards[row, ShardColumn.SLOT0]) + fragment
    assert slot >= 1 << 17
    packet = contribution(1, fragment, 3, shard=9)
    assert rig.send(packet, CHILDREN[1])[0] == DROP
    assert rig.memory.rows[slot, 6:].tobytes() == packet[24:]
