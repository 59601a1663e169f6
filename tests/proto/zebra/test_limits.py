"""The ends of ranges: numbers that wrap, keys and gradients at their limits, two jobs in one switch, what is kept and for how long."""

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.proto.common.program import Action, Verdicts
from inanet.proto.zebra.job import Job, fixed, following
from inanet.proto.zebra.layout import orchestrate
from inanet.proto.zebra.packets import EncodedPackets, Header, ahead, beyond
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.switch import ZebraProgram
from inanet.proto.zebra.worker import Pulled, Stalled
from inanet.testing.switched import SWITCH, Impairment
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint
from inanet.wire.zebra import Flag, Kind, Packet

from .rig import TIMING, Rig, random_gradients, spread, summed
from .test_sums import BAD

KEYS = np.arange(8, dtype=np.uint64)
ONES = np.ones((8, 1), np.float32)
DROP, GROUP, REPLY = int(Action.DROP), int(Action.GROUP), int(Action.REPLY)
LAST = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)


def at_iteration(rig: Rig, number: int) -> None:
    """As if this many iterations were over."""
    for worker in rig.workers:
        worker._begun = worker.done = number
    for shard in rig.shards:
        shard.finished = number


@pytest.mark.parametrize("number", [2**31 - 2, 2**32 - 2, 2**33 - 2])
def test_iterations_go_on_where_their_numbers_wrap(number: int) -> None:
    rig, rng = Rig(2, 2, Impairment(3, **BAD)), np.random.default_rng(1)
    rig.start(fixed(1, spread(np.arange(10, dtype=np.uint64))))
    at_iteration(rig, number)
    pushed = []
    for _ in range(5):
        gradients = random_gradients(rng, 2, 30, 30)
        rig.push(gradients)
        pushed += gradients
    keys, total = spread(np.arange(30, dtype=np.uint64)), summed(pushed)
    assert rig.pull(keys)[1].ravel().tolist() == [total.get(key, [0.0])[0] for key in keys.tolist()]
    assert [worker.done for worker in rig.workers] == [number + 5] * 2
    # another life of the switch takes any number for the first
    rig.restart()
    rig.push([(KEYS, ONES)] * 2)
    assert rig.program.iterations == 1


def test_pulls_go_on_where_their_sequence_numbers_wrap() -> None:
    rig = Rig(1, 1, Impairment(5, **BAD))
    keys = np.arange(200, dtype=np.uint64)
    rig.push([(keys, np.arange(200, dtype=np.float32)[:, None])])
    rig.workers[0]._pulls._asked = [2**32 - 3]
    for _ in range(2):
        assert rig.pull(keys)[0].ravel().tolist() == list(range(200))


def test_versions_of_hot_sets_wrap_and_leave_the_empty_one_alone() -> None:
    assert [following(0), following(1), following(65534), following(65535)] == [1, 2, 65535, 1]


def test_serial_numbers() -> None:
    found = np.array([0, 1, 2**32 - 1, 2**31], np.int64)
    assert ahead(found, 2**32).tolist() == [0, 1, -1, -(2**31)]
    assert beyond(found, 2**32 - 1).tolist() == [1, 2, 0, 2**31 + 1]


@pytest.mark.parametrize("sharding", ["hash", "range"])
@pytest.mark.parametrize("hot", [False, True])
def test_keys_at_the_ends_of_64_bits(sharding: str, hot: bool) -> None:
    rig = Rig(2, 3, sharding=sharding)
    if hot:
        rig.start(fixed(1, LAST[::-1].copy()))
    values = np.arange(6, dtype=np.float32)[:, None]
    rig.push([(LAST, values), (LAST[::2].copy(), values[::2].copy())])
    assert rig.pull(LAST)[1].ravel().tolist() == [0.0, 1.0, 4.0, 3.0, 8.0, 5.0]


@pytest.mark.parametrize("width", [1, 255])
def test_denormals_and_the_largest_floats(width: int) -> None:
    """As integers or by themselves, no sum is wrong; what float32 cannot hold is infinite."""
    rig = Rig(2, 1, width=width, packet_bytes=1472)
    rig.start(fixed(1, KEYS[:4]))
    row = np.array([np.finfo(np.float32).max, 1e-45, -1023.5, 2.0**-20] * 2, np.float32)
    gradients = np.repeat(row[:, None], width, axis=1)
    rig.push([(KEYS, gradients)] * 2)
    found = rig.pull(KEYS)[0]
    assert (found[:, 0] == found[:, -1]).all()
    # hot: a step is 2^-20; the large one has gone to the PS
    assert found[:4, 0].tolist() == [np.inf, 0.0, -2047.0, 2.0**-19]
    assert found[4:, 0].tolist() == [np.inf, np.float32(2 * np.float32(1e-45)), -2047.0, 2.0**-19]
    assert rig.workers[0].stats()["misfits"] == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_no_sum_of_integers_wraps(sign: int) -> None:
    """Three workers' integers are up to (2^31 - 1) / 3, which is 715827882; float32 has 715827840 and 715827904."""
    for value, misfits in ((715827840.0, 0), (715827904.0, 1)):
        rig = Rig(3, 1)
        rig.start(fixed(1, KEYS[:1], shift=0))
        rig.push([(KEYS[:1], np.array([[sign * value]], np.float32))] * 3)
        assert rig.pull(KEYS[:1])[0][0, 0] == np.float32(3 * sign * value)
        assert rig.workers[0].stats()["misfits"] == misfits


def test_a_push_of_more_packets_than_a_ledger_has_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would never be acknowledged."""
    rig = Rig(1, 1)
    keys = np.arange(60, dtype=np.uint64)
    monkeypatch.setattr("inanet.proto.zebra.worker.MOST", 9)
    with pytest.raises(ValueError, match="60 keys make 9 packets, a push has fewer than 9"):
        rig.workers[0].push(keys, np.ones((60, 1), np.float32), 0.0)
    rig.push([(keys[:50], np.ones((50, 1), np.float32))])


@pytest.mark.parametrize(("registers", "pairs"), [(1, 4000), (2, 1000), (3, 255)])
def test_no_packet_needs_more_passes_than_a_switch_counts(registers: int, pairs: int) -> None:
    """Packets of jumbo frames have room for a thousand gradients, and all of them may be of one register."""
    job = Job(1, (1,), (2,), 3, packet_bytes=9000, registers=registers, hot_pairs=pairs)
    program = ZebraProgram()
    program.add_job(job, 1)
    program.prepare(1, fixed(1, np.arange(2000, dtype=np.uint64)))
    ranks = np.arange(0, 2000, registers)
    order, counts = orchestrate(ranks % registers, registers, job.capacity(Kind.HOT))
    words = np.ones((len(ranks), 1), np.uint32)
    encoded = EncodedPackets(
        Kind.HOT, Header(1, 0, 0, 1, 1, 1), counts, ranks[order].astype(np.uint64), words
    )
    batch = PacketBatch(encoded.arena, encoded.offsets, encoded.lengths, np.ones(len(encoded), np.uint64))
    program.process(batch, np.zeros(len(encoded), np.uint8), Verdicts(len(encoded)), 0.0)
    assert program.stats()["iterations"] == 1
    assert program.stats()["contributions"] == len(ranks)


# ------------------------------------------------------------ two jobs, one switch


def two_jobs(budget: int = 1 << 20) -> tuple[ZebraProgram, list[Job]]:
    program = ZebraProgram(budget=budget)
    jobs = [
        Job(
            number,
            (endpoint(f"10.0.{number}.1", 4000), endpoint(f"10.0.{number}.2", 4000)),
            (endpoint(f"10.0.{number}.3", 5000),),
            SWITCH,
            key=number,
        )
        for number in (1, 2)
    ]
    for job in jobs:
        program.add_job(job, job.number)
    return program, jobs


def test_two_jobs_are_not_promised_the_same_registers() -> None:
    program, jobs = two_jobs(20_000)
    hot = fixed(1, np.arange(900, dtype=np.uint64))
    program.prepare(1, hot)
    with pytest.raises(
        ValueError, match=r"job 2: 900 hot parameters need \d+ B of registers, \d+ B are left"
    ):
        program.prepare(2, hot)
    program.remove_job(1)
    program.prepare(2, hot)
    assert jobs[1].number == 2


def packets(program: ZebraProgram, source: int, *sent: bytes) -> list[int]:
    arena = np.frombuffer(b"".join(sent), np.uint8).copy()
    lengths = np.array([len(one) for one in sent], np.int64)
    batch = PacketBatch(arena, np.cumsum(lengths) - lengths, lengths, np.full(len(sent), source, np.uint64))
    verdicts = Verdicts(len(sent))
    program.process(batch, np.zeros(len(sent), np.uint8), verdicts, 0.0)
    return verdicts.action[: len(sent)].tolist()


def test_one_jobs_packets_do_not_reach_another_ones_sums() -> None:
    """In one batch: a job's own packets, the other's, and those that pretend."""
    program, jobs = two_jobs()
    for job in jobs:
        program.prepare(job.number, fixed(1, KEYS))

    def hot(job: int, key: int, sequence: int, word: int) -> bytes:
        return Packet(Kind.HOT, job, 0, 1, 1, sequence, 1, 0, (0,), (word,)).encode(key)

    mine = hot(1, 1, 0, 100), hot(2, 1, 0, 5), hot(1, 2, 1, 7), hot(2, 2, 0, 9)
    assert packets(program, jobs[0].workers[0], *mine) == [REPLY, DROP, DROP, DROP]
    assert packets(program, jobs[1].workers[0], *mine) == [DROP, DROP, DROP, REPLY]
    stats = program.stats()
    assert (stats["contributions"], stats["drop_bad_tag"], stats["drop_foreign_host"]) == (2, 4, 2)
    assert [int(program._tables[n].registers.values.sum()) for n in (1, 2)] == [100, 9]
    # a shard of one job acknowledges sums of the other
    ack = Packet(Kind.ACK, 1, 0, 1, 1, 0, 0, Kind.AGGREGATE << 4).encode(1)
    assert packets(program, jobs[1].shards[0], ack) == [DROP]
    news = Packet(Kind.NEWS, 1, 0, 1, 1, 0, 1, Flag.END, next_version=9).encode(1)
    assert packets(program, jobs[1].shards[0], news) == [DROP]
    assert packets(program, jobs[0].shards[0], news) == [GROUP]


# --------------------------------------------------- what others say, and what is kept


def send(rig: Rig, source: int, destination: int, packet: Packet) -> None:
    data = packet.encode(77)
    arena = np.frombuffer(data, np.uint8).copy()
    rig.star.send(source, Transmission(destination, arena, np.zeros(1, np.int64), len(data)))


def test_packets_of_a_job_of_another_width_do_no_harm() -> None:
    rig = Rig(1, 1)
    rig.start(fixed(1, KEYS))
    worker, shard = rig.job.workers[0], rig.job.shards[0]
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    for kind in (Kind.NEWS, Kind.VALUES):
        send(rig, shard, worker, Packet(kind, 3, 0, 1, 1, 0, 2, 0, (0,) if kind == Kind.NEWS else (), (1, 2)))
    send(rig, SWITCH, shard, Packet(Kind.AGGREGATE, 3, 0, 1, 1, 0, 1, Flag.FLOAT, (0,), (1,)))
    send(rig, SWITCH, worker, Packet(Kind.VALUES, 3, 0, 1, 1, 0, 1, 0, (), (1,)))
    rig.star.run(lambda: rig.workers[0].done == 1, deadline=1.0)
    assert rig.workers[0].stats()["drop_bad_type"] == 2
    assert rig.workers[0].stats()["drop_foreign_host"] == 1
    assert rig.shards[0].stats()["drop_bad_type"] == 1
    assert rig.pull(KEYS)[0].ravel().tolist() == [1.0] * 8


def test_gradients_of_two_hot_sets_do_not_meet_in_an_iteration() -> None:
    rig = Rig(2, 1)
    rig.start(fixed(1, KEYS[:4]))
    rig.prepare(fixed(2, KEYS[4:]))
    rig.shards[0].announce(1)
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.001)
    send(rig, rig.job.workers[1], rig.job.shards[0], Packet(Kind.COLD, 3, 1, 2, 1, 0, 1, 0, (9,), (1,)))
    rig.star.settle(0.001)
    assert rig.shards[0].stats()["drop_stale_plan"] == 1


def test_late_packets_of_the_old_set_add_nothing_to_the_new_one() -> None:
    """Everything that was sent in two iterations under set 1 comes again, in any order, while set 2 is being used."""
    rig = Rig(2, 2)
    rig.start(fixed(1, KEYS[:6]))
    seen: list[tuple[int, int, bytes]] = []
    send_one = rig.star.send

    def record(source: int, transmission: Transmission) -> None:
        seen.extend(
            (source, transmission.destination, transmission.packet(i)) for i in range(len(transmission))
        )
        send_one(source, transmission)

    rig.star.send = record  # type: ignore[method-assign]
    rig.push([(KEYS, ONES)] * 2)
    rig.prepare(fixed(2, KEYS[:1:-1].copy()))
    rig.push([(KEYS, ONES)] * 2)
    rng, old = np.random.default_rng(4), list(seen)
    for restart in (False, True):
        if restart:
            # the new life has seen nothing, and the first that it sees is old
            rig.restart()
        for worker in rig.workers[: 1 + restart]:
            worker.push(KEYS, ONES, rig.star.now)
        for place in rng.permutation(len(old)).tolist():
            source, destination, data = old[place]
            arena = np.frombuffer(data, np.uint8).copy()
            send_one(source, Transmission(destination, arena, np.zeros(1, np.int64), len(data)))
        if not restart:
            rig.star.settle(0.001)
            rig.workers[1].push(KEYS, ONES, rig.star.now)
        done = 3 + restart
        rig.star.run(lambda done=done: all(worker.done == done for worker in rig.workers), deadline=2.0)
    assert {worker.hot.version for worker in rig.workers} == {2}
    assert rig.pull(KEYS)[0].ravel().tolist() == [8.0] * 8


def test_hot_sets_that_are_over_are_forgotten() -> None:
    rig = Rig(2, 2)
    rig.start(fixed(1, KEYS))
    for version in range(2, 12):
        rig.push([(KEYS, ONES)] * 2)
        rig.prepare(fixed(version, KEYS))
    for worker in rig.workers:
        assert len(worker._known) <= 4
    for shard in rig.shards:
        assert len(shard._hot) <= 4
        assert set(shard._ranks) == set(shard._hot)
    assert len(rig.program._tables[3].prepared) <= 2


def test_arrays_may_be_used_again_at_once() -> None:
    """Pushes that wait behind others, and pulls that are not answered yet, keep what they were given."""
    rig = Rig(1, 1)
    rig.start(fixed(1, KEYS))
    worker, keys, values = rig.workers[0], KEYS.copy(), ONES.copy()
    for step in (1.0, 10.0, 100.0):
        values[:] = step
        worker.push(keys, values, rig.star.now)
    values[:] = 5e5
    asked: NDArray[np.uint64] = KEYS[::-1].copy()
    worker.pull(asked, rig.star.now)
    asked[:], keys[:] = 0, 7
    rig.star.run(lambda: any(isinstance(event, Pulled) for _, event in rig.star.log), deadline=1.0)
    assert rig.pull(KEYS)[0].ravel().tolist() == [111.0] * 8


def test_a_hot_set_that_a_worker_was_not_given_yet_is_waited_for_by_name() -> None:
    rig = Rig(1, 1)
    rig.push([(KEYS, ONES)])
    rig.shards[0].prepare(fixed(5, KEYS))
    rig.shards[0].announce(5)
    rig.push([(KEYS, ONES)])
    worker, values = rig.workers[0], ONES.copy()
    worker.push(KEYS, values, rig.star.now)
    # whoever calls may use the array again while the push waits
    values[:] = 0
    rig.star.settle(2 * TIMING.silent)
    told = [event for _, event in rig.star.log if isinstance(event, Stalled)]
    assert told[-1].waiting_for == ("whoever decides what is hot has not told of hot set 5",)
    assert worker.knows_why
    rig.program.prepare(3, fixed(5, KEYS))
    worker.prepare(fixed(5, KEYS))
    rig.star.run(lambda: worker.done == 3, deadline=1.0)
    assert worker.hot.version == 5
    assert rig.pull(KEYS)[0].ravel().tolist() == [3.0] * 8


def test_a_dead_peer_is_asked_ever_more_rarely() -> None:
    rig = Rig(1, 1)
    rig.push([(KEYS, ONES)])
    rig.star.detach(rig.job.shards[0])
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.settle(2.0)
    before = rig.workers[0]._push.streams[0].repeated
    rig.star.settle(10.0)
    # a packet a second of each that is outstanding, which are two and an END
    assert rig.workers[0]._push.streams[0].repeated - before <= 3 * 11


def test_a_shard_outlives_what_makes_no_sense() -> None:
    """Whoever has the key of a job may still send nonsense."""
    rig = Rig(1, 1)
    rig.start(fixed(1, KEYS))
    shard = ParameterShard(rig.job, 0)
    shard.prepare(fixed(1, KEYS))
    nonsense = Packet(Kind.AGGREGATE, 3, 0, 1, 1, 0, 1, 0, (800,), (1,)).encode(77)
    arena = np.frombuffer(nonsense, np.uint8).copy()
    batch = PacketBatch(
        arena, np.zeros(1, np.int64), np.array([len(nonsense)]), np.array([SWITCH], np.uint64)
    )
    shard.receive(batch, 0.0)
    assert shard.stats()["drop_bad_slot"] == 1
