"""A switch's program of epochs, packet by packet: how many are enough, what is acknowledged, what is old, who may speak."""

from typing import Any

import numpy as np
import pytest

from inanet.proto.common.program import Action, Verdicts
from inanet.proto.slots.goat.frames import seal
from inanet.proto.slots.goat.program import tenant_at
from inanet.proto.slots.goat_async.program import PARITY_BYTES, EpochProgram
from inanet.wire.drops import Drop
from inanet.wire.goat import FRAME, MAGIC_VERSION, EpochKind, Kind
from tests.proto.slots.goat.test_policy import FACTS, KEY, PARTS, S1, W0, W1, W4
from tests.proto.tree.rig import batch_of

PATIENT = 0.006


def frame(kind: int, *, worker: int = 0, number: int = 1, value: int | None = None, **fields: Any) -> bytes:
    """A packet; of ``worker`` unless ``bitmap`` says otherwise."""
    made = np.zeros(1, FRAME)
    made["magic"], made["kind"], made["job"], made["number"] = MAGIC_VERSION, kind, 1, number
    made["node"], made["bitmap"] = 2, 1 << worker
    made["values"] = worker + 1 if value is None else value
    for name, content in fields.items():
        if name == "values":
            made["values"][0, : len(content)] = content
        else:
            made[name] = content
    seal(made.view(np.uint8).reshape(1, -1), np.uint64(KEY))
    return made.tobytes()


def data(worker: int, number: int = 1, **fields: Any) -> bytes:
    return frame(Kind.DATA, worker=worker, number=number, **fields)


def publish(epoch: int, needs: list[int], *, revision: int = 0, mask: int = 0) -> bytes:
    values = [*needs, *([0] * (64 - len(needs)))]
    return frame(EpochKind.PUBLISH, number=epoch, fragment=revision, bitmap=mask, values=values)


def taken(number: int, asker: int = 0, **fields: Any) -> bytes:
    return frame(EpochKind.TAKEN, number=number, asker=asker, bitmap=1, **fields)


class Judge:
    """The program at S2, which sums sub-model 0 of w0 and w1 and sub-model 1 of w0 and w4."""

    def __init__(self) -> None:
        self.program = EpochProgram(budget=100 * (284 + PARITY_BYTES))
        self.program.add_job(tenant_at(FACTS, 2, KEY))
        self.program.hold(1, PARTS)

    def __call__(self, packet: bytes, source: int, now: float = 0.0) -> tuple[str, int, Any]:
        """What becomes of a packet: 'gone' and the reason, or a kind, where it goes, and the packet."""
        batch = batch_of([(packet, source)])
        verdicts = Verdicts(1)
        self.program.process(batch, np.zeros(1, np.uint8), verdicts, now)
        if verdicts.action[0] == Action.DROP:
            return "gone", int(verdicts.reason[0]), None
        found = np.frombuffer(batch.packet(0), FRAME)[0]
        kind = int(found["kind"])
        name = (Kind(kind) if kind <= Kind.RESULT else EpochKind(kind)).name
        return name, int(verdicts.target[0]), found

    def drawn(self) -> list[Any]:
        return [
            np.frombuffer(one.packet(k), FRAME)[0]
            for one in self.program.spilled()
            for k in range(len(one.offsets))
        ]


@pytest.fixture
def judge() -> Judge:
    return Judge()


def test_a_contribution_comes_back_as_its_acknowledgement_until_enough_are_in(judge: Judge) -> None:
    assert judge(publish(1, [2]), S1)[0] == "gone"
    kind, to, found = judge(data(0), W0)
    assert (kind, to, int(found["number"]), int(found["bitmap"])) == ("ACK", W0, 1, 1)
    kind, to, found = judge(data(1), W1)
    assert (kind, to, int(found["bitmap"]), int(found["asker"])) == ("SUM", S1, 0b11, 2)
    assert (found["values"] == 3).all()
    # a copy of what is in the sum sends it again, not too often
    assert judge(data(0), W0)[:2] == ("gone", Drop.DUPLICATE)
    kind, to, found = judge(data(0), W0, PATIENT)
    assert (kind, int(found["number"]), int(found["asker"])) == ("SUM", 1, 1)


def test_one_is_enough_where_one_is_published_and_the_late_one_counts_in_the_next_epoch(judge: Judge) -> None:
    judge(publish(1, [1]), S1)
    kind, _, found = judge(data(1), W1)
    assert (kind, int(found["bitmap"])) == ("SUM", 0b10)
    # what comes while the sum is under way is passed on as it is, and so is a copy of that
    for _ in range(2):
        kind, to, found = judge(data(0), W0)
        assert (kind, to, int(found["bitmap"]), int(found["node"])) == ("PASSED", S1, 1, 2)
    # the PS has the sum: whoever made it leave is told, and the slot is free
    kind, to, found = judge(taken(1, asker=2), S1)
    assert (kind, to, int(found["number"])) == ("ACK", W1, 1)
    assert judge(taken(1, asker=2), S1)[:2] == ("gone", Drop.UNMATCHED)
    # the next gradient of w1 stays: this epoch's sum has left
    kind, _, _ = judge(data(1, number=2), W1)
    assert kind == "ACK"
    assert judge.drawn() == []
    assert judge(publish(2, [1]), S1)[0] == "gone"
    (late,) = judge.drawn()
    assert (int(late["kind"]), int(late["bitmap"]), int(late["number"])) == (Kind.SUM, 0b10, 2)
    assert (late["values"] == 2).all()


def test_copies_are_told_from_new_gradients_however_late_they_are(judge: Judge) -> None:
    judge(publish(1, [2]), S1)
    for fragment in (0, 1):
        judge(data(0, fragment=fragment), W0)
        judge(data(1, fragment=fragment), W1)
        judge(taken(1, asker=2, fragment=fragment), S1)
    # its sum has left: only the PS can tell whether that has counted
    assert judge(data(0), W0)[0] == "PASSED"
    assert judge(data(0, number=2), W0)[0] == "ACK"
    assert judge(data(0, number=2), W0)[0] == "ACK"
    # of the gradient before, and of one that cannot be yet
    for number in (1, 0, 4):
        assert judge(data(0, number=number), W0)[:2] == ("gone", Drop.STALE_SEQUENCE)
    # another fragment of it has not been seen
    assert judge(data(0, number=2, fragment=1), W0)[0] == "ACK"
    judge(publish(2, [1]), S1)
    first, second = judge.drawn()
    assert (first["values"] == 1).all()
    assert int(first["bitmap"]) == int(second["bitmap"]) == 1


def test_a_slot_whose_release_is_lost_is_free_with_the_next_gradient_of_a_worker_in_it(judge: Judge) -> None:
    judge(publish(1, [1]), S1)
    assert judge(data(1), W1)[0] == "SUM"
    # the PS has it and says so in vain; the worker's next gradient is no copy, and is not behind the sum either
    judge(publish(2, [2]), S1)
    assert judge(data(1, number=2, value=7), W1)[0] == "ACK"
    assert judge.program.stats()["occupied_1"] == 1
    # nobody tells the worker that the PS has this one
    assert judge(taken(1, asker=2), S1)[:2] == ("gone", Drop.UNMATCHED)
    kind, _, found = judge(data(0), W0)
    assert (kind, int(found["bitmap"]), int(found["number"])) == ("SUM", 0b11, 2)
    assert (found["values"] == 8).all()


def test_a_late_notification_never_undoes_a_newer_one(judge: Judge) -> None:
    judge(publish(3, [2, 2]), S1)
    judge(publish(3, [1, 2], revision=2), S1)
    for late in (publish(2, [5, 5], revision=9), publish(3, [5, 5]), publish(3, [5, 5], revision=2)):
        judge(late, S1)
    assert judge.program.published(1) == {0: (3, 2, 1), 1: (3, 2, 2), 2: (3, 2, 0)}
    judge(publish(4, [2, 1]), S1)
    judge(publish(3, [9, 9], revision=7), S1)
    assert judge.program.published(1)[0] == (4, 0, 2)


def test_those_who_are_waited_for_no_longer_leave_at_once_whatever_the_number_says(judge: Judge) -> None:
    judge(publish(1, [2]), S1)
    assert judge(data(0), W0)[0] == "ACK"
    judge(publish(1, [2], revision=1, mask=0b01), S1)
    (found,) = judge.drawn()
    assert (int(found["bitmap"]), int(found["asker"])) == (1, 0)
    # nothing of somebody else's
    judge(taken(1), S1)
    assert judge(data(1), W1)[0] == "ACK"
    judge(publish(1, [2], revision=2, mask=0b01), S1)
    assert judge.drawn() == []


def test_publications_survive_other_jobs_and_go_with_their_own(judge: Judge) -> None:
    judge(publish(5, [2]), S1)
    judge(data(0, number=1), W0)
    judge.program.hold(1, (type(PARTS[0])(3, 8, 1, (0,) * 8, (-1, -1, -1)),))
    assert judge.program.published(1)[0] == (5, 0, 2)
    kind, _, found = judge(data(1), W1)
    assert (kind, int(found["bitmap"])) == ("SUM", 0b11)
    judge.program.remove_job(1)
    judge.program.add_job(tenant_at(FACTS, 2, KEY))
    judge.program.hold(1, PARTS)
    assert judge.program.published(1)[0] == (0, 0, 0)
    # gradients are counted anew, and what was in the slot is gone
    judge(publish(1, [1]), S1)
    kind, _, found = judge(data(1), W1)
    assert (kind, int(found["number"]), (found["values"] == 2).all()) == ("SUM", 1, True)


@pytest.mark.parametrize(
    ("packet", "source", "reason"),
    [
        (data(0), W1, Drop.FOREIGN_HOST),
        (data(4), W4, Drop.FOREIGN_HOST),
        (data(0, bitmap=3), W0, Drop.FOREIGN_HOST),
        (data(0, fragment=4), W0, Drop.BAD_SLOT),
        (data(0, submodel=7), W0, Drop.BAD_SLOT),
        (data(0, node=64), W0, Drop.NO_ROUTE),
        (publish(1, [1]), W0, Drop.FOREIGN_HOST),
        (taken(1), W0, Drop.FOREIGN_HOST),
        (frame(Kind.RESULT), W0, Drop.FOREIGN_HOST),
        (frame(Kind.SUM, node=3), W0, Drop.FOREIGN_HOST),
        (frame(EpochKind.PASSED, node=2), W0, Drop.FOREIGN_HOST),
        (frame(EpochKind.ACK, node=0), W0, Drop.FOREIGN_HOST),
        (frame(10), W0, Drop.BAD_TYPE),
        (data(0)[:-1], W0, Drop.SHORT),
        (taken(1, fragment=99), S1, Drop.BAD_SLOT),
        (taken(1, submodel=40), S1, Drop.BAD_SLOT),
    ],
)
def test_nobody_speaks_for_another(judge: Judge, packet: bytes, source: int, reason: Drop) -> None:
    assert judge(packet, source)[:2] == ("gone", reason)


def test_what_is_for_others_goes_on(judge: Judge) -> None:
    for packet, source, where in (
        (data(0, node=3), W0, S1),
        (data(0, node=0), W0, S1),
        (frame(EpochKind.READY, node=0), W0, S1),
        (frame(Kind.RESULT, node=0), S1, W0),
        (frame(EpochKind.REPEAT, node=0), S1, W0),
        (frame(EpochKind.ACK, node=0), S1, W0),
        (frame(EpochKind.ACK, node=3), S1, W0),
    ):
        assert judge(packet, source)[1] == where


def test_a_damaged_slot_is_forgotten_and_its_workers_may_send_again(judge: Judge) -> None:
    judge(publish(1, [2]), S1)
    judge(data(0), W0)
    judge.program.file.registers.values[10, 3] ^= 1 << 9
    assert judge(data(1), W1)[:2] == ("gone", Drop.BAD_CHECKSUM)
    assert judge.program.stats()["occupied_1"] == 0
    assert judge(data(0), W0)[0] == "ACK"
    kind, _, found = judge(data(1), W1)
    assert (kind, int(found["bitmap"]), (found["values"] == 3).all()) == ("SUM", 0b11, True)


def test_a_sum_that_is_damaged_on_its_second_way_is_not_sent_for_ever(judge: Judge) -> None:
    judge(publish(1, [2]), S1)
    judge(data(0), W0)
    assert judge(data(1), W1)[0] == "SUM"
    # it is lost, or the PS's word of it
    judge.program.file.registers.values[10, 3] ^= 1 << 9
    for worker, port in ((1, W1), (0, W0), (0, W0)):
        kind, to, found = judge(data(worker), port, PATIENT)
        assert (kind, to, int(found["bitmap"]), int(found["values"][0])) == (
            "PASSED",
            S1,
            1 << worker,
            worker + 1,
        )
    assert judge.program.stats()["occupied_1"] == 0
    assert judge(data(1, number=2), W1)[0] == "ACK"


def test_registers_have_room_for_what_tells_gradients_apart() -> None:
    program = EpochProgram(budget=100 * (284 + PARITY_BYTES))
    assert program.file.slots == 100
    assert program.register_bytes() == 100 * (284 + PARITY_BYTES)
