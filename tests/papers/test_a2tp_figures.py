"""A2TP's other figures at sizes that a test can run: the numbers are snapshots, virtual time does not vary."""

import pytest

from inanet.papers import a2tp_datacenter, a2tp_sweep, a2tp_threshold, a2tp_training
from inanet.papers.a2tp_testbed import HOST, SAMPLE, A, B, build, throughputs
from inanet.papers.outcome import joined


def test_the_model_bounds_the_threshold_from_below() -> None:
    found = {
        (slots, flows): round(a2tp_threshold.bound(flows, slots), 4)
        for slots in a2tp_threshold.MEMORIES
        for flows in (2, 8, 32)
    }
    assert found == {
        (450, 2): 0.0419,
        (450, 8): 0.0743,
        (450, 32): 0.1145,
        (900, 2): 0.0307,
        (900, 8): 0.0564,
        (900, 32): 0.0947,
    }
    for (slots, flows), threshold in found.items():
        assert a2tp_threshold.least_collisions(flows, slots, threshold + 1e-3) > 0
        assert a2tp_threshold.least_collisions(flows, slots, threshold - 1e-3) < 0
        # the approximation of a small decreasing factor costs little
        exact = a2tp_threshold.bound(flows, slots, a2tp_threshold.exact_collisions)
        assert exact == pytest.approx(threshold, rel=0.1)


def test_figure_5_says_which_of_its_claims_do_not_hold() -> None:
    outcome = a2tp_threshold.fig5()
    assert [claim.holds for claim in outcome.claims] == [False, True, True, True, True]
    assert all(claim.reason for claim in outcome.claims if not claim.holds)


@pytest.mark.parametrize(("system", "total"), [("switchml", 67.7059), ("atp", 35.901), ("a2tp", 36.7512)])
def test_two_jobs_and_a_straggler(system: str, total: float) -> None:
    rack = build(system, (A, B), {B: 13 / HOST})
    # early: windows of A2TP have been cut and not grown again
    its = throughputs(rack, 4 * SAMPLE, 2 * SAMPLE)
    assert its[A] + its[B] == pytest.approx(total, rel=1e-4)
    assert its[B] < 14.5


def test_a_sweep_reports_its_points_and_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {"switchml": 50.0, "switchml, long": 40.0, "atp": 45.0, "a2tp": 60.0}
    monkeypatch.setattr(a2tp_sweep, "pair", lambda name, level, slots: totals[name] + slots / 1000 + level)
    monkeypatch.setattr(a2tp_sweep, "peak_slots", lambda: (440, {440: 52.0}))
    outcome = a2tp_sweep.fig7()
    assert [table.title[:3] for table in outcome.tables] == ["(a)", "(b)"]
    held = {claim.name: claim for claim in outcome.claims}
    assert held["(b) PTA of a job alone, slots"].holds
    assert held["(a) A2TP over atp at its worst point, ratio"].holds
    best = held["(b) A2TP over switchml at its best point, per cent"]
    assert (best.holds, round(best.ours)) == (False, 20)
    assert "per cent above it" in best.reason


def test_iterations_beside_a_straggler_and_of_several_jobs() -> None:
    model = a2tp_training.Model(40e6, 0.02)
    alone = model.bytes * 8 * a2tp_training.PACKET / a2tp_training.VALUES / a2tp_training.RATE + model.seconds
    one = a2tp_training.several("atp", model, 1, 2, 0.0)
    assert one == pytest.approx(alone, rel=0.4)
    four = {system: a2tp_training.several(system, model, 4, 2, 0.0) for system in ("switchml", "atp", "a2tp")}
    assert {system: round(value / one, 2) for system, value in four.items()} == pytest.approx(
        {"switchml": 0.98, "atp": 1.06, "a2tp": 1.0}, abs=0.02
    )


@pytest.mark.parametrize(
    ("system", "scaled"), [("ring", 0.092420), ("switchml", 0.039962), ("atp", 0.052543), ("a2tp", 0.051074)]
)
def test_a_few_jobs_in_the_leaf_spine(monkeypatch: pytest.MonkeyPatch, system: str, scaled: float) -> None:
    monkeypatch.setattr(a2tp_datacenter, "SHORTER", 10_000)
    found = a2tp_datacenter.iteration(system, 144, 2.0, fewer=48, rounds=1, settled=0.0)
    assert found * 1e3 == pytest.approx(scaled, rel=1e-4)


def test_jobs_are_placed_apart_and_the_same_every_time() -> None:
    jobs = a2tp_datacenter.place(320)
    assert jobs == a2tp_datacenter.place(320)
    assert jobs[:7] == a2tp_datacenter.place(168)
    assert len(jobs) == 13
    for job in jobs:
        assert 2 <= len(job.workers) <= 8
        assert len({*job.workers, job.ps}) == len(job.workers) + 1
        assert max(*job.workers, job.ps) < 24
    assert (a2tp_datacenter.layout().uplink, a2tp_datacenter.layout().cores) == (20e9, 2)


def test_parts_of_a_figure_are_told_apart() -> None:
    five = a2tp_threshold.fig5()
    both = joined({"a": five, "b": five})
    assert len(both.claims) == 2 * len(five.claims)
    assert [panel.title for panel in both.panels] == ["(a) least threshold", "(b) least threshold"]
    assert both.notes == five.notes
