"""A PS shard that is killed and started again: with its journal nothing is lost, without it everybody is told."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inanet.proto.zebra import journal
from inanet.proto.zebra.job import fixed
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.store import Adagrad, Ftrl
from inanet.proto.zebra.worker import IterationDone, Refused, Stalled
from inanet.testing.switched import Impairment
from inanet.wire.batch import PacketBatch

from .rig import Notes, Rig, random_gradients, spread
from .test_sums import BAD

KEYS = np.arange(40, dtype=np.uint64)
ONES = np.ones((40, 1), np.float32)


def trained(
    seed: int, workers: int, shards: int, impaired: bool, restarts: tuple[tuple[int, int], ...], long: int
) -> list[bytes]:
    """The model after each of four iterations, with another hot set from the third on. Whenever one of the intervals, in virtual
    microseconds, has passed, a shard is restarted, or the switch, whose number is that of the shards.
    """
    rng, seen = np.random.default_rng(seed), []
    rig = Rig(
        workers, shards, Impairment(seed, **BAD) if impaired else None, optimiser=Adagrad(0.1), long=long
    )
    rig.start(fixed(1, spread(np.arange(20, dtype=np.uint64))))
    for iteration in range(4):
        gradients = random_gradients(rng, workers, 60, 60)
        for worker, (keys, _) in zip(rig.workers, gradients, strict=True):
            # sums that no order of additions in floats would give twice
            values = np.random.default_rng(iteration).standard_normal((len(keys), 1)).astype(np.float32)
            worker.push(keys, values, rig.star.now)
        if iteration == 0:
            rig.prepare(fixed(2, spread(np.arange(10, 50, dtype=np.uint64)[::-1].copy())))
        for interval, which in restarts:
            rig.star.settle(1e-6 * interval)
            if which % (shards + 1) == shards:
                rig.restart()
            else:
                rig.restart_shard(which % (shards + 1))
        done = iteration + 1
        rig.star.run(lambda done=done: all(worker.done == done for worker in rig.workers), deadline=30.0)
        seen += [part.tobytes() for shard in rig.shards for part in shard.store.items()]
        pulled = rig.pull(spread(np.arange(60, dtype=np.uint64)))
        assert all((one == pulled[0]).all() for one in pulled)
        seen.append(pulled[0].tobytes())
    assert {worker.hot.version for worker in rig.workers} == {2}
    return seen


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**20),
    workers=st.integers(1, 4),
    shards=st.integers(1, 2),
    impaired=st.booleans(),
    restarts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2)), min_size=1, max_size=3).map(tuple),
    long=st.sampled_from([0, 1000, 1 << 30]),
)
def test_no_moment_of_a_restart_changes_a_bit(
    seed: int, workers: int, shards: int, impaired: bool, restarts: tuple[tuple[int, int], ...], long: int
) -> None:
    clean = trained(seed, workers, shards, False, (), 1 << 30)
    assert trained(seed, workers, shards, impaired, restarts, long) == clean


def test_what_was_acknowledged_and_not_finished_is_sent_again_by_workers_and_switch() -> None:
    """A shard dies with all but one worker's gradients, and nobody has anything left to repeat."""
    rig = Rig(3, 1)
    rig.start(fixed(1, KEYS[:20]))
    rig.push([(KEYS, ONES)] * 3)
    for worker in rig.workers[:2]:
        worker.push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.005)
    assert [worker._push.unacknowledged() for worker in rig.workers] == [[], [], []]
    rig.restart_shard(0)
    rig.workers[2].push(KEYS, ONES, rig.star.now)
    rig.star.run(lambda: all(worker.done == 2 for worker in rig.workers), deadline=1.0)
    assert [worker.stats()["restarts"] for worker in rig.workers] == [1, 1, 0]
    assert rig.pull(KEYS)[0].ravel().tolist() == [6.0] * 40


def test_sums_that_the_dead_shard_had_are_sent_again() -> None:
    """The switch's CPU has nothing left to repeat; a worker that the shard has not heard holds the iteration up."""
    rig = Rig(2, 1)
    rig.start(fixed(1, KEYS[:20]))
    shard = rig.shards[0]
    take = shard.receive

    def deaf(batch: PacketBatch, now: float) -> None:
        kept = batch.sources != rig.job.workers[1]
        take(PacketBatch(batch.arena, batch.offsets[kept], batch.lengths[kept], batch.sources[kept]), now)

    shard.receive = deaf  # type: ignore[method-assign]
    for worker in rig.workers:
        worker.push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.005)
    assert (rig.program._tables[3].cpu.kept, rig.program.iterations, shard.finished) == (0, 1, 0)
    rig.restart_shard(0)
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=1.0)
    assert rig.program.stats()["shard_restarts"] == 1
    assert rig.pull(KEYS)[0].ravel().tolist() == [2.0] * 40


def test_an_iteration_that_was_written_down_is_told_again() -> None:
    """A shard dies between its record and its first word to the workers."""
    rig = Rig(2, 1)
    rig.start(fixed(1, KEYS[:20]))
    shard, address = rig.shards[0], rig.job.shards[0]
    shard._tell = lambda values: None  # type: ignore[method-assign]
    for worker in rig.workers:
        worker.push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.01)
    assert (shard.finished, [worker.done for worker in rig.workers]) == (1, [0, 0])
    rig.star.detach(address)
    rig.restart_shard(0)
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=1.0)
    rig.push([(KEYS, ONES)] * 2)
    assert rig.pull(KEYS)[1].ravel().tolist() == [4.0] * 40


def test_a_hot_set_that_was_announced_is_still_the_next_one() -> None:
    rig = Rig(2, 2)
    rig.start(fixed(1, KEYS[:10]))
    rig.push([(KEYS, ONES)] * 2)
    rig.prepare(fixed(2, KEYS[10:20]))
    rig.restart_shard(0)
    rig.push([(KEYS, ONES)] * 2)
    # the last iteration's news, told again, name the set that they named before
    rig.prepare(fixed(3, KEYS[20:30]))
    rig.restart_shard(0)
    rig.push([(KEYS, ONES)] * 2)
    assert {worker.hot.version for worker in rig.workers} == {2}
    rig.push([(KEYS, ONES)] * 2)
    assert {worker.hot.version for worker in rig.workers} == {3}
    assert rig.pull(KEYS)[0].ravel().tolist() == [8.0] * 40


@pytest.mark.parametrize("pulling", [True, False])
def test_a_shard_without_its_journal_is_an_error_of_every_rank_at_once(pulling: bool) -> None:
    rig = Rig(3, 2)
    rig.start(fixed(1, KEYS[:20]))
    rig.push([(KEYS, ONES)] * 3)
    rig.restart_shard(1, lost=True)
    for worker in rig.workers:
        if pulling:
            worker.pull(KEYS[20:], rig.star.now)
        worker.push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.01)
    told = [event for _, event in rig.star.log if isinstance(event, Refused)]
    assert sorted(event.rank for event in told) == [0, 1, 2]
    assert {(event.shard, event.joining) for event in told} == {(1, False)}
    assert (
        "shard 1 (10.0.2.2:5000) has been restarted and knows the model of iteration 0 only, this rank that of 1"
        in told[0].reason
    )
    # nobody waits, nobody sends
    assert [worker.timer() for worker in rig.workers] == [None] * 3
    with pytest.raises(RuntimeError, match=r"rank 0.*has been restarted"):
        rig.workers[0].pull(KEYS, rig.star.now)
    assert sum(isinstance(event, IterationDone) for _, event in rig.star.log) == 3


def test_before_anything_is_finished_a_shard_needs_no_journal() -> None:
    rig = Rig(2, 1)
    rig.start(fixed(1, KEYS[:20]))
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.005)
    rig.restart_shard(0, lost=True)
    rig.workers[1].push(KEYS, ONES, rig.star.now)
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=1.0)
    assert rig.pull(KEYS)[0].ravel().tolist() == [2.0] * 40


# ------------------------------------------------------------- the journal


def kept(optimiser: Ftrl, long: int, steps: int = 5) -> tuple[Rig, Notes]:
    rng, rig = np.random.default_rng(2), Rig(2, 1, optimiser=optimiser, width=2, long=long)
    rig.start(fixed(1, spread(np.arange(20, dtype=np.uint64))))
    for _ in range(steps):
        rig.push(random_gradients(rng, 2, 60, 40, 2))
    return rig, rig.notes[0]


def test_a_journal_that_is_written_anew_says_the_same() -> None:
    rig, notes = kept(Ftrl(0.1), 1 << 30)
    _, short = kept(Ftrl(0.1), 500)
    assert short.rewritten > 0 == notes.rewritten
    assert len(short.data) < len(notes.data)
    wanted = rig.shards[0].snapshot()
    for found in (notes, short):
        shard = ParameterShard(rig.job, 0, Ftrl(0.1))
        assert shard.restore(found.entries()) == 5
        shard.life = 0
        assert shard.snapshot() == wanted


def test_a_record_that_was_cut_off_counts_for_nothing() -> None:
    _, notes = kept(Ftrl(0.1), 1 << 30, 2)
    ends = [end for end, _ in journal.records(notes.data)]
    for cut in range(ends[-2], len(notes.data)):
        assert [end for end, _ in journal.records(notes.data[:cut])] == ends[:-1]


def test_damage_that_is_not_at_the_end_is_told() -> None:
    _, notes = kept(Ftrl(0.1), 1 << 30, 2)
    for place in (0, 9, 60, len(notes.data) - 3):
        broken = bytearray(notes.data)
        broken[place] ^= 4
        with pytest.raises(journal.BadState, match="is damaged"):
            list(journal.records(bytes(broken)))


def test_a_damaged_length_is_not_taken_for_the_end() -> None:
    _, notes = kept(Ftrl(0.1), 1 << 30, 2)
    begins = [0, *(end for end, _ in journal.records(notes.data))][:-2]
    assert len(begins) == 4
    for begin in begins:
        # counts of keys, or of letters: all that follows would be cut off
        broken = bytearray(notes.data)
        broken[begin + 28 + 5] ^= 4
        with pytest.raises(journal.BadState, match=f"the record at byte {begin} is damaged"):
            list(journal.records(bytes(broken)))


def test_no_model_is_of_an_iteration_that_cannot_be() -> None:
    nothing = np.zeros((0, 1), np.float32)
    forged = journal.parameters(journal.Record.WHOLE, 1 << 63, 0, 0, KEYS[:0], nothing, [])
    with pytest.raises(journal.BadState, match="a record of iteration 9223372036854775808"):
        list(journal.records(forged))


def test_the_journal_of_another_shard_is_refused() -> None:
    rig, notes = kept(Ftrl(0.1), 1 << 30, 1)
    with pytest.raises(
        journal.BadState, match=r"it is of job 3, shard 0.*Ftrl; this is job 3, shard 0.*Adagrad"
    ):
        ParameterShard(rig.job, 0, Adagrad()).restore(notes.entries())
    with pytest.raises(journal.BadState, match="no model of iteration 4, but one of 1"):
        ParameterShard(rig.job, 0, Ftrl()).restore(notes.entries(), iteration=4)
    _, longer = kept(Ftrl(0.1), 1 << 30, 3)
    with pytest.raises(journal.BadState, match="no model of iteration 1, but one of 3"):
        ParameterShard(rig.job, 0, Ftrl()).restore(longer.entries(), anew=True, iteration=1)
    shard = ParameterShard(rig.job, 0, Ftrl())
    shard.restore(notes.entries())
    with pytest.raises(ValueError, match="hot set 1 is in use, and was another one"):
        shard.prepare(fixed(1, KEYS))


def test_a_new_job_begins_with_the_model_of_an_iteration_that_all_shards_have() -> None:
    rig, notes = kept(Ftrl(0.1), 500)
    before, _ = kept(Ftrl(0.1), 1 << 30, 4)
    shard = ParameterShard(rig.job, 0, Ftrl(0.1), journal=notes)
    assert shard.restore(notes.entries(), anew=True, iteration=4) == 4
    assert (shard.finished, shard._next) == (0, 0)
    keys, values = shard.store.items()
    assert (keys == before.shards[0].store.items()[0]).all()
    assert (values == before.shards[0].store.items()[1]).all()
    again = ParameterShard(rig.job, 0, Ftrl(0.1))
    assert again.restore(notes.entries()) == 0
    assert (again.store.items()[1] == values).all()


# ------------------------------------------------------- processes of workers


def test_a_second_process_in_a_ranks_place_is_refused_and_no_gradient_counts_twice() -> None:
    """The first has sent some of the first iteration, to switch and shard, when it dies."""
    rig = Rig(2, 1, lives=[11, 12])
    rig.start(fixed(1, KEYS[:20]))
    rig.workers[1].push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.005)
    again = Rig(2, 1, lives=[11, 13]).workers[1]
    again.prepare(rig.sets[0])
    again.start(1)
    rig.star.attach(rig.job.workers[1], again)
    again.push(KEYS[:3], ONES[:3], rig.star.now)
    rig.star.settle(0.01)
    (refused,) = [event for _, event in rig.star.log if isinstance(event, Refused)]
    assert (refused.rank, refused.joining) == (1, True)
    assert "another process has had the place of this rank at shard 0 (10.0.2.1:5000)" in refused.reason
    assert rig.shards[0].stats()["drop_refused"] > 0
    # the first life's gradients are all that counts, also at the switch, which has forgotten them meanwhile
    first = rig.star.machines[rig.job.workers[1]] = rig.workers[1]
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=2.0)
    assert first.stats()["restarts"] == 1
    assert rig.pull(KEYS)[0].ravel().tolist() == [2.0] * 40


def test_a_shard_remembers_processes_over_a_restart() -> None:
    rig = Rig(1, 1, lives=[11])
    rig.push([(KEYS, ONES)])
    rig.restart_shard(0)
    rig.push([(KEYS, ONES)])
    rig.workers[0] = Rig(1, 1, lives=[12]).workers[0]
    rig.star.attach(rig.job.workers[0], rig.workers[0])
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.01)
    assert "which has finished iteration 2" in rig.workers[0].refused


def test_a_shard_that_lets_nobody_join_is_named() -> None:
    rig = Rig(1, 2, lives=[11])
    rig.star.detach(rig.job.shards[1])
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.settle(6.0)
    (stalled,) = [event for _, event in rig.star.log if isinstance(event, Stalled)]
    assert stalled.waiting_for == ("shard 1 (10.0.2.2:5000) has not let this rank join",)


def test_a_switch_that_outlives_a_job_forgets_it_for_the_next() -> None:
    rig = Rig(2, 1, lives=[1, 2])
    rig.start(fixed(1, KEYS[:20]))
    rig.push([(KEYS, ONES)] * 2)
    # part of another iteration is in its registers
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.005)
    after = Rig(2, 1, lives=[3, 4])
    after.program = after.star.program = rig.program
    for machine in (*after.workers, *after.shards):
        machine.prepare(rig.sets[0])
    after.shards[0].announce(1)
    for worker in after.workers:
        worker.start(1)
    after.push([(KEYS, ONES)] * 2)
    assert after.pull(KEYS)[0].ravel().tolist() == [2.0] * 40
    assert after.program.stats()["sums"] == 40


def test_a_switch_that_forgot_a_job_and_one_that_was_restarted_are_two_lives() -> None:
    rig = Rig(2, 1, lives=[1, 2])
    rig.start(fixed(1, KEYS[:20]))
    # a second process joins, is refused, and the first goes on
    again = Rig(2, 1, lives=[1, 3]).workers[1]
    rig.workers[0].push(KEYS, ONES, rig.star.now)
    rig.workers[1].push(KEYS[:0], ONES[:0], rig.star.now)
    for joining in (rig.workers[1], again):
        for sent in joining.transmit(rig.star.now):
            rig.star.send(rig.job.workers[1], sent)
    rig.star.detach(rig.job.workers[1])
    rig.star.settle(0.005)
    assert rig.program._tables[3].begun == 1
    assert not rig.workers[0]._push.unacknowledged()
    rig.restart()
    rig.star.attach(rig.job.workers[1], rig.workers[1])
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=2.0)
    assert rig.pull(KEYS)[0].ravel().tolist() == [1.0] * 40


def test_lives_fit_into_their_fields() -> None:
    rig = Rig(1, 1)
    with pytest.raises(ValueError, match="70000 does not fit"):
        ParameterShard(rig.job, 0, life=70000)
    with pytest.raises(ValueError, match="4294967296 does not fit"):
        Rig(1, 1, lives=[1 << 32])


def test_a_refusal_of_something_earlier_is_late() -> None:
    rig = Rig(1, 1)
    rig.push([(KEYS, ONES)])
    lost = ParameterShard(rig.job, 0)
    worker = rig.workers[0]
    worker.pull(KEYS, rig.star.now)
    sent = worker.transmit(rig.star.now)[0]
    lengths = np.full(len(sent), sent.length, np.int64)
    source = np.full(len(sent), rig.job.workers[0], np.uint64)
    lost.receive(PacketBatch(sent.arena, sent.offsets, lengths, source), rig.star.now)
    (answer,) = lost.transmit(rig.star.now)
    # what was not put on its way is repeated, and the pull is answered by the shard that knows
    rig.star.run(lambda: worker._current is None, deadline=1.0)
    rig.star.send(rig.job.shards[0], answer)
    rig.star.settle(0.001)
    assert (worker.refused, worker.stats()["drop_stale_round"]) == ("", 1)
