"""The scheduler: the GINA program, its rounding, and what a register file really holds."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from inanet.planning.goat import column_generation as columns
from inanet.planning.goat import relaxation
from inanet.planning.goat.instance import Instance, from_graph
from inanet.planning.goat.krgs import (
    DoesNotFit,
    choice,
    knapsacks,
    polish,
    relax,
    repair,
    required_switches,
    round_once,
    schedule,
)
from inanet.planning.goat.relaxation import nearest
from inanet.planning.goat.submodels import layers_of, partition
from inanet.planning.goat.topologies import leaf_spine, make_programmable, place
from tests.planning.goat.jobs import paper_fat_tree, small


def check_is_a_schedule(instance: Instance, opened: np.ndarray, nodes: np.ndarray) -> None:
    """Every worker's sub-model goes to one node that holds it, and the registers hold them."""
    switches = len(instance.switches)
    assert nodes.shape == (len(instance.sizes), len(instance.workers))
    holds = np.column_stack([opened, np.ones(len(opened), bool)])
    assert holds[np.arange(len(opened))[:, None], nodes].all()
    assert nodes.max() <= switches
    assert (instance.load(opened) <= instance.memory).all()


def test_cost_is_within_a_fifth_of_the_exact_optimum() -> None:
    ratios = []
    for seed in range(12):
        instance = small(seed)
        exact = relaxation.solve_exactly(instance)
        made = schedule(instance, seed)
        check_is_a_schedule(instance, made.opened, made.nodes)
        ratios.append(made.cost / exact.cost)
        assert made.relaxed.bound <= exact.cost * (1 + 1e-9)
        assert made.cost >= exact.cost * (1 - 1e-5)
    print(f"cost over the exact optimum: median {statistics.median(ratios):.4f}, worst {max(ratios):.4f}")
    assert statistics.median(ratios) <= 1.2
    # the instances are not trivial: an optimum everywhere would say that memory does not bind
    assert max(ratios) > 1.0


def test_the_exact_optimum_of_an_instance_that_can_be_counted_by_hand() -> None:
    # two leaves under one programmable spine with room for one of two equal sub-models; PS and one worker left, two
    # workers right
    graph = leaf_spine(1, 2, 4)
    make_programmable(graph, 0, switches=["spine0"], memory=1024)
    instance = from_graph(graph, "h0", ["h1", "h2", "h3"], partition([("a", 1024), ("b", 1024)], 4096))
    # h0 and h2 share a leaf: h2 is 2 links away, h1 and h3 are 4. The sub-model in the spine: 2 + 2 for h1 and h3, 2 for
    # its sum and 2 for h2, who sends to the PS. The other: 4 + 4 + 2.
    exact = relaxation.solve_exactly(instance)
    assert exact.cost == 1024 * (8 + 10)
    assert schedule(instance, 0).cost == exact.cost


@pytest.mark.parametrize("seed", range(6))
def test_column_generation_has_the_optimum_of_the_plain_program(seed: int) -> None:
    instance = small(seed)
    plain, made = relax(instance, "plain"), relax(instance, "columns")
    # footprints are whole slots: the bound is computed with the least bytes of memory per byte sent
    assert made.bound <= plain.value * (1 + 1e-6)
    assert made.bound == pytest.approx(plain.value, rel=2e-3)
    assert made.value == pytest.approx(made.bound, rel=1e-5)
    assert (made.y <= made.x[:, None, :] + 1e-12).all()
    assert (made.y.sum(axis=2) <= 1 + 1e-9).all()
    torn = ((made.x > 1e-6) & (made.x < 1 - 1e-6)).any(axis=1)
    assert torn.sum() < len(torn)


def test_the_papers_instance_is_solved_whole_or_in_columns() -> None:
    instance = paper_fat_tree()
    assert (len(instance.switches), len(instance.workers)) == (16, 40)
    assert instance.sizes.max() <= 4_000_000
    assert instance.total == 244_403_360
    one = schedule(instance, 3, method="columns")
    check_is_a_schedule(instance, one.opened, one.nodes)
    assert one.ratio < 1.05
    assert one.cost == schedule(instance, 3, method="columns").cost
    assert one.rounded.required.sum() >= len(instance.sizes)


def test_a_limit_on_time_keeps_a_true_bound() -> None:
    instance = paper_fat_tree()
    full, cut = columns.solve(instance), columns.solve(instance, rounds=3)
    assert cut.bound < full.bound * (1 + 1e-9)
    assert cut.value > full.value
    check = schedule(instance, 0, method="columns")
    assert check.cost >= cut.bound


@pytest.mark.parametrize(
    ("x", "count"),
    [
        ([0.6, 0.6, 0.4, 0.4], 2),
        ([1.0, 0.0, 0.3], 1),
        ([0.5, 0.5, 0.5, 0.5, 0.5], 2),
        ([0.0, 0.0], 0),
        ([0.9999999], 1),
    ],
)
def test_k_counts_whole_switches_and_knapsacks_hold_more_than_a_half(x: list[float], count: int) -> None:
    values = np.array([x])
    assert required_switches(values).tolist() == [count]
    where = knapsacks(values[0], count)
    assert (where >= 0).tolist() == [count > 0 and value > 0 for value in x]
    sums = [values[0][where == sack].sum() for sack in range(count)]
    assert all(total > 0.5 for total in sums)


def test_probabilities_above_one_are_scaled_down() -> None:
    x, y = np.array([0.6, 0.6, 0.4, 0.4]), np.array([[0.6, 0.4, 0.0, 0.0], [0.1, 0.0, 0.0, 0.4]])
    chances = choice(y, x, np.array([True, True, False, False]))
    assert chances.sum(axis=1) == pytest.approx([1, 1])
    assert chances.min() >= 0
    # 1 and 2/3 of which no PS is left
    assert chances[0] == pytest.approx([0.6, 0.4, 0, 0, 0])
    assert chances[1] == pytest.approx([1 / 6, 0, 0, 0, 5 / 6])


def test_k_of_zero_sends_everything_to_the_ps() -> None:
    instance = small(1)
    relaxed = relax(instance)
    starved = replace(relaxed, x=relaxed.x * 0.3, y=relaxed.y * 0.3)
    starved.x[:] = np.minimum(starved.x, 0.9 / len(instance.switches))
    rounded = round_once(instance, starved, np.random.default_rng(0))
    assert not rounded.opened.any()
    assert (rounded.nodes == len(instance.switches)).all()
    assert instance.cost(rounded.opened, rounded.nodes) == instance.without_aggregation()


def test_rounding_follows_the_fractional_solution() -> None:
    instance = small(3)
    relaxed = relax(instance)
    rng = np.random.default_rng(5)
    often = sum(round_once(instance, relaxed, rng).opened.astype(int) for _ in range(200))
    assert not often[relaxed.x < 1e-6].any()
    whole = relaxed.x > 1 - 1e-6
    alone = whole & (required_switches(relaxed.x)[:, None] == np.round(relaxed.x.sum(axis=1))[:, None])
    used = relaxed.y.max(axis=1) > 1 - 1e-6
    assert (often[alone & used & (whole.sum(axis=1) == 1)[:, None]] == 200).all()


def test_overshoot_is_reported_and_repaired() -> None:
    instance = small(0)
    everything = np.ones((len(instance.sizes), len(instance.switches)), bool)
    assert (instance.load(everything) > instance.memory).any()
    fits = repair(instance, everything)
    assert (instance.load(fits) <= instance.memory).all()
    assert fits[everything].any()
    better = polish(instance, fits)
    before = instance.cost(fits, nearest(instance, fits))
    assert instance.cost(better, nearest(instance, better)) <= before
    assert (instance.load(better) <= instance.memory).all()
    overshoots = [schedule(small(seed), seed, roundings=1).overshoot for seed in range(10)]
    assert max(overshoots) > 1.0
    # the paper's bound, under its assumption
    assert max(overshoots) < 4.0


def test_addresses_do_not_overlap_and_fit_the_register_file() -> None:
    instance = small(2)
    made = schedule(instance, 2)
    for s, name in enumerate(instance.switches):
        taken: set[int] = set()
        for g in np.nonzero(made.opened[:, s])[0].tolist():
            base = made.bases()[name, g]
            mine = set(range(base, base + instance.submodels[g].fragments))
            assert not taken & mine
            taken |= mine
        assert len(taken) * instance.slot_bytes <= instance.memory[s]
    everything = replace(made, opened=np.ones_like(made.opened))
    with pytest.raises(DoesNotFit, match="slots; its sub-models need"):
        everything.bases()


def test_a_slot_that_costs_more_than_its_values_leaves_room_for_less() -> None:
    graph = leaf_spine(2, 2, 8)
    make_programmable(graph, 0, share=1.0, memory=512 * 1024)
    ps, workers = place(graph, 6, 0)
    parts = partition(layers_of([1 << 20] * 4), 128 * 1024)
    plain = schedule(from_graph(graph, ps, workers, parts), 0)
    real = schedule(from_graph(graph, ps, workers, parts, slot_bytes=256 + 16), 0)
    assert real.opened.sum() < plain.opened.sum()
    assert real.cost > plain.cost
    real.bases()


def test_without_programmable_switches_everything_goes_to_the_ps() -> None:
    graph = leaf_spine(2, 2, 8)
    ps, workers = place(graph, 5, 0)
    instance = from_graph(graph, ps, workers, partition([("a", 4096)], 4096))
    made = schedule(instance, 0)
    assert made.cost == made.relaxed.bound == instance.without_aggregation()
    assert made.ps_bytes() == (5 * 4096, 5 * 4096)


def test_every_stage_can_be_inspected() -> None:
    made = schedule(small(4), 4)
    text = "\n".join(made.explain())
    for word in ("without aggregation", "bound of the relaxation", "rounded", "repaired", "polished"):
        assert word in text
    assert f"{made.cost / 1e9:.4f}" in text
    assert all(name in text for name in made.instance.switches)
    sources = made.sources()
    assert (sources.sum(axis=1) == len(made.instance.workers)).all()
    assert ((sources[:, :-1] > 0) == made.opened).all()
    total, direct = made.ps_bytes()
    assert total == direct + made.instance.sizes @ made.opened.sum(axis=1)


def test_no_roundings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        schedule(small(0), 0, roundings=0)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_ps_is_spared_for_a_few_links_more(seed: int) -> None:
    graph = leaf_spine()
    make_programmable(graph, seed)
    ps, workers = place(graph, 35, seed)
    instance = from_graph(graph, ps, workers, partition(layers_of([4_000_000] * 50), 4_000_000))
    plain, spared = (schedule(instance, seed, method="columns", spare=links) for links in (0.0, 1.0))
    check_is_a_schedule(instance, spared.opened, spared.nodes)
    assert spared.ps_bytes()[1] < plain.ps_bytes()[1]
    assert plain.cost < spared.cost < 1.03 * plain.cost
    # costs and bound are those of the real network
    assert spared.cost == instance.cost(spared.opened, spared.nodes)
    assert spared.relaxed.bound == plain.relaxed.bound
    assert plain.relaxed.value <= spared.relaxed.value <= spared.cost * 1.001
    spared.bases()
