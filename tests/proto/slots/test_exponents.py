"""Exponents at the root go there directly, and are agreed whatever is lost."""

import numpy as np
import pytest

from inanet.proto.slots.exponents import PART, ExponentClient, ExponentRoot, Question
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.xagg import Kind, Packet, decode
from tests.proto.tree.rig import batch_of

KEY, ROOT = 99, 5


class Group:
    """``workers`` clients at addresses 100, 101, ... and their root."""

    def __init__(self, workers: int = 3) -> None:
        self.root = ExponentRoot()
        self.root.add_job(7, KEY, {100 + k: 1 << k for k in range(workers)})
        self.offers: dict[int, list[np.ndarray]] = {}
        self.clients = [ExponentClient(7, ROOT, 1 << k, KEY) for k in range(workers)]

    def up(self, worker: int, now: float = 0.0) -> None:
        for transmission in self.clients[worker].transmit(now):
            self.root.receive(self._batch(transmission, 100 + worker), now)

    def down(self, lose: tuple[int, ...] = (), now: float = 0.0) -> None:
        for transmission in self.root.transmit(0.0):
            worker = transmission.destination - 100
            if worker not in lose:
                batch = self._batch(transmission, ROOT)
                self.clients[worker].receive(batch, np.arange(len(batch)), now)

    @staticmethod
    def _batch(transmission: Transmission, source: int) -> PacketBatch:
        return batch_of([(transmission.packet(i), source) for i in range(len(transmission))])


def offered(group: Group, round_: int, blocks: int) -> list[Question]:
    rng = np.random.default_rng(round_)
    questions = []
    for client in group.clients:
        question = Question(3, round_, np.zeros(blocks, np.uint8))
        mine = rng.integers(0, 255, blocks).astype(np.uint8)
        client.offer(question, 0, mine[:PART], 0.0)
        if blocks > PART:
            client.offer(question, 1, mine[PART:], 0.0)
        questions.append(question)
        group.offers.setdefault(round_, []).append(mine)
    return questions


def test_all_get_the_maxima():
    group = Group()
    questions = offered(group, 1, 2500)
    for worker in range(3):
        group.up(worker)
    group.down()
    expected = np.max(group.offers[1], axis=0)
    for question in questions:
        assert question.done
        np.testing.assert_array_equal(question.table, expected)
    assert all(client.timer() is None for client in group.clients)


def test_a_lost_answer_is_given_again_also_when_others_have_begun_the_next_round():
    group = Group()
    first = offered(group, 1, 10)
    for worker in range(3):
        group.up(worker)
    group.down(lose=(1,))
    # workers 0 and 2 go on; worker 1 still lacks the first round
    offered(group, 2, 10)
    group.up(0)
    group.up(2)
    assert not first[1].done
    group.up(1, now=group.clients[1].timer() + 0.1)
    group.down()
    assert first[1].done
    np.testing.assert_array_equal(first[1].table, np.max(group.offers[1], axis=0))


def test_repetitions_back_off_and_are_counted():
    group = Group()
    offered(group, 1, 10)
    client, times, now = group.clients[0], [], 0.0
    for _ in range(12):
        assert len(client.transmit(now)) == 1
        times.append(now)
        assert client.transmit(now) == []
        now = client.timer()
    assert np.diff(times).tolist() == pytest.approx([0.01 * 1.5**n for n in range(10)] + [0.5])
    assert client.repeated == 11


def test_rounds_older_than_two_are_stale():
    group = Group(1)
    for round_ in (1, 2, 3):
        offered(group, round_, 1)
        group.up(0)
        group.down()
    packet = Packet(Kind.DATA, 7, 1, 0, 1, 3, 0, 0, bytes(1024)).encode(KEY)
    group.root.receive(batch_of([(packet, 100)]), 0.0)
    assert group.root.drops[Drop.STALE_ROUND] == 1


@pytest.mark.parametrize(
    ("changes", "source", "key", "reason"),
    [
        ({"job": 8}, 100, KEY, Drop.FOREIGN_JOB),
        ({}, 100, KEY + 1, Drop.BAD_TAG),
        ({}, 101, KEY, Drop.FOREIGN_HOST),
        ({"kind": Kind.RESULT}, 100, KEY, Drop.BAD_TYPE),
    ],
)
def test_every_drop_has_its_reason(changes, source, key, reason):
    group = Group()
    fields = {"kind": Kind.DATA, "job": 7, "host": 1, "gradient": 0, "round": 1, "shard": 3} | changes
    packet = Packet(plan=0, attempt=0, payload=bytes(1024), **fields).encode(key)
    group.root.receive(batch_of([(packet, source)]), 0.0)
    assert group.root.drops[reason] == 1
    assert group.root.transmit(0.0) == []


def test_packets_are_those_of_the_framing() -> None:
    group = Group(1)
    (question,) = offered(group, 1, 1500)
    (sent,) = group.clients[0].transmit(0.0)
    packets = [decode(sent.packet(k), KEY) for k in range(len(sent))]
    assert [(p.kind, p.job, p.host, p.gradient, p.round, p.shard) for p in packets] == [
        (Kind.DATA, 7, 1, part, 1, 3) for part in range(2)
    ]
    assert b"".join(p.payload for p in packets) == question.own.tobytes() + bytes(2 * 1024 - 1500)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, Drop.OK),
        ({"gradient": 1}, Drop.DUPLICATE),
        ({"gradient": 2}, Drop.BAD_FRAGMENT),
        ({"gradient": 2**32 - 1}, Drop.BAD_FRAGMENT),
        ({"shard": 4}, Drop.DUPLICATE),
        ({"round": 2}, Drop.DUPLICATE),
        ({"job": 8}, Drop.FOREIGN_JOB),
        ({"kind": Kind.DATA}, Drop.BAD_TYPE),
    ],
)
def test_an_answer_counts_only_for_a_part_that_was_asked_for(changes: dict[str, int], reason: Drop) -> None:
    client = ExponentClient(7, ROOT, 1, KEY)
    question = Question(3, 1, np.zeros(2 * PART, np.uint8))
    client.offer(question, 0, np.ones(PART, np.uint8), 0.0)
    client.transmit(0.0)
    fields = {"kind": Kind.RESULT, "job": 7, "host": 0, "gradient": 0, "round": 1, "shard": 3} | changes
    answer = Packet(plan=0, attempt=0, payload=bytes([9]) * 1024, **fields).encode(KEY)
    assert client.receive(batch_of([(answer, ROOT)]), np.zeros(1, np.int64), 0.0).tolist() == [reason]
    assert question.agreed.tolist() == [reason is Drop.OK, False]
    assert question.table.any() == (reason is Drop.OK)


def test_repetitions_wait_for_answers_that_take_long() -> None:
    """A straggler's answers come after 50 ms: what is offered from then on is not repeated at the first timeout of 10 ms."""
    group = Group(1)
    client, now = group.clients[0], 0.0
    for round_ in range(1, 9):
        offered(group, round_, 10)
        repeated = client.repeated
        while now < round_ * 0.05:
            group.up(0, now)
            now = round(now + 0.001, 6)
        group.down(now=now)
    assert client.repeated == repeated > 0
    assert client.timer() is None


def test_workers_share_what_the_root_can_hold() -> None:
    rooms = [ExponentClient(7, ROOT, 1, KEY, workers=workers).room for workers in (1, 2, 8, 32)]
    assert rooms == [996, 498, 124, 31]
