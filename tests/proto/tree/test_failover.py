"""Killed aggregators and roots leave every bit as it was; nothing is counted twice (re-parenting, root restart)."""

import numpy as np
import pytest

from inanet.proto.common.plan import ExponentMode
from inanet.testing.fabric import VirtualFabric, float_arrays
from tests.proto.tree.test_impairment import impaired
from tests.proto.tree.test_rounds import ONE_EACH, STAR, TREE, spec_of

COUNT = 256 * 1200 + 5
CHAIN = {"ps": None, "a0": "ps", "a1": "a0", "w0": "a1", "w1": "a1", "w2": "a0", "w3": "ps"}


def reference(mode: ExponentMode, rounds: int = 2) -> list[bytes]:
    fabric = VirtualFabric(STAR, ONE_EACH)
    results = []
    for round_ in range(rounds):
        arrays = float_arrays(COUNT, 4, seed=round_)
        fabric.all_reduce(spec_of(COUNT, mode=mode), arrays)
        results.append(arrays[0].tobytes())
    return results


def packets_at(fabric: VirtualFabric, name: str) -> int:
    """Packets a node has received so far: a position in a round that does not depend on time."""
    return fabric.devices[name].counters()["rx_packets"]


def run_with(fabric, mode, trigger, act):
    """Two rounds; ``act`` is called once, in the first step in which ``trigger`` holds, during the second one."""
    spec = spec_of(COUNT, mode=mode)
    results = []
    acted = False
    for round_ in range(2):
        arrays = float_arrays(COUNT, 4, seed=round_)
        number = fabric.begin(spec, arrays)

        def until(number=number, round_=round_):
            nonlocal acted
            if round_ == 1 and not acted and trigger():
                acted = True
                act()
            return fabric.done(number)

        fabric.run(until)
        assert len({array.tobytes() for array in arrays.values()}) == 1
        results.append(arrays[0].tobytes())
    assert acted, "the failure was never injected"
    fabric.settle()
    return results


@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.CARRIED])
@pytest.mark.parametrize("lost", [0, 40, 700, 1190])
@pytest.mark.parametrize("parents", [TREE, CHAIN], ids=["tree", "chain"])
def test_aggregator_dies_in_the_middle_of_a_round(parents, lost, mode):
    fabric = VirtualFabric(parents, ONE_EACH, window=96)
    start = fabric.nodes["a0"].stats()

    def trigger():
        stats = fabric.nodes["a0"].stats()
        return stats["fragments_completed"] >= first + lost

    first = start["fragments_completed"]
    spec = spec_of(COUNT, mode=mode)
    arrays = float_arrays(COUNT, 4, seed=0)
    fabric.all_reduce(spec, arrays)
    fabric.settle()
    results = [arrays[0].tobytes()]
    first = fabric.nodes["a0"].stats()["fragments_completed"]
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec, arrays)
    fabric.run(trigger)
    fabric.lose_aggregator("a0")
    fabric.run(lambda: fabric.done(number))
    results.append(arrays[0].tobytes())
    assert len({array.tobytes() for array in arrays.values()}) == 1
    assert results == reference(mode)
    # the fabric goes on without it
    arrays = float_arrays(COUNT, 4, seed=2)
    exact = sum(array.astype(np.float64) for array in arrays.values())
    fabric.all_reduce(spec, arrays)
    np.testing.assert_allclose(arrays[1], exact, atol=2e-6)


def test_two_aggregators_die_one_after_the_other():
    fabric = VirtualFabric(CHAIN, ONE_EACH, window=64)
    actions = iter([lambda: fabric.lose_aggregator("a1"), lambda: fabric.lose_aggregator("a0")])
    spec = spec_of(COUNT)
    results = []
    for round_ in range(2):
        arrays = float_arrays(COUNT, 4, seed=round_)
        if round_ == 0:
            fabric.all_reduce(spec, arrays)
            fabric.settle()
        else:
            base = fabric.nodes["ps"].stats()["contributions_in"]
            number = fabric.begin(spec, arrays)
            for limit in (300, 900):
                goal = base + limit
                fabric.run(lambda goal=goal: fabric.nodes["ps"].stats()["contributions_in"] >= goal)
                next(actions)()
            fabric.run(lambda number=number: fabric.done(number))
        results.append(arrays[0].tobytes())
    assert results == reference(ExponentMode.CARRIED)


@pytest.mark.parametrize("phase", ["sending", "half", "results", "confirming"])
@pytest.mark.parametrize("parents", [STAR, TREE], ids=["star", "tree"])
def test_root_is_killed_and_restarted(parents, phase):
    fabric = VirtualFabric(parents, ONE_EACH, window=96)
    children = 4 if parents is STAR else 2
    ps = fabric.nodes["ps"]
    base = {}

    def trigger():
        stats = ps.stats()
        base.setdefault("in", stats["contributions_in"])
        got = stats["contributions_in"] - base["in"]
        done = sum(node.stats()["results_in"] for name, node in fabric.nodes.items() if name[0] == "w")
        base.setdefault("done", done)
        return {
            "sending": got >= 30,
            "half": got >= 600 * children,
            "results": done - base["done"] >= 2000,
            "confirming": done - base["done"] >= 4 * 1200 + 3,
        }[phase]

    results = run_with(fabric, ExponentMode.CARRIED, trigger, lambda: fabric.restart_root("ps"))
    assert results == reference(ExponentMode.CARRIED)
    arrays = float_arrays(COUNT, 4, seed=2)
    exact = sum(array.astype(np.float64) for array in arrays.values())
    fabric.all_reduce(spec_of(COUNT), arrays)
    np.testing.assert_allclose(arrays[1], exact, atol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_aggregator_and_root_die_under_impairment(seed):
    fabric = VirtualFabric(
        TREE, ONE_EACH, window=96, wrap=impaired(seed, drop=0.05, duplicate=0.05, reorder=0.05, corrupt=0.05)
    )
    spec = spec_of(COUNT)
    arrays = float_arrays(COUNT, 4, seed=0)
    fabric.all_reduce(spec, arrays)
    results = [arrays[0].tobytes()]
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec, arrays)
    base = fabric.nodes["ps"].stats()["contributions_in"]
    fabric.run(lambda: fabric.nodes["ps"].stats()["contributions_in"] >= base + 500)
    fabric.lose_aggregator("a1")
    fabric.run(lambda: fabric.nodes["ps"].stats()["contributions_in"] >= base + 1500)
    fabric.restart_root("ps")
    fabric.run(lambda: fabric.done(number))
    results.append(arrays[0].tobytes())
    assert len({array.tobytes() for array in arrays.values()}) == 1
    assert results == reference(ExponentMode.CARRIED)


def test_a_late_packet_of_a_dead_aggregator_is_a_stale_plan():
    """The zombie: an aggregator declared dead goes on sending with its retired id."""
    fabric = VirtualFabric(TREE, ONE_EACH, window=64)
    spec = spec_of(COUNT)
    arrays = float_arrays(COUNT, 4, seed=0)
    number = fabric.begin(spec, arrays)
    fabric.run(lambda: fabric.nodes["a0"].stats()["fragments_completed"] >= 200)
    zombie, device = fabric.nodes["a0"], fabric.devices["a0"]
    endpoint = device.endpoint
    fabric.lose_aggregator("a0")
    ghost = fabric.network.open(port=endpoint & 0xFFFF)
    for _ in range(3):
        for transmission in zombie.transmit(fabric.clock.now):
            ghost.send(transmission)
        zombie.on_timer(fabric.clock.advance(0.05))
    fabric.run(lambda: fabric.done(number))
    assert fabric.nodes["ps"].drops_by_reason()["stale_plan"] > 0
    clean = float_arrays(COUNT, 4, seed=0)
    VirtualFabric(STAR, ONE_EACH).all_reduce(spec, clean)
    assert arrays[2].tobytes() == clean[2].tobytes()
