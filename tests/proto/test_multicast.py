"""R6: results once for all children by multicast; who hears nothing, stalls or dies costs nobody a bit, and nobody waits."""

import functools
import itertools

import numpy as np
import pytest

from inanet.phy.gather import select
from inanet.phy.wrapper import Wrapper
from inanet.proto.multicast import LONGEST_EXCLUSION, Multicast
from inanet.proto.plan import Child, ExponentMode, NodePlan, Placement
from inanet.proto.reliability import Link, Receiver, Timing
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import Flag, Kind, Packet
from tests.proto.rig import JOB, KEY, Rig, batch_of, child_at, integers
from tests.proto.rig import TREE as TREE_ID
from tests.proto.test_impairment import ALL_FIVE, impaired
from tests.proto.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of

COUNT = 256 * 1100 + 77
#: data fragments of a round; its exponents fit into two more
FRAGMENTS = 1101
EIGHT = {"ps": None} | {f"w{i}": "ps" for i in range(8)}
EIGHT_EACH = {f"w{i}": [i] for i in range(8)}


def run_rounds(fabric, rounds=2, ranks=4, count=COUNT):
    results = []
    for round_ in range(rounds):
        arrays = float_arrays(count, ranks, seed=round_)
        fabric.all_reduce(spec_of(count), arrays)
        assert len({array.tobytes() for array in arrays.values()}) == 1
        results.append(arrays[0].tobytes())
    return results


@functools.cache
def by_unicast(ranks=4):
    parents, each = (STAR, ONE_EACH) if ranks == 4 else (EIGHT, EIGHT_EACH)
    return run_rounds(VirtualFabric(parents, each), ranks=ranks)


def groups_joined(fabric, name):
    return fabric.network.groups_of(fabric.network.device(fabric.devices[name].endpoint))


@pytest.mark.parametrize("parents", [STAR, TREE, DEEP], ids=["star", "tree", "deep"])
@pytest.mark.parametrize("downlink", ["multicast", "auto"])
def test_every_result_leaves_once_and_bits_are_those_of_unicast(parents, downlink):
    fabric = VirtualFabric(parents, ONE_EACH, downlink=downlink)
    fabric.settle(1.0)
    assert run_rounds(fabric) == by_unicast()
    stats = fabric.nodes["ps"].stats()
    # exponents travel in the first round only
    assert stats["rows_sent"] == stats["results_multicast"] == 2 * FRAGMENTS + 2
    assert stats["repairs_multicast"] == stats["repairs_unicast"] == stats["retransmissions"] == 0
    assert all(fabric.nodes[name].stats()["results_in"] == 2 * FRAGMENTS + 2 for name in ONE_EACH)
    parents_ = {parent for parent in parents.values() if parent}
    shared = [name for name in parents_ if list(parents.values()).count(name) > 1]
    assert all(fabric.nodes[name].stats()["results_multicast"] == 2 * FRAGMENTS + 2 for name in shared)


@pytest.mark.parametrize("downlink", ["multicast", "auto"])
@pytest.mark.parametrize("name", [*ONE_EACH, "ps"])
def test_bits_do_not_depend_on_whose_packets_suffer(name, downlink):
    everybody = impaired(11, **dict.fromkeys(("drop", "duplicate", "reorder"), 0.05))

    def wrap(device, its, clock):
        return everybody(device, its, clock) if its == name else device

    fabric = VirtualFabric(STAR, ONE_EACH, downlink=downlink, wrap=wrap)
    fabric.settle(1.0)
    assert run_rounds(fabric) == by_unicast()
    stats = fabric.nodes["ps"].stats()
    assert stats["results_multicast"] > FRAGMENTS
    if name != "ps":
        assert stats["repairs_unicast"] > 50
        # what one alone asks for is never sent to all
        assert stats["repairs_multicast"] == 0


@pytest.mark.parametrize("downlink", ["multicast", "auto"])
def test_bits_survive_faults_of_all_kinds_everywhere(downlink):
    fabric = VirtualFabric(TREE, ONE_EACH, downlink=downlink, wrap=impaired(5, **ALL_FIVE))
    fabric.settle(1.0)
    assert run_rounds(fabric) == by_unicast()
    figures = fabric.figures()
    assert sum(node.get("results_multicast", 0) for node in figures.values()) > FRAGMENTS
    assert sum(node.get("repairs_unicast", 0) for node in figures.values()) > 50


# ---------------------------------------------------------------- who hears nothing


class Deaf(Wrapper):
    """Joins no group, as behind a switch that does not forward it."""

    def join(self, group):
        return None

    def leave(self, group):
        return None


def deaf(*names):
    return lambda device, name, clock: Deaf(device) if name in names else device


@pytest.mark.parametrize("downlink", ["multicast", "auto"])
def test_a_child_that_hears_no_group_is_served_by_unicast_and_the_others_are_not(downlink):
    fabric = VirtualFabric(STAR, ONE_EACH, downlink=downlink, wrap=deaf("w2"))
    fabric.settle(1.0)
    assert run_rounds(fabric) == by_unicast()
    stats = fabric.nodes["ps"].stats()
    assert stats["results_multicast"] == 2 * FRAGMENTS + 2
    # one copy for the group, one for the deaf one, and what the group was sent before that was noticed
    assert stats["rows_sent"] <= 4 * FRAGMENTS + 4 + 3 * fabric.window
    if downlink == "auto":
        assert stats["rows_sent"] == 4 * FRAGMENTS + 4


def test_auto_is_unicast_as_long_as_nobody_has_answered():
    fabric = VirtualFabric(STAR, ONE_EACH, downlink="auto", wrap=deaf(*ONE_EACH))
    fabric.settle(1.0)
    assert run_rounds(fabric) == by_unicast()
    stats = fabric.nodes["ps"].stats()
    assert stats["results_multicast"] == 0
    assert stats["rows_sent"] == 4 * (2 * FRAGMENTS + 2)


def test_auto_changes_over_in_the_middle_of_a_round():
    """Snooping switches need seconds to learn who listens: groups begin to work when they please."""

    class Late(Deaf):
        def join(self, group):
            self.group = group

    fabric = VirtualFabric(
        STAR, ONE_EACH, downlink="auto", window=64, wrap=lambda d, name, c: Late(d) if name in ONE_EACH else d
    )
    arrays = float_arrays(COUNT, 4, seed=0)
    number = fabric.begin(spec_of(COUNT), arrays)
    ps = fabric.nodes["ps"]
    fabric.run(lambda: fabric.nodes["w0"].stats()["results_in"] > 300)
    for name in ONE_EACH:
        device = fabric.devices[name]
        device._device.join(device.group)
    before = ps.stats()["rows_sent"]
    (tree,) = ps._jobs[0].trees.values()
    # the probe that was due has been sent; the next one is answered
    fabric.clock.now += 1.0
    ps.on_timer(fabric.clock.now)
    fabric.run(lambda: fabric.done(number))
    assert len(tree.multicast.grouped) == 4
    assert arrays[0].tobytes() == by_unicast()[0]
    assert 0 < ps.stats()["results_multicast"] < FRAGMENTS
    assert ps.stats()["rows_sent"] - before < 2 * FRAGMENTS


@pytest.mark.parametrize("names", [("w2",), ("w0", "w3"), ("w0", "w1", "w2"), tuple(ONE_EACH)])
def test_small_tensors_find_out_who_is_deaf(names):
    """Their results never fill a window. Nobody is sent by multicast, again and again, what cannot arrive."""
    fabric = VirtualFabric(STAR, ONE_EACH, downlink="multicast", wrap=deaf(*names))
    took = []
    for round_ in range(12):
        arrays = float_arrays(5, 4, seed=round_)
        started = fabric.clock.now
        fabric.all_reduce(spec_of(5, mode=ExponentMode.FIXED), arrays)
        took.append(fabric.clock.now - started)
        assert len({array.tobytes() for array in arrays.values()}) == 1
    # two requests at most: after a repetition by multicast comes one by unicast
    assert max(took) < 3 * fabric.timing.retransmit
    assert took[-1] == 0
    (tree,) = fabric.nodes["ps"]._jobs[0].trees.values()
    hearing = [name for name in ONE_EACH if name not in names]
    assert [link.name for link in tree.multicast.grouped] == (hearing if len(hearing) > 1 else [])


# ---------------------------------------------------------------- who is slow


class Sleeper(Wrapper):
    """Reads nothing while it is asleep."""

    asleep = False

    def receive(self):
        return None if self.asleep else super().receive()


def test_a_child_that_stalls_is_left_behind_and_catches_up():
    fabric = VirtualFabric(
        STAR, ONE_EACH, downlink="multicast", windows={"ps": 8192}, window=96, wrap=lambda d, n, c: Sleeper(d)
    )
    fabric.all_reduce(spec_of(COUNT), float_arrays(COUNT, 4, seed=0))
    ps = fabric.nodes["ps"]
    sent = ps.stats()["results_multicast"]
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec_of(COUNT), arrays)
    fabric.run(lambda: ps.stats()["results_multicast"] > sent + 200)
    started = fabric.clock.now
    fabric.devices["w3"].asleep = True

    def others():
        done = {name for name, event in fabric.log if getattr(event, "round", None) == number}
        return done >= {"w0", "w1", "w2"}

    fabric.run(others)
    # two retransmission intervals until it is noticed, and not one more for each window
    assert fabric.clock.now - started < 3 * fabric.timing.retransmit
    assert not fabric.done(number)
    assert ps.stats()["results_multicast"] == sent + FRAGMENTS
    fabric.devices["w3"].asleep = False
    fabric.run(lambda: fabric.done(number))
    assert [array.tobytes() for array in arrays.values()] == [by_unicast()[1]] * 4
    # once it has answered a probe it is in the group again
    fabric.settle(5.0)
    (tree,) = ps._jobs[0].trees.values()
    assert len(tree.multicast.grouped) == 4
    before = ps.stats()["rows_sent"]
    fabric.all_reduce(spec_of(COUNT), float_arrays(COUNT, 4, seed=2))
    assert ps.stats()["rows_sent"] == before + FRAGMENTS


@pytest.mark.parametrize("taken_in", [True, False])
def test_who_was_left_behind_gets_the_rest_once(taken_in):
    """Whether it is back in the group before it has caught up or not, and whatever the group says meanwhile."""
    fabric = VirtualFabric(
        STAR, ONE_EACH, downlink="multicast", windows={"ps": 8192}, window=96, wrap=lambda d, n, c: Sleeper(d)
    )
    ps = fabric.nodes["ps"]
    arrays = float_arrays(COUNT, 4, seed=0)
    number = fabric.begin(spec_of(COUNT), arrays)
    fabric.run(lambda: ps.stats()["results_multicast"] > 200)
    # what the group is sent meanwhile is lost here, but for what is on its way
    fabric.devices["w3"].asleep = True
    fabric.devices["w3"].leave(fabric.group_of("ps"))
    reached = 900 if taken_in else FRAGMENTS + 1
    fabric.run(lambda: ps.stats()["results_multicast"] >= reached)
    (tree,) = ps._jobs[0].trees.values()
    assert [link.name for link in tree.multicast.grouped] == ["w0", "w1", "w2"]
    behind = tree.down[3]
    cursor = ps._jobs[0].shards[0].down[3].cursor
    assert cursor < 500
    before = ps.stats()
    if taken_in:
        tree.multicast.listeners[3].excluded_until = 0.0
        assert tree.multicast.answered(3, 1, fabric.clock.now)
        assert behind.grouped
    fabric.devices["w3"].join(fabric.group_of("ps"))
    fabric.devices["w3"].asleep = False
    fabric.run(lambda: fabric.done(number))
    assert {array.tobytes() for array in arrays.values()} == {by_unicast()[0]}
    stats = ps.stats()
    # lost is what the group was sent before that was noticed: no more than the window
    assert stats["repairs_unicast"] + stats["repairs_multicast"] <= 96
    by_multicast = stats["results_multicast"] - before["results_multicast"]
    assert stats["rows_sent"] - before["rows_sent"] - by_multicast <= FRAGMENTS - cursor + 96


def test_who_was_left_behind_is_not_sent_early_what_comes_anyway():
    """It hears the end of groups whose fragments it is still to get, and asks for them."""
    fabric = VirtualFabric(
        STAR, ONE_EACH, downlink="multicast", windows={"ps": 8192}, window=96, wrap=lambda d, n, c: Sleeper(d)
    )
    ps = fabric.nodes["ps"]
    number = fabric.begin(spec_of(COUNT, mode=ExponentMode.FIXED), float_arrays(COUNT, 4, seed=0))
    fabric.run(lambda: ps.stats()["results_multicast"] > 200)
    fabric.devices["w3"].asleep = True
    fabric.run(lambda: ps.stats()["results_multicast"] == FRAGMENTS)
    state = ps._jobs[0].shards[0]
    cursor = state.down[3].cursor
    assert 200 < cursor < 500
    lost = Packet(
        Kind.LOST,
        job=0,
        host=8,
        gradient=0,
        round=number,
        shard=0,
        plan=1,
        attempt=0,
        payload=bytes([255]) * 128,
        flags=Flag.DOWN,
    )
    source = fabric.devices["w3"].endpoint
    ps.receive(batch_of([(lost.encode(fabric.key), source)]), fabric.clock.now)
    log = ps.memory.down_log[state.slot0 : state.slot0 + cursor]
    assert sorted(fragment for _, fragment in state.down[3].link.resend) == sorted(log.tolist())


class Slow(Wrapper):
    """Takes one batch every five milliseconds."""

    def __init__(self, device, clock):
        super().__init__(device)
        self._clock = clock
        self._free = 0.0

    def receive(self):
        if self._clock() < self._free:
            return None
        batch = super().receive()
        if batch is not None:
            self._free = self._clock() + 0.005
        return batch

    def timer(self):
        return self._free if self._free > self._clock() else None


def test_a_pause_between_rounds_is_no_stall():
    """The last credit of a round stays out, so that a window may fill long after it began to: nobody was slow by then."""
    fabric = VirtualFabric(STAR, ONE_EACH, downlink="multicast", windows={"ps": 8192}, window=96)
    count = 300
    spec = spec_of(256 * count, mode=ExponentMode.FIXED)
    ps = fabric.nodes["ps"]
    for round_ in range(1, 4):
        fabric.all_reduce(spec, float_arrays(256 * count, 4, seed=round_))
        (tree,) = ps._jobs[0].trees.values()
        assert all(0 < link.in_flight < link.window for link in tree.down.values())
        assert len(tree.multicast.grouped) == 4
        assert ps.stats()["rows_sent"] == round_ * count
        fabric.clock.now += 10 * fabric.timing.retransmit


def test_a_group_goes_at_the_rate_of_its_slowest_member():
    """Nothing is lost in a receive buffer of exactly the window, and nobody leaves the group."""
    fabric = VirtualFabric(
        STAR,
        ONE_EACH,
        downlink="multicast",
        windows={"ps": 8192, "w1": 128},
        queue=16384,
        wrap=lambda device, name, clock: Slow(device, clock) if name == "w1" else device,
    )
    fabric.network.device(fabric.devices["w1"].endpoint)._capacity = 128 + 64
    assert run_rounds(fabric) == by_unicast()
    stats = fabric.nodes["ps"].stats()
    assert stats["rows_sent"] == stats["results_multicast"] == 2 * FRAGMENTS + 2
    assert fabric.devices["w1"].counters()["kernel_overflow"] == 0
    assert fabric.clock.now - 1000.0 > 2 * FRAGMENTS / 128 * 0.005


# ---------------------------------------------------------------- repetitions


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
            int(h[0]) >> 8 & 15 == Kind.RESULT and h[2] == self.fragment and h[4] & 0xFFFF == 0
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
                receiver = fabric.nodes[name]._jobs[0].shards[0].from_parent
                if receiver is not None and receiver.next_due is not None:
                    times[name] = receiver.next_due
            fabric.run(lambda at=fabric.clock.now: fabric.clock.now > at or fabric.done(number))
        return times

    first = requests()
    assert len(set(first.values())) == 4
    assert first == requests()


# ---------------------------------------------------------------- who dies, who moves


@pytest.mark.parametrize("lost", [0, 300, 900])
@pytest.mark.parametrize("downlink", ["multicast", "auto"])
def test_an_aggregator_dies_while_it_multicasts_and_its_children_move(lost, downlink):
    fabric = VirtualFabric(TREE, ONE_EACH, downlink=downlink, window=96)
    fabric.settle(1.0)
    fabric.all_reduce(spec_of(COUNT), float_arrays(COUNT, 4, seed=0))
    fabric.settle(1.0)
    a0 = fabric.nodes["a0"]
    before = a0.stats()["results_multicast"]
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec_of(COUNT), arrays)
    fabric.run(lambda: a0.stats()["results_multicast"] >= before + lost)
    old = groups_joined(fabric, "w0")
    fabric.lose_aggregator("a0")
    assert groups_joined(fabric, "w0") == groups_joined(fabric, "a1") == [fabric.group_of("ps")] != old
    fabric.run(lambda: fabric.done(number))
    assert {array.tobytes() for array in arrays.values()} == {by_unicast()[1]}
    fabric.settle(1.0)
    sent = fabric.nodes["ps"].stats()["rows_sent"]
    fabric.all_reduce(spec_of(COUNT), float_arrays(COUNT, 4, seed=2))
    assert fabric.nodes["ps"].stats()["rows_sent"] == sent + FRAGMENTS


def test_a_root_that_starts_again_multicasts_what_its_children_had():
    fabric = VirtualFabric(TREE, ONE_EACH, downlink="multicast", window=96)
    fabric.all_reduce(spec_of(COUNT), float_arrays(COUNT, 4, seed=0))
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec_of(COUNT), arrays)
    sent = fabric.nodes["ps"].stats()["results_multicast"]
    fabric.run(lambda: fabric.nodes["ps"].stats()["results_multicast"] > sent + 400)
    fabric.restart_root("ps")
    fabric.run(lambda: fabric.done(number))
    assert {array.tobytes() for array in arrays.values()} == {by_unicast()[1]}


def test_the_end_of_a_job_leaves_its_groups():
    fabric = VirtualFabric(TREE, ONE_EACH, downlink="multicast")
    run_rounds(fabric, 1)
    assert {len(node.groups) for name, node in fabric.nodes.items() if name != "ps"} == {1}
    for name, node in fabric.nodes.items():
        node.drop_job(0)
        assert node.groups == frozenset()
        fabric._follow_groups(name)
        assert groups_joined(fabric, name) == []


# ---------------------------------------------------------------- who belongs to a group


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
            group.sent += 1
            if fragment % each == 0:
                group.ask(0, fragment, 1)
                group.decide(1.0, timing)
        assert (not group.listeners[0].hears) == expected
        assert group.listeners[1].hears


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
