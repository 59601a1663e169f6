"""Exponents at the root go there directly, and are agreed whatever is lost."""

import numpy as np
import pytest

from inanet.proto.slots.exponents import GROUP, ExponentClient, ExponentRoot, Question
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.xagg import Kind, Packet
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

    def down(self, lose: tuple[int, ...] = ()) -> None:
        for transmission in self.root.transmit(0.0):
            worker = transmission.destination - 100
            if worker not in lose:
                batch = self._batch(transmission, ROOT)
                for index in range(len(batch)):
                    self.clients[worker].receive(batch, index)

    @staticmethod
    def _batch(transmission: Transmission, source: int) -> PacketBatch:
        return batch_of([(transmission.packet(i), source) for i in range(len(transmission))])


def offered(group: Group, round_: int, blocks: int) -> list[Question]:
    rng = np.random.default_rng(round_)
    questions = []
    for client in group.clients:
        question = Question(3, round_, np.zeros(blocks, np.uint8))
        mine = rng.integers(0, 255, blocks).astype(np.uint8)
        for part in range(len(question.agreed)):
            client.offer(question, part, mine[part * GROUP : (part + 1) * GROUP], 0.0)
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
