"""Multicast results leave once for all children; who hears nothing or dies costs nobody a bit."""

import pytest

from inanet.phy.wrapper import Wrapper
from inanet.proto.common.plan import ExponentMode
from inanet.testing.fabric import VirtualFabric, float_arrays
from tests.proto.tree.multicast import COUNT, FRAGMENTS, by_unicast, groups_joined, run_rounds
from tests.proto.tree.test_impairment import ALL_FIVE, impaired
from tests.proto.tree.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of


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
    (tree,) = ps.state.jobs[0].trees.values()
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
    (tree,) = fabric.nodes["ps"].state.jobs[0].trees.values()
    hearing = [name for name in ONE_EACH if name not in names]
    assert [link.name for link in tree.multicast.grouped] == (hearing if len(hearing) > 1 else [])


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
