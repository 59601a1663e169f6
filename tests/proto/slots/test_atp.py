"""ATP end to end in virtual time, and its program packet by packet."""

import numpy as np
import pytest

from inanet.proto.common.plan import ExponentMode
from inanet.proto.common.program import Action
from inanet.proto.slots.atp.program import AtpProgram
from inanet.proto.slots.atp.slots import SlotTable
from inanet.proto.slots.atp.worker import AtpPace, atp_worker
from inanet.testing.switched import Impairment, Star
from inanet.wire import atp
from inanet.wire.atp import PULL, Flag, Packet, decode
from inanet.wire.drops import Drop
from tests.proto.slots.jobs import NOISE, Job, floats, ps_at, spec, worker_at
from tests.proto.slots.judge import PS, SLOT_BYTES, SUM, A, B, ack, data, judge, on_star, single, two_jobs


@pytest.mark.parametrize(
    ("workers", "window", "slots", "elements"),
    [(4, 50, 450, 10_000), (3, 16, 1, 3_000), (4, 50, 20, 6_000), (32, 16, 64, 900), (1, 8, 8, 2_000)],
)
def test_bits_are_those_of_one_host_under_loss_duplication_and_delay(workers, window, slots, elements):
    job = single(workers, window, slots, NOISE)
    job.add(0, spec(elements))
    for seed in range(3):
        job.begin(0, floats(elements, workers, seed))
    job.star.run(job.done)
    job.check()
    assert job.sum("retransmissions") > 0


def test_without_loss_the_switch_sums_everything():
    job = single(4, 50, 450)
    job.add(0, spec(31_000))
    job.begin(0, floats(31_000, 4, 1))
    job.star.run(job.done)
    job.check()
    stats = job.star.program.stats()
    assert (stats["completed"], stats["folded"], stats["collisions"]) == (500, 2_000, 0)
    assert stats["contributions_summed"] == 1_500
    ps = job.star.machines[ps_at(1)]
    assert ps.stats() == {
        "packets_added": 500,
        "contributions_in": 500,
        "fragments_completed": 500,
        "answers": 500,
        "pulls": 0,
    }
    assert stats["occupied_1"] == 0
    assert stats["recirculations"] == stats["packets"]


@pytest.mark.parametrize("elements", [0, 1, 61, 62, 63, 256, 1025])
def test_tails(elements):
    job = single(3, 8, 4, NOISE)
    job.add(0, spec(elements))
    for seed in range(2):
        job.begin(0, floats(elements, 3, seed))
    job.star.run(job.done)
    job.check()


@pytest.mark.parametrize("mode", [ExponentMode.CARRIED, ExponentMode.FIXED])
def test_misfits_go_out_again_without_a_barrier(mode):
    job = single(3, 32, 64, NOISE)
    job.add(0, spec(5_000, mode=mode))
    for seed in range(3):
        job.begin(0, floats(5_000, 3, seed))
        job.star.run(job.done)
    job.check()


@pytest.mark.parametrize("first", [65_536 - 30, 2**24 - 30, 2**23 - 30])
def test_sequence_and_generation_wrap(first):
    job = single(3, 16, 8, NOISE, first=first)
    job.add(0, spec(4_000))
    job.begin(0, floats(4_000, 3, 1))
    job.star.run(job.done)
    job.check()
    assert job.workers[0].window.next > first + 60


def test_two_jobs_on_shared_slots_never_see_each_other():
    """Both jobs hash to the same few slots, with the same sequence numbers, one beginning late."""
    star = Star(AtpProgram(budget=3 * SLOT_BYTES), NOISE)
    jobs = [on_star(star, number, 3, 16, 3) for number in (1, 2)]
    for job in jobs:
        job.add(0, spec(3_000))
    jobs[0].begin(0, floats(3_000, 3, 1))
    star.settle(0.0005)
    for seed in (2, 3):
        for job in jobs:
            job.begin(0, floats(3_000, 3, seed + 10 * job.job))
    star.run(lambda: all(job.done() for job in jobs))
    for job in jobs:
        job.check()
    assert star.program.stats()["collisions"] > 100


def test_slots_are_used_again_by_rounds_and_jobs():
    star = Star(AtpProgram(budget=8 * SLOT_BYTES), NOISE)
    for number in (1, 2, 1):
        job = on_star(star, number, 2, 8, 8)
        job.add(0, spec(1_000))
        for seed in range(2):
            job.begin(0, floats(1_000, 2, seed))
        star.run(job.done)
        job.check()
        star.program.remove_job(number)
        star.machines[ps_at(number)].remove_job(number)
        for address in job.addresses:
            star.detach(address)
        star.log.clear()


def test_a_dead_workers_slots_age_out_for_the_others_to_use():
    star = Star(AtpProgram(budget=4 * SLOT_BYTES, age=0.5))
    job, other = on_star(star, 1, 2, 4, 4), on_star(star, 2, 2, 4, 4)
    for each in (job, other):
        each.add(0, spec(1_000, dtype="i32", mode=ExponentMode.NONE))
    rng = np.random.default_rng(1)
    arrays = [rng.integers(-1000, 1000, 1_000).astype(np.int32) for _ in range(2)]
    job.begin(0, arrays, only=[0])
    star.settle(0.001)
    assert star.program.stats()["occupied_1"] == 4
    star.detach(job.addresses[0])
    star.detach(job.addresses[1])
    star.settle(1.0)
    stats = star.program.stats()
    assert (stats["occupied_1"], stats["aged"]) == (0, 4)
    # nothing was discarded: the PS has the partial sums
    assert star.machines[ps_at(1)].stats()["packets_added"] == 4
    other.begin(0, arrays)
    star.run(other.done)
    other.check()


def test_packets_late_by_less_than_the_horizon_change_nothing():
    job = single(2, 8, 4, Impairment(seed=3, duplicate=0.1, late=0.05, delay=0.1))
    job.add(0, spec(3_000))
    for seed in range(2):
        job.begin(0, floats(3_000, 2, seed))
    job.star.run(job.done)
    job.check()
    assert job.star.machines[ps_at(1)].drops_by_reason()["stale_sequence"] > 0


def test_re_hashing_leaves_crowded_slots():
    """Two jobs with as many slots as both need: after a while hardly anything collides."""
    star = Star(AtpProgram(budget=200 * SLOT_BYTES))
    jobs = [on_star(star, number, 2, 50, 200) for number in (1, 2)]
    collisions = []
    for job in jobs:
        job.add(0, spec(31_000))
    for seed in range(3):
        before = star.program.stats()["collisions"]
        for job in jobs:
            job.begin(0, floats(31_000, 2, seed))
        star.run(lambda: all(job.done() for job in jobs))
        collisions.append(star.program.stats()["collisions"] - before)
    for job in jobs:
        job.check()
    assert collisions[0] > 0
    assert collisions[2] <= collisions[0] / 4


def test_tables_are_the_same_everywhere():
    one, two = SlotTable(7, 50, 450), SlotTable(7, 50, 450)
    numbers = np.arange(100, 150)
    assert len(set(one.of(numbers).tolist())) == 50
    slot = one.again(120)
    assert slot not in two.of(numbers).tolist()
    two.use(np.array([120]), np.array([slot]))
    np.testing.assert_array_equal(one.of(numbers), two.of(numbers))
    assert SlotTable(7, 4, 1).again(0) == -1


def test_a_window_halves_once_per_window_of_congestion():
    pace = AtpPace(16, 20)
    yes, no = np.ones(1, np.bool_), np.zeros(1, np.bool_)
    sizes = []
    for base, ecn in [(0, no), (17, no), (20, yes), (25, yes), (36, no), (45, no), (54, no)]:
        pace.answered(np.array([base]), ecn, no, base, 0.0)
        sizes.append(pace.window)
    assert sizes == [17, 18, 18, 18, 9, 10, 10]


# ---------------------------------------------------------------- the program alone


@pytest.fixture
def program() -> AtpProgram:
    return two_jobs()


def test_the_sum_goes_to_the_ps_and_its_answer_to_all(program):
    first, last = judge(program, (data(0, 5), A), (data(1, 5), B))
    assert first[:2] == (Action.DROP, Drop.OK)
    assert (last[0], last[2].bitmap, last[2].values, last[3]) == (Action.UNICAST, 3, SUM, PS)
    assert program.stats()["occupied_1"] == 1
    answer = judge(program, (ack(5), PS))[0]
    assert (answer[0], answer[3]) == (Action.GROUP, 1)
    assert program.stats()["occupied_1"] == 0


def test_sequence_number_and_job_zero_are_not_free(program):
    judge(program, (data(0, 0), A))
    assert judge(program, (data(0, 1), A))[0][2].flags & Flag.COLLISION
    assert judge(program, (data(1, 0), B))[0][2].values == SUM


def test_a_collision_sends_the_newcomer_to_its_own_ps_as_it_is(program):
    judge(program, (data(0, 5), A))
    result = judge(program, (data(0, 5, job=2), worker_at(2, 0)))[0]
    assert (result[0], result[3]) == (Action.UNICAST, ps_at(2))
    assert (result[2].values, result[2].bitmap) == (data(0, 5).values, 1)
    assert result[2].flags == Flag.COLLISION
    assert judge(program, (data(1, 5), B))[0][2].values == SUM


def test_a_job_cannot_free_read_or_add_to_the_slots_of_another(program):
    judge(program, (data(0, 5), A))
    theirs = [
        (ack(5, job=2), ps_at(2)),
        (ack(5, job=2, flags=PULL), ps_at(2)),
        (data(0, 5, job=2, flags=Flag.RESEND), worker_at(2, 0)),
        (data(1, 5, job=2), worker_at(2, 1)),
        (ack(5), ps_at(2)),
        (ack(5, flags=PULL), ps_at(2)),
        (data(1, 5), worker_at(2, 1)),
        (data(1, 5, flags=Flag.RESEND), worker_at(2, 1)),
    ]
    for item in theirs:
        result = judge(program, item)[0]
        assert result[2].values == item[0].values
    assert program.stats()["drop_foreign_host"] == 4
    assert judge(program, (data(1, 5), B))[0][2].values == SUM


def test_a_repeated_packet_takes_what_its_slot_holds_along(program):
    judge(program, (data(0, 5), A))
    result = judge(program, (data(1, 5, flags=Flag.RESEND), B))[0]
    assert (result[0], result[2].bitmap, result[2].values) == (Action.UNICAST, 3, SUM)
    assert (program.stats()["occupied_1"], program.stats()["contributions_summed"]) == (0, 1)
    # its own contribution is in the slot already: not added again
    judge(program, (data(0, 6), A))
    result = judge(program, (data(0, 6, flags=Flag.RESEND), A))[0]
    assert (result[2].bitmap, result[2].values) == (1, data(0, 6).values)
    # nothing in the slot: as it is, and no collision
    result = judge(program, (data(0, 7, flags=Flag.RESEND), A))[0]
    assert (result[2].flags, result[2].bitmap) == (Flag.RESEND, 1)


def test_duplicates_are_dropped_before_completion_and_answered_after(program):
    assert judge(program, (data(0, 5), A), (data(0, 5), A))[1][:2] == (Action.DROP, Drop.DUPLICATE)
    judge(program, (data(1, 5), B))
    assert judge(program, (data(0, 5), A))[0][2].values == SUM


def test_marks_are_kept_from_the_first_contribution_to_the_last(program):
    judge(program, (data(0, 5), A), congested=1)
    assert judge(program, (data(1, 5), B))[0][2].flags & Flag.ECN
    # and one that only the last contribution has
    judge(program, (data(0, 6, slot=1), A))
    assert judge(program, (data(1, 6, slot=1, flags=Flag.ECN), B))[0][2].flags & Flag.ECN
    # the next fragment in the slot is not marked
    judge(program, (ack(5), PS), (data(0, 7), A))
    assert not judge(program, (data(1, 7), B))[0][2].flags & Flag.ECN


def test_a_pull_fetches_the_partial_sum_and_frees_the_slot(program):
    judge(program, (data(0, 5), A))
    result = judge(program, (ack(5, flags=PULL), PS))[0]
    assert (result[0], result[2].bitmap, result[2].flags) == (Action.REPLY, 1, Flag.NONE)
    assert result[2].values == data(0, 5).values
    assert judge(program, (ack(5, flags=PULL), PS))[0][1] is Drop.UNMATCHED


def test_probes_pass_untouched(program):
    judge(program, (data(0, 5), A))
    probe = judge(program, (data(0, 5, flags=atp.PROBE), A))[0]
    assert (probe[0], probe[3]) == (Action.UNICAST, PS)
    echo = Packet(2, 2, 1, 5, 0, (0,) * 62, atp.ECHO)
    assert judge(program, (echo, PS))[0][0::3] == (Action.UNICAST, B)
    assert program.stats()["occupied_1"] == 1


def test_aged_slots_send_their_partial_sums_to_the_ps(program):
    judge(program, (data(0, 0x1234, slot=3, job=0x501), A))
    program.on_timer(program.timer() + 2.0)
    (spilled,) = program.spilled()
    packet = decode(spilled.packet(0))
    assert spilled.destination == PS
    assert (packet.app, packet.seq, packet.agtr, packet.bitmap) == (0x501, 0x1234, 3, 1)
    assert packet.values == data(0, 0).values
    assert program.timer() is None
    assert program.spilled() == []


def test_quotas_bound_what_a_job_holds():
    made = AtpProgram(budget=8 * SLOT_BYTES)
    on_star(Star(made), 1, 2, 8, 8, quota=2)
    judge(made, *[(data(0, seq, slot=seq), A) for seq in range(4)])
    stats = made.stats()
    assert (stats["occupied_1"], stats["collisions"]) == (2, 2)


def test_own_shares_are_kept_apart():
    made = AtpProgram(budget=8 * SLOT_BYTES, shared=2)
    star = Star(made)
    on_star(star, 1, 2, 8, 3)
    star.program.remove_job(1)
    job = Job(star, 3, 2, lambda member: atp_worker(member, 8, 3))
    made.add_job(job.tenant(ps=ps_at(3), slots=3))
    judge(made, (data(0, 0, job=3, slot=2), worker_at(3, 0)))
    assert made.file.registers.owner[4] == 3
    assert judge(made, (data(0, 0, job=3, slot=3), worker_at(3, 0)))[0][1] is Drop.BAD_SLOT
    with pytest.raises(ValueError, match="address of a PS"):
        made.add_job(job.tenant())


@pytest.mark.parametrize(
    ("packet", "source", "reason"),
    [
        (data(0, 1).encode()[:-1], A, Drop.SHORT),
        (data(0, 1).encode() + b"\0", A, Drop.OVERSIZED),
        (data(0, 1, job=3), A, Drop.FOREIGN_JOB),
        (data(0, 1), B, Drop.FOREIGN_HOST),
        (Packet(0, 2, 1, 1, 0, (0,) * 62), A, Drop.FOREIGN_HOST),
        (Packet(3, 2, 1, 1, 0, (0,) * 62), A, Drop.FOREIGN_HOST),
        (data(0, 1, slot=8), A, Drop.BAD_SLOT),
        (ack(1), A, Drop.FOREIGN_HOST),
    ],
)
def test_every_drop_has_its_reason(program, packet, source, reason):
    assert judge(program, (packet, source))[0][:2] == (Action.DROP, reason)
    assert program.stats()[f"drop_{reason.label}"] == 1
