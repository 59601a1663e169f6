"""Programs of the ATP family, packet by packet: jobs 1 and 2 with two workers each on the same slots."""

from dataclasses import replace

import numpy as np

from inanet.proto.common.program import Action, Verdicts
from inanet.proto.slots.atp.program import AtpProgram
from inanet.proto.slots.atp.ps import atp_server
from inanet.proto.slots.atp.worker import AtpFraming, atp_worker
from inanet.proto.slots.ps import PSJob
from inanet.proto.slots.worker import Membership, Worker
from inanet.testing.switched import SWITCH, Impairment, Star
from inanet.wire import a2tp, atp
from inanet.wire.atp import Flag, Packet, decode
from inanet.wire.drops import Drop
from tests.proto.slots.jobs import Job, ps_at, worker_at
from tests.proto.tree.rig import batch_of

SLOT_BYTES = 62 * 4 + 24
A, B, PS = worker_at(1, 0), worker_at(1, 1), ps_at(1)
SUM = tuple(100 + 2 * i for i in range(62))


def frame_type_of(worker: Worker) -> np.dtype:
    """The frames of a worker of the family."""
    assert isinstance(worker.framing, AtpFraming)
    return worker.framing.frame_type


def on_star(
    star: Star,
    number: int,
    workers: int,
    window: int,
    slots: int,
    *,
    first: int = 0,
    make=atp_worker,
    own: dict | None = None,
    **kwargs,
) -> Job:
    """A job with its PS on a star whose switch has ``slots`` slots for it; ``own`` goes to the workers."""

    def worker(member: Membership) -> Worker:
        return make(replace(member, first=first), window, slots, **(own or {}))

    job = Job(star, number, workers, worker, ps=True)
    ps = star.machines.get(ps_at(number)) or atp_server(frame_type_of(job.workers[0]))
    ps.add_job(PSJob(number, job.members, [SWITCH], window, slots, switches=[SWITCH], first=first))
    star.attach(ps_at(number), ps)
    star.program.add_job(job.tenant(ps=ps_at(number), **kwargs))
    return job


def single(
    workers: int,
    window: int,
    slots: int,
    impairment: Impairment | None = None,
    *,
    program: type[AtpProgram] = AtpProgram,
    **kwargs,
) -> Job:
    """One job alone on a star."""
    star = Star(program(budget=slots * SLOT_BYTES), impairment)
    return on_star(star, 1, workers, window, slots, **kwargs)


def two_jobs(program: type[AtpProgram] = AtpProgram, slots: int = 8) -> AtpProgram:
    """A program with both jobs."""
    made = program(budget=slots * SLOT_BYTES, age=1.0)
    star = Star(made)
    for number in (1, 2):
        on_star(star, number, 2, slots, slots)
    return made


def judge(program: AtpProgram, *packets: tuple[Packet | bytes, int], now: float = 0.0, congested: int = 0):
    """Action, reason, packet afterwards and target, for each."""
    dtype = atp.FRAME if program.variant.head == atp.HEADER_BYTES else a2tp.FRAME
    batch = batch_of((p if isinstance(p, bytes) else p.encode(dtype), s) for p, s in packets)
    verdicts = Verdicts(len(packets))
    program.process(batch, np.full(len(packets), congested, np.uint8), verdicts, now)
    return [
        (
            Action(verdicts.action[i]),
            Drop(verdicts.reason[i]),
            decode(batch.packet(i), dtype) if len(batch.packet(i)) == dtype.itemsize else None,
            int(verdicts.target[i]),
        )
        for i in range(len(batch))
    ]


def data(
    worker: int, seq: int, slot: int = 0, job: int = 1, flags: Flag = Flag.NONE, mark: int = 0
) -> Packet:
    """A worker's contribution."""
    values = tuple(range(worker * 100, worker * 100 + 62))
    return Packet(1 << worker, 2, job, seq, slot, values, flags, mark)


def ack(seq: int, slot: int = 0, job: int = 1, flags: Flag = Flag.ACK) -> Packet:
    """The PS's answer."""
    return Packet(1, 2, job, seq, slot, (0,) * 62, flags)
