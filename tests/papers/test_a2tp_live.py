"""A2TP's Fig. 2 on real daemons: what is made of the numbers, and one small run."""

from dataclasses import replace

import pytest

from inanet.lab import namespaces
from inanet.papers import a2tp_live
from inanet.papers.a2tp_live import RATES, SYSTEMS_RUN, Run, fig2, judge, measure
from inanet.papers.a2tp_testbed import A, B
from tests.lab.conftest import lacking

MEGABIT = 125_000


def run(alone: float, beside: float, straggler: float, held: float) -> Run:
    """A for 10 s, from 1 to 11; B from 4 to 8. Rounds of a megabit, throughputs in Mbit/s."""
    a = [1 + k / alone for k in range(int(3 * alone))]
    a += [4 + k / beside for k in range(int(4 * beside))]
    a += [8 + k / alone for k in range(int(3 * alone))]
    b = [4 + k / straggler for k in range(int(4 * straggler) + 1)]
    samples = [(1 + k / 10, {A: 0.5, B: held if 4 <= 1 + k / 10 <= 8 else 0.0}) for k in range(100)]
    return Run(4.0, {A: a, B: b}, samples, {}, MEGABIT)


def test_phases_are_told_apart_and_claims_judged_by_them() -> None:
    runs = {
        "switchml": run(20, 20, 10, 0.4),
        "atp": run(40, 28.8, 10, 0.5),
        "a2tp": run(40, 39.6, 10, 0.02),
    }
    outcome = judge(runs, settled=0.5)
    means = {row[0]: row[1:] for row in outcome.tables[0].rows}
    assert means["atp"] == pytest.approx((40, 28.8, 10, 40, 28, 0.5), rel=0.01)
    assert means["a2tp"][-1] == pytest.approx(0.02)
    assert all(claim.holds and not claim.reason for claim in outcome.claims)
    by_time = [row for row in outcome.tables[2].rows if row[0] == "a2tp"]
    assert len(by_time) == 20
    assert [row[1] for row in by_time if row[3] > 0] == [3 + index / 2 for index in range(9)]


def test_claims_that_do_not_hold_say_why() -> None:
    same = run(40, 20, 10, 0.5)
    outcome = judge({"switchml": same, "atp": same, "a2tp": same}, settled=0.5)
    broken = [claim for claim in outcome.claims if not claim.holds]
    assert len(broken) == 3
    assert all(claim.reason for claim in broken)
    # what A2TP should be better at than ATP, and is not
    worse = judge({"switchml": same, "atp": same, "a2tp": run(40, 10, 10, 0.9)}, settled=0.5)
    assert [claim.holds for claim in worse.claims[3:]] == [False, False]
    assert all(claim.reason for claim in worse.claims if not claim.holds)
    # nobody got anything: no division by nothing, no claim that holds by accident
    silent = Run(4.0, {A: [1.0], B: [4.0]}, [], {}, MEGABIT)
    assert not all(claim.holds for claim in judge(dict.fromkeys(SYSTEMS_RUN, silent)).claims)


def test_the_rate_is_the_first_that_leaves_processors_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATP is measured at one rate after the other, the others at the one that is found; its busy runs count for nothing."""
    asked = []

    def measured(system: str, *, rate: int) -> Run:
        asked.append((system, rate))
        busy = {"switch": 0.5, "PS": 0.1, "agents": 0.6, "ranks": 0.0}
        return replace(run(40, 28.8, 10, 0.5), rate=rate, busy=busy, idle=0.1 if rate == RATES[0] else 0.4)

    monkeypatch.setattr(a2tp_live, "measure", measured)
    outcome = fig2()
    assert asked == [("atp", RATES[0]), ("atp", RATES[1]), ("switchml", RATES[1]), ("a2tp", RATES[1])]
    load = outcome.tables[1]
    assert load.columns == ("system", "switch", "PS", "agents", "ranks", "idle")
    assert load.rows[1] == ("atp", 0.5, 0.1, 0.6, 0.0, 0.4)
    assert "Hosts send 10 Mbit/s" in outcome.notes[0]
    # who was short of what is told by the run
    reasons = {claim.name: claim.reason for claim in outcome.claims if claim.reason}
    assert reasons["A2TP: A's loss beside B, per cent"].startswith("processors were idle for 40 per cent")
    asked.clear()
    fig2(RATES[:1])
    assert asked == [(system, RATES[0]) for system in ("atp", "switchml", "a2tp")]


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_jobs_share_the_switch_of_a_star() -> None:
    try:
        namespaces.require_privileges()
    except namespaces.Unprivileged as error:
        lacking(str(error))
    # hosts that are alone in their job do not need a switch: two are the least
    found = measure("a2tp", (0.2, 0.4, 0.2), rate=200_000_000, workers=2, elements=1 << 14)
    assert min(len(found.times[A]), len(found.times[B])) > 1
    assert found.times[A][0] < found.began < found.times[B][0] < found.times[B][-1] < found.times[A][-1]
    assert found.counters["contributions_summed"] > 0
    assert {job for _, held in found.held for job in held} == {A, B}
    # every role was at work, and none of them on more processors than there are
    assert set(found.busy) == {"switch", "PS", "agents", "ranks"}
    assert min(found.busy.values()) > 0
    assert 0 <= found.idle <= 1
