"""Multicast results: what is sent again and to whom, and who belongs to a group."""

import itertools

import numpy as np
import pytest

from inanet.phy.gather import select
from inanet.phy.wrapper import Wrapper
from inanet.proto.common.plan import Child, ExponentMode, NodePlan, Placement
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.multicast import LONG_AGO, LONGEST_EXCLUSION, Multicast
from inanet.proto.tree.reliability import Link, Receiver
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import Flag, Kind
from tests.proto.tree.multicast import EIGHT, EIGHT_EACH, by_unicast, run_rounds
from tests.proto.tree.rig import JOB, KEY, Rig, child_at, integers
from tests.proto.tree.rig import TREE as TREE_ID
from tests.proto.tree.test_rounds import ONE_EACH, STAR, spec_of


class Loser(Wrapper):
    """Loses the first copy of the result of one fragment."""

    def __init__(self, device, fragment):
        super().__init__(device)
        self.fragment = fragment

    def receive(self):
        batch = super().receive()
        if batch is None or self.fragment is None:
            return batch
        headers = [np.frombuffer(batch.packet(i)[:20], "<u4") for i in range(len(batch))]
        hit = [
            int(h[0]) >> 8 & 15 == Kind.RESULT and h[2] & 0xFFFFFF == self.fragment and h[4] & 0xFFFF == 0
            for h in headers
        ]
        if not any(hit):
            return batch
        keep = np.flatnonzero(~np.array(hit))
        self.fragment = None
        return select(batch, keep)


@pytest.mark.parametrize(("losers", "multicast", "unicast"), [(1, 0, 1), (2, 0, 2), (3, 1, 0), (8, 1, 0)])
def test_repairs_go_to_all_when_more_than_a_quarter_asks(losers, multicast, unicast):
    names = list(EIGHT_EACH)[:losers]
    fabric = VirtualFabric(
        EIGHT,
        EIGHT_EACH,
        downlink="multicast",
        wrap=lambda device, name, clock: Loser(device, 500) if name in names else device,
    )
    assert run_rounds(fabric, ranks=8) == by_unicast(8)
    stats = fabric.nodes["ps"].stats()
    assert (stats["repairs_multicast"], stats["repairs_unicast"]) == (multicast, unicast)


def test_a_repair_does_not_wait_for_the_rest_of_the_log():
    """Not even that of the slowest, whose window is what holds the group back."""
    rig = Rig(root=True, children=4, count=900, window=4096)
    children = tuple(Child(f"c{i}", child_at(i), 1 << i, 1, 4096 if i else 16, True) for i in range(4))
    place = Placement(TREE_ID, None, children, (), endpoint("239.192.0.1", 7401))
    rig.node.apply(NodePlan(JOB, 6, KEY, 32, (place,), 4096), rig.now)
    values = integers(1)[0]
    for start in range(0, 900, 50):
        rig.feed(*[rig.data(child, f, values) for f in range(start, start + 50) for child in range(4)])
    assert len([s for s in rig.sent() if s.kind is Kind.RESULT]) == 16
    lost = np.zeros(32, np.int32)
    lost[0] = 1 << 3
    rig.feed((rig.packet(Kind.LOST, host=1, values=lost, flags=Flag.DOWN), child_at(0)))
    rig.now += rig.node.timing.reorder
    rig.node.on_timer(rig.now)
    # the window has room for the one that is lost
    results = [(s.destination, s.packet.gradient) for s in rig.sent() if s.kind is Kind.RESULT]
    assert results == [(child_at(0), 3)]
    credit = rig.packet(Kind.CREDIT, host=1, gradient=4, values=np.array([TREE_ID]), flags=Flag.DOWN)
    rig.feed((credit, child_at(0)))
    results = [(s.destination, s.packet.gradient) for s in rig.sent() if s.kind is Kind.RESULT]
    assert results == [(place.group, fragment) for fragment in range(16, 20)]


def test_requests_for_what_many_may_lack_are_spread():
    timing = Timing()
    plain, spread = Receiver(10, timing), Receiver(10, timing, iter([0.5, 0.25, 0.75]).__next__)
    plain.group_ended(0, 10.0)
    spread.group_ended(0, 10.0)
    assert (plain.next_due, spread.next_due) == (10.002, pytest.approx(10.003))
    spread.checked(0, 1, 11.0)
    assert spread.next_due == pytest.approx(11.0 + 0.02 * 1.25)
    spread.checked(0, 1, 12.0)
    assert spread.next_due == pytest.approx(12.0 + 0.04 * 1.75)


def test_neighbours_ask_at_different_times_and_the_same_every_run():
    def requests():
        fabric = VirtualFabric(STAR, ONE_EACH, downlink="multicast", wrap=lambda d, n, c: Loser(d, 7))
        arrays = float_arrays(2560, 4)
        number = fabric.begin(spec_of(2560, mode=ExponentMode.FIXED), arrays)
        times = {}
        while not fabric.done(number):
            for name in ONE_EACH:
                receiver = fabric.nodes[name].state.jobs[0].shards[0].from_parent
                if receiver is not None and receiver.next_due is not None:
                    times[name] = receiver.next_due
            fabric.run(lambda at=fabric.clock.now: fabric.clock.now > at or fabric.done(number))
        return times

    first = requests()
    assert len(set(first.values())) == 4
    assert first == requests()


def group_of(count, trusted=True):
    group = Multicast(Link("group", 1, 0, 0))
    links = {index: Link(f"c{index}", 100 + index, 1 << index, 64) for index in range(count)}
    group.follow(links, trusted=trusted)
    return group, links


def test_one_listener_alone_is_no_group():
    assert group_of(1)[0].grouped == ()
    group, links = group_of(2)
    assert [link.grouped for link in links.values()] == [True, True]
    group.link.again(3, 9)
    group.exclude(1, 10.0, Timing())
    assert group.grouped == ()
    assert not links[1].grouped
    # what was queued for all is not lost
    assert [list(link.resend) for link in links.values()] == [[(3, 9)], [(3, 9)]]
    assert not group.link.resend


def test_exclusions_grow_and_answers_to_old_probes_do_not_end_them():
    timing = Timing()
    group, links = group_of(3)
    now, seconds = 10.0, []
    for _ in range(12):
        group.exclude(1, now, timing)
        until = group.listeners[0].excluded_until
        seconds.append(until - now)
        assert not group.answered(0, group.probes, until + 1.0)
        assert not group.probe(now, timing)
        assert group.probe(until, timing)
        assert not group.answered(0, group.probes, until - 0.1)
        assert group.answered(0, group.probes, until)
        assert links[0].grouped
        now = until
    assert seconds[:4] == [0.5, 1.0, 2.0, 4.0]
    assert seconds[-1] == LONGEST_EXCLUSION
    # after a long time without reproach it is as at the beginning
    now += 3 * LONGEST_EXCLUSION
    group.exclude(1, now, timing)
    assert group.listeners[0].excluded_until == now + 0.5


def test_who_asks_for_half_of_everything_is_excluded_and_for_less_is_not():
    timing = Timing()
    for each, expected in ((2, True), (3, False)):
        group, _ = group_of(4)
        for fragment in range(100):
            group.link.packets += 1
            if fragment % each == 0:
                group.ask(0, fragment, 1)
                group.decide(1.0, timing)
        assert (not group.listeners[0].hears) == expected
        assert group.listeners[1].hears


def test_who_asks_for_a_few_in_a_hundred_is_never_excluded():
    """Requests are of what was sent before: whenever counting began afresh, they were more than what had followed."""
    group, _ = group_of(4)
    for burst in range(1000):
        for sent, lost in ((91, 1), (10, 8)):
            group.link.packets += sent
            for fragment in range(lost):
                group.ask(burst, sent + fragment, 1)
            group.decide(1.0, Timing())
            assert group.listeners[0].hears


def test_who_hears_nothing_any_more_is_excluded_after_as_much_as_is_remembered():
    group, _ = group_of(4)
    group.link.packets = 100 * LONG_AGO
    group.ask(0, 0, 1)
    group.decide(1.0, Timing())
    asked = 0
    while group.listeners[0].hears:
        group.link.packets += 1
        asked += 1
        group.ask(0, asked, 1)
        group.decide(1.0, Timing())
    assert asked <= 2 * LONG_AGO


def test_who_asks_again_while_a_repetition_is_on_its_way_does_not_get_it_twice():
    rig = Rig(root=True, children=4, count=40, window=64)
    children = tuple(Child(f"c{i}", child_at(i), 1 << i, 1, 64, True) for i in range(4))
    place = Placement(TREE_ID, None, children, (), endpoint("239.192.0.1", 7401))
    rig.node.apply(NodePlan(JOB, 6, KEY, 32, (place,), 64), rig.now)
    rig.feed(*[rig.data(child, f, integers(1)[0]) for f in range(40) for child in range(4)])
    rig.sent()
    (tree,) = rig.node.state.jobs[JOB].trees.values()
    for link in tree.down.values():
        link.congestion.round_trip = 0.1
    bits = np.zeros(32, np.int32)
    bits[0] = 1 << 3

    def repeated(at, *askers):
        rig.now = at
        rig.feed(
            *[(rig.packet(Kind.LOST, host=1 << c, values=bits, flags=Flag.DOWN), child_at(c)) for c in askers]
        )
        rig.now += rig.node.timing.reorder
        rig.node.on_timer(rig.now)
        return [s.destination for s in rig.sent() if s.kind is Kind.RESULT and s.packet.gradient == 3]

    began = rig.now + 1.0
    before = tree.down[0].in_flight
    assert repeated(began, 0, 1) == [place.group]
    # it was lost, and has left again: so much is on its way
    assert tree.down[0].in_flight == before
    assert repeated(began + 0.02, 0, 1) == repeated(began + 0.06, 0) == repeated(began + 0.14, 1) == []
    assert tree.down[0].in_flight == before
    assert repeated(began + 0.3, 0) == [child_at(0)]
    assert repeated(began + 0.4, 0) == []


def test_probes_become_rare_and_end_when_all_have_answered():
    timing = Timing()
    group, _ = group_of(2, trusted=False)
    now, times = 0.0, []
    while len(times) < 14:
        if group.probe(now, timing):
            times.append(now)
        now = group.probe_due
    gaps = [round(b - a, 3) for a, b in itertools.pairwise(times)]
    assert gaps[:3] == [0.02, 0.04, 0.08]
    assert gaps[-1] == 5.0
    assert group.answered(0, group.probes, now)
    assert group.grouped == ()
    assert group.answered(1, group.probes - 1, now)
    assert len(group.grouped) == 2
    assert not group.probe(now + 100, timing)
    assert group.probe_due is None
