"""Flow control: what is in flight never exceeds what the receiver granted, and no loss of credit stops a link for good."""

import numpy as np
import pytest

from inanet.phy.wrapper import Wrapper
from inanet.proto.common.plan import ExponentMode
from inanet.proto.tree.xagg import slotwork
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.xagg import ROW_BYTES, Flag, Kind
from tests.proto.tree.rig import NEW_PARENT, PARENT, Rig, child_at, integers
from tests.proto.tree.rig import TREE as TREE_ID
from tests.proto.tree.test_impairment import impaired
from tests.proto.tree.test_orders import Loses
from tests.proto.tree.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of

COUNT = 256 * 50


class Gauge(Wrapper):
    """Counts rows by sender in the receive queue: what is in flight, since nothing takes time on this network."""

    def __init__(self, device, highest: dict[tuple[int, int], int]) -> None:
        super().__init__(device)
        self.highest = highest

    def receive(self):
        inside = self._device
        counts: dict[int, int] = {}
        for source, packets in inside._queue:
            if packets.shape[1] == ROW_BYTES:
                counts[source] = counts.get(source, 0) + int((packets[:, 1] & 15 != Kind.RESTART).sum())
        for source, count in counts.items():
            hop = (source, inside.endpoint)
            self.highest[hop] = max(self.highest.get(hop, 0), count)
        return inside.receive()


def gauged(highest):
    return lambda device, name, clock: Gauge(device, highest)


def run_rounds(
    fabric: VirtualFabric, rounds: int = 3, mode: ExponentMode = ExponentMode.CARRIED
) -> list[bytes]:
    results = []
    for round_ in range(rounds):
        arrays = float_arrays(COUNT, 4, seed=round_)
        fabric.all_reduce(spec_of(COUNT, mode=mode), arrays)
        assert len({array.tobytes() for array in arrays.values()}) == 1
        results.append(arrays[0].tobytes())
    return results


@pytest.fixture(scope="module")
def clean() -> list[bytes]:
    return run_rounds(VirtualFabric(STAR, ONE_EACH))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("parents", [STAR, TREE, DEEP], ids=["star", "tree", "deep"])
def test_windows_are_kept_and_never_empty_for_want_of_credit(parents, window, clean):
    highest: dict[tuple[int, int], int] = {}
    fabric = VirtualFabric(parents, ONE_EACH, window=window, wrap=gauged(highest))
    start = fabric.clock.now
    assert run_rounds(fabric) == clean
    assert max(highest.values()) == window
    # without loss nothing ever waits for a timer longer than one reorder window
    assert fabric.clock.now - start < 0.1


@pytest.mark.parametrize(
    "windows",
    [
        {"ps": 2, "a0": 3, "a1": 64, "w0": 500, "w1": 1},
        {"ps": 500, "a0": 1, "a1": 2},
        {"ps": 4, "w0": 400, "w1": 400, "w2": 400, "w3": 400},
    ],
)
def test_windows_may_differ_between_the_directions_of_a_hop(windows, clean):
    """A root shares its buffer among many children and grants each less than it is granted itself: it has to return credit
    by what it grants."""
    highest: dict[tuple[int, int], int] = {}
    fabric = VirtualFabric(TREE, ONE_EACH, windows=windows, wrap=gauged(highest))
    start = fabric.clock.now
    assert run_rounds(fabric) == clean
    assert fabric.clock.now - start < 0.1
    names = {device.endpoint: name for name, device in fabric.devices.items()}
    for (_, receiver), count in highest.items():
        assert count <= fabric.granted(names[receiver])


def test_a_node_that_was_not_told_what_it_grants_returns_credit_often():
    fabric = VirtualFabric(TREE, ONE_EACH, windows={"ps": 20, "w0": 2000}, window=20)
    for name, node in fabric.nodes.items():
        plan = fabric.plan_of(name)
        node.apply(type(plan)(plan.job, 2, plan.key, plan.ranks, plan.placements), fabric.clock.now)
    fabric.version = 2
    start = fabric.clock.now
    run_rounds(fabric, 1)
    assert fabric.clock.now - start < 0.1


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("parents", [STAR, DEEP], ids=["star", "deep"])
def test_small_windows_survive_loss(parents, window, clean):
    """Packets and credits are lost, duplicated and damaged: slow, but never stuck."""
    shares = {"drop": 0.05, "duplicate": 0.03, "corrupt": 0.03}
    fabric = VirtualFabric(parents, ONE_EACH, window=window, wrap=impaired(window, **shares))
    assert run_rounds(fabric, 2) == clean[:2]


def test_lost_credits_cost_time_but_nothing_else(clean):
    fabric = VirtualFabric(TREE, ONE_EACH, window=4, wrap=lambda d, n, c: Loses(d, Kind.CREDIT))
    assert run_rounds(fabric) == clean
    assert sum(node.drops_by_reason()["bad_tag"] for node in fabric.nodes.values()) == 6 * 7


@pytest.mark.parametrize("queue", [3, 10])
def test_a_receive_queue_that_overflows(queue, clean):
    """Windows that promise more than the queue holds: the kernel drops the tails of bursts, control packets included."""
    fabric = VirtualFabric(DEEP, ONE_EACH, window=24, queue=queue)
    assert run_rounds(fabric, 2) == clean[:2]
    assert sum(device.counters()["kernel_overflow"] for device in fabric.devices.values()) > 50


def test_asking_twice_for_what_is_queued_or_was_never_sent_frees_no_window():
    rig = Rig(count=40, window=8)
    values = integers(1)[0]
    rig.feed(*[rig.data(c, f, values) for f in range(30) for c in (0, 1)])
    (tree,) = rig.node.state.jobs[7].trees.values()
    assert len([s for s in rig.sent() if s.kind is Kind.DATA]) == 8
    assert tree.up.in_flight == 8
    # fragments 4 to 7 are lost; of 30 to 39 the parent cannot have anything yet
    lost = (rig.packet(Kind.LOST, host=8, values=np.array([0xF0, 0xFF << 24 | 1 << 23])), PARENT)
    rig.feed(lost, lost)
    assert tree.up.in_flight == 4
    rig.feed(lost)
    assert tree.up.in_flight == 4
    sent = [s.packet.gradient for s in rig.sent() if s.kind is Kind.DATA]
    assert sent == [4, 5, 6, 7]
    assert tree.up.in_flight == 8


def test_a_link_waits_from_when_it_is_full():
    """What was in flight before may date from long ago; the window of a parent that has just been filled is not empty.

    Until it is given up, the last row prods the parent: it has to look at its group whatever else was lost.
    """
    rig = Rig(count=40, window=8)
    values = integers(1)[0]
    rig.feed(*[rig.data(c, f, values) for f in range(5) for c in (0, 1)])
    (tree,) = rig.node.state.jobs[7].trees.values()
    rig.sent()
    # then the node had nothing to send, and what was timed is forgotten with a round that ended
    tree.up.congestion.reset()
    assert tree.up.in_flight == 5
    rig.now += 10.0
    rig.feed(*[rig.data(c, f, values) for f in range(5, 30) for c in (0, 1)])
    rig.sent()
    filled = rig.now
    for factor in (0.9, 1.0, 1.9):
        assert prods_at(rig, filled + factor * rig.node.timing.retransmit) == ([7] if factor == 1.0 else [])
    assert tree.up.in_flight == 8
    rig.now = filled + rig.node.timing.retransmit_max
    rig.node.on_timer(rig.now)
    assert len([s for s in rig.sent() if s.kind is Kind.DATA]) == 8


def prods_at(rig, now):
    """Fragments that are repeated as ends of their groups when a timer is due."""
    rig.now = now
    rig.node.on_timer(now)
    return [s.packet.gradient for s in rig.sent() if s.kind is Kind.DATA and s.packet.flags == Flag.GROUP_END]


def test_what_left_long_ago_is_asked_after_as_soon_as_its_link_is_full():
    rig = Rig(count=40, window=8)
    values = integers(1)[0]
    rig.feed(*[rig.data(c, f, values) for f in range(5) for c in (0, 1)])
    rig.sent()
    rig.now += 10.0
    rig.feed(*[rig.data(c, f, values) for f in range(5, 30) for c in (0, 1)])
    rig.sent()
    assert prods_at(rig, rig.now) == [7]


def test_a_link_prods_with_what_is_not_answered_yet():
    """Its last row may be: what was repeated for others has become a result meanwhile."""
    rig = Rig(count=40, window=8)
    rig.feed(*[rig.data(c, f, integers(1)[0]) for f in range(30) for c in (0, 1)])
    assert [s.packet.gradient for s in rig.sent() if s.kind is Kind.DATA] == list(range(8))
    result = rig.packet(Kind.RESULT, host=0, gradient=7, values=integers(1)[0])
    rig.feed((result, PARENT))
    assert prods_at(rig, rig.now + rig.node.timing.retransmit) == [6]


def test_a_link_whose_window_is_answered_starts_afresh():
    """Credit must have been lost."""
    rig = Rig(count=40, window=8)
    rig.feed(*[rig.data(c, f, integers(1)[0]) for f in range(30) for c in (0, 1)])
    rig.sent()
    rig.feed(
        *[(rig.packet(Kind.RESULT, host=0, gradient=f, values=integers(1)[0]), PARENT) for f in range(8)]
    )
    rig.sent()
    rig.now += rig.node.timing.retransmit
    rig.node.on_timer(rig.now)
    sent = [s.packet for s in rig.sent() if s.kind is Kind.DATA]
    assert [packet.gradient for packet in sent] == list(range(8, 16))


def test_what_was_sent_again_stays_counted_when_its_link_goes():
    rig = Rig()
    rig.feed(*[rig.data(child, 0, integers(1)[0]) for child in (0, 1)])
    rig.sent()
    rig.feed((rig.packet(Kind.LOST, host=8, values=np.array([1])), PARENT))
    assert len([s for s in rig.sent() if s.kind is Kind.DATA]) == 1
    assert rig.node.stats()["retransmissions"] == 1
    rig.node.apply(rig.plan(6, parent=NEW_PARENT), rig.now, attach=[TREE_ID])
    assert rig.node.stats()["retransmissions"] == 1


def test_credit_of_an_older_link_does_not_count():
    rig = Rig(window=4, count=64)
    values = integers(1)[0]
    rig.feed(*[rig.data(c, f, values) for f in range(60) for c in (0, 1)])
    rig.sent()
    rig.node.apply(rig.plan(6), rig.now, attach=[TREE_ID])
    rig.feed((rig.packet(Kind.LOST, host=8, values=np.array([0xFF])), PARENT))
    rig.sent()
    (tree,) = rig.node.state.jobs[7].trees.values()
    word = np.array([TREE_ID])
    stale = rig.packet(Kind.CREDIT, host=8, gradient=5000, values=word, plan=5)
    fresh = rig.packet(Kind.CREDIT, host=8, gradient=3, values=word, plan=6)
    before = tree.up.in_flight
    assert before == 4
    rig.feed((stale, PARENT))
    assert tree.up.in_flight == before
    rig.feed((fresh, PARENT))
    assert tree.up.in_flight == before - 3
    assert rig.drops == {"stale_plan": 1}


def test_credit_counts_wrap():
    rig = Rig(window=8)
    (tree,) = rig.node.state.jobs[7].trees.values()
    word = np.array([TREE_ID])
    tree.up.taken, tree.up.in_flight = 2**32 - 2, 8
    rig.feed((rig.packet(Kind.CREDIT, host=8, gradient=3, values=word), PARENT))
    assert (tree.up.in_flight, tree.up.taken) == (3, 3)
    memory = rig.node.memory
    row = tree.row
    memory.taken[row, 0] = tree.down[0].reported = 2**32 - 1
    rig.feed(rig.data(0, 0, integers(1)[0]), rig.data(0, 1, integers(1)[0]))
    (credit,) = [s for s in rig.sent() if s.kind is Kind.CREDIT]
    assert (credit.destination, credit.packet.gradient) == (child_at(0), 1)


def test_packets_of_a_future_plan_give_their_credit_back():
    """A child that follows the new plan first must not find its window used up by what its parent could not take yet."""
    rig = Rig(window=4)
    values = integers(1)[0]
    rig.feed(*[rig.data(0, f, values, plan=6) for f in range(4)])
    assert rig.drops == {"future_plan": 4}
    credits = [s.packet.gradient for s in rig.sent() if s.kind is Kind.CREDIT]
    assert credits == [4]


@pytest.fixture
def looked(monkeypatch):
    """Fragments whose rows a node has looked at before it sends them again."""
    fragments = []
    mend = slotwork.mend

    def counting(*its):
        fragments.append(its[-1])
        return mend(*its)

    monkeypatch.setattr(slotwork, "mend", counting)
    return fragments


def test_results_that_are_not_known_yet_are_not_looked_for_row_by_row(looked):
    """Children ask twice a second for all that they lack of groups that have ended, while most of it is still to come.

    A server that took 6 ms for each such request had no time for what would have answered them.
    """
    rig = Rig(count=1024, window=512)
    rig.feed(*[rig.data(c, f, integers(1)[0]) for f in range(1000) for c in (0, 1)])
    rig.sent()
    rig.feed(
        *[(rig.packet(Kind.RESULT, host=0, gradient=f, values=integers(1)[0]), PARENT) for f in (3, 7, 9)]
    )
    assert sorted(s.packet.gradient for s in rig.sent() if s.kind is Kind.RESULT) == [3, 3, 7, 7, 9, 9]
    rig.now += 1.0
    lost = rig.packet(Kind.LOST, host=1, flags=Flag.DOWN, values=np.full(32, -1))
    rig.feed((lost, child_at(0)))
    assert looked == [3, 7, 9]
    assert [s.packet.gradient for s in rig.sent() if s.kind is Kind.RESULT] == [3, 7, 9]


def test_results_that_wait_to_leave_again_are_not_looked_at_for_every_request(looked):
    """As above, of what is known but does not fit into a window: a thousand rows, for each child, twice a second."""
    rig = Rig(root=True, count=200, window=64)
    for filled in range(0, 192, 64):
        rig.feed(*[rig.data(c, f, integers(1)[0]) for f in range(filled, filled + 64) for c in (0, 1)])
        rig.sent()
        credit = rig.packet(
            Kind.CREDIT, host=1, gradient=filled + 64, values=np.array([TREE_ID]), flags=Flag.DOWN
        )
        rig.feed((credit, child_at(0)))
    lost = rig.packet(Kind.LOST, host=1, flags=Flag.DOWN, values=np.full(32, -1))
    for _ in range(10):
        rig.now += 0.5
        rig.feed((lost, child_at(0)))
    assert looked == list(range(192))
    assert len([s for s in rig.sent() if s.kind is Kind.RESULT and s.destination == child_at(0)]) == 64


def test_what_leaves_after_a_device_was_full_leaves_when_something_was_heard_last():
    """A device that is full for a round had all of it leave at the round's beginning: links gave up what had just left."""
    rig = Rig(root=True, count=200, window=64)
    rig.feed(*[rig.data(c, f, integers(1)[0]) for f in range(100) for c in (0, 1)])
    leaving = rig.node.transmit(rig.now)
    first = next(leaving)
    assert first.destination == child_at(0)
    rig.now += 10.0
    rig.feed(*[rig.data(c, f, integers(1)[0]) for f in range(100, 101) for c in (0, 1)])
    assert child_at(1) in [transmission.destination for transmission in leaving]
    (tree,) = rig.node.state.jobs[7].trees.values()
    rig.node.on_timer(rig.now)
    link = tree.down[1]
    assert (link.in_flight, link.waiting_since, link.congestion.timed_since) == (64, rig.now, rig.now)


def test_a_parent_that_lost_its_memory_gets_results_as_fast_as_it_takes_them():
    """All of them at every request, from every child, filled a slow link for five times as long as the round took."""
    rig = Rig(count=200, window=64)
    rig.feed(*[rig.data(c, f, integers(1)[0]) for f in range(64) for c in (0, 1)])
    rig.sent()
    results = [
        (rig.packet(Kind.RESULT, host=0, gradient=f, values=integers(1)[0]), PARENT) for f in range(200)
    ]
    rig.feed(*results)
    rig.node.apply(rig.plan(6), rig.now, attach=[TREE_ID])
    rig.sent()
    lost = (rig.packet(Kind.LOST, host=8, plan=6, values=np.full(32, -1)), PARENT)

    def given():
        rig.feed(lost)
        return [s.packet.gradient for s in rig.sent() if s.kind is Kind.RESULT and s.destination == PARENT]

    first = given()
    assert len(first) == 64
    rig.now += 0.1
    assert given() == []
    credit = rig.packet(Kind.CREDIT, host=8, plan=6, gradient=40, values=np.array([TREE_ID]))
    rig.feed((credit, PARENT))
    rig.now += 0.1
    assert len(given()) == 40


def test_a_parent_that_does_not_answer_is_asked_what_it_lacks_ever_more_rarely():
    """It answered each of fifty questions a second with all that it lacked, as soon as it had a processor."""
    rig = Rig(count=40, window=64)
    rig.feed(*[rig.data(c, f, integers(1)[0]) for f in range(20) for c in (0, 1)])
    rig.sent()
    rig.node.apply(rig.plan(6, parent=NEW_PARENT), rig.now, attach=[TREE_ID])
    rig.node.on_timer(rig.now)
    asked = [s for s in rig.wait(5.0) if s.kind is Kind.READY and s.destination == NEW_PARENT]
    assert len(asked) == 14
