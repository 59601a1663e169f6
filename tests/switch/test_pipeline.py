"""The pipeline without ports: runs, limits, registers, ageing."""

import numpy as np
import pytest

from inanet.phy.device import aligned_offsets
from inanet.proto.common.program import Action, Verdicts
from inanet.switch.egress import EgressQueue
from inanet.switch.pipeline import BATCH, MOST_WAYS, Hardware, Occupancy, Pipeline, RegistersExceeded, Run
from inanet.switch.programs import Registration
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop
from tests.switch.adder import GROUP, Adder, packet

WORKERS, PS = [11, 12, 13], 99
ONES = np.ones(16, np.int32)


def batch(packets: list[bytes], source: int) -> PacketBatch:
    lengths = np.array([len(one) for one in packets], np.int64)
    offsets, size = aligned_offsets(lengths)
    arena = np.zeros(size, np.uint8)
    for at, one in zip(offsets, packets, strict=True):
        arena[at : at + len(one)] = np.frombuffer(one, np.uint8)
    return PacketBatch(arena, offsets, lengths, np.full(len(packets), source, np.uint64))


def handles(count: int, value: int = 5) -> np.ndarray:
    return np.full(count, value, np.uint64)


def through(pipeline: Pipeline, packets: list[bytes], source: int, now: float = 0.0) -> list[Run]:
    """What a worker's packets make leave."""
    given = batch(packets, source)
    return pipeline.process(
        pipeline.registrations[0], given, handles(len(given), source), handles(len(given), 0), now
    )


def contents(run: Run) -> list[bytes]:
    return [run.arena[at : at + run.length].tobytes() for at in run.offsets]


def pipeline_of(adder: Adder, **options: object) -> Pipeline:
    registration = Registration("adder", adder, (range(9, 10),), passes=adder.passes)
    return Pipeline([registration], **options)  # type: ignore[arg-type]


def test_the_last_contribution_leaves_with_the_sum() -> None:
    pipeline = pipeline_of(Adder(WORKERS))
    for number in (0, 1):
        sent = [packet(slot, number, 1, ONES * (slot + number)) for slot in range(20)]
        assert through(pipeline, sent, WORKERS[number]) == []
    (run,) = through(pipeline, [packet(slot, 2, 1, ONES * slot) for slot in range(20)], WORKERS[2])
    assert (run.action, run.target, run.origin, run.mark) == (Action.GROUP, GROUP, 0, False)
    assert contents(run) == [packet(slot, 2, 1, ONES * (3 * slot + 1)) for slot in range(20)]
    again = through(pipeline, [packet(3, 0, 1, ONES)], WORKERS[0])
    assert [(one.action, one.origin, contents(one)) for one in again] == [
        (Action.REPLY, WORKERS[0], [packet(3, 0, 1, ONES * 10)])
    ]
    stats = pipeline.stats()
    assert (stats["absorbed"], stats["emitted"], stats["passed"]) == (40, 21, 0)
    assert stats["stages"]["slot"] == stats["stages"]["aggregate"] == 61  # type: ignore[index]


def test_drops_have_the_programs_reasons() -> None:
    pipeline = pipeline_of(Adder(WORKERS))
    sent = [
        packet(1, 0, 1, ONES),
        packet(1, 0, 1, ONES),
        packet(1, 1, 1, ONES),
        b"abc",
        packet(70, 0, 1, ONES),
    ]
    (run,) = through(pipeline, sent, WORKERS[0])
    assert (run.action, contents(run)) == (Action.PASS, sent[4:])
    assert pipeline.drops_by_reason() == {"duplicate": 1, "foreign_host": 1, "short": 1}


class Scripted(Adder):
    """Judges by a table instead."""

    def __init__(self, table: list[tuple[int, int, int, int]]) -> None:
        super().__init__(WORKERS)
        self.table = table

    def process(self, batch: PacketBatch, congested: object, verdicts: Verdicts, now: float) -> None:
        for i in range(len(batch)):
            action, target, length, mark = self.table[int.from_bytes(batch.packet(i)[:2], "little")]
            verdicts.action[i], verdicts.target[i], verdicts.mark[i] = action, target, mark
            verdicts.length[i] = length or batch.lengths[i]


def test_runs_end_where_way_length_or_mark_change_and_keep_order() -> None:
    table = [
        (Action.PASS, 0, 0, 0),
        (Action.UNICAST, 7, 0, 0),
        (Action.PASS, 0, 0, 0),
        (Action.UNICAST, 8, 0, 0),
        (Action.UNICAST, 7, 0, 1),
        (Action.UNICAST, 7, 0, 1),
        (Action.UNICAST, 7, 4, 1),
        (Action.GROUP, 7, 4, 0),
        (Action.UNICAST, 7, 0, 0),
        (Action.DROP, 0, 0, 0),
    ]
    pipeline = pipeline_of(Scripted(table))
    packets = [i.to_bytes(2, "little") + bytes(10) for i in range(len(table))]
    runs = through(pipeline, packets, WORKERS[0])
    found = [(run.action, run.target, run.mark, [one[0] for one in contents(run)]) for run in runs]
    assert found == [
        (Action.PASS, 0, False, [0, 2]),
        (Action.UNICAST, 7, False, [1]),
        (Action.UNICAST, 7, True, [4, 5]),
        (Action.UNICAST, 7, True, [6]),
        (Action.UNICAST, 7, False, [8]),
        (Action.UNICAST, 8, False, [3]),
        (Action.GROUP, 7, False, [7]),
    ]
    assert [run.length for run in runs] == [12, 12, 12, 4, 12, 12, 4]


def test_more_ways_than_one_call_tells_apart_and_more_packets_than_a_batch() -> None:
    count = BATCH + 1000
    table = [(Action.UNICAST, i, 0, 0) for i in range(count)]
    pipeline = pipeline_of(Scripted(table))
    runs = through(pipeline, [i.to_bytes(2, "little") for i in range(count)], WORKERS[0])
    assert len(runs) == count > MOST_WAYS
    assert [(run.target, contents(run)) for run in runs] == [
        (i, [i.to_bytes(2, "little")]) for i in range(count)
    ]


def test_programs_that_do_not_fit_are_refused() -> None:
    one, two = Adder(WORKERS, name="one"), Adder(WORKERS, name="two")
    size = one.register_bytes()
    registrations = [
        Registration("one", one, (range(9, 10),)),
        Registration("two", two, (range(10, 11),)),
    ]
    assert Pipeline(registrations, Hardware(registers=2 * size)).registers.free == 0
    with pytest.raises(
        RegistersExceeded,
        match=rf"program two takes {size} B of registers and {size - 1} of {2 * size - 1} B are free "
        rf"\(one {size} B\): give it fewer slots, or the switch a larger register file",
    ):
        Pipeline(registrations, Hardware(registers=2 * size - 1))
    with pytest.raises(RegistersExceeded, match=f"its share is {size - 1} B: give it a larger share"):
        Pipeline([Registration("one", one, (range(9, 10),), share=size - 1)])


def test_programs_that_claim_the_same_packets_are_refused() -> None:
    one, two = Adder(WORKERS), Adder(WORKERS)
    with pytest.raises(
        ValueError, match="programs one and two both claim UDP ports 12 to 14; give one others"
    ):
        Pipeline([Registration("one", one, (range(9, 15),)), Registration("two", two, (range(12, 20),))])
    with pytest.raises(ValueError, match="one and two both claim raw frames"):
        Pipeline([Registration("one", one, raw=True), Registration("two", two, raw=True)])
    with pytest.raises(ValueError, match="two programs are named one"):
        Pipeline([Registration("one", one), Registration("one", two)])


def test_a_program_with_too_many_passes_is_refused_at_load() -> None:
    with pytest.raises(ValueError, match=r"program adder need 4 passes .* recirculates them 2 times at most"):
        pipeline_of(Adder(WORKERS, passes=4), hardware=Hardware(recirculations=2))


def test_passes_beyond_the_limit_are_dropped_and_counted() -> None:
    adder = Adder(WORKERS[:1], passes=1)
    pipeline = pipeline_of(adder, hardware=Hardware(recirculations=2))
    adder.passes = 3
    assert len(through(pipeline, [packet(1, 0, 1, ONES)], WORKERS[0])) == 1
    adder.passes = 4
    assert through(pipeline, [packet(1, 0, 2, ONES)] * 2, WORKERS[0]) == []
    stats = pipeline.stats()
    assert (stats["over_the_limit"], stats["most_passes"], stats["recirculations"]) == (2, 4, 2 + 6)
    assert pipeline.drops_by_reason() == {Drop.TOO_MANY_PASSES.label: 2}


def test_passes_beyond_the_limit_are_told_of_absorbed_packets_too() -> None:
    """The program has added them already, which the hardware would not have done."""
    adder = Adder(WORKERS, passes=1)
    pipeline = pipeline_of(adder, hardware=Hardware(recirculations=2))
    adder.passes = 4
    assert through(pipeline, [packet(1, 0, 1, ONES)] * 2, WORKERS[0]) == []
    stats = pipeline.stats()
    assert (stats["absorbed"], stats["over_the_limit"]) == (1, 1)
    assert pipeline.drops_by_reason() == {Drop.DUPLICATE.label: 1}


def test_recirculation_takes_the_loopback_ports_bandwidth_before_anything_is_added() -> None:
    adder = Adder(WORKERS[:2], passes=3)
    # 1 MB/s, room for three packets' second and third passes
    size = 2 * len(packet(0, 0, 0, ONES))
    loopback = EgressQueue("loopback", 8e6, 3 * size + 5)
    pipeline = pipeline_of(adder, loopback=loopback)
    sent = [packet(slot, 0, 1, ONES) for slot in range(5)]
    assert through(pipeline, sent, WORKERS[0]) == []
    assert adder.bitmap[:5].tolist() == [1, 1, 1, 0, 0]
    assert pipeline.drops_by_reason() == {"queue_full": 2}
    assert through(pipeline, sent[3:], WORKERS[0], now=2 * size / 1e6) == []
    assert adder.bitmap[:5].tolist() == [1, 1, 1, 1, 1]


def test_slots_age_out_and_occupancy_is_sampled() -> None:
    adder = Adder(WORKERS, PS, age=2.0)
    pipeline = pipeline_of(adder, occupancy=Occupancy(interval=1.0, capacity=3))
    assert pipeline.timer() == 0.0
    pipeline.on_timer(0.0)
    through(pipeline, [packet(4, 0, 1, ONES), packet(5, 0, 1, ONES)], WORKERS[0], now=0.5)
    through(pipeline, [packet(4, 1, 1, ONES * 5)], WORKERS[1], now=0.75)
    seen: list[Transmission] = []
    for _ in range(4):
        now = pipeline.timer()
        pipeline.on_timer(now)
        for run in pipeline.spilled(pipeline.registrations[0], 3):
            assert (run.action, run.target, run.origin) == (Action.UNICAST, PS, 3)
            seen.append((now, contents(run)))  # type: ignore[arg-type]
    assert seen == [(2.5, [packet(5, 255, 1, ONES)]), (2.75, [packet(4, 255, 1, ONES * 6)])]
    assert pipeline.stats()["occupancy"] == [
        {"at": 0.0, "slots": {"adder/1": 0}},
        {"at": 1.0, "slots": {"adder/1": 2}},
        {"at": 2.0, "slots": {"adder/1": 2}},
    ]
