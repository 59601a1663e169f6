"""Windows that follow what a path bears, and whole fabrics whose children overrun a shared port."""

import math
import tracemalloc
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest

from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.flow import AT_FIRST, FIRST_WINDOW, LEAST_WINDOW
from inanet.proto.tree.links import Links
from inanet.proto.tree.reliability import Congestion, Link, Sender
from inanet.proto.tree.slots import BURSTS, GROUP
from inanet.sim.fabric import SimulatedFabric
from inanet.sim.link import LinkSpec
from inanet.testing.fabric import float_arrays
from inanet.wire.batch import PacketBatch
from inanet.wire.xagg import ROW_BYTES, Kind
from tests.proto.tree.test_rounds import spec_of

GRANTED = 4096


def use_up(congestion: Congestion, lost: float = 0.0, took: float = 0.001, now: float = 0.0) -> float:
    """Send a window's worth, of which a share is lost; returns the window after it."""
    packets = int(min(congestion.window, GRANTED)) + 1
    missing = int(lost * packets)
    congestion.sent(packets, packets, now)
    if missing:
        congestion.settled(0, missing, GRANTED, now + took)
    congestion.settled(packets - missing, 0, GRANTED, now + took)
    return congestion.window


def test_a_window_doubles_until_it_has_all_that_was_granted() -> None:
    congestion = Congestion()
    windows = [use_up(congestion) for _ in range(6)]
    assert windows[:4] == [2 * FIRST_WINDOW, 4 * FIRST_WINDOW, 8 * FIRST_WINDOW, 16 * FIRST_WINDOW]
    assert min(windows[4:]) >= GRANTED


def test_it_shrinks_by_what_was_lost_and_grows_by_a_sixteenth() -> None:
    congestion = Congestion(window=1600.0)
    assert use_up(congestion, lost=0.5) == pytest.approx(1600 * (1 + 1 / 16 - 0.5), rel=0.01)
    before = congestion.window
    assert use_up(congestion) == pytest.approx(before * 17 / 16, rel=0.01)


def test_however_much_is_lost_a_window_is_at_most_halved_and_never_vanishes() -> None:
    congestion = Congestion(window=1600.0)
    assert use_up(congestion, lost=1.0) > 800
    for _ in range(20):
        use_up(congestion, lost=1.0)
    assert congestion.window == LEAST_WINDOW


def test_five_per_cent_of_accidents_leave_a_window_as_it_is() -> None:
    congestion = Congestion(window=1600.0)
    for _ in range(40):
        use_up(congestion, lost=0.05)
    assert congestion.window >= 1600


def test_round_trips_are_timed_where_nothing_is_lost() -> None:
    congestion = Congestion()
    use_up(congestion, took=0.004)
    assert congestion.round_trip == pytest.approx(0.004)
    use_up(congestion, lost=0.2, took=0.5)
    assert congestion.round_trip == pytest.approx(0.004)
    use_up(congestion, took=0.007)
    assert congestion.round_trip == pytest.approx(0.007)
    use_up(congestion, took=0.003)
    assert congestion.round_trip == pytest.approx(0.0065)


def test_a_wait_for_lost_packets_is_no_round_trip() -> None:
    """What is lost keeps the clock running until as much more has come; long queues at most double from one to the next."""
    congestion = Congestion()
    use_up(congestion, took=3.0)
    assert congestion.round_trip == pytest.approx(AT_FIRST * congestion.plausible)
    congestion = Congestion()
    use_up(congestion, took=0.004)
    use_up(congestion, took=0.5)
    assert congestion.round_trip == pytest.approx(congestion.plausible)
    use_up(congestion, took=0.5)
    assert congestion.round_trip == pytest.approx(2 * congestion.plausible)


def test_a_queue_that_several_links_fill_at_once_is_measured_at_once() -> None:
    """Twice an empty queue's time is less than it takes to cross a full one: all that was on its way was sent again."""
    congestion = Congestion()
    use_up(congestion, took=0.0005)
    use_up(congestion, took=0.018)
    assert congestion.round_trip == pytest.approx(0.018)


def test_a_pause_between_rounds_is_no_round_trip() -> None:
    link = Link("parent", 1, 1, GRANTED)
    link.sent(10, 0.0)
    link.forget(0)
    link.credit(10, 9.0)
    assert link.congestion.round_trip == 0.0


def test_what_was_sent_less_than_a_round_trip_ago_is_not_missed_yet() -> None:
    sender = Sender(Link("parent", 1, 1, GRANTED))
    sender.advance(100, 1.0)
    sender.advance(160, 2.0)
    sender.advance(200, 3.0)
    assert [sender.sent_before(when) for when in (0.5, 1.0, 2.5, 3.0)] == [0, 100, 160, 200]


def test_a_request_that_crosses_its_repetition_is_not_served_twice() -> None:
    link = Link("parent", 1, 1, GRANTED)
    link.congestion.round_trip = 0.01

    def is_coming(now: float) -> bool:
        return link.is_coming(0, 7, link.believed_before(now, 0.5))

    assert not is_coming(1.0)
    link.again(0, 7)
    assert is_coming(1.0)
    assert link.take_resend(62, 1.0) == [(0, 7)]
    assert is_coming(1.019)
    assert not is_coming(1.021)
    link.again(0, 7)
    link.take_resend(62, 1.021)
    # however long a stall was taken for a round trip
    link.congestion.round_trip = 3.0
    assert is_coming(1.520)
    assert not is_coming(1.522)


def test_a_full_link_that_hears_nothing_prods_ever_more_rarely() -> None:
    timing, link = Timing(retransmit=0.02, retransmit_max=0.5), Link("parent", 1, 1, 8)
    link.congestion.round_trip = 0.001
    link.sent(8, 1.0)
    dues = []
    for _ in range(4):
        dues.append(link.prod_due(timing))
        link.prod(dues[-1], timing)
    assert np.diff([1.0, *dues]).tolist() == pytest.approx([0.02, 0.02, 0.04, 0.08])
    link.credit(8, 2.0)
    link.sent(8, 2.0)
    assert link.prod_due(timing) == pytest.approx(2.02)


def test_a_full_link_that_hears_too_little_prods() -> None:
    """All but two of a window are lost: each packet that comes lets another leave, and credit never stops."""
    timing, link = Timing(retransmit=0.02, retransmit_max=0.5), Link("parent", 1, 1, 64)
    link.sent(64, 1.0)
    now, taken = 1.0, 0
    while now < link.prod_due(timing):
        now, taken = now + 0.002, taken + 2
        link.credit(taken, now)
        link.sent(2, now)
    assert now == pytest.approx(1.02)
    link.prod(now, timing)
    assert link.prod_due(timing) == pytest.approx(1.04)
    # it has answered that it lacks the others: now the window is what it seems
    link.written_off(62, 1.022)
    link.sent(62, 1.022)
    assert link.prod_due(timing) == pytest.approx(1.042)


def test_what_left_before_a_prod_is_missed_when_it_is_answered() -> None:
    """And not before: what was said by then was said before the prod, and crossed what had left."""
    link = Link("parent", 1, 1, GRANTED)
    link.congestion.round_trip = 0.1
    assert link.believed_before(1.0, 0.5) == pytest.approx(0.8)
    link.prod(0.95, Timing())
    assert link.believed_before(1.04, 0.5) == pytest.approx(0.84)
    assert link.believed_before(1.06, 0.5) == pytest.approx(0.95)


def test_a_link_that_takes_long_to_cross_waits_as_long_before_it_prods() -> None:
    timing, link = Timing(retransmit=0.02, retransmit_max=0.5), Link("parent", 1, 1, 8)
    link.congestion.round_trip = 0.2
    link.sent(8, 1.0)
    dues = []
    for _ in range(3):
        dues.append(link.prod_due(timing))
        link.prod(dues[-1], timing)
    assert np.diff([1.0, *dues]).tolist() == pytest.approx([0.2, 0.2, 0.4])
    # whatever a stall was taken for
    link.congestion.round_trip = 3.0
    assert link.patience(timing) == 0.5


#: 4 MiB from every host through one port at 1 Gbit/s whose queue holds a few super-frames, or many
FRAGMENTS = 4096


@pytest.mark.parametrize(("queue", "most"), [(256 << 10, 4.0), (2_500_000, 1.5)], ids=["256 KiB", "2.5 MB"])
def test_four_children_share_a_port_without_drowning_it(queue: int, most: float) -> None:
    """With windows as granted, such rounds took four to eight times the bound, and a third of the packets were repetitions."""
    hosts = [f"w{rank}" for rank in range(4)]
    fabric = SimulatedFabric(
        {"ps": None, **dict.fromkeys(hosts, "ps")},
        {host: [rank] for rank, host in enumerate(hosts)},
        link=LinkSpec(1e9, delay=20e-6, queue=queue),
        capacity=3 * FRAGMENTS,
        window=1953,
    )
    spec = spec_of(FRAGMENTS * 256, mode=ExponentMode.CARRIED)
    nodes = fabric.plans.nodes.values()

    def wasted() -> int:
        """Packets that came twice, which means that they were repeated although they were not lost."""
        return sum(node.drops_by_reason()["duplicate"] for node in nodes)

    fabric.all_reduce(spec, float_arrays(FRAGMENTS * 256, 4, seed=0))
    # while nobody knows how long a round trip takes
    before = wasted()
    assert before < 0.02 * 8 * FRAGMENTS
    bound = 4 * FRAGMENTS * (ROW_BYTES + 42) * 8 / 1e9
    for seed in (1, 2):
        assert fabric.all_reduce(spec, float_arrays(FRAGMENTS * 256, 4, seed=seed)) < most * bound
    assert wasted() - before < 0.02 * 2 * 8 * FRAGMENTS
    dropped = fabric.network.counters()["switch-ps"]["dropped"]
    assert 0 < dropped <= sum(node.stats()["retransmissions"] for node in nodes)


@pytest.mark.parametrize("downlink", ["unicast", "multicast"])
def test_long_queues_are_no_reason_to_repeat_what_is_in_them(
    downlink: Literal["unicast", "multicast"],
) -> None:
    """Prods every 20 ms had all of a queue of 200 ms reported missing, and believed to be: two to five packets in six."""
    hosts, fragments = [f"w{rank}" for rank in range(4)], 1500
    fabric = SimulatedFabric(
        {"ps": None, **dict.fromkeys(hosts, "ps")},
        {host: [rank] for rank, host in enumerate(hosts)},
        link=LinkSpec(20e6, delay=1e-3, queue=2_000_000),
        links={"ps": LinkSpec(80e6, delay=1e-3, queue=2_000_000)},
        capacity=3 * fragments,
        window=256,
        downlink=downlink,
    )
    spec = spec_of(fragments * 256, mode=ExponentMode.PROLOGUE)
    bound = fragments * (ROW_BYTES + 66) * 8 / 20e6
    for seed in range(2):
        assert fabric.all_reduce(spec, float_arrays(fragments * 256, 4, seed=seed)) < 1.5 * bound
    assert sum(link.get("dropped", 0) for link in fabric.network.counters().values()) == 0
    repeated = sum(node.stats()["retransmissions"] for node in fabric.plans.nodes.values())
    assert repeated < 0.04 * 2 * 8 * fragments


def test_a_round_whose_exponents_suit_nobody_is_started_again_once() -> None:
    """Restarts are as large as data and have no window: said again every 20 ms, they took 14 to 46 times the bound."""
    hosts, fragments = [f"w{rank}" for rank in range(4)], 1500
    fabric = SimulatedFabric(
        {"ps": None, **dict.fromkeys(hosts, "ps")},
        {host: [rank] for rank, host in enumerate(hosts)},
        link=LinkSpec(20e6, delay=1e-3, queue=500_000),
        links={"ps": LinkSpec(80e6, delay=1e-3, queue=500_000)},
        capacity=3 * fragments,
        window=1024,
    )
    spec = spec_of(fragments * 256, mode=ExponentMode.CARRIED)
    bound = 2 * fragments * (ROW_BYTES + 66) * 8 / 20e6
    for seed, factor in enumerate((1.0, 1e6)):
        arrays = {
            rank: its * np.float32(factor)
            for rank, its in float_arrays(fragments * 256, 4, seed=seed).items()
        }
        assert fabric.all_reduce(spec, arrays) < 1.2 * bound
    assert sum(link.get("dropped", 0) for link in fabric.network.counters().values()) == 0
    repeated = sum(node.stats()["retransmissions"] for node in fabric.plans.nodes.values())
    assert repeated <= 4 * fragments


#: XAgg's testbed (Fig. 12): servers sum for three workers each, one of the workers is the PS's own; three have slow links.
SLOW, FAST = [f"slow{rank}" for rank in range(3)], [f"fast{rank}" for rank in range(3)]
TESTBED = {
    "ps": None,
    "s1": "ps",
    "s2": "ps",
    **dict.fromkeys(SLOW, "s1"),
    **dict.fromkeys(FAST, "s2"),
    "w7": "ps",
}


@pytest.mark.parametrize(
    ("count", "queue", "window", "loss"),
    [
        (1500, 256 << 10, 512, 0.0),
        (1500, 100_000, 128, 0.0),
        (6000, 100_000, 4096, 1e-4),
        (3000, 2_500_000, 4096, 0.01),
    ],
    ids=["shallow", "small windows", "large windows", "losses"],
)
def test_no_window_creeps_behind_packets_that_are_lost(
    count: int, queue: int, window: int, loss: float
) -> None:
    """Rounds by multicast took 10 to 20 times the bound, as long as every packet let but one more leave, 2 ms later."""
    fabric = SimulatedFabric(
        TESTBED,
        {name: [rank] for rank, name in enumerate([*SLOW, *FAST, "w7"])},
        link=LinkSpec(1e9, delay=20e-6, queue=queue, loss=loss),
        links=dict.fromkeys(SLOW, LinkSpec(4e8, delay=20e-6, queue=queue, loss=loss)),
        capacity=3 * count,
        window=window,
        downlink="multicast",
    )
    spec = spec_of(count * 256, mode=ExponentMode.PROLOGUE)
    # three contributions and the sum through a server's port
    bound = 4 * count * (ROW_BYTES + 66) * 8 / 1e9
    for seed in range(2):
        assert fabric.all_reduce(spec, float_arrays(count * 256, 7, seed=seed)) < 3 * bound


def test_credit_tells_what_has_come_or_is_lost() -> None:
    """Links keep order: all that left before what is still in flight has been overtaken, however it was sent."""
    link = Link("peer", 1, 1, 1000)
    assert link.overtaken_since == -math.inf
    for at in (1.0, 2.0):
        link.note_burst(0, 10 * int(at) - 10, at)
        link.sent(10, at)
    assert link.overtaken_since == -math.inf
    link.credit(9, 3.0)
    assert link.overtaken_since == -math.inf
    link.written_off(1, 3.0)
    assert link.overtaken_since == 1.0
    link.credit(18, 3.0)
    assert link.overtaken_since == 1.0
    # one of the first is repeated
    link.note_burst(-1, 0, 4.0)
    link.sent(1, 4.0)
    link.credit(19, 5.0)
    assert link.overtaken_since == 2.0
    assert not link.is_coming(0, 3, link.believed_before(5.0, 0.5))
    link.credit(20, 5.0)
    assert link.overtaken_since == 4.0


def test_packets_that_left_at_one_time_are_told_apart_by_nobody() -> None:
    link = Link("peer", 1, 1, 1000)
    for start in (0, 10):
        link.note_burst(0, start, 1.0)
        link.sent(10, 1.0)
    link.credit(10, 3.0)
    assert link.overtaken_since == -math.inf
    link.credit(20, 3.0)
    assert link.overtaken_since == 1.0


def test_what_left_before_something_that_a_neighbour_has_is_missed_at_once() -> None:
    """However long a round trip takes: nothing else overtakes on the way."""
    link = Link("parent", 1, 1, GRANTED)
    link.congestion.round_trip = 0.1
    assert link.believed_before(1.0, 0.5, seen=0.97) == pytest.approx(0.97)
    assert link.believed_before(1.0, 0.5, seen=0.5) == pytest.approx(0.8)


def test_a_link_that_never_timed_a_round_trip_doubts_only_what_may_queue() -> None:
    link = Link("parent", 1, 1, GRANTED)
    link.sent(64, 1.0)
    assert link.believed_before(1.0, 0.5) == pytest.approx(1.0)
    link.sent(1, 1.0)
    assert link.believed_before(1.0, 0.5) == pytest.approx(0.9)
    link.prod(0.95, Timing())
    assert link.believed_before(1.0, 0.5) == pytest.approx(0.9)


def test_when_an_entry_of_a_log_left_is_remembered() -> None:
    sender = Sender(Link("parent", 1, 1, GRANTED))
    sender.advance(100, 1.0)
    sender.advance(160, 2.0)
    assert [sender.link.sent_at(sender.row, position) for position in (0, 99, 100, 159)] == [
        1.0,
        1.0,
        2.0,
        2.0,
    ]
    assert sender.link.sent_at(sender.row + 1, 0) == -np.inf


@pytest.mark.parametrize("lost", [0, 1, 700])
def test_what_a_report_of_losses_costs_does_not_grow_with_the_log(lost: int) -> None:
    """Each group of a long tensor may be reported, again and again."""
    count, burst = 1 << 20, 496
    log = np.arange(count, dtype=np.uint32)
    sender = Sender(Link("parent", 1, 1, GRANTED))
    for k in range(count // burst):
        sender.advance((k + 1) * burst, float(k))
    links = SimpleNamespace(_node=SimpleNamespace(memory=SimpleNamespace(up_log=log)))
    state = SimpleNamespace(up=sender, slot0=0, row=0)
    group = sender.cursor // GROUP - 1
    end = (group + 1) * GROUP - lost
    wanted = np.arange(end, end + lost)
    tracemalloc.start()
    try:
        seen = Links.newest_seen(links, state, -1, group, wanted)  # type: ignore[arg-type]
        forgotten = Links.newest_seen(links, state, -1, 0, wanted)  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == (end - 1) // burst
    assert forgotten == -np.inf
    assert peak < BURSTS * burst * 32


def _first_of_four_tensors(lost: int) -> float:
    """Seconds until the first of four tensors is reduced, that were begun together; the server loses exponents ``lost``."""
    fabric = SimulatedFabric(
        {"ps": None, "w0": "ps", "w1": "ps"},
        {"w0": [0], "w1": [1]},
        link=LinkSpec(1e9, delay=100e-6),
        capacity=70_000,
        window=512,
    )
    count = 15_000
    server = fabric.plans.nodes["ps"]
    receive, seen = server.receive, [0]

    def lossy(batch: PacketBatch, now: float) -> None:
        for offset in batch.offsets.tolist():
            words = batch.arena[offset : offset + 24].view(np.uint32)
            # exponents of the first tensor are shard 1, and w0 is child 1
            if words[0] >> 8 & 15 == Kind.DATA and words[4] & 0xFFFF == 1 and words[1] == 1:
                seen[0] += 1
                if seen[0] == lost:
                    batch.arena[offset + 40] ^= 1
        receive(batch, now)

    server.receive = lossy  # type: ignore[method-assign]
    specs = [TensorSpec(f"t{k}", "f32", (count * 256,), "sum", ExponentMode.PROLOGUE) for k in range(4)]
    began = fabric.network.now
    rounds = [fabric.begin(spec, float_arrays(count * 256, 2, seed=k)) for k, spec in enumerate(specs)]
    fabric.network.run(lambda: fabric.plans.done(rounds[0]), deadline=60)
    assert seen[0] > 8
    return fabric.network.now - began


def test_a_lost_exponent_is_missed_although_other_tensors_keep_its_link_busy() -> None:
    assert _first_of_four_tensors(lost=8) < _first_of_four_tensors(lost=0) + 0.1
