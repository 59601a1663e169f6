"""Several jobs, several switches, and senders that mean no good: sums stay what they are."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.proto.common.plan import ExponentMode
from inanet.proto.common.program import Action
from inanet.proto.slots.a2tp.system import A2tpProgram, a2tp_worker
from inanet.proto.slots.atp.program import AtpProgram
from inanet.proto.slots.atp.worker import atp_worker
from inanet.proto.slots.esa.system import EsaProgram, esa_worker
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.switchml.worker import switchml_worker
from inanet.proto.slots.tenants import Tenant
from inanet.testing.switched import Impairment, Star
from inanet.wire.a2tp import FRAME as MARKED
from inanet.wire.atp import FRAME, Flag
from inanet.wire.endpoint import endpoint
from inanet.wire.switchml import FRAMES
from tests.proto.slots.jobs import Job, floats, ps_at, spec, worker_at
from tests.proto.slots.judge import SLOT_BYTES, ack, data, judge, on_star

STRANGER = endpoint("192.0.2.1", 4000)


def hostile(rng: np.random.Generator, frame: np.dtype, job: int) -> bytes:
    """A packet with a plausible header: small numbers, so that it meets what is under way."""
    packet = np.zeros(1, frame)
    packet.view(np.uint8)[:] = rng.integers(0, 256, frame.itemsize)
    if "packet_id" in frame.names:
        packet["kind"] = 0x11
        packet["job"], packet["packet_id"] = job, rng.integers(0, 64)
        packet["pool_index"] = rng.integers(0, 8) | (rng.integers(0, 2) << 15)
    else:
        packet["bitmap"] = 1 << rng.integers(0, 4)
        packet["flags"] = rng.choice([0, 0, 0, 1, 4, 5, 0x80, 0x81])
        packet["app"], packet["seq"], packet["agtr"] = job, rng.integers(0, 64), rng.integers(0, 8)
    data = packet.tobytes()
    return data if rng.random() < 0.9 else data[: rng.integers(0, len(data))]


@pytest.mark.parametrize(
    ("program", "make", "frame"),
    [
        (SwitchMLProgram, switchml_worker, FRAMES[64]),
        (AtpProgram, atp_worker, FRAME),
        (A2tpProgram, a2tp_worker, MARKED),
        (EsaProgram, esa_worker, MARKED),
    ],
    ids=["switchml", "atp", "a2tp", "esa"],
)
def test_whatever_other_jobs_and_strangers_send_a_job_gets_its_sums(program, make, frame):
    """Job 2's workers and PS send anything under any job; strangers as well; nobody can speak for job 1."""
    rng = np.random.default_rng(9)
    noise = Impairment(seed=4, drop=0.03, duplicate=0.03, late=0.05)
    if program is SwitchMLProgram:
        star = Star(SwitchMLProgram(values=64), noise)
        jobs = [Job(star, n, 2, lambda member: switchml_worker(member, 8, values=64)) for n in (1, 2)]
        for job in jobs:
            star.program.add_job(job.tenant(slots=8))
    else:
        star = Star(program(budget=8 * SLOT_BYTES), noise)
        jobs = [on_star(star, n, 2, 16, 8, make=make) for n in (1, 2)]
    honest = jobs[0]
    honest.add(0, spec(8_000))
    honest.begin(0, floats(8_000, 2, 1))
    bad = [worker_at(2, 0), worker_at(2, 1), ps_at(2), STRANGER]
    star.settle(50e-6)
    for _ in range(2_000):
        star.inject(bad[rng.integers(4)], hostile(rng, frame, int(rng.integers(1, 4))), rng.random() * 0.001)
    star.run(honest.done)
    honest.check()
    drops = {name for name, count in star.program.stats().items() if name.startswith("drop_") and count}
    assert {"drop_foreign_host", "drop_foreign_job", "drop_short"} <= drops
    assert star.program.stats()["drop_foreign_host"] > 500


def test_two_levels_of_switches_sum_racks_first():
    """Workers 0 and 1 below one leaf, 2 and 3 below another; the top switch sums what the leaves have summed."""
    leaves = [AtpProgram(budget=4 * SLOT_BYTES) for _ in range(2)]
    top, at = AtpProgram(budget=4 * SLOT_BYTES), [endpoint("10.9.0.1", 1), endpoint("10.9.0.2", 1)]
    up, ps = endpoint("10.9.1.1", 1), ps_at(1)
    for rack, leaf in enumerate(leaves):
        members = {worker_at(1, index): 1 << index for index in (2 * rack, 2 * rack + 1)}
        leaf.add_job(Tenant(1, members, 1, ps=up))
    top.add_job(Tenant(1, {at[0]: 0b0011, at[1]: 0b1100}, 1, ps=ps))
    sums = []
    for rack, leaf in enumerate(leaves):
        packets = [(data(index, 5, slot=2), worker_at(1, index)) for index in (2 * rack, 2 * rack + 1)]
        first, last = judge(leaf, *packets)
        assert (first[0], last[0], last[3]) == (Action.DROP, Action.UNICAST, up)
        sums.append((last[2], at[rack]))
    # the same sum again, as after a loss: answered by the leaf, dropped above
    again = judge(leaves[0], (data(0, 5, slot=2), worker_at(1, 0)))[0]
    first, repeated, last = judge(top, sums[0], (again[2], at[0]), sums[1])
    assert (first[0], repeated[0], last[0], last[3]) == (Action.DROP, Action.DROP, Action.UNICAST, ps)
    assert last[2].bitmap == 0b1111
    assert last[2].values == tuple(600 + 4 * i for i in range(62))
    # a leaf speaks for its own rack only
    assert judge(top, (sums[0][0], at[1]))[0][1].label == "foreign_host"
    # the answer frees the slots of all of them
    answer = judge(top, (ack(5, slot=2), ps))[0]
    assert answer[0] is Action.GROUP
    assert judge(leaves[0], (answer[2], up))[0][0] is Action.GROUP
    assert judge(leaves[1], (answer[2], up))[0][0] is Action.GROUP
    assert all(program.stats()["occupied_1"] == 0 for program in (*leaves, top))


@pytest.mark.parametrize(("program", "make"), [(AtpProgram, atp_worker), (A2tpProgram, a2tp_worker)])
def test_congestion_on_the_way_in_shrinks_every_window(program, make):
    """Links that carry 22 fragments in a round trip and 100 us of queue: windows come down from 120 to about that."""
    rates = {worker_at(1, index): 20e6 for index in range(2)}
    sizes = {}
    for ecn, seconds in ((100e-6, 0.013), (1.0, 0.002)):
        star = Star(program(budget=300 * SLOT_BYTES), rates=rates, ecn=ecn, latency=50e-6, tick=20e-6)
        job = on_star(star, 1, 2, 200, 300, make=make, own={"initial": 120})
        job.add(0, spec(62_000))
        job.begin(0, floats(62_000, 2, 1))
        star.settle(seconds)
        assert job.sum("retransmissions") == 0
        sizes[ecn] = job.workers[0].pace.window
    assert sizes[1.0] >= 120
    assert sizes[100e-6] < 40


def test_frames_of_repeated_packets_say_so():
    star = Star(AtpProgram(budget=8 * SLOT_BYTES))
    job = on_star(star, 1, 2, 8, 8)
    job.add(0, spec(62, dtype="i32", mode=ExponentMode.NONE))
    job.begin(0, [np.ones(62, np.int32)] * 2, only=[0])
    worker = job.workers[0]
    first = np.frombuffer(worker.transmit(0.0)[0].arena, FRAME)
    again = np.frombuffer(worker.transmit(worker.timer())[0].arena, FRAME)
    assert set(first["flags"].tolist()) == {0}
    assert set(again["flags"].tolist()) == {Flag.RESEND}
    np.testing.assert_array_equal(first["values"], again["values"])


@pytest.mark.parametrize("system", ["switchml", "atp", "a2tp", "esa"])
def test_survivors_go_on_under_later_numbers(system):
    """A worker dies in the middle; the others begin anew without it while packets from before are still on their way."""
    noise = Impairment(seed=8, drop=0.05, duplicate=0.1, late=0.2, delay=0.02)
    programs = {"atp": AtpProgram, "a2tp": A2tpProgram, "esa": EsaProgram}
    makers = {"atp": atp_worker, "a2tp": a2tp_worker, "esa": esa_worker}

    def job_of(workers: int, first: int) -> Job:
        if system != "switchml":
            return on_star(star, 1, workers, 16, 8, make=makers[system], first=first)
        job = Job(
            star, 1, workers, lambda member: switchml_worker(replace(member, first=first), 8, values=64)
        )
        star.program.add_job(job.tenant(slots=8))
        return job

    star = Star(
        SwitchMLProgram(values=64) if system == "switchml" else programs[system](budget=8 * SLOT_BYTES), noise
    )
    old = job_of(3, 0)
    old.add(0, spec(6_000))
    old.begin(0, floats(6_000, 3, 1))
    star.settle(0.003)
    assert not old.done()
    star.detach(old.addresses[2])
    star.settle(0.001)
    star.program.remove_job(1)
    if system != "switchml":
        star.machines[ps_at(1)].remove_job(1)
    star.log.clear()
    new = job_of(2, max(worker.successor for worker in old.workers[:2]))
    new.add(0, spec(6_000))
    for seed in range(2):
        new.begin(0, floats(6_000, 2, seed))
    star.run(new.done)
    new.check()
