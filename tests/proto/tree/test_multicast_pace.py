"""Multicast results: children that stall are left behind and catch up, slow ones are waited for."""

import pytest

from inanet.phy.wrapper import Wrapper
from inanet.proto.common.plan import ExponentMode
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.xagg import Flag, Kind, Packet
from tests.proto.tree.multicast import COUNT, FRAGMENTS, by_unicast, run_rounds
from tests.proto.tree.rig import batch_of
from tests.proto.tree.test_rounds import ONE_EACH, STAR, spec_of


def trust_paths(fabric):
    """The paths are known to bear every window: nobody begins cautiously."""
    for node in fabric.nodes.values():
        for job in node.state.jobs.values():
            for tree in job.trees.values():
                for link in tree.links():
                    link.congestion.window = 8192


class Sleeper(Wrapper):
    """Reads nothing while it is asleep."""

    asleep = False

    def receive(self):
        return None if self.asleep else super().receive()


def test_a_child_that_stalls_is_left_behind_and_catches_up():
    fabric = VirtualFabric(
        STAR, ONE_EACH, downlink="multicast", windows={"ps": 8192}, window=96, wrap=lambda d, n, c: Sleeper(d)
    )
    trust_paths(fabric)
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
    (tree,) = ps.state.jobs[0].trees.values()
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
    trust_paths(fabric)
    ps = fabric.nodes["ps"]
    arrays = float_arrays(COUNT, 4, seed=0)
    number = fabric.begin(spec_of(COUNT), arrays)
    fabric.run(lambda: ps.stats()["results_multicast"] > 200)
    # what the group is sent meanwhile is lost here, but for what is on its way
    fabric.devices["w3"].asleep = True
    fabric.devices["w3"].leave(fabric.group_of("ps"))
    reached = 900 if taken_in else FRAGMENTS + 1
    fabric.run(lambda: ps.stats()["results_multicast"] >= reached)
    (tree,) = ps.state.jobs[0].trees.values()
    assert [link.name for link in tree.multicast.grouped] == ["w0", "w1", "w2"]
    behind = tree.down[3]
    cursor = ps.state.jobs[0].shards[0].down[3].cursor
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
    trust_paths(fabric)
    ps = fabric.nodes["ps"]
    number = fabric.begin(spec_of(COUNT, mode=ExponentMode.FIXED), float_arrays(COUNT, 4, seed=0))
    fabric.run(lambda: ps.stats()["results_multicast"] > 200)
    fabric.devices["w3"].asleep = True
    fabric.run(lambda: ps.stats()["results_multicast"] == FRAGMENTS)
    state = ps.state.jobs[0].shards[0]
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
    # by then all of it has arrived or is lost
    ps.receive(batch_of([(lost.encode(fabric.key), source)]), fabric.clock.now + 1.0)
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
        (tree,) = ps.state.jobs[0].trees.values()
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
