"""A2TP: its equations as tables, its marks packet by packet, and its jobs in virtual time."""

import numpy as np
import pytest

from inanet.proto.common.plan import ExponentMode
from inanet.proto.common.program import Action
from inanet.proto.slots.a2tp.system import A2tpProgram, a2tp_worker
from inanet.proto.slots.a2tp.windows import (
    ARTIFACT,
    PAPER,
    A2tpPace,
    PublicStraggling,
    Straggling,
    Windows,
    congestion_degree,
    decreasing_factor,
)
from inanet.testing.switched import Impairment, Star
from inanet.wire.a2tp import FRAME, Mark
from inanet.wire.atp import Flag
from tests.proto.slots.jobs import NOISE, Job, floats, ps_at, spec, worker_at
from tests.proto.slots.judge import PS, SLOT_BYTES, SUM, A, B, data, judge, on_star, single, two_jobs

# ---------------------------------------------------------------- equations 1 to 6


@pytest.mark.parametrize(
    ("alpha", "gamma", "p", "d"),
    [
        (0.10, 0.5, 0.0, 0.0),
        (0.15, 0.0, 0.0, 0.0),
        (0.575, 1.0, 0.5, 0.5),
        (0.575, 0.5, 0.5, 0.70711),
        (0.575, 0.0, 0.5, 1.0),
        (1.0, 1.0, 1.0, 1.0),
        (0.32, 0.25, 0.2, 0.66874),
    ],
)
def test_equation_5_decreasing_factor(alpha, gamma, p, d):
    degree = congestion_degree(alpha, 0.15)
    assert degree == pytest.approx(p)
    assert decreasing_factor(degree, gamma) == pytest.approx(d, abs=1e-5)


@pytest.mark.parametrize(
    ("before", "h", "e", "gamma", "after"),
    [
        # alpha, beta, ACW, LCW: below the threshold both grow by one
        ((0.0, 0.0, 20.0, 40.0), 1.0, 0.0, 1.0, (0.0625, 0.0, 21.0, 41.0)),
        # equation 1, then 4 with gamma = 1: p = (0.53125 - 0.15) / 0.85
        ((0.5, 0.0, 20.0, 40.0), 1.0, 0.0, 1.0, (0.53125, 0.0, 20 * (1 - 0.448529 / 2), 41.0)),
        # a straggling job gives way more: d = p ** 0.4
        ((0.5, 0.0, 20.0, 40.0), 1.0, 0.0, 0.4, (0.53125, 0.0, 20 * (1 - 0.725632 / 2), 41.0)),
        # equations 2 and 6
        ((0.0, 0.2, 20.0, 40.0), 0.0, 1.0, 1.0, (0.0, 0.25, 21.0, 40 * 0.875)),
        # ACW is capped by LCW
        ((0.0, 1.0, 39.0, 40.0), 0.0, 1.0, 1.0, (0.0, 1.0, 20.0, 20.0)),
        # at least one fragment each, at most the largest
        ((1.0, 1.0, 1.0, 1.0), 1.0, 1.0, 0.0, (1.0, 1.0, 1.0, 1.0)),
        ((0.0, 0.0, 50.0, 50.0), 0.0, 0.0, 1.0, (0.0, 0.0, 50.0, 50.0)),
    ],
)
def test_equations_1_to_6_update_both_windows(before, h, e, gamma, after):
    windows = Windows(1, 50)
    windows.alpha, windows.beta, windows.acw, windows.lcw = before
    windows.update(h, e, gamma)
    assert (windows.alpha, windows.beta, windows.acw, windows.lcw) == pytest.approx(after, rel=1e-5)


def test_profiles_have_the_papers_and_the_artifacts_constants():
    assert (PAPER.w, PAPER.g, PAPER.threshold) == (1 / 16, 1 / 16, 0.15)
    assert (ARTIFACT.w, ARTIFACT.g, ARTIFACT.threshold) == (1 / 8, 1 / 8, 0.1)
    windows = Windows(20, 50, ARTIFACT)
    windows.alpha = 0.9
    # no Col mark in this window: the public program does not decrease
    windows.update(0.0, 0.0, 1.0)
    assert windows.acw == 21.0
    windows.alpha, windows.acw = 0.9, 20.0
    windows.update(0.9, 0.0, 0.5)
    assert windows.acw == pytest.approx(20 * (1 - 0.8**0.5 / 1.9))


def test_weights_share_slots_in_their_proportion_and_equal_degrees_are_fair():
    """AIMD on one bottleneck: who grows by twice as much gets twice as much."""
    jobs = [Windows(10, 1000, weight=2.0), Windows(10, 1000, weight=1.0)]
    for window in jobs:
        window.lcw = 1000.0
    held = np.zeros(2)
    for _ in range(4000):
        wanted = sum(window.acw for window in jobs)
        h = max(0.0, (wanted - 300) / wanted)
        for k, window in enumerate(jobs):
            window.update(h, 0.0, 1.0)
            held[k] += window.acw
    assert held[0] / held[1] == pytest.approx(2.0, rel=0.05)
    straggler, fair = Windows(20, 50), Windows(20, 50, straggling=False)
    for window in (straggler, fair):
        window.alpha = 0.5
        window.update(1.0, 0.0, 0.1)
    assert straggler.acw < fair.acw


# ---------------------------------------------------------------- equation 3


@pytest.mark.parametrize("gbps", [53.0, 40.0, 22.0, 5.0])
@pytest.mark.parametrize("interval", [1e-6, 7e-6, 50e-6])
def test_gamma_is_what_gets_through_of_what_could(gbps, interval):
    """Fig. 11: about 0.4 when 22 of 53 Gbps get through, about 0.99 without a straggler."""
    base, bits = 20e-6, 309 * 8
    lcw = 53e9 * base / bits
    straggling = Straggling()
    straggling.echoed(base)
    seen, answered = [], 0
    for k in range(1, 2000):
        due = int(gbps * 1e9 * k * interval / bits)
        if due > answered:
            straggling.answers(due - answered, lcw, k * interval)
            answered = due
        seen.append(straggling.gamma)
    assert np.mean(seen[500:]) == pytest.approx(gbps / 53.0, abs=0.03)


def test_gamma_is_one_until_there_is_a_base_round_trip():
    straggling = Straggling()
    straggling.echoed(0.0)
    for k in range(100):
        straggling.answers(1, 100.0, k * 1e-5)
    assert (straggling.gamma, straggling.base) == (1.0, None)


def test_the_artifacts_gamma_samples_once_an_update_within_20_to_100_us():
    straggling = PublicStraggling()
    straggling.updated(1.0)
    straggling.answers(5, 50.0, 1.0 + 10e-6)
    assert straggling.gamma == 1.0
    straggling.answers(5, 50.0, 1.0 + 30e-6)
    assert straggling.gamma == pytest.approx(63 / 64 + 0.2 / 64)
    straggling.answers(40, 50.0, 1.0 + 60e-6)
    assert straggling.gamma == pytest.approx(63 / 64 + 0.2 / 64)
    straggling.updated(2.0)
    straggling.answers(5, 50.0, 2.0 + 150e-6)
    assert straggling.gamma == pytest.approx(63 / 64 + 0.2 / 64)


def test_fig_11_gamma_in_the_network():
    """Four workers with links for 53, one of them with 22 of it; the window is what the base round trip takes."""
    got = {}
    for name, slow in (("none", 53e6), ("straggler", 22e6)):
        rates = {worker_at(1, index): 53e6 for index in range(4)} | {worker_at(1, 3): slow}
        star = Star(A2tpProgram(budget=1000 * SLOT_BYTES), latency=240e-6, rates=rates, tick=40e-6)
        own = {"initial": 193}
        job = on_star(star, 1, 4, 193, 1000, make=a2tp_worker, own=own)
        job.add(0, spec(31 * 700, dtype="i32", mode=ExponentMode.NONE))
        job.begin(0, [np.full(31 * 700, index, np.int32) for index in range(4)])
        star.run(lambda worker=job.workers[0]: worker.window.base > 450)
        assert job.sum("retransmissions") == 0
        got[name] = job.workers[0].pace.degrees()["gamma"]
    assert got["straggler"] == pytest.approx(22 / 53, abs=0.05)
    assert got["none"] > 0.9


# ---------------------------------------------------------------- which fragments use slots


def test_the_first_acw_of_every_lcw_use_slots():
    windows = Windows(8, 64)
    windows.acw = 3.0
    pace = A2tpPace(windows, first=100)
    plan = pace.uses_slots(np.arange(100, 116))
    assert plan.tolist() == ([True] * 3 + [False] * 5) * 2


def test_batches_are_split_at_the_end_of_an_epoch():
    """Whatever the batches, windows depend on numbers and marks only."""
    rng = np.random.default_rng(5)
    marks = rng.random((400, 2)) < 0.4
    ends = []
    for cuts in ([400], list(range(1, 401)), [3, 90, 91, 250, 400]):
        windows = Windows(16, 64)
        pace = A2tpPace(windows)
        start = 0
        for stop in cuts:
            numbers = np.arange(start, stop)
            pace.answered(numbers, marks[start:stop, 0], marks[start:stop, 1], stop, 0.0)
            start = stop
        ends.append((windows.acw, windows.lcw, windows.alpha, windows.beta, pace.updates))
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][4] > 10


# ---------------------------------------------------------------- the program alone


@pytest.fixture
def program() -> A2tpProgram:
    return two_jobs(A2tpProgram)


def test_a_collision_marks_the_occupant_and_the_newcomer(program):
    judge(program, (data(0, 5), A))
    newcomer = judge(program, (data(0, 5, job=2), worker_at(2, 0)))[0]
    assert (newcomer[0], newcomer[3]) == (Action.UNICAST, ps_at(2))
    assert newcomer[2].flags & Flag.COLLISION
    assert newcomer[2].mark == Mark.COL
    occupant = judge(program, (data(1, 5), B))[0]
    assert (occupant[2].mark, occupant[2].flags) == (Mark.COL, Flag.NONE)
    assert occupant[2].values == SUM


def test_a_mark_set_after_completion_leaves_with_whoever_asks_again(program):
    judge(program, (data(0, 5), A), (data(1, 5), B), (data(0, 9, job=2), worker_at(2, 0)))
    assert judge(program, (data(0, 5), A))[0][2].mark == Mark.COL


def test_bypass_has_its_own_flag_and_takes_the_slots_partial_sum_along(program):
    judge(program, (data(0, 5), A))
    result = judge(program, (data(1, 5, mark=Mark.BYPASS), B))[0]
    assert (result[0], result[2].bitmap, result[2].values) == (Action.UNICAST, 3, SUM)
    assert not result[2].flags & Flag.RESEND
    assert program.stats()["occupied_1"] == 0
    # and occupies nothing where there is nothing
    result = judge(program, (data(0, 6, mark=Mark.BYPASS), A))[0]
    assert (result[2].bitmap, result[2].flags, program.stats()["occupied_1"]) == (1, Flag.NONE, 0)
    # nor does it collide with, or mark, another fragment
    judge(program, (data(0, 7), A), (data(0, 8, mark=Mark.BYPASS), A))
    assert judge(program, (data(1, 7), B))[0][2].mark == 0
    assert program.stats()["collisions"] == 0


def test_the_artifacts_bypass_is_its_retransmission_flag_as_well():
    job = single(2, 8, 8, program=A2tpProgram, make=a2tp_worker, own={"profile": "artifact"})
    job.workers[0].pace.windows.acw = 1.0
    job.workers[0].pace.__init__(job.workers[0].pace.windows)
    job.add(0, spec(400, dtype="i32", mode=ExponentMode.NONE))
    job.begin(0, [np.ones(400, np.int32)] * 2)
    sent = next(t for t in job.workers[0].transmit(0.0) if len(t) > 1)
    frames = np.frombuffer(sent.arena, FRAME)
    assert frames["flags"].tolist() == [0] + [Flag.RESEND] * 7
    assert frames["col"].tolist() == [0] + [Mark.BYPASS] * 7


def test_profiles_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="paper, artifact"):
        single(2, 8, 8, program=A2tpProgram, make=a2tp_worker, own={"profile": "artefact"})


# ---------------------------------------------------------------- jobs


@pytest.mark.parametrize(
    ("workers", "window", "slots", "elements"),
    [(4, 50, 450, 8_000), (3, 16, 1, 2_500), (32, 16, 8, 400), (1, 8, 8, 1_000)],
)
def test_bits_are_those_of_one_host_under_loss_duplication_and_delay(workers, window, slots, elements):
    job = single(workers, window, slots, NOISE, program=A2tpProgram, make=a2tp_worker)
    job.add(0, spec(elements))
    for seed in range(3):
        job.begin(0, floats(elements, workers, seed))
    job.star.run(job.done)
    job.check()
    assert job.sum("retransmissions") > 0


@pytest.mark.parametrize("first", [65_536 - 30, 2**24 - 30])
def test_sequence_and_generation_wrap(first):
    job = single(2, 16, 8, NOISE, program=A2tpProgram, make=a2tp_worker, first=first)
    job.add(0, spec(3_000))
    job.begin(0, floats(3_000, 2, 1))
    job.star.run(job.done)
    job.check()
    assert job.workers[0].window.next > first + 40


def test_windows_that_diverge_between_workers_are_completed_by_the_ps():
    """One worker bypasses nearly everything, the other nothing: no retransmission is needed."""
    job = single(2, 32, 64, Impairment(), program=A2tpProgram, make=a2tp_worker)
    job.workers[0].pace.windows.update = lambda h, e, gamma: None
    job.workers[0].pace.windows.acw = 2.0
    job.workers[0].pace.__init__(job.workers[0].pace.windows)
    job.add(0, spec(6_200, dtype="i32", mode=ExponentMode.NONE))
    job.begin(0, [np.full(6_200, 7 + index, np.int32) for index in range(2)])
    job.star.run(job.done)
    job.check()
    stats = job.star.program.stats()
    assert stats["bypassed"] > 100
    assert stats["flushed"] > 0
    assert job.star.machines[PS].stats()["pulls"] > 0


def test_a_straggling_job_leaves_the_slots_to_the_other():
    """Fig. 2, small: both jobs want all slots; a worker of B has a fifth of its link."""
    rates = {worker_at(job, index): 20e6 for job in (1, 2) for index in range(2)} | {worker_at(2, 1): 4e6}
    star = Star(A2tpProgram(budget=48 * SLOT_BYTES), latency=100e-6, rates=rates, tick=100e-6)
    jobs = [on_star(star, number, 2, 48, 48, make=a2tp_worker, own={"initial": 24}) for number in (1, 2)]
    for job, fragments in zip(jobs, (1_500, 300), strict=True):
        job.add(0, spec(31 * fragments, dtype="i32", mode=ExponentMode.NONE))
        job.begin(0, [np.full(31 * fragments, index, np.int32) for index in range(2)])
    a, b = (job.workers[0] for job in jobs)
    star.run(jobs[1].done)
    star.run(jobs[0].done)
    for job in jobs:
        job.check()
    assert b.pace.degrees()["gamma"] < 0.5
    assert b.pace.windows.acw < a.pace.windows.acw / 2


def test_two_jobs_on_shared_slots_never_see_each_other():
    star = Star(A2tpProgram(budget=3 * SLOT_BYTES), NOISE)
    jobs: list[Job] = [on_star(star, number, 3, 16, 3, make=a2tp_worker) for number in (1, 2)]
    for job in jobs:
        job.add(0, spec(2_000))
        for seed in range(2):
            job.begin(0, floats(2_000, 3, seed + 10 * job.job))
    star.run(lambda: all(job.done() for job in jobs))
    for job in jobs:
        job.check()
    stats = star.program.stats()
    assert stats["collisions"] > 20
    assert max(job.workers[0].pace.windows.alpha for job in jobs) > 0.15
