"""The rate negotiator: who gets what as workers begin and end, under loss, and when messages overtake each other."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.planning.rates import LEAST, PROBE, Capacity, Grant, Negotiator, Rates
from inanet.planning.topology import Topology, Tree
from tests.planning.test_fair_shares import verify

FIGURE_1 = Topology(
    roots=("ps",),
    aggregators={"s1": "ps"},
    workers={"w1": ("s1",), "w2": ("s1",), "w3": ("s1",), "w4": ("ps",)},
)
TEN = Capacity(10.0, 10.0)


def negotiator_for(topology: Topology, *, multicast: bool = False, job: int = 0) -> Negotiator:
    negotiator = Negotiator()
    for name in (*topology.roots, *topology.aggregators, *topology.workers):
        negotiator.node(name, TEN)
    negotiator.plan(job, topology.trees(topology.workers), multicast=multicast)
    return negotiator


def ups(negotiator: Negotiator) -> dict[str, float]:
    return {key[3]: rate for key, rate in negotiator.rates().items() if key[4] == "up"}


def test_figure_1_as_workers_begin_and_end() -> None:
    negotiator = negotiator_for(FIGURE_1, multicast=True)
    negotiator.node("w2", Capacity(5.0, 5.0))
    for name in ("w1", "w2", "w4"):
        negotiator.ready(0, name, 1)
    # w3 is late: the server holds what comes, and forwards nothing yet
    assert ups(negotiator) == {"w1": 5.0, "w2": 5.0, "w4": 10.0}
    negotiator.done(0, "w4", 2)
    negotiator.done(0, "w1", 2)
    negotiator.done(0, "w2", 2)
    negotiator.ready(0, "w3", 1)
    # it alone is missing: the server's ingress carries its gradient, and results as fast as they are made of it
    assert ups(negotiator) == {"w3": 5.0, "s1": 5.0}
    negotiator.done(0, "w3", 2)
    assert ups(negotiator) == {"s1": 5.0}
    negotiator.rest(0)
    assert negotiator.rates() == {}


def test_grants_go_to_those_who_are_concerned_and_nobody_else() -> None:
    negotiator = negotiator_for(FIGURE_1)
    negotiator.ready(0, "w1", 1)
    assert negotiator.grants() == [("w1", Grant(0, 1, 10.0, 0.0))]
    assert negotiator.grants() == []
    negotiator.ready(0, "w2", 1)
    # w1 gives half of it up, and hears of that before w2 hears that it may have it
    assert negotiator.grants() == [("w1", Grant(0, 2, 5.0, 0.0)), ("w2", Grant(0, 3, 5.0, 0.0))]
    negotiator.ready(0, "w4", 1)
    assert [name for name, _ in negotiator.grants()] == ["w4"]
    negotiator.done(0, "w1", 2)
    assert negotiator.grants() == [("w2", Grant(0, 5, 10.0, 0.0))]


def test_a_maximum_is_respected_and_the_rest_shared() -> None:
    negotiator = negotiator_for(FIGURE_1)
    negotiator.ready(0, "w1", 1, 2.0)
    negotiator.ready(0, "w2", 1)
    assert ups(negotiator) == {"w1": 2.0, "w2": 8.0}


def test_unicast_results_share_the_egress_of_the_node_that_sends_them() -> None:
    star = Topology(roots=("ps",), workers={"a": ("ps",), "b": ("ps",)})
    for multicast, down in ((False, 5.0), (True, 5.0)):
        negotiator = negotiator_for(star, multicast=multicast)
        negotiator.node("ps", Capacity(10.0, 20.0))
        negotiator.ready(0, "a", 1)
        negotiator.ready(0, "b", 1, down)
        (grant,) = [grant for name, grant in negotiator.grants() if name == "ps"]
        # results come at the slower one's 5; sent one by one they fill the link, sent once they leave half of it
        assert grant.down == (down if multicast else 2 * down)


def test_jobs_share_the_links_of_common_nodes_in_both_directions() -> None:
    star = Topology(roots=("ps",), workers={"a": ("ps",), "b": ("ps",)})
    negotiator = negotiator_for(star, job=1)
    negotiator.plan(2, star.trees(["a"]))
    for name in ("a", "b"):
        negotiator.ready(1, name, 1)
    negotiator.ready(2, "a", 1)
    rates = negotiator.rates()
    # three flows into the PS, and three of results out of it
    assert {rate for key, rate in rates.items() if key[4] == "up"} == {10 / 3}
    assert sum(rate for key, rate in rates.items() if key[4] == "down") <= 10.0
    negotiator.end(1)
    assert ups(negotiator) == {"a": 10.0}


def test_shards_share_a_workers_link() -> None:
    sharded = Topology(roots=("p", "q"), workers=dict.fromkeys(("a", "b"), ("p", "q")))
    negotiator = negotiator_for(sharded, multicast=True)
    for name in ("a", "b"):
        negotiator.ready(0, name, 1)
    grants = dict(negotiator.grants())
    assert grants["a"].up == pytest.approx(10.0)
    assert grants["p"].down == pytest.approx(5.0)


def test_nodes_on_one_host_share_its_link_and_need_none_between_them() -> None:
    names = dict.fromkeys(("a", "b"), ("a-agg", "b-agg"))
    fabric = Topology(roots=("a-agg", "b-agg"), workers=names)
    negotiator = Negotiator()
    for name in ("a", "b"):
        negotiator.node(name, TEN, f"host {name}")
        negotiator.node(f"{name}-agg", TEN, f"host {name}")
    negotiator.plan(0, fabric.trees(names))
    for name in names:
        negotiator.ready(0, name, 1)
    rates = negotiator.rates()
    own = {
        key: rate for key, rate in rates.items() if key[2].removesuffix("-agg") == key[3].removesuffix("-agg")
    }
    # each link carries, both ways, a gradient of the other's shard and the results of its own
    across = [rate for key, rate in rates.items() if key not in own]
    assert across == [5.0] * 4
    assert all(rate >= 5.0 for rate in own.values())


def test_words_that_were_overtaken_count_for_nothing() -> None:
    negotiator = negotiator_for(FIGURE_1)
    negotiator.done(0, "w1", 2)
    negotiator.ready(0, "w1", 1)
    assert ups(negotiator) == {}
    negotiator.ready(0, "w1", 3)
    negotiator.loss(0, "w1", 3, 100, 90)
    assert ups(negotiator) == {"w1": 10.0}
    rates = Rates()
    assert math.isinf(rates.total)
    assert rates.granted(Grant(0, 2, 5.0, 0.0))
    assert not rates.granted(Grant(0, 1, 9.0, 0.0))
    assert not rates.granted(Grant(0, 2, 9.0, 0.0))
    assert rates.granted(Grant(7, 1, 1.0, 2.0))
    assert rates.total == 8.0
    rates.restart(0)
    assert rates.granted(Grant(0, 1, 4.0, 0.0))
    assert rates.total == 7.0


def test_nobody_unknown_disturbs() -> None:
    negotiator = negotiator_for(FIGURE_1)
    negotiator.ready(0, "stranger", 1)
    negotiator.ready(9, "w1", 1)
    negotiator.done(9, "w1", 1)
    negotiator.loss(9, "w1", 1, 1, 1)
    negotiator.rest(9)
    negotiator.end(9)
    assert negotiator.grants() == []
    with pytest.raises(ValueError, match="no share"):
        Negotiator(1.0)


def test_loss_at_the_threshold_is_tolerated_and_beyond_it_cut_by_as_much() -> None:
    negotiator = negotiator_for(FIGURE_1)
    for name in ("w1", "w2"):
        negotiator.node(name, Capacity(60e9, 60e9))
    negotiator.node("s1", Capacity(60e9, 60e9))
    negotiator.ready(0, "w1", 1)
    negotiator.loss(0, "w1", 2, 1000, 10)
    assert ups(negotiator) == {"w1": 60e9}
    negotiator.loss(0, "w1", 3, 1000, 250)
    assert ups(negotiator)["w1"] == pytest.approx(45e9)
    negotiator.loss(0, "w1", 4, 1000, 0)
    assert ups(negotiator)["w1"] == pytest.approx(45e9 * (1 + PROBE))
    negotiator.loss(0, "w1", 5, 1000, 1000)
    assert ups(negotiator)["w1"] == LEAST
    # another one can use what it does not
    negotiator.ready(0, "w2", 1)
    assert ups(negotiator)["w2"] == pytest.approx(60e9 - LEAST)


def test_figure_21_a_link_drops_from_60_to_20_and_recovers() -> None:
    """Periods of 10 ms: the rate follows at once, never collapses (TCP's does), and comes back."""
    negotiator = negotiator_for(FIGURE_1)
    for name in ("w1", "s1"):
        negotiator.node(name, Capacity(60e9, 60e9))
    negotiator.ready(0, "w1", 0)
    trace = []
    for period in range(1, 121):
        rate = ups(negotiator)["w1"]
        trace.append(rate)
        link = 20e9 if 20 <= period < 70 else 60e9
        lost = max(0.0, 1 - link / rate)
        negotiator.loss(0, "w1", period, 1_000_000, round(lost * 1_000_000))
    before, narrow, after = trace[:20], trace[20:69], trace[69:]
    assert set(before) == {60e9}
    # within one period of the change, and from then on never above what the next doubling of a probe can reach
    assert 19.9e9 < narrow[0] < 20.1e9
    assert min(narrow) > 15e9
    assert max(narrow) < 25e9
    assert 18e9 < sum(narrow) / len(narrow) < 21e9
    assert set(after[20:]) == {60e9}


@st.composite
def situations(draw: st.DrawFn) -> Negotiator:
    """Random trees of one or two jobs over common nodes, with random links, workers in random states, and losses."""
    roots = tuple(f"r{i}" for i in range(draw(st.integers(1, 3))))
    aggregators: dict[str, str] = {}
    for index in range(draw(st.integers(0, 4))):
        aggregators[f"a{index}"] = draw(st.sampled_from([*roots, *aggregators]))

    def root_of(name: str) -> str:
        while name in aggregators:
            name = aggregators[name]
        return name

    workers = {
        f"w{index}": tuple(
            draw(st.sampled_from([n for n in (*roots, *aggregators) if root_of(n) == root])) for root in roots
        )
        for index in range(draw(st.integers(1, 5)))
    }
    topology = Topology(roots=roots, aggregators=aggregators, workers=workers)
    negotiator = Negotiator()
    rates = st.one_of(st.just(math.inf), st.integers(1, 100).map(lambda gbps: gbps * 1e9))
    for name in (*roots, *aggregators, *workers):
        negotiator.node(name, Capacity(draw(rates), draw(rates)))
    for job in range(draw(st.integers(1, 2))):
        members = draw(st.sets(st.sampled_from(sorted(workers)), min_size=1))
        negotiator.plan(job, topology.trees(members), multicast=draw(st.booleans()))
        for name in sorted(members):
            for sequence in range(draw(st.integers(0, 3))):
                what = draw(st.sampled_from(("ready", "done", "loss")))
                if what == "ready":
                    negotiator.ready(job, name, sequence, draw(rates))
                elif what == "done":
                    negotiator.done(job, name, sequence)
                else:
                    negotiator.loss(job, name, sequence, 1000, draw(st.integers(0, 1000)))
    return negotiator


@given(situations())
@settings(max_examples=60, deadline=None)
def test_negotiated_rates_keep_iq_1_and_waste_nothing(negotiator: Negotiator) -> None:
    limits = {
        (name, side): limit
        for name, capacity in negotiator._capacities.items()
        for side, limit in (("in", capacity.receive), ("out", capacity.send))
        if math.isfinite(limit)
    }
    verify(negotiator.flows(), limits, negotiator.rates())


@given(situations())
@settings(max_examples=60, deadline=None)
def test_what_nodes_were_told_keeps_the_limits(negotiator: Negotiator) -> None:
    told: dict[str, float] = {}
    for name, grant in negotiator.grants():
        told[name] = told.get(name, 0.0) + grant.total
    for name, total in told.items():
        assert total <= negotiator._capacities[name].send * (1 + 1e-9)
    assert negotiator.grants() == []


def test_trees_without_anybody_have_no_flows() -> None:
    negotiator = Negotiator()
    negotiator.plan(0, (Tree(0, "ps", {}, {}),))
    assert negotiator.rates() == {}
