"""ESA: who is more urgent gets the slot, and nothing of the one that gives way is lost."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.proto.common.plan import ExponentMode
from inanet.proto.common.program import Action
from inanet.proto.slots.esa.system import EsaProgram, esa_worker
from inanet.proto.slots.window import TIMING
from inanet.testing.switched import Star
from inanet.wire.atp import Flag, decode
from inanet.wire.drops import Drop
from inanet.wire.esa import FRAME
from tests.proto.slots.jobs import NOISE, floats, ps_at, spec, worker_at
from tests.proto.slots.judge import PS, SLOT_BYTES, SUM, A, B, data, judge, on_star, single, two_jobs

C, D = worker_at(2, 0), worker_at(2, 1)


@pytest.fixture
def program() -> EsaProgram:
    return two_jobs(EsaProgram)


def spilled(program: EsaProgram):
    """(destination, packet) of everything that left beside the batch."""
    return [
        (transmission.destination, decode(transmission.packet(index), FRAME))
        for transmission in program.spilled()
        for index in range(len(transmission))
    ]


def test_the_more_urgent_fragment_evicts_and_the_partial_sum_goes_to_its_ps(program):
    judge(program, (data(0, 5, mark=3), A))
    result = judge(program, (data(0, 9, job=2, mark=4), C))[0]
    assert result[:2] == (Action.DROP, Drop.OK)
    ((to, evicted),) = spilled(program)
    assert (to, evicted.app, evicted.seq, evicted.bitmap, evicted.mark) == (PS, 1, 5, 1, 3)
    assert evicted.values == data(0, 5).values
    assert judge(program, (data(1, 9, job=2, mark=4), D))[0][2].values == SUM
    stats = program.stats()
    assert (stats["evicted"], stats["occupied_1"], stats["occupied_2"]) == (1, 0, 1)


@pytest.mark.parametrize("priority", [0, 3])
def test_others_collide_as_in_atp(program, priority):
    judge(program, (data(0, 5, mark=3), A))
    result = judge(program, (data(0, 9, job=2, mark=priority), C))[0]
    assert (result[0], result[3]) == (Action.UNICAST, ps_at(2))
    assert result[2].flags & Flag.COLLISION
    assert result[2].mark == priority
    assert spilled(program) == []
    assert judge(program, (data(1, 5, mark=3), B))[0][2].values == SUM


def test_a_complete_sum_gives_way_without_being_sent_twice(program):
    judge(program, (data(0, 5, mark=3), A), (data(1, 5, mark=3), B))
    judge(program, (data(0, 9, job=2, mark=4), C))
    assert spilled(program) == []
    # were it lost on its way, its workers' repetitions would go to the PS
    result = judge(program, (data(0, 5, mark=3, flags=Flag.RESEND), A))[0]
    assert (result[0], result[3], result[2].bitmap) == (Action.UNICAST, PS, 1)


def test_several_evictions_in_a_batch_leave_for_several_ps(program):
    judge(program, (data(0, 5, mark=1), A), (data(0, 6, slot=1, job=2, mark=1), C))
    judge(program, (data(0, 7, job=2, mark=2), C), (data(0, 8, slot=1, mark=2), A), (data(0, 9, mark=3), A))
    assert [(to, packet.seq) for to, packet in spilled(program)] == [(PS, 5), (ps_at(2), 6), (ps_at(2), 7)]


@pytest.mark.parametrize(("workers", "slots"), [(3, 1), (2, 12)])
def test_bits_are_those_of_one_host_while_jobs_evict_each_other(workers, slots):
    star = Star(EsaProgram(budget=slots * SLOT_BYTES), NOISE)
    jobs = [on_star(star, number, workers, 16, slots, make=esa_worker) for number in (1, 2)]
    elements = 2_000
    for job in jobs:
        for tensor in range(2):
            for worker in job.workers:
                worker.add_tensor(tensor, spec(elements), priority=job.job ^ tensor)
            job.know(tensor, spec(elements))
            job.begin(tensor, floats(elements, workers, tensor + 10 * job.job))
        # job 1 has the slots when job 2 comes, whose first tensor is more urgent
        star.settle(100e-6)
    star.run(lambda: all(job.done() for job in jobs))
    for job in jobs:
        job.check()
    assert star.program.stats()["evicted"] > 0


def test_32_workers_of_a_job_whose_own_tensors_evict_each_other():
    job = single(32, 16, 1, NOISE, program=EsaProgram, make=esa_worker)
    for tensor in range(2):
        for worker in job.workers:
            worker.add_tensor(tensor, spec(400), priority=tensor)
        job.know(tensor, spec(400))
        job.begin(tensor, floats(400, 32, tensor))
    job.star.run(job.done)
    job.check()
    assert job.star.program.stats()["evicted"] > 0


def test_the_ps_pulls_what_is_left_after_an_eviction():
    """Worker 0's values are evicted, worker 1's lie in the slot: nobody repeats anything, the PS asks for the rest."""
    patient = {"timing": replace(TIMING, probe=1.0)}
    job = single(2, 4, 4, program=EsaProgram, make=esa_worker, own=patient)
    star = job.star
    job.add(0, spec(50, dtype="i32", mode=ExponentMode.NONE))
    job.begin(0, [np.full(50, 3 + index, np.int32) for index in range(2)], only=[0])
    star.settle(50e-6)
    registers = star.program.file.registers
    (slot,) = np.flatnonzero(registers.owner == 1)[:1]
    on_star(star, 2, 2, 4, 4, make=esa_worker)
    judge(star.program, (data(0, 9, slot=int(slot), job=2, mark=4), C))
    star.program.remove_job(2)
    job.begin_late(1)
    star.run(job.done)
    job.check()
    assert star.machines[PS].stats()["pulls"] > 0
    assert job.sum("retransmissions") == 0


def test_priorities_fit_a_byte():
    worker = single(1, 4, 4, program=EsaProgram, make=esa_worker).workers[0]
    with pytest.raises(ValueError, match="0 to 255"):
        worker.add_tensor(0, spec(10), priority=256)


@pytest.mark.parametrize("first", [65_536 - 30, 2**24 - 30])
def test_sequence_and_generation_wrap(first):
    job = single(2, 16, 8, NOISE, program=EsaProgram, make=esa_worker, first=first)
    job.add(0, spec(3_000))
    job.begin(0, floats(3_000, 2, 1))
    job.star.run(job.done)
    job.check()
    assert job.workers[0].window.next > first + 40
