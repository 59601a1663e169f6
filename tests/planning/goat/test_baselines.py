"""The model of shared slots under which GOAT's baselines are computed."""

from typing import Any

import numpy as np
import pytest

from inanet.planning.goat.baselines import LEAST_RATE, Routes, routes, sending_rates, share
from inanet.planning.goat.topologies import fat_tree, leaf_spine, make_programmable, place

#: two workers under switch 0, two under switch 1, both below switch 2, which is next to the PS
TREE = Routes(
    (((1, 0), (2, 2)),) * 2 + (((1, 1), (2, 2)),) * 2, (3,) * 4, (((1, 2),), ((1, 2),), ()), (2, 2, 1), 100
)
UNIT = 256


def traffic(rates: list[float], policy: Any, fragments: int = 400, **how: Any) -> tuple[float, float, float]:
    """Fragments in links, at the PS, and unaggregated there."""
    its = share(TREE, fragments * UNIT, np.array(rates), policy, samples=100, **how)
    assert its.sent == 4 * fragments * UNIT
    assert its.in_network == its.sent - its.ps
    return its.links / UNIT, its.ps / UNIT, its.direct / UNIT


def test_without_aggregation_everything_takes_the_shortest_path() -> None:
    assert traffic([1.0] * 4, "none") == (400 * 12, 1600, 1600)


@pytest.mark.parametrize("policy", ["atp", "esa"])
def test_equal_workers_share_slots_without_a_collision(policy: str) -> None:
    # a link from each worker, one from each lower switch, one to the PS
    assert traffic([1.0] * 4, policy) == (400 * 7, 400, 0)
    # aggregated once only: both sums of the lower switches arrive
    assert traffic([1.0] * 4, policy, again=False) == (400 * (4 + 2 * 2), 800, 0)


def test_drift_makes_atp_miss_its_slots_and_memory_for_everything_mends_it() -> None:
    # Slot j sees fragments j, j + 100, j + 200, j + 300. The third of the fast passes the lower switches by and holds
    # the upper slot, which both sums of the second then find taken: five packets for four fragments.
    assert traffic([1.0, 0.5, 1.0, 0.5], "atp")[1:] == (500, 0)
    rates = [1.0, 0.5, 0.8, 0.4]
    links, ps, direct = traffic(rates, "atp")
    assert direct > 0
    assert links > 400 * 7
    assert traffic(rates, "atp", fragments=100) == (100 * 7, 100, 0)
    # one fragment ahead of the memory is what the fast may be; the more drift, the more is lost
    more = traffic([1.0, 0.2, 1.0, 0.2], "atp")
    assert more[1] > ps


def test_a_slot_that_waits_for_the_ps_is_taken_longer() -> None:
    rates = [1.0, 0.6, 0.4, 0.3]
    assert traffic(rates, "atp", release="instant")[1] < traffic(rates, "atp")[1]


def test_esa_never_counts_twice_and_its_priorities_differ() -> None:
    rates = [1.0, 0.7, 0.45, 0.3]
    late, early = traffic(rates, "esa", priority="late"), traffic(rates, "esa", priority="early")
    assert late != early
    for links, ps, direct in (late, early):
        assert 400 <= ps <= 1600
        assert direct <= ps
        assert 400 * 7 <= links <= 400 * 12


def test_rates_are_seeded_and_in_range() -> None:
    rates = sending_rates(500, 0.2, 1)
    assert (rates == sending_rates(500, 0.2, 1)).all()
    assert rates.min() >= LEAST_RATE
    assert rates.max() <= 1.0
    # a half normal below 1: mean 1 - 0.2 sqrt(2 / pi)
    assert rates.mean() == pytest.approx(1 - 0.2 * np.sqrt(2 / np.pi), abs=0.02)
    assert (sending_rates(5, 0.0, 1, mean=0.5) == 0.5).all()
    with pytest.raises(ValueError, match=r"mean 1\.2"):
        sending_rates(5, 0.1, 1, mean=1.2)


@pytest.mark.parametrize("favour", [False, True])
def test_paths_that_meet_stay_together(favour: bool) -> None:
    graph = fat_tree()
    make_programmable(graph, 4)
    ps, workers = place(graph, 40, 4)
    its = routes(graph, ps, workers, 4, favour_programmable=favour)
    for stops, length in zip(its.stops, its.length, strict=True):
        assert all(0 < hop < length for hop, _ in stops)
        for (hop, switch), ahead in zip(stops, [stops[n + 1 :] for n in range(len(stops))], strict=True):
            assert its.switch_stops[switch] == tuple((h - hop, s) for h, s in ahead)
            assert its.switch_length[switch] == length - hop
    assert its == routes(graph, ps, workers, 4, favour_programmable=favour)


def test_favouring_programmable_switches_finds_more_of_them() -> None:
    graph = fat_tree()
    make_programmable(graph, 4)
    ps, workers = place(graph, 40, 4)
    stops = [
        sum(map(len, routes(graph, ps, workers, 4, favour_programmable=its).stops)) for its in (False, True)
    ]
    assert stops[1] > stops[0]


def test_unequal_memories_and_rates_are_refused() -> None:
    graph = leaf_spine(2, 2, 6)
    make_programmable(graph, 0, switches=["spine0"], memory=1024)
    make_programmable(graph, 0, switches=["spine1"], memory=2048)
    with pytest.raises(ValueError, match="one size"):
        routes(graph, "h0", ["h1"], 0)
    with pytest.raises(ValueError, match="3 rates for 4 workers"):
        share(TREE, 1024, np.ones(3), "atp")
