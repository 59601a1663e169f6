"""A worker's results through the kernel program: what is taken and what is not, and that nothing is lost or torn."""

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from inanet.phy.memory import MemoryNetwork
from inanet.proto.node import Node
from inanet.proto.plan import ExponentMode, Fold, NodePlan, Parent, Part, Placement, Shard, TensorLayout
from inanet.proto.reliability import Timing
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import ROW_BYTES, Flag, Kind, Packet
from inanet.xdp.inbox import MAX_SEGMENTS, Inbox, InboxCount
from inanet.xdp.worker import InboxDevice, ReceivingNode, inbox_of
from tests.proto.test_impairment import ALL_FIVE, impaired
from tests.proto.test_rounds import ONE_EACH, STAR, TREE, spec_of
from tests.xdp.conftest import CHILDREN, DROP, OWN, PARENT, PASS, frame
from tests.xdp.test_rawip import bare
from tests.xdp.test_rawip import frame as raw_frame
from tests.xdp.virtual import InboxFabric

pytestmark = pytest.mark.privileged("loads BPF programs")

KEY, JOB, SHARD, ROUND = 0x0123456789ABCDEF, 7, 2, 41
#: fragments of the tensor
FRAGMENTS = 150
GROUP = endpoint("239.192.0.9", 7401)
Open = Callable[..., Inbox]


@pytest.fixture
def open_inbox(root_needed: None) -> Iterator[Open]:
    """Loads the program for a worker at :data:`OWN` that hears :data:`PARENT`; everything is freed after the test."""
    with ExitStack() as stack:

        def make(rows: int = 64, at: int = OWN) -> Inbox:
            inbox = Inbox(rows, at)
            stack.callback(inbox.close)
            inbox.follow({(PARENT if at & 0xFFFF else bare(PARENT), JOB): KEY}, frozenset())
            return inbox

        yield make


def packet(fragment: int, **other: Any) -> bytes:
    """A result, or what is like one."""
    key = other.pop("key", KEY)
    fields: dict[str, Any] = {
        "kind": Kind.RESULT,
        "job": JOB,
        "host": 0,
        "gradient": fragment,
        "round": ROUND,
    }
    fields |= {"shard": SHARD, "plan": 1, "attempt": 0}
    payload = np.full(256, fragment + 1, np.int32).tobytes()
    return Packet(**(fields | {"payload": payload} | other)).encode(key)


def show(inbox: Inbox, arrived: bytes) -> int:
    """Run the program on a frame; returns the verdict. What is passed is as it came."""
    verdict, left, _ = inbox.program("native").test_run(arrived)
    assert verdict in (DROP, PASS)
    assert verdict == DROP or left == arrived
    return verdict


def everything(inbox: Inbox) -> list[tuple[bytes, int]]:
    """Packets that are in the ring, with their sources."""
    found: list[tuple[bytes, int]] = []
    while (batch := inbox.take()) is not None:
        found += [(batch.packet(index), int(batch.sources[index])) for index in range(len(batch))]
    return found


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


def test_a_golden_set_leaves_the_same_node(open_inbox: Open) -> None:
    inbox = open_inbox(512)
    timing = Timing()
    through = begin(ReceivingNode("w", FRAGMENTS + 10, timing, None, inbox))
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


SPOOFED = {
    "another host": frame(packet(1), CHILDREN[0]),
    "another port of the parent's": frame(packet(1), PARENT ^ 1),
    "another key": frame(packet(1, key=KEY ^ 2), PARENT),
    "another job": frame(packet(1, job=8), PARENT),
    "a contribution": frame(packet(1, kind=Kind.DATA), PARENT),
    "an exponent": frame(packet(1, kind=Kind.EXPONENT), PARENT),
    "a result of a host's": frame(packet(1, host=1), PARENT),
    "another version": frame(b"\xa2" + packet(1)[1:], PARENT),
    "another address": frame(packet(1), PARENT, CHILDREN[0]),
    "another port": frame(packet(1), PARENT, OWN + 1),
    "a group that is not heard": frame(packet(1), PARENT, GROUP),
    "a short packet": frame(packet(1)[:-4], PARENT),
    "a long packet": frame(packet(1) + bytes(4), PARENT),
    "nothing": frame(b"", PARENT),
    "two packets, the second damaged": frame(packet(1) + packet(2)[:20] + bytes(4) + packet(2)[24:], PARENT),
    "a header that promises more": frame(packet(1) * 2, PARENT)[:-ROW_BYTES],
    "the first part of a packet": (lambda whole: whole[:20] + b"\x20" + whole[21:])(frame(packet(1), PARENT)),
    "IP options": (lambda whole: whole[:14] + b"\x46" + whole[15:])(frame(packet(1), PARENT)),
    "IPv6": (lambda whole: whole[:12] + b"\x86\xdd" + whole[14:])(frame(packet(1), PARENT)),
    "TCP": (lambda whole: whole[:23] + b"\x06" + whole[24:])(frame(packet(1), PARENT)),
}


def test_nothing_but_the_jobs_own_results_is_taken(open_inbox: Open) -> None:
    inbox = open_inbox()
    for what, arrived in SPOOFED.items():
        assert show(inbox, arrived) == PASS, what
    assert everything(inbox) == []
    assert inbox.state["head"][0] == 0
    assert inbox.counts()[InboxCount.TAKEN] == 0
    assert show(inbox, frame(packet(1), PARENT)) == DROP
    assert everything(inbox) == [(packet(1), PARENT)]


def test_what_is_no_longer_the_jobs_passes(open_inbox: Open) -> None:
    inbox = open_inbox()
    node = begin(ReceivingNode("w", FRAGMENTS, None, None, inbox))
    arrived, to_group = frame(packet(1), PARENT), frame(packet(1), PARENT, GROUP)
    assert (show(inbox, arrived), show(inbox, to_group)) == (DROP, DROP)
    assert len(everything(inbox)) == 2
    # another parent, the same group no longer, another key (R5)
    moved = Placement(0, Parent("ps", CHILDREN[3], 2, 512, 0), (), (), 0, False)
    node.apply(NodePlan(JOB, 2, KEY ^ 5, 2, (moved,), 512), 1.0)
    assert (show(inbox, arrived), show(inbox, to_group)) == (PASS, PASS)
    assert show(inbox, frame(packet(1), CHILDREN[3])) == PASS
    assert show(inbox, frame(packet(1, key=KEY ^ 5), CHILDREN[3])) == DROP
    node.drop_job(JOB)
    assert show(inbox, frame(packet(1, key=KEY ^ 5), CHILDREN[3])) == PASS


def test_old_rounds_that_are_sent_again_change_nothing(open_inbox: Open) -> None:
    inbox = open_inbox(512)
    node = begin(ReceivingNode("w", FRAGMENTS, None, None, inbox))
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


def test_a_full_ring_leaves_the_rest_to_the_socket(open_inbox: Open) -> None:
    inbox = open_inbox(64)
    verdicts = [show(inbox, frame(packet(fragment), PARENT)) for fragment in range(70)]
    assert verdicts == [DROP] * 64 + [PASS] * 6
    assert inbox.counts()[[InboxCount.TAKEN, InboxCount.FULL, InboxCount.PASSED]].tolist() == [64, 6, 6]
    batch = inbox.take()
    assert batch is not None
    # rows of a batch that is being worked on are not written to
    assert show(inbox, frame(packet(99), PARENT)) == PASS
    assert [batch.packet(index) for index in range(64)] == [packet(fragment) for fragment in range(64)]
    assert inbox.take() is None
    assert show(inbox, frame(packet(99), PARENT)) == DROP
    assert everything(inbox) == [(packet(99), PARENT)]


def test_super_frames_go_round_the_ring(open_inbox: Open) -> None:
    inbox = open_inbox(256)
    rng = np.random.default_rng(1)
    sent = 0
    pending: list[bytes] = []
    for _ in range(60):
        size = int(rng.integers(1, MAX_SEGMENTS + 1))
        packets = [packet(sent + index) for index in range(size)]
        verdict = show(inbox, frame(b"".join(packets), PARENT))
        # no more is there than fits, and what fits is taken
        assert (verdict == DROP) == (len(pending) + size <= inbox.rows)
        if verdict == DROP:
            pending += packets
            sent += size
        else:
            assert everything(inbox) == [(data, PARENT) for data in pending]
            pending = []
    assert sent > 4 * inbox.rows
    assert everything(inbox) == [(data, PARENT) for data in pending]
    counts = inbox.counts()
    assert counts[InboxCount.TAKEN] == sent
    assert counts[InboxCount.FRAMES] == 60
    assert counts[InboxCount.FULL] > 0


def test_a_frame_of_which_a_part_is_something_else_goes_up_whole(open_inbox: Open) -> None:
    inbox = open_inbox()
    whole = packet(1) + packet(2) + packet(3)
    assert show(inbox, frame(whole, PARENT)) == DROP
    for mixed in (
        packet(1) + packet(2, job=8) + packet(3),
        packet(1) + packet(2, kind=Kind.EXPONENT),
        whole + bytes(36),
        whole[:-1],
    ):
        assert show(inbox, frame(mixed, PARENT)) == PASS
    assert len(everything(inbox)) == 3
    counts = inbox.counts()
    assert counts[[InboxCount.FOREIGN, InboxCount.OTHER, InboxCount.PASSED]].tolist() == [2, 2, 4]


def test_jobs_share_a_frame_when_both_are_the_workers(open_inbox: Open) -> None:
    inbox = open_inbox()
    inbox.follow({(PARENT, JOB): KEY, (PARENT, 8): KEY ^ 8}, frozenset())
    assert show(inbox, frame(packet(1) + packet(2, job=8, key=KEY ^ 8) + packet(3), PARENT)) == DROP
    assert len(everything(inbox)) == 3


def test_the_raw_framing(open_inbox: Open) -> None:
    inbox = open_inbox(64, bare(OWN))
    assert show(inbox, raw_frame(packet(4), PARENT)) == DROP
    assert everything(inbox) == [(packet(4), bare(PARENT))]
    assert show(inbox, raw_frame(packet(4), CHILDREN[0])) == PASS
    assert show(inbox, frame(packet(4), PARENT)) == PASS
    assert show(inbox, raw_frame(packet(4), PARENT, protocol=6)) == PASS


def test_it_wakes_only_who_sleeps(open_inbox: Open) -> None:
    inbox = open_inbox()

    def readable() -> bool:
        return bool(select.select([inbox.fileno()], [], [], 0)[0])

    assert show(inbox, frame(packet(0), PARENT)) == DROP
    assert not readable()
    assert len(everything(inbox)) == 1
    inbox.sleep()
    assert not readable()
    for fragment in range(3):
        assert show(inbox, frame(packet(fragment), PARENT)) == DROP
        # once is enough
        assert inbox.state["asleep"][0] == 0
    assert select.select([inbox.fileno()], [], [], 5)[0]
    inbox.awake()
    assert len(everything(inbox)) == 3
    inbox.sleep()
    assert not readable()


def test_processors_at_once_lose_and_tear_nothing(open_inbox: Open) -> None:
    inbox = open_inbox(256)
    senders = 3
    each = 40
    frames = [
        [frame(b"".join(packet(1000 * who + 8 * k + j) for j in range(8)), PARENT) for k in range(each)]
        for who in range(senders)
    ]
    program = inbox.program("native")
    left: list[list[int]] = [[] for _ in range(senders)]

    def send(who: int) -> None:
        for number, arrived in enumerate(frames[who]):
            if program.test_run(arrived)[0] == PASS:
                left[who].append(number)

    threads = [threading.Thread(target=send, args=(who,)) for who in range(senders)]
    for thread in threads:
        thread.start()
    got: list[bytes] = []
    while True:
        ended = not any(thread.is_alive() for thread in threads)
        got += [data for data, _ in everything(inbox)]
        if ended:
            break
    for thread in threads:
        thread.join()
    passed = {(who, number) for who in range(senders) for number in left[who]}
    expected = [
        packet(1000 * who + 8 * k + j)
        for who in range(senders)
        for k in range(each)
        if (who, k) not in passed
        for j in range(8)
    ]
    assert sorted(got) == sorted(expected)
    # of each sender in its order
    for who in range(senders):
        mine = [int.from_bytes(data[8:12], "little") for data in got]
        mine = [number for number in mine if number // 1000 == who]
        assert mine == sorted(mine)


def test_the_device_reads_the_socket_only_when_something_may_be_there(open_inbox: Open) -> None:
    network = MemoryNetwork()
    inner, peer = network.open(), network.open()
    inbox = open_inbox(64, inner.endpoint)
    inbox.follow({(PARENT, JOB): KEY}, frozenset())
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


def test_bits_do_not_depend_on_the_ring(open_inbox: Open) -> None:
    """Everything that a network can do, results that find no room, and an aggregator that dies."""
    fabric = InboxFabric(
        lambda endpoint: open_inbox(8, endpoint), TREE, ONE_EACH, wrap=impaired(7, **ALL_FIVE)
    )
    assert fabric_rounds(fabric, lose=True) == fabric_rounds(VirtualFabric(STAR, ONE_EACH), lose=False)
    for name in ("w0", "w1", "w2", "w3"):
        counters, stats = fabric.devices[name].counters(), fabric.nodes[name].stats()
        assert counters["xdp_taken"] > 0.5 * stats["results_in"]
        assert counters["xdp_full"] > 0
