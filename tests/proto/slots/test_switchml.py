"""SwitchML end to end in virtual time: the same bits as one host, whatever the network does."""

import numpy as np
import pytest

from inanet.proto.common.events import PeerSilent, Refused
from inanet.proto.common.plan import ExponentMode
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.slots.registers import OutOfRegisters
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.switchml.worker import switchml_worker
from inanet.proto.slots.worker import Membership, Worker
from inanet.testing.switched import SWITCH, Impairment, Star
from inanet.wire.drops import Drop
from inanet.wire.switchml import Packet, decode
from tests.proto.slots.jobs import NOISE, Job, floats, spec, worker_at
from tests.proto.tree.rig import batch_of


def switchml(
    workers: int, pool: int, *, values: int = 256, impairment: Impairment | None = None, age: float = 10.0
) -> Job:
    star = Star(SwitchMLProgram(values=values, age=age), impairment)
    job = Job(star, 1, workers, lambda member: switchml_worker(member, pool, values=values))
    star.program.add_job(job.tenant(slots=pool))
    return job


@pytest.mark.parametrize(
    ("workers", "pool", "values", "elements"),
    [(4, 16, 256, 20_000), (3, 1, 64, 700), (2, 8, 64, 5_000), (32, 8, 256, 2_500), (1, 4, 256, 3_000)],
)
def test_bits_are_those_of_one_host_under_loss_duplication_and_delay(workers, pool, values, elements):
    job = switchml(workers, pool, values=values, impairment=NOISE)
    job.add(0, spec(elements))
    for seed in range(3):
        job.begin(0, floats(elements, workers, seed))
    job.star.run(job.done)
    job.check()
    assert job.sum("retransmissions") > 0


def test_packets_late_by_many_windows_change_nothing():
    late = Impairment(seed=3, duplicate=0.1, late=0.05, delay=0.1)
    job = switchml(3, 4, values=64, impairment=late)
    job.add(0, spec(6_000))
    for seed in range(2):
        job.begin(0, floats(6_000, 3, seed))
    job.star.run(job.done)
    job.check()
    assert job.star.program.stats()["drop_stale_sequence"] > 0


@pytest.mark.parametrize("elements", [0, 1, 63, 255, 256, 257, 4097])
def test_tails(elements):
    job = switchml(3, 4, values=64, impairment=NOISE)
    job.add(0, spec(elements))
    job.begin(0, floats(elements, 3, 1))
    job.begin(0, floats(elements, 3, 2))
    job.star.run(job.done)
    job.check()


@pytest.mark.parametrize("mode", [ExponentMode.CARRIED, ExponentMode.FIXED])
def test_misfits_go_out_again_without_a_barrier(mode):
    job = switchml(4, 16, impairment=NOISE)
    job.add(0, spec(9_000, mode=mode))
    for seed in range(4):
        # sizes of blocks change from round to round: many do not fit what was carried, nor the factor
        job.begin(0, floats(9_000, 4, seed))
        job.star.run(job.done)
    job.check()
    fragments = -(-9_000 // 256)
    assert job.workers[0].window.next > 4 * fragments


def test_carried_data_leaves_before_exponents_are_agreed():
    job = switchml(2, 64)
    job.add(0, spec(2_000, mode=ExponentMode.CARRIED))
    job.begin(0, floats(2_000, 2, 1))
    job.star.run(job.done)
    before = job.workers[0].window.next
    job.begin(0, floats(2_000, 2, 1), only=[0])
    sent = job.workers[0].transmit(job.star.now)
    assert job.workers[0].window.next - before == 8
    assert {transmission.destination for transmission in sent} >= {SWITCH}


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_integers_are_summed_exactly_without_exponents(dtype):
    job = switchml(3, 8, impairment=NOISE)
    job.add(0, spec(1_000, dtype=dtype, mode=ExponentMode.NONE))
    rng = np.random.default_rng(1)
    arrays = [
        rng.integers(-(2**29), 2**29, 1_000).astype({"i32": "i4", "i64": "i8"}[dtype]) for _ in range(3)
    ]
    job.begin(0, arrays)
    job.star.run(job.done)
    job.check()


def test_several_tensors_share_one_sequence():
    job = switchml(3, 4, impairment=NOISE)
    sizes = [300, 5_000, 1, 2_049]
    for tensor, elements in enumerate(sizes):
        job.add(tensor, spec(elements, op="mean"))
    for round_ in range(2):
        for tensor, elements in enumerate(sizes):
            job.begin(tensor, floats(elements, 3, 10 * round_ + tensor))
    job.star.run(job.done)
    job.check()
    assert job.workers[0].window.next == 2 * sum(-(-elements // 256) for elements in sizes)


def test_packet_ids_wrap():
    star = Star(SwitchMLProgram(values=64), NOISE)
    first = 2**32 - 40

    def make(member: Membership) -> Worker:
        fields = {name: getattr(member, name) for name in Membership.__slots__}
        return switchml_worker(Membership(**(fields | {"first": first})), 8, values=64)

    job = Job(star, 1, 3, make)
    star.program.add_job(job.tenant(slots=8))
    job.add(0, spec(6_400))
    job.begin(0, floats(6_400, 3, 1))
    job.star.run(job.done)
    job.check()
    assert job.workers[0].window.next > 2**32


def test_nan_is_refused_by_all_workers_together():
    job = switchml(3, 4)
    job.add(0, spec(2_000))
    arrays = floats(2_000, 3, 1)
    arrays[1][777] = np.nan
    job.begin_bad(0, arrays)
    job.star.run(lambda: len(job.star.log) == 3)
    events = dict(job.star.log)
    assert all(isinstance(event, Refused) for event in events.values())
    assert (events[worker_at(1, 1)].local_rank, events[worker_at(1, 1)].index) == (0, 777)
    assert events[worker_at(1, 0)].local_rank == -1
    # the next round is as good as any
    job.begin(0, floats(2_000, 3, 2))
    job.star.run(job.done)
    job.check()


def test_maxima_are_refused_because_switches_add():
    worker = switchml_worker(Membership(1, 0, 1, 1, SWITCH), 4)
    with pytest.raises(ValueError, match="xagg"):
        worker.add_tensor(0, spec(10, dtype="i32", op="max", mode=ExponentMode.NONE))
    with pytest.raises(ValueError, match="root for exponents"):
        worker.add_tensor(0, spec(10))
    with pytest.raises(ValueError, match="32 workers"):
        Membership(1, 32, 33, 33, SWITCH)


def test_silence_is_reported():
    job = switchml(2, 4)
    job.add(0, spec(2_000))
    job.begin(0, floats(2_000, 2, 1), only=[0])
    job.star.settle(6.0)
    silent = [event for _, event in job.star.log if isinstance(event, PeerSilent)]
    assert silent
    assert silent[0].seconds >= 5.0
    # the other one comes at last: nothing is lost
    job.begin_late(1)
    job.star.run(job.done)
    job.check()


def test_two_jobs_in_shares_of_their_own_do_not_meet():
    star = Star(SwitchMLProgram(values=64), NOISE)
    jobs = [Job(star, number, 3, lambda member: switchml_worker(member, 4, values=64)) for number in (0, 255)]
    for job in jobs:
        star.program.add_job(job.tenant(slots=4))
        job.add(0, spec(3_000))
    for seed in range(2):
        for job in jobs:
            job.begin(0, floats(3_000, 3, seed + job.job))
    star.run(lambda: all(job.done() for job in jobs))
    for job in jobs:
        job.check()


def test_a_share_is_used_again_by_the_next_job():
    star = Star(SwitchMLProgram(values=64, budget=560 * 20), NOISE)
    assert star.program.file.slots == 20
    for number in range(3):
        job = Job(star, number, 2, lambda member: switchml_worker(member, 16, values=64))
        star.program.add_job(job.tenant(slots=16))
        with pytest.raises(OutOfRegisters, match="20 are not given out"):
            star.program.add_job(Job(star, 9, 1, lambda member: switchml_worker(member, 9)).tenant(slots=9))
        job.add(0, spec(2_000))
        job.begin(0, floats(2_000, 2, number))
        star.run(job.done)
        job.check()
        star.program.remove_job(number)
        for address in job.addresses:
            star.detach(address)
    assert star.program.register_bytes() <= 560 * 20


# ---------------------------------------------------------------- the program alone


def judge(program: SwitchMLProgram, *packets: tuple[Packet | bytes, int], now: float = 0.0):
    """Action, reason and packet afterwards, for each."""
    batch = batch_of((p if isinstance(p, bytes) else p.encode(), source) for p, source in packets)
    verdicts = Verdicts(len(packets))
    program.process(batch, np.zeros(len(packets), np.uint8), verdicts, now)
    return [
        (Action(verdicts.action[i]), Drop(verdicts.reason[i]), batch.packet(i)) for i in range(len(batch))
    ]


def packet(worker: int, number: int, slot: int = 0, version: int = 0, **kwargs) -> Packet:
    return Packet(1, number, slot, version, tuple(range(worker, worker + 64)), **kwargs)


@pytest.fixture
def program() -> SwitchMLProgram:
    made = SwitchMLProgram(values=64)
    star = Star(made)
    job = Job(star, 1, 2, lambda member: switchml_worker(member, 4, values=64))
    made.add_job(job.tenant(slots=4))
    return made


A, B = worker_at(1, 0), worker_at(1, 1)


def test_the_last_contribution_carries_the_sum_to_all(program):
    first, last = judge(program, (packet(0, 8), A), (packet(1, 8), B))
    assert first[:2] == (Action.DROP, Drop.OK)
    assert last[0] is Action.GROUP
    assert decode(last[2]).values == tuple(2 * i + 1 for i in range(64))


def test_a_duplicate_of_a_complete_slot_is_answered_to_its_sender_alone(program):
    judge(program, (packet(0, 8), A), (packet(1, 8), B))
    answer = judge(program, (packet(0, 8), A))[0]
    assert answer[0] is Action.REPLY
    assert decode(answer[2]).values == tuple(2 * i + 1 for i in range(64))
    # also when the other worker has gone on with the other version
    judge(program, (packet(1, 12, version=1), B))
    assert judge(program, (packet(0, 8), A))[0][0] is Action.REPLY


def test_a_duplicate_of_an_incomplete_slot_is_not_added(program):
    again = judge(program, (packet(0, 8), A), (packet(0, 8), A))[1]
    assert again[:2] == (Action.DROP, Drop.DUPLICATE)
    assert decode(judge(program, (packet(1, 8), B))[0][2]).values[0] == 1


def test_a_late_duplicate_cannot_take_a_slot_back(program):
    judge(program, (packet(0, 8), A), (packet(1, 8), B), (packet(0, 16), A))
    late = judge(program, (packet(1, 8), B))[0]
    assert late[:2] == (Action.DROP, Drop.STALE_SEQUENCE)
    assert judge(program, (packet(1, 16), B))[0][0] is Action.GROUP
    # 2^31 - 1 packets late is the horizon
    judge(program, (packet(0, 16 + 2**31 - 1), A))
    assert judge(program, (packet(1, 16), B))[0][1] is Drop.STALE_SEQUENCE


def test_exponents_of_packets_are_folded_as_maxima(program):
    results = judge(program, (packet(0, 8, exponents=(-3, 5)), A), (packet(1, 8, exponents=(-1, -7)), B))
    assert decode(results[1][2]).exponents == (-1, 5)


@pytest.mark.parametrize(
    ("data", "source", "reason"),
    [
        (packet(0, 1).encode()[:-1], A, Drop.SHORT),
        (packet(0, 1).encode() + b"\0", A, Drop.OVERSIZED),
        (b"\x11\x01", A, Drop.SHORT),
        (b"\x13" + packet(0, 1).encode()[1:], A, Drop.BAD_TYPE),
        (b"\x11\x02" + packet(0, 1).encode()[2:], A, Drop.FOREIGN_JOB),
        (packet(0, 1).encode(), worker_at(2, 0), Drop.FOREIGN_HOST),
        (packet(0, 1, slot=4).encode(), A, Drop.BAD_SLOT),
        (packet(0, 1, slot=16383, version=1).encode(), A, Drop.BAD_SLOT),
    ],
)
def test_every_drop_has_its_reason(program, data, source, reason):
    assert judge(program, (data, source))[0][:2] == (Action.DROP, reason)
    assert program.stats()[f"drop_{reason.label}"] == 1
    assert not program.file.registers.occupied.any()


def test_partial_sums_of_a_dead_worker_age_out_and_complete_ones_stay(program):
    judge(program, (packet(0, 8), A), (packet(1, 8), B), (packet(0, 9, slot=1), A))
    assert program.stats()["occupied_1"] == 1
    program.on_timer(program.timer() + 11.0)
    assert (program.stats()["occupied_1"], program.stats()["aged"]) == (0, 1)
    assert program.timer() is None
    assert judge(program, (packet(0, 8), A), now=12.0)[0][0] is Action.REPLY
    # whoever lives sends again
    judge(program, (packet(0, 9, slot=1), A), now=12.0)
    assert judge(program, (packet(1, 9, slot=1), B), now=12.0)[0][0] is Action.GROUP


def test_every_register_is_accessed_once_a_pass_and_recirculations_are_counted():
    program = SwitchMLProgram(values=256, budget=10_000)
    program.add_job(Job(Star(program), 1, 2, lambda m: switchml_worker(m, 2)).tenant(slots=2))
    for number in range(8):
        judge(program, *[(Packet(1, number, number % 2, number // 2 % 2, (1,) * 256), s) for s in (A, B, A)])
    stats = program.stats()
    assert stats["packets"] == 24
    assert stats["recirculations"] == 3 * 24
    assert stats["accesses_values"] <= 24
    assert stats["accesses_bitmap"] == stats["accesses_key"] == 24
    assert program.register_bytes() <= 10_000
