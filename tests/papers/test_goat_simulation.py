"""The simulations of GOAT's figures, on one placement and few workers."""

import pytest

from inanet.papers.goat_simulation import (
    AT_MOST,
    GRADIENT,
    PUBLISHED,
    SCHEMES,
    SPARING,
    Case,
    Model,
    _best,
    _reductions,
    simulate,
    submodels,
)
from inanet.planning.goat.baselines import Traffic


def test_workers_send_what_the_papers_workers_send() -> None:
    parts = submodels()
    assert sum(part.size for part in parts) == pytest.approx(GRADIENT, rel=1e-5)
    assert max(part.size for part in parts) <= AT_MOST


@pytest.mark.parametrize("network", ["leaf-spine", "fat-tree"])
def test_schemes_are_ordered_and_their_bytes_add_up(network: str) -> None:
    case = Case(network, 12)
    its = simulate(case, seeds=(1,))[PUBLISHED]
    assert list(its.traffic) == list(SCHEMES)
    for traffic in its.traffic.values():
        assert traffic.sent == pytest.approx(12 * GRADIENT, rel=1e-5)
        assert traffic.direct <= traffic.ps <= traffic.sent
        assert traffic.in_network == traffic.sent - traffic.ps
    assert its.bound <= its.traffic["GOAT"].links <= its.traffic["ESA"].links
    assert its.traffic[SPARING].direct <= its.traffic["GOAT"].direct
    assert its.traffic["GOAT"].links <= its.traffic[SPARING].links < 1.05 * its.traffic["GOAT"].links
    assert its.traffic["ATP"].links <= its.traffic["Geryon"].links
    assert its.traffic["Geryon"].direct == its.traffic["Geryon"].sent
    assert its == simulate(case, seeds=(1,))[PUBLISHED]


def test_goat_does_not_depend_on_rates_and_the_others_do() -> None:
    kind = Model(favour_programmable=True)
    calm, wild = (
        simulate(Case("leaf-spine", 12, sd), (kind,), seeds=(1,))[kind].traffic for sd in (0.0, 0.3)
    )
    assert calm["GOAT"] == wild["GOAT"]
    assert calm["ATP"].links < wild["ATP"].links
    assert calm["ATP"] == calm["ESA"]


def test_claims_name_the_model_that_is_best_for_a_baseline() -> None:
    poor, good = Model(), Model(favour_programmable=True, release="instant")
    goat, esa, best = Traffic(60, 0, 0, 200), Traffic(100, 0, 0, 200), Traffic(50, 0, 0, 200)
    swept = {("ESA", poor): esa, ("ESA", good): best, ("ATP", poor): Traffic(10, 0, 0, 200)}
    assert _best(swept, "ESA", lambda its: its.links) == (good, best)
    (claim,) = _reductions(
        goat,
        {"ESA": esa},
        swept,
        lambda its: its.links,
        {"ESA": 45.0},
        "links",
        lambda scheme: f"no {scheme}.",
    )
    assert (claim.ours, claim.holds) == (40.0, False)
    assert claim.reason.startswith("no ESA. Under the model that is best for it")
    assert claim.reason.endswith("programmable switches): -20.0")
