"""Packets that nobody sound would send, at machines of switched systems: of any length, from too long ago, to nobody."""

import numpy as np
import pytest

from inanet.proto.common.plan import ExponentMode
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.slots.a2tp.system import A2tpProgram, a2tp_worker
from inanet.proto.slots.atp.program import AtpProgram
from inanet.proto.slots.atp.worker import atp_worker
from inanet.proto.slots.esa.system import EsaProgram, esa_worker
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.program import SwitchProgram
from inanet.proto.slots.ps import SumServer
from inanet.proto.slots.registers import Register
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.switchml.worker import switchml_worker
from inanet.proto.slots.tenants import Tenant
from inanet.testing.switched import SWITCH, Star
from inanet.wire import a2tp, atp
from inanet.wire.atp import ECHO, Flag, Packet
from inanet.wire.drops import Drop
from inanet.wire.switchml import FRAMES
from tests.proto.slots.jobs import ROOT, Job, spec, worker_at
from tests.proto.slots.judge import PS, SLOT_BYTES, A, B, ack, data, judge, on_star, single, two_jobs
from tests.proto.slots.test_ps import Server
from tests.proto.slots.test_tenancy import hostile
from tests.proto.tree.rig import batch_of

SYSTEMS = {
    "switchml": (SwitchMLProgram, switchml_worker, FRAMES[64]),
    "atp": (AtpProgram, atp_worker, atp.FRAME),
    "a2tp": (A2tpProgram, a2tp_worker, a2tp.FRAME),
    "esa": (EsaProgram, esa_worker, a2tp.FRAME),
}
ANYWHERE = [worker_at(job, index) for job in (1, 2) for index in range(2)] + [PS, SWITCH, ROOT]


def one_job(system: str) -> Job:
    """A job of two workers, with four slots, in the middle of a round."""
    program, make, _ = SYSTEMS[system]
    if program is SwitchMLProgram:
        star = Star(SwitchMLProgram(values=64))
        job = Job(star, 1, 2, lambda member: switchml_worker(member, 4, values=64))
        star.program.add_job(job.tenant(slots=4))
    else:
        job = single(2, 8, 4, program=program, make=make)
    job.add(0, spec(2_000, dtype="i32", mode=ExponentMode.NONE))
    job.begin(0, [np.full(2_000, 5 + index, np.int32) for index in range(2)])
    job.star.settle(50e-6)
    return job


@pytest.mark.parametrize("system", SYSTEMS)
def test_packets_of_every_length_break_nothing_and_lead_somewhere_or_nowhere(system):
    """Plausible headers in front of every number of bytes, from and to everybody; the round is right all the same."""
    job = one_job(system)
    rng = np.random.default_rng(3)
    size = SYSTEMS[system][2].itemsize
    verdicts = Verdicts(8 * (size + 4))
    packets = []
    for length in range(size + 4):
        whole = hostile(rng, SYSTEMS[system][2], 1).ljust(size, b"\1") + b"\2" * 4
        packets += [(whole[:length], source) for source in ANYWHERE]
    # workers' own packets are another test's subject: here nobody may speak for the job
    strange = [(packet, source) for packet, source in packets if source not in job.members and source != PS]
    job.star.program.process(batch_of(strange), np.zeros(len(strange), np.uint8), verdicts, job.star.now)
    assert (verdicts.action[: len(strange)] == Action.DROP).all()
    assert (verdicts.reason[: len(strange)] != Drop.OK).all()
    short = [(packet, source) for packet, source in packets if len(packet) != size]
    for machine in (*job.workers, *(m for m in job.star.machines.values() if isinstance(m, SumServer))):
        machine.receive(batch_of(short), job.star.now)
    root = job.star.machines[ROOT]
    root.receive(batch_of(packets), job.star.now)
    assert isinstance(root, ExponentRoot)
    assert root.stats()["exponent_packets"] == 0
    job.star.run(job.done)
    job.check()


def test_an_echo_to_nobody_leads_nowhere():
    """It would have left for address -1, which no switch of frames knows how to look up."""
    program = two_jobs()
    for bitmap in (0, 1 << 2, 1 << 31):
        echo = Packet(bitmap, 2, 1, 5, 0, (0,) * 62, ECHO)
        assert judge(program, (echo, PS))[0][:2] == (Action.DROP, Drop.FOREIGN_HOST)
    assert judge(program, (Packet(2, 2, 1, 5, 0, (0,) * 62, ECHO), PS))[0][3] == B


def test_an_answer_that_names_a_slot_beyond_all_keeps_the_old_one():
    job = one_job("atp")
    worker = job.workers[0]
    number = worker.window.base
    before = worker.framing._table.of(np.arange(number, number + 8)).tolist()
    answer = Packet(1, 2, 1, number, 0, (12,) * 62, Flag.ACK | Flag.COLLISION, length=4)
    worker.receive(batch_of([(answer.encode(), PS)]), job.star.now)
    assert worker.window.base == number + 1
    assert worker.framing._table.of(np.arange(number, number + 8)).tolist() == before


def test_what_is_older_than_the_horizon_does_not_take_a_live_fragments_place():
    """2^23 + 6 fragments late is as far ahead as 2^23 - 6: nobody can be there."""
    server = Server(first=2**24)
    server.feed((data(0, 5), A))
    late = (5 - 2**23 - 6) & (2**24 - 1)
    old = Packet(1, 2, 1 | late >> 16 << 8, late & 0xFFFF, 0, (9,) * 62)
    assert server.feed((old, A)) == []
    assert server.ps.drops_by_reason()["bad_fragment"] == 1
    (answer,) = server.feed((data(1, 5), B))
    assert answer.values[0] == 100


def test_a_collision_after_completion_is_the_newcomers_alone():
    """Col leaves with the sum, as in section 4.2: a straggler's slots wait for it longer, and so are marked more often."""
    program = two_jobs(A2tpProgram)
    judge(program, (data(0, 5), A), (data(1, 5), B))
    newcomer = judge(program, (data(0, 9, job=2), worker_at(2, 0)))[0][2]
    assert newcomer.mark & a2tp.Mark.COL
    answer = judge(program, (ack(5), PS))[0]
    assert (answer[0], answer[2].mark) == (Action.GROUP, 0)
    # the mark ended with the slot
    judge(program, (data(0, 6), A))
    assert not judge(program, (data(1, 6), B))[0][2].mark & a2tp.Mark.COL


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_packet_accesses_a_register_more_often_than_once_a_pass(system):
    """Claims, collisions, evictions, flushes, answers and pulls, packet by packet."""
    rng = np.random.default_rng(8)
    program: SwitchProgram
    if system == "switchml":
        program = SwitchMLProgram(values=64)
        program.add_job(Tenant(1, {A: 1, B: 2}, 1, slots=8))
    else:
        program = two_jobs(SYSTEMS[system][0], slots=2)
    places = [A, B, PS, worker_at(2, 0), worker_at(2, 1)]
    seen: set[str] = set()
    verdicts = Verdicts(1)
    for _ in range(400):
        before = program.stats()
        source = places[rng.integers(len(places))]
        packet = hostile(rng, SYSTEMS[system][2], int(rng.integers(1, 3)))
        if system != "switchml" and len(packet) == SYSTEMS[system][2].itemsize:
            # few fragments, and senders who say who they are: a slot gets all that it waits for
            frame = np.frombuffer(bytearray(packet), SYSTEMS[system][2])
            frame["bitmap"], frame["app"] = 1 + (source in (B, places[4])), 1 + (source in places[3:])
            frame["seq"], frame["agtr"] = rng.integers(0, 3), rng.integers(0, 2)
            packet = frame.tobytes()
        batch = batch_of([(packet, source)])
        program.process(batch, np.zeros(1, np.uint8), verdicts, 0.0)
        program.spilled()
        after = program.stats()
        for register in Register:
            name = f"accesses_{register.name.lower()}"
            assert after[name] - before[name] <= 1
        seen |= {name for name in after if after[name] != before.get(name, 0)}
    assert {"folded", "completed", "accesses_values"} <= seen
    assert {"esa": {"evicted", "flushed"}, "a2tp": {"bypassed", "flushed"}}.get(system, set()) <= seen


def test_switchml_refuses_members_that_stand_for_several_workers():
    """Its packets have no bitmap: the sum would never have been complete."""
    with pytest.raises(ValueError, match="give a switch below one bit, not 0x6"):
        SwitchMLProgram(values=64).add_job(Tenant(1, {A: 1, B: 6}, 1, slots=4))


def test_one_slot_and_32_workers_of_two_jobs():
    star = Star(A2tpProgram(budget=SLOT_BYTES))
    jobs = [on_star(star, number, 32, 8, 1, make=a2tp_worker) for number in (1, 2)]
    for job in jobs:
        job.add(0, spec(700, dtype="i32", mode=ExponentMode.NONE))
        job.begin(0, [np.full(700, job.job + index, np.int32) for index in range(32)])
    star.run(lambda: all(job.done() for job in jobs))
    for job in jobs:
        job.check()
    assert star.program.stats()["collisions"] > 0
