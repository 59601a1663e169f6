"""A worker behind its ring: the same node as without one, whatever comes which way."""

import select
import socket

import numpy as np
import pytest

from inanet.phy.memory import MemoryNetwork
from inanet.phy.udp import UdpDevice
from inanet.proto.common.plan import (
    ExponentMode,
    Fold,
    NodePlan,
    Parent,
    Part,
    Placement,
    Shard,
    TensorLayout,
)
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.node import Node
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.endpoint import address_of
from inanet.wire.xagg import Flag, Kind
from inanet.xdp.worker import InboxDevice, inbox_of
from tests.proto.tree.test_impairment import ALL_FIVE, impaired
from tests.proto.tree.test_rounds import ONE_EACH, STAR, TREE, spec_of
from tests.xdp.conftest import CHILDREN, DROP, PARENT, PASS, OpenInbox, frame
from tests.xdp.results import GROUP, JOB, KEY, ROUND, SHARD, everything, packet, show
from tests.xdp.virtual import InboxFabric

pytestmark = pytest.mark.privileged("loads BPF programs")

#: fragments of the tensor
FRAGMENTS = 150


def batch_of(data: bytes, source: int) -> PacketBatch:
    """One packet, as a socket would deliver it."""
    arena = np.zeros(-(-max(len(data), 4) // 4) * 4, np.uint8)
    arena[: len(data)] = np.frombuffer(data, np.uint8)
    return PacketBatch(
        arena, np.zeros(1, np.int64), np.array([len(data)], np.int64), np.array([source], np.uint64)
    )


def begin(node: Node) -> Node:
    """A worker in the middle of a round; its parent's plan and layout."""
    spec = spec_of(FRAGMENTS * 256, mode=ExponentMode.FIXED)
    placement = Placement(0, Parent("a", PARENT, 1, 512, GROUP), (), (), 0, False)
    node.apply(NodePlan(JOB, 1, KEY, 2, (placement,), 512), 0.0)
    node.add_layout(
        JOB,
        TensorLayout(0, spec, (Shard(SHARD, 0, 0, Part.DATA, Fold.SUM, 0, FRAGMENTS),)),
        last_round=ROUND - 1,
    )
    node.begin(JOB, 0, ROUND, [np.zeros(FRAGMENTS * 256, np.float32)], 0.0)
    list(node.transmit(0.0))
    return node


def golden() -> list[tuple[bytes, int]]:
    """Packets with their sources: results in disorder and twice, and every reason to refuse one."""
    order = np.random.default_rng(3).permutation(FRAGMENTS - 20).tolist()
    packets = [(packet(fragment), PARENT) for fragment in order]
    packets += [(packet(fragment), PARENT) for fragment in order[:5]]
    sound = packet(FRAGMENTS - 10)
    # damaged, then as it was sent
    packets += [(sound[:at] + bytes([sound[at] ^ 16]) + sound[at + 1 :], PARENT) for at in (30, 900, 1050)]
    packets += [(sound[:at] + bytes([sound[at] ^ 16]) + sound[at + 1 :], PARENT) for at in (1, 9, 23)]
    packets += [(cut, PARENT) for cut in (b"", sound[:35], sound[:40], sound[:-4], sound + bytes(4))]
    packets += [(sound, PARENT), (sound, CHILDREN[0]), (packet(2, host=1), PARENT)]
    for other in ({"job": 9}, {"key": KEY ^ 1}, {"shard": 9}, {"round": ROUND - 1}, {"round": ROUND + 1}):
        packets.append((packet(FRAGMENTS - 9, **other), PARENT))
    packets.append((packet(FRAGMENTS + 5), PARENT))
    for kind in (Kind.DATA, Kind.EXPONENT):
        packets.append((packet(FRAGMENTS - 8, kind=kind), PARENT))
    packets.append((packet(FRAGMENTS - 7, flags=Flag.GROUP_END), PARENT))
    return packets


def same(one: Node, other: Node) -> None:
    """Two nodes hold the same and have counted the same."""
    for name in ("rows", "bitmap", "round", "state", "attempt", "down_log", "shards", "taken", "logged"):
        assert np.array_equal(getattr(one.memory, name), getattr(other.memory, name)), name
    assert one.drops_by_reason() == other.drops_by_reason()
    assert one.stats() == other.stats()


def test_a_golden_set_leaves_the_same_node(open_inbox: OpenInbox) -> None:
    inbox = open_inbox(512)
    timing = Timing()
    through = begin(Node("w", FRAGMENTS + 10, timing, None, inbox.follow))
    plain = begin(Node("w", FRAGMENTS + 10, timing))
    taken = 0
    for data, source in golden():
        plain.receive(batch_of(data, source), 0.001)
        if show(inbox, frame(data, source)) == PASS:
            assert inbox.take() is None
            through.receive(batch_of(data, source), 0.001)
        else:
            batch = inbox.take()
            assert batch is not None
            assert [(batch.packet(0), int(batch.sources[0]))] == [(data, source)]
            through.receive(batch, 0.001)
            taken += 1
        same(through, plain)
    assert taken >= FRAGMENTS - 20
    drops = through.drops_by_reason()
    expected = (
        Drop.BAD_CHECKSUM,
        Drop.BAD_TAG,
        Drop.DUPLICATE,
        Drop.STALE_ROUND,
        Drop.FOREIGN_HOST,
        Drop.SHORT,
    )
    assert all(drops.get(reason.label) for reason in expected), drops


def test_what_is_no_longer_the_jobs_passes(open_inbox: OpenInbox) -> None:
    inbox = open_inbox()
    node = begin(Node("w", FRAGMENTS, None, None, inbox.follow))
    inbox.hear({GROUP})
    arrived, to_group = frame(packet(1), PARENT), frame(packet(1), PARENT, GROUP)
    assert (show(inbox, arrived), show(inbox, to_group)) == (DROP, DROP)
    assert len(everything(inbox)) == 2
    inbox.hear(frozenset())
    assert show(inbox, to_group) == PASS
    # another parent, another key (re-parenting)
    moved = Placement(0, Parent("ps", CHILDREN[3], 2, 512, 0), (), (), 0, False)
    node.apply(NodePlan(JOB, 2, KEY ^ 5, 2, (moved,), 512), 1.0)
    assert show(inbox, arrived) == PASS
    assert show(inbox, frame(packet(1), CHILDREN[3])) == PASS
    assert show(inbox, frame(packet(1, key=KEY ^ 5), CHILDREN[3])) == DROP
    node.drop_job(JOB)
    assert show(inbox, frame(packet(1, key=KEY ^ 5), CHILDREN[3])) == PASS


def test_old_rounds_that_are_sent_again_change_nothing(open_inbox: OpenInbox) -> None:
    inbox = open_inbox(512)
    node = begin(Node("w", FRAGMENTS, None, None, inbox.follow))
    before = node.memory.rows.copy(), node.memory.state.copy()
    for round_ in (ROUND - 1, ROUND - 9, ROUND + 1):
        for fragment in range(20):
            assert show(inbox, frame(packet(fragment, round=round_), PARENT)) == DROP
    while (batch := inbox.take()) is not None:
        node.receive(batch, 0.001)
    assert np.array_equal(node.memory.rows, before[0])
    assert np.array_equal(node.memory.state, before[1])
    assert node.drops_by_reason()[Drop.STALE_ROUND.label] == 40
    assert node.drops_by_reason()[Drop.NOT_OPEN.label] == 20


def test_the_device_reads_the_socket_only_when_something_may_be_there(open_inbox: OpenInbox) -> None:
    network = MemoryNetwork()
    inner, peer = network.open(), network.open()
    inbox = open_inbox(64, inner.endpoint)
    inbox.follow({(PARENT, JOB): KEY})
    device = InboxDevice(inner, inbox)
    assert inbox_of(device) is inbox
    assert inbox_of(inner) is None
    reads = 0
    plain = inner.receive

    def counted() -> PacketBatch | None:
        nonlocal reads
        reads += 1
        return plain()

    inner.receive = counted  # type: ignore[method-assign]

    def drain() -> int:
        packets = 0
        while (batch := device.receive()) is not None:
            packets += len(batch)
        return packets

    def arrive(fragment: int) -> None:
        assert show(inbox, frame(packet(fragment), PARENT, inner.endpoint)) == DROP

    assert drain() == 0
    assert reads == 1
    for fragment in range(3):
        arrive(fragment)
        assert drain() == 1
    assert reads == 1
    # something else for the socket is counted by the program
    assert show(inbox, frame(b"x" * 36, PARENT, inner.endpoint)) == PASS
    arrive(3)
    assert drain() == 1
    assert reads == 2
    # and what came another way is found because it wakes, though results come all the time
    peer.send(Transmission(inner.endpoint, np.zeros(36, np.uint8), np.zeros(1, np.int64), 36))
    found = 0
    for fragment in range(6):
        arrive(fragment)
        found += drain() - 1
    assert found == 1
    counters = device.counters()
    assert counters["rx_packets"] == 11
    assert counters["xdp_taken"] == 10
    assert counters["xdp_passed"] == 1
    device.close()
    device.close()


def test_whoever_stops_reading_early_is_called_again(open_inbox: OpenInbox) -> None:
    """A driver takes so many packets at a time and then waits for the descriptor, whatever has woken it."""
    inner = UdpDevice("127.0.0.1")
    inbox = open_inbox(64, inner.endpoint)
    inbox.follow({(PARENT, JOB): KEY})
    device = InboxDevice(inner, inbox)
    waiting = select.poll()
    waiting.register(device.fileno(), select.POLLIN)

    def arrive(fragment: int) -> None:
        assert show(inbox, frame(packet(fragment), PARENT, inner.endpoint)) == DROP

    def called() -> bool:
        return bool(waiting.poll(0))

    def one() -> int | None:
        batch = device.receive()
        return None if batch is None else len(batch)

    # results before anybody has looked
    arrive(0)
    assert called()
    assert (one(), one()) == (1, None)
    assert not called()
    # woken by the program
    arrive(1)
    assert called()
    assert one() == 1
    arrive(2)
    assert called()
    assert (one(), one()) == (1, None)
    assert not called()
    # woken by the socket: the program has nothing to say while somebody is awake
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.sendto(bytes(36), address_of(inner.endpoint))
        assert waiting.poll(5000)
        assert one() == 1
    arrive(3)
    arrive(4)
    assert called()
    assert (one(), one()) == (2, None)
    assert not called()
    device.close()


def fabric_rounds(fabric: VirtualFabric, lose: bool) -> list[bytes]:
    """Results of three rounds; in the last one, the first aggregator dies if it is to be lost."""
    count, results = 256 * 110 + 7, []
    spec = spec_of(count, mode=ExponentMode.CARRIED)
    for round_ in range(3):
        arrays = float_arrays(count, 4, seed=round_)
        number = fabric.begin(spec, arrays)
        if lose and round_ == 2:
            before = fabric.nodes["a0"].stats()["fragments_completed"]
            fabric.run(lambda before=before: fabric.nodes["a0"].stats()["fragments_completed"] > before + 30)
            fabric.lose_aggregator("a0")
        fabric.run(lambda number=number: fabric.done(number))
        assert len({array.tobytes() for array in arrays.values()}) == 1
        results.append(arrays[0].tobytes())
    return results


def test_bits_do_not_depend_on_the_ring(open_inbox: OpenInbox) -> None:
    """Everything that a network can do, results that find no room, and an aggregator that dies."""
    fabric = InboxFabric(
        lambda endpoint: open_inbox(8, endpoint), TREE, ONE_EACH, wrap=impaired(7, **ALL_FIVE)
    )
    assert fabric_rounds(fabric, lose=True) == fabric_rounds(VirtualFabric(STAR, ONE_EACH), lose=False)
    for name in ("w0", "w1", "w2", "w3"):
        counters, stats = fabric.devices[name].counters(), fabric.nodes[name].stats()
        assert counters["xdp_taken"] > 0.5 * stats["results_in"]
        assert counters["xdp_full"] > 0
