"""Single faults: what a switch and a PS do with packets that are repeated, foreign, early or late; who is told of what."""

import numpy as np

from inanet.proto.common.events import PeerSilent
from inanet.proto.zebra.job import fixed
from inanet.proto.zebra.worker import Pulled, Stalled
from inanet.testing.switched import SWITCH
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint
from inanet.wire.zebra import Flag, Kind, Packet

from .rig import Rig

KEYS = np.arange(4, dtype=np.uint64)
ONES = np.ones((4, 1), np.float32)


def hot(rig: Rig, rank: int, iteration: int, sequence: int, **more: object) -> bytes:
    fields: dict[str, object] = {"version": 1, "width": 1, "names": (0,), "words": (1 << 20,)} | more
    return Packet(Kind.HOT, 3, rank, iteration=iteration, sequence=sequence, **fields).encode(77)  # type: ignore[arg-type]


def started(workers: int = 2) -> Rig:
    rig = Rig(workers, 1)
    rig.start(fixed(1, KEYS))
    return rig


def test_a_replay_of_an_earlier_iteration_adds_nothing() -> None:
    rig = started()
    rig.push([(KEYS, ONES)] * 2)
    rig.star.inject(rig.job.workers[0], hot(rig, 0, 1, 0))
    rig.push([(KEYS, ONES)] * 2)
    assert rig.program.stats()["drop_stale_round"] == 1
    assert rig.pull(KEYS)[0].ravel().tolist() == [4.0] * 4


def test_what_a_switch_refuses_has_a_reason_and_changes_nothing() -> None:
    rig = started()
    worker = rig.job.workers[0]
    rig.star.inject(worker, hot(rig, 0, 1, 0, version=9))
    rig.star.inject(endpoint("10.9.9.9", 4000), hot(rig, 0, 1, 0))
    rig.star.inject(worker, hot(rig, 0, 1, 0, width=2, words=(1, 2)))
    rig.star.inject(worker, hot(rig, 0, 1, 0, flags=Flag.FLOAT))
    rig.star.inject(worker, hot(rig, 0, 1, 0)[:-1])
    rig.star.inject(worker, Packet(Kind.PULL, 3, 0, 1, 1, 0, 1, names=(1,)).encode(77))
    rig.star.inject(worker, Packet(Kind.HOT, 4, 0, 1, 1, 0, 1).encode(77))
    rig.star.settle(0.01)
    drops = {k: v for k, v in rig.program.stats().items() if k.startswith("drop_")}
    assert drops == {
        "drop_future_plan": 1,
        "drop_foreign_host": 1,
        "drop_bad_type": 3,
        "drop_short": 1,
        "drop_foreign_job": 1,
    }
    rig.star.inject(worker, hot(rig, 0, 1, 500, flags=Flag.END, names=(), words=()))
    rig.push([(KEYS, ONES)] * 2)
    assert rig.program.stats()["drop_bad_fragment"] == 1
    # a rank that is not in the table, under the right version
    rig.star.inject(worker, hot(rig, 0, 2, 0, names=(44,)))
    rig.push([(KEYS, ONES)] * 2)
    assert rig.program.stats()["drop_bad_slot"] == 1
    assert rig.pull(KEYS)[1].ravel().tolist() == [4.0] * 4


def test_sums_wait_with_the_cpu_until_the_ps_has_them() -> None:
    rig = started()
    address = rig.job.shards[0]
    shard = rig.star.machines[address]
    rig.star.detach(address)
    for worker in rig.workers:
        worker.push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.05)
    cpu = rig.program._tables[3].cpu
    assert cpu.kept > 0
    assert rig.program.stats()["occupied_3"] == 0
    rig.star.attach(address, shard)
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=20.0)
    rig.star.settle(1.0)
    assert cpu.kept == 0
    assert rig.program.stats()["cpu_repeated"] > 0
    assert rig.pull(KEYS)[0].ravel().tolist() == [2.0] * 4


def test_a_missing_worker_is_named_by_the_others_and_by_the_ps() -> None:
    rig = started(3)
    for worker in rig.workers[:2]:
        worker.push(KEYS, ONES, rig.star.now)
    rig.star.settle(6.0)
    told = [event for _, event in rig.star.log if isinstance(event, PeerSilent)]
    assert {event.name for event in told} == {"rank 2", "switch"}
    stalled = [event for _, event in rig.star.log if isinstance(event, Stalled)]
    assert {event.rank for event in stalled} == {0, 1}
    assert stalled[0].waiting_for == ("shard 0 has not finished the iteration: it waits for rank 2",)
    assert rig.workers[1].ranks_waited_for == (2,)
    assert rig.program.missing(3) == [2]
    # told once, and no harm done
    rig.workers[2].push(KEYS, ONES, rig.star.now)
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=20.0)


def test_an_unreachable_switch_is_named() -> None:
    rig = started(1)
    rig.star.program = None
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.settle(6.0)
    (stalled,) = [event for _, event in rig.star.log if isinstance(event, Stalled)]
    assert stalled.waiting_for[0].startswith("the switch (10.0.0.254:48864) has not acknowledged")


def test_the_ps_refuses_what_does_not_come_from_its_job() -> None:
    rig = started(1)
    aggregate = Packet(Kind.AGGREGATE, 3, 0, 1, 1, 0, 1, 0, (0,), (5,)).encode(77)
    cold = Packet(Kind.COLD, 3, 0, 1, 1, 0, 1, 0, (9,), (5,)).encode(77)
    arena = np.frombuffer(aggregate, np.uint8).copy()
    for source, data in ((rig.job.workers[0], aggregate), (SWITCH, cold)):
        arena = np.frombuffer(data, np.uint8).copy()
        rig.star.send(source, Transmission(rig.job.shards[0], arena, np.zeros(1, np.int64), len(data)))
    rig.star.settle(0.01)
    assert rig.shards[0].stats()["drop_foreign_host"] == 2


def test_a_hot_set_does_not_change_under_a_running_iteration() -> None:
    rig = started()
    rig.push([(KEYS, ONES)] * 2)
    rig.prepare(fixed(2, KEYS[::-1].copy()))
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.001)
    # rank 1 has a set that is ready, but not named yet
    rig.star.inject(rig.job.workers[1], hot(rig, 1, 2, 0, version=2))
    rig.star.settle(0.001)
    assert rig.program.stats()["drop_stale_plan"] == 1
    rig.workers[1].push(KEYS, ONES, rig.star.now)
    rig.star.run(lambda: all(worker.done == 2 for worker in rig.workers), deadline=20.0)
    rig.push([(KEYS, ONES)] * 2)
    assert rig.workers[1].hot.version == 2
    assert rig.pull(KEYS)[0].ravel().tolist() == [6.0] * 4


def test_a_late_answer_to_an_earlier_pull_is_not_taken_for_one_to_this() -> None:
    rig = started(1)
    rig.push([(np.array([50, 60], np.uint64), np.array([[5.0], [6.0]], np.float32))])
    assert rig.pull(np.array([50], np.uint64))[0][0, 0] == 5.0
    late = Packet(Kind.VALUES, 3, 0, 0, 1, 0, 1, 0, (), (0x40A00000,)).encode(77)
    worker, shard = rig.job.workers[0], rig.job.shards[0]
    rig.workers[0].pull(np.array([60], np.uint64), rig.star.now)
    rig.workers[0].transmit(rig.star.now)
    arena = np.frombuffer(late, np.uint8).copy()
    rig.star.send(shard, Transmission(worker, arena, np.zeros(1, np.int64), len(late)))
    rig.star.settle(0.1)
    found = [event.values[0, 0] for _, event in rig.star.log if isinstance(event, Pulled)]
    assert found == [5.0, 6.0]
    assert rig.workers[0].stats()["drop_unmatched"] == 1
