"""Rows of ``ina bench plan``: what they say of predictions and of Gloo, without a lab."""

import importlib.util

import pytest

from inanet.bench.peers.rank import Sample
from inanet.bench.plan import TOPOLOGIES, contestants_for, row, summary, table
from inanet.bench.runs import Run
from inanet.lab.library import topology
from inanet.lab.network import fleet
from inanet.planning.costs import Costs
from inanet.planning.prices import Choice, choose

SIZE = 97 << 20


def choice(name: str) -> Choice:
    return choose(fleet(topology(name), SIZE, shared_cores=2), SIZE, Costs())


def runs(*seconds: float) -> list[Run]:
    return [Run(Sample(value, 0.0, 0.0), 0.5) for value in seconds]


def test_a_plan_is_compared_with_its_prediction_and_with_gloo() -> None:
    chosen = choice("star4-fast-aggregator")
    assert chosen.helps
    predicted = chosen.chosen.seconds
    found = row("t", 4, SIZE, chosen, {"gloo": runs(2.0, 2.0), "xagg-udp": runs(predicted, predicted)}, 0.5)
    assert found["prediction_error"] == pytest.approx(0.0)
    assert found["ratio_to_gloo"] == pytest.approx(predicted / 2)
    late = row("t", 4, SIZE, chosen, {"gloo": runs(1.0), "xagg-udp": runs(2 * predicted)}, 0.01)
    assert late["prediction_error"] == pytest.approx(0.5)
    assert late["short_of_cpu"]
    both = summary([found, late])
    assert both["max_prediction_error"] == pytest.approx(0.5)
    assert both["worst_ratio_to_gloo"] == pytest.approx(2 * predicted)
    assert both["ok"]
    assert not both["holds"]
    assert summary([found])["holds"]


def test_a_ring_is_what_gloo_takes() -> None:
    chosen = choice("star2")
    assert not chosen.helps
    found = row("t", 2, SIZE, chosen, {"gloo": runs(0.9, 1.0, 1.1)}, None)
    assert (found["plan"], found["measured_seconds"], found["ratio_to_gloo"]) == ("ring", 1.0, 1.0)
    text = "\n".join(table(summary([found]) | {"cores": 2, "load": 0.0}))
    assert "ring" in text
    assert "holds" in text


def test_the_topologies_of_the_claim_can_be_planned() -> None:
    for name in TOPOLOGIES:
        found = choice(name)
        assert found.chosen.seconds <= found.ring.seconds


@pytest.mark.parametrize(
    ("name", "who"), [("star2", ["gloo"]), ("star4-fast-aggregator", ["gloo", "xagg-udp"])]
)
def test_daemons_run_only_for_plans_that_need_them(name: str, who: list[str]) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("Gloo comes with torch (bench extra)")
    assert [peer.name for peer in contestants_for(choice(name))] == who
