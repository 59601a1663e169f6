"""RoCE inside datagrams, for jobs that the coordinator puts on a switch."""

import numpy as np
import pytest

from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import TensorSpec
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.netreduce.job import NetReduceJob
from inanet.proto.netreduce.tunnel import (
    WINDOW,
    TunnelProgram,
    TunnelWorker,
    address_of,
    join,
    rings_of,
    sizes_of,
)
from inanet.proto.slots.registers import OutOfRegisters
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.window import TIMING
from inanet.proto.slots.worker import Membership
from inanet.testing.switched import SWITCH, Impairment, Star
from inanet.wire import roce
from inanet.wire.drops import Drop
from tests.proto.netreduce.packets import batch_of
from tests.proto.slots.jobs import KEY, Job, floats, spec, worker_at

SLOTS = 64


def tunnelled(workers: int, impairment: Impairment | None = None) -> Job:
    star = Star(TunnelProgram(), impairment)
    peers = [worker_at(1, index) for index in range(workers)]
    job = Job(star, 1, workers, lambda member: TunnelWorker(member, sizes_of(SLOTS), TIMING, peers))
    star.program.add_job(job.tenant(slots=SLOTS))
    return job


@pytest.mark.parametrize(("workers", "elements"), [(1, 3000), (2, 0), (3, 4097)])
def test_bits_are_those_of_one_host_under_loss_duplication_and_delay(workers, elements):
    job = tunnelled(workers, Impairment(seed=2, drop=0.02, duplicate=0.02, late=0.02))
    job.add(0, spec(elements))
    for seed in range(3):
        job.begin(0, floats(elements, workers, seed))
    job.star.run(job.done, deadline=120.0)
    job.check()
    assert job.star.program.stats()["completed"] > 0


class Ranks:
    """Hosts with ``each`` ranks in a job with ``rings`` rings on a star, and what one host with all ranks would have computed."""

    def __init__(self, hosts: int, each: int, rings: int, impairment: Impairment | None = None) -> None:
        self.star = Star(TunnelProgram(), impairment)
        self.each, self.round = each, 0
        ends = [worker_at(1, host) for host in range(hosts)]
        facts = NetReduceJob("netreduce", 1, tuple(ends), SWITCH, SWITCH, 0, SLOTS, slots=SLOTS, rings=rings)
        members = [Membership(1, host, hosts, hosts * each, SWITCH, SWITCH, key=KEY) for host in range(hosts)]
        self.workers = [join(member, facts, TIMING) for member in members]
        for end, worker in zip(ends, self.workers, strict=True):
            self.star.attach(end, worker)
        self.star.program.serve(facts, KEY, SWITCH)

    def reduce(self, what: TensorSpec, arrays: list[np.ndarray]) -> None:
        self.round += 1
        for host, worker in enumerate(self.workers):
            worker.add_tensor(self.round, what)
            mine = arrays[host * self.each : (host + 1) * self.each]
            worker.begin(self.round, self.round, mine, self.star.now)
        self.star.run(
            lambda: sum(event.round == self.round for _, event in self.star.log) == len(self.workers),
            deadline=120.0,
        )


@pytest.mark.parametrize("rings", [1, 2, 3])
@pytest.mark.parametrize("elements", [5, 3001])
def test_rings_for_the_ranks_of_a_host_give_the_bits_of_one_host(rings: int, elements: int) -> None:
    """Parallel NetReduce: each ring has a piece, of all ranks of its hosts; 5 elements are in one piece."""
    ranks = Ranks(2, 3, rings, Impairment(seed=5, drop=0.02, duplicate=0.02))
    for seed in range(2):
        arrays = floats(elements, 6, seed)
        expected = [array.copy() for array in arrays]
        assert LocalTensor(spec(elements), 6).reduce(expected) is None
        ranks.reduce(spec(elements), arrays)
        for array in arrays:
            np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))
    inner = ranks.star.program.inner
    assert len(inner._rings) == rings_of(SLOTS, rings) == min(rings, 2)
    busy = {number for number, ring in inner._rings.items() if ring.memory.held.any()}
    assert len(busy) == (min(rings, 2) if elements > 256 else 1)
    assert ranks.workers[0].stats()["messages_sent"] > 0
    ranks.star.program.remove_job(1)
    assert (inner.register_bytes(), inner._rings, ranks.star.program._rings) == (0, {}, {})


def test_rings_that_do_not_fit_leave_nothing_behind() -> None:
    program = TunnelProgram(budget=100_000)
    with pytest.raises(OutOfRegisters):
        program.serve(
            NetReduceJob("netreduce", 1, (1, 2), SWITCH, SWITCH, 0, SLOTS, slots=SLOTS, rings=2), KEY, SWITCH
        )
    assert program.inner.register_bytes() == 0
    with pytest.raises(KeyError):
        program.remove_job(1)


def test_a_training_process_may_be_as_late_as_its_round():
    """It evaluates, or waits for a processor: how long that may last is for the coordinator to say, not for queue pairs."""
    job = tunnelled(3)
    job.add(0, spec(700))
    job.begin(0, floats(700, 3, 1), only=[0, 1])
    job.star.settle(20.0)
    job.begin_late(2)
    job.star.run(job.done)
    job.check()
    # two wait, and say so less and less often
    assert 0 < job.sum("revived") <= 2 * 8
    assert job.sum("retransmissions") < 2 * 8 * 8 * WINDOW * sizes_of(SLOTS).length


def test_packets_of_other_senders_go_nowhere():
    program = TunnelProgram()
    members = {0x0A00_0001_0FA0 + rank: 1 << rank for rank in range(2)}
    program.add_job(Tenant(7, members, 7, slots=SLOTS))
    inside = [address_of(7, rank) << 16 | 50000 for rank in range(2)]
    good = roce.Packet(inside[0], inside[1], roce.Opcode.ACKNOWLEDGE, 14, 0).encode()
    elsewhere = roce.Packet(inside[0], 0x0808_0808 << 16 | 1, roce.Opcode.ACKNOWLEDGE, 14, 0).encode()
    batch = batch_of([good, good, elsewhere, b"\x45"])
    batch.sources[:] = [min(members), max(members), min(members), min(members)]
    verdicts = Verdicts(4)
    program.process(batch, np.zeros(4, np.uint8), verdicts, 0.0)
    assert verdicts.action.tolist() == [Action.UNICAST, Action.DROP, Action.DROP, Action.DROP]
    assert int(verdicts.target[0]) == max(members)
    assert set(verdicts.reason[1:].tolist()) == {Drop.FOREIGN_HOST}
    program.remove_job(7)
    with pytest.raises(KeyError):
        program.remove_job(7)


def test_jobs_do_not_reach_each_others_hosts() -> None:
    program = TunnelProgram()
    ends = [0x0A00_0001_0FA0 + k for k in range(4)]
    for job, mine in ((7, ends[:2]), (8, ends[2:])):
        program.add_job(Tenant(job, {end: 1 << rank for rank, end in enumerate(mine)}, job, slots=SLOTS))
    across = roce.Packet(
        address_of(7, 0) << 16 | 50000, address_of(8, 1) << 16 | roce.PORT, roce.Opcode.ACKNOWLEDGE, 16, 0
    )
    batch, verdicts = batch_of([across.encode()]), Verdicts(1)
    batch.sources[:] = ends[0]
    program.process(batch, np.zeros(1, np.uint8), verdicts, 0.0)
    assert (verdicts.action[0], verdicts.reason[0]) == (Action.DROP, Drop.FOREIGN_HOST)


def test_slots_that_are_too_few_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="give the program more memory"):
        sizes_of(16)
    small = TunnelProgram(budget=100_000)
    assert small.offer(None, 9).slots < SLOTS
    with pytest.raises(OutOfRegisters):
        small.add_job(Tenant(1, {1: 1, 2: 2}, 1, slots=SLOTS))
    with pytest.raises(ValueError, match="shares no slots"):
        small.add_job(Tenant(1, {1: 1, 2: 2}, 1))


def test_a_host_of_switched_jobs_finds_the_figures_it_wants():
    job = tunnelled(2)
    job.add(0, spec(1000))
    job.begin(0, floats(1000, 2, 1))
    job.star.run(job.done)
    for worker in job.workers:
        stats = worker.stats()
        assert stats["rows_sent"] == stats["results_in"] > 0
        assert stats["retransmissions"] == 0
        assert worker.layout.frame_bytes > 4 * worker.layout.width
        assert not worker.drops.any()
