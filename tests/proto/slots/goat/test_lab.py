"""GOAT over three switches in virtual time: the bits of one host, each sub-model at its node, late workers welcome."""

import numpy as np
import pytest

from inanet.planning.goat.publication import Memory, Publisher
from inanet.proto.common.events import Refused
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode
from tests.proto.slots.goat.lab import (
    TESTBED,
    WORKERS,
    Round,
    floats,
    fragments_of,
    impair,
    lab,
    scheduled,
    spec,
)

#: little memory at the PS's switch, enough for some at the others: KRGS uses all of them, and the PS
SLOTS = {"s1": 5, "s2": 10, "s3": 13}
ELEMENTS = 2_000


@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.CARRIED, ExponentMode.FIXED])
def test_bits_are_those_of_one_host_under_loss_duplication_and_delay(mode):
    what = spec(ELEMENTS, mode=mode)
    its = impair(lab(SLOTS))
    plan = scheduled(what, SLOTS)
    assert {node for part in plan for node in part.nodes} == {0, 1, 2, 3}
    its.add_tensor(0, what, plan)
    reference = LocalTensor(what, 8)
    rounds = [Round(reference, floats(ELEMENTS, 8, seed)) for seed in range(2)]
    for one in rounds:
        its.begin(0, one.arrays)
    its.run(deadline=20.0)
    for one in rounds:
        one.check()
    assert sum(worker.stats()["retransmissions"] for worker in its.workers.values()) > 0
    assert all(program.stats()["completed"] > 0 for program in its.programs.values())
    # a slot names nobody else's fragment: nothing collides
    assert all(program.stats()["collisions"] == 0 for program in its.programs.values())


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_integers_are_exact(dtype):
    what = spec(700, dtype=dtype, mode=ExponentMode.NONE)
    its = impair(lab(SLOTS))
    its.add_tensor(0, what, scheduled(what, SLOTS))
    rng = np.random.default_rng(3)
    numbers = rng.integers(-(2**27), 2**27, (8, 700)).astype(np.int32 if dtype == "i32" else np.int64)
    one = Round(LocalTensor(what, 8), list(numbers))
    its.begin(0, one.arrays)
    its.run(deadline=20.0)
    one.check()


def test_a_late_worker_finds_its_slots_and_the_ps_hears_no_more_than_sums():
    what = spec(ELEMENTS, dtype="i32", mode=ExponentMode.NONE)
    ample = dict.fromkeys(SLOTS, 200)
    its = lab(ample)
    plan = scheduled(what, ample)
    assert {part.nodes for part in plan} == {(2,) * 4 + (3,) * 4}
    its.add_tensor(0, what, plan)
    one = Round(LocalTensor(what, 8), [np.full(ELEMENTS, k, np.int32) for k in range(8)])
    # everybody has sent all there is, and has repeated some of it, when the last one comes
    its.begin(0, one.arrays, delays=[0.0] * 7 + [0.2])
    its.run(deadline=20.0)
    one.check()
    stats = its.server.stats()
    fragments = fragments_of(what)
    assert stats["packets_added"] == 2 * fragments
    assert stats["direct"] == 0
    # two sums for a fragment, one of them repeated while the other is late, instead of eight contributions
    assert its.packets_into_ps() < 8 * fragments


def test_a_node_sums_what_comes_from_another_rack_and_the_rest_is_passed_on():
    what = spec(ELEMENTS)
    only = {"s1": 0, "s2": 200, "s3": 0}
    its = lab(only)
    plan = scheduled(what, only)
    assert {part.nodes for part in plan} == {(2,) * 8}
    its.add_tensor(0, what, plan)
    one = Round(LocalTensor(what, 8), floats(ELEMENTS, 8, 1))
    its.begin(0, one.arrays)
    its.run(deadline=20.0)
    one.check()
    fragments = fragments_of(what)
    assert its.programs["s2"].stats()["folded"] == 8 * fragments
    assert its.programs["s1"].stats()["folded"] == its.programs["s3"].stats()["folded"] == 0
    assert its.server.stats()["packets_added"] == fragments


def test_without_memory_everything_goes_to_the_ps():
    what = spec(ELEMENTS)
    nothing = dict.fromkeys(SLOTS, 0)
    its = lab(nothing)
    its.add_tensor(0, what, scheduled(what, nothing))
    one = Round(LocalTensor(what, 8), floats(ELEMENTS, 8, 1))
    its.begin(0, one.arrays)
    its.run(deadline=20.0)
    one.check()
    assert its.server.stats()["direct"] == 8 * fragments_of(what)


def test_damage_in_a_switch_and_in_the_ps_is_found_and_summed_again():
    what = spec(ELEMENTS, dtype="i32", mode=ExponentMode.NONE)
    ample = dict.fromkeys(SLOTS, 200)
    its = lab(ample)
    its.add_tensor(0, what, scheduled(what, ample))
    one = Round(LocalTensor(what, 8), [np.arange(k, k + ELEMENTS, dtype=np.int32) for k in range(8)])
    its.begin(0, one.arrays, delays=[0.0] * 7 + [0.1])
    registers = its.programs["s3"].file.registers
    table = next(iter(its.server.jobs.values())).table

    def damage() -> None:
        assert registers.bitmap[5] == 0b0111_0000
        registers.values[5, 17] ^= 1 << 12
        # the PS has the other rack's sum by now
        place = int(np.flatnonzero(table.bitmap == 0b1111)[9])
        table.values[place, 3] ^= 1 << 30

    its.network.at(0.05, damage)
    its.run(deadline=20.0)
    one.check()
    assert its.programs["s3"].stats()["drop_bad_checksum"] == 1
    assert its.server.stats()["forgotten"] == 1


def test_several_tensors_follow_each_other_in_memory_of_their_own():
    first, second = spec(500), spec(700)
    ample = dict.fromkeys(SLOTS, 100)
    its = impair(lab(ample))
    tree = TESTBED
    made = Publisher(1, tree.parents, tree.ps, tree.switches, tree.workers, ample, Memory())
    plans = [made.publish("a", fragments_of(first)), made.publish("b", fragments_of(second))]
    taken = [
        (site, slot)
        for plan in plans
        for part in plan
        for site, base in enumerate(part.bases)
        if base >= 0
        for slot in range(base, base + part.count)
    ]
    assert len(taken) == len(set(taken))
    assert [part.number for plan in plans for part in plan] == list(range(sum(map(len, plans))))
    rounds = []
    for tensor, (what, plan) in enumerate(zip((first, second), plans, strict=True)):
        its.add_tensor(tensor, what, plan)
        rounds.append(Round(LocalTensor(what, 8), floats(what.elements, 8, tensor)))
    for _ in range(2):
        for tensor, one in enumerate(rounds):
            again = Round(LocalTensor((first, second)[tensor], 8), floats(one.arrays[0].size, 8, tensor))
            rounds[tensor] = again
            its.begin(tensor, again.arrays)
        its.run(deadline=20.0)
        for one in rounds:
            one.check()


def test_nan_is_refused_by_all_workers_together():
    what = spec(ELEMENTS)
    its = lab(SLOTS)
    its.add_tensor(0, what, scheduled(what, SLOTS))
    arrays = floats(ELEMENTS, 8, 1)
    arrays[2][777] = np.nan
    its.begin(0, arrays)
    its.network.run(lambda: len(its.network.log) == len(WORKERS), deadline=20.0)
    events = dict(its.network.log)
    assert all(isinstance(event, Refused) for event in events.values())
    assert (events["w2"].local_rank, events["w2"].index) == (0, 777)
