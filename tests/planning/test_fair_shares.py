"""Iq. (1) as max-min fair shares: never broken, nothing wasted, whatever the trees, jobs and links."""

import math
from collections.abc import Hashable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.planning.fair_shares import Flow, share

NEAR = 1e-6


def verify(
    flows: Mapping[Hashable, Flow], limits: Mapping[Hashable, float], rates: Mapping[Hashable, float]
) -> None:
    """Raise unless the rates keep all limits and no flow could have more at nobody's cost but a faster one's."""
    load = {r: sum(rates[k] for k, flow in flows.items() if r in flow.uses) for r in limits}
    for resource, used in load.items():
        assert used <= limits[resource] * (1 + NEAR)
    for key, flow in flows.items():
        assert rates[key] <= flow.ceiling
        if flow.follows:
            assert rates[key] <= min(rates[s] for s in flow.follows)  # nothing is forwarded before it came
            if flow.holds:
                assert min(rates[s] for s in flow.follows) <= rates[key] * (1 + NEAR)  # line 2 of Iq. (1)
    for key in flows:
        assert limited(key, flows, limits, rates, load, frozenset()), f"{key} wastes capacity"


def limited(
    key: Hashable,
    flows: Mapping[Hashable, Flow],
    limits: Mapping[Hashable, float],
    rates: Mapping[Hashable, float],
    load: Mapping[Hashable, float],
    seen: frozenset[Hashable],
) -> bool:
    """Whether something stops a flow at its rate: directly, or at the other end of a chain of couplings."""
    flow, rate = flows[key], rates[key]
    if math.isinf(rate) or rate >= flow.ceiling:
        return True
    for resource in flow.uses:
        full = resource in limits and load[resource] >= limits[resource] * (1 - NEAR)
        users = [rates[k] for k, other in flows.items() if resource in other.uses]
        if full and rate >= max(users) * (1 - NEAR):
            return True
    # the slowest source of a flow that holds is tied to it, and a flow to its sources
    tied = [s for s in flow.follows if rates[s] <= rate * (1 + NEAR)]
    tied += [
        k
        for k, other in flows.items()
        if other.holds
        and key in other.follows
        and rates[k] <= rate * (1 + NEAR)
        and rate <= min(rates[s] for s in other.follows) * (1 + NEAR)
    ]
    return any(limited(k, flows, limits, rates, load, seen | {key}) for k in tied if k not in seen)


def test_four_workers_share_one_port() -> None:
    flows = {f"w{i}": Flow(((f"w{i}", "out"), ("ps", "in"))) for i in range(4)}
    assert set(share(flows, {("ps", "in"): 10.0}).values()) == {2.5}


def test_what_a_slow_one_leaves_goes_to_the_others() -> None:
    flows = {"slow": Flow(("in",), 1.0), "a": Flow(("in",)), "b": Flow(("in",))}
    assert share(flows, {"in": 10.0}) == {"slow": 1.0, "a": 4.5, "b": 4.5}


def test_nothing_to_keep_to_is_no_limit() -> None:
    assert share({"a": Flow(("in",)), "b": Flow((), 3.0)}, {}) == {"a": math.inf, "b": 3.0}
    assert share({}, {"in": 1.0}) == {}


def test_nobody_sends_faster_than_the_slowest_can_be_forwarded() -> None:
    """The second line of Iq. (1): min b <= B_out. Only the slowest is held; the others may run ahead."""
    flows = {
        "a": Flow(("s in",)),
        "b": Flow(("s in",)),
        "up": Flow(("s out",), follows=("a", "b"), holds=True),
    }
    assert share(flows, {"s in": 10.0, "s out": 2.0}) == {"a": 2.0, "b": 8.0, "up": 2.0}


def test_forwarding_takes_no_more_than_comes_in() -> None:
    flows = {
        "a": Flow(("s in",), 1.0),
        "b": Flow(("s in",)),
        "up": Flow(("ps in",), follows=("a", "b"), holds=True),
        "direct": Flow(("ps in",)),
    }
    assert share(flows, {"s in": 10.0, "ps in": 10.0}) == {"a": 1.0, "b": 9.0, "up": 1.0, "direct": 9.0}


def test_one_held_source_is_enough() -> None:
    """A child that stops for its own child's sake counts: no second one is held back."""
    flows = {
        "leaf": Flow(("x",)),
        "inner": Flow((), follows=("leaf",), holds=True),
        "other": Flow(("in",)),
        "up": Flow(("x",), follows=("inner", "other"), holds=True),
    }
    assert share(flows, {"x": 2.0, "in": 5.0}) == {"leaf": 1.0, "inner": 1.0, "up": 1.0, "other": 5.0}


def test_unknown_sources_are_an_error() -> None:
    with pytest.raises(KeyError):
        share({"up": Flow((), follows=("nobody",))}, {})


@st.composite
def forests(draw: st.DrawFn) -> tuple[dict[Hashable, Flow], dict[Hashable, float]]:
    """Random trees of flows over common nodes, with and without limits."""
    nodes = draw(st.integers(1, 6))
    rate = st.one_of(st.just(math.inf), st.integers(1, 40).map(float))
    flows: dict[Hashable, Flow] = {}
    open_: list[Hashable] = []
    for index in range(draw(st.integers(1, 14))):
        ends = draw(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)))
        uses = ((ends[0], "out"), (ends[1], "in"))
        take = draw(st.integers(0, min(3, len(open_))))
        sources = tuple(open_[:take])
        del open_[:take]
        flows[index] = Flow(uses, draw(rate), sources, bool(sources) and draw(st.booleans()))
        open_.append(index)
    limits = {(n, side): draw(rate) for n in range(nodes) for side in ("in", "out")}
    return flows, {r: limit for r, limit in limits.items() if math.isfinite(limit)}


@given(forests())
@settings(max_examples=80, deadline=None)
def test_shares_are_max_min_optimal(forest: tuple[dict[Hashable, Flow], dict[Hashable, float]]) -> None:
    flows, limits = forest
    verify(flows, limits, share(flows, limits))
