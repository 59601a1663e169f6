"""Leaf bitmaps: a PS behind switches that pass incomplete sums on."""

import numpy as np
import pytest

from inanet.proto.slots.leaves import Sums, fold, give, make_leaves
from inanet.wire.drops import Drop

A, B, C, D = 1, 2, 4, 8
FULL = 15


class Table:
    """A table of four workers whose contributions are 1, 10, 100 and 1000."""

    def __init__(self, places: int = 4) -> None:
        self.leaves = make_leaves(places, 2)
        self.completed = np.zeros(1, np.int64)

    def take(self, *packets: tuple[int, int], **marks: int) -> tuple[list[Drop], list[int]]:
        """Packets as (fragment, bitmap); reasons, and places to answer."""
        count = len(packets)
        values = [sum(10**k for k in range(4) if bitmap >> k & 1) for _, bitmap in packets]
        arena = np.array([[value, -value] for value in values], ">i4").view(np.uint8).reshape(-1)
        flags = {name: np.full(count, marks.get(name, 0), np.uint8) for name in ("ecn", "col", "collided")}
        sums = Sums(
            ats=np.arange(count) * 8,
            number=np.array([number for number, _ in packets], np.int64),
            bitmap=np.array([bitmap for _, bitmap in packets], np.uint32),
            slot=np.zeros(count, np.int64),
            **flags,
        )
        reason, out = np.zeros(count, np.uint8), np.zeros(count, np.int64)
        found = fold(self.leaves, sums, arena, np.uint32(FULL), 1.0, reason, out, self.completed)
        return [Drop(code) for code in reason], out[:found].tolist()

    def sum(self, place: int) -> list[int]:
        """What an answer would carry."""
        arena = np.zeros(8, np.uint8)
        give(self.leaves, np.array([place]), arena, 0, 8)
        return arena.view(">i4").tolist()


@pytest.mark.parametrize(
    ("bitmaps", "reasons"),
    [
        # disjoint ones are added, in any order
        ([A, B, C, D], "ok ok ok ok"),
        ([C | D, A | B], "ok ok"),
        # what is in already is dropped, alone or together
        ([A, A, B | C, C, A | B, D], "ok duplicate ok duplicate duplicate ok"),
        # all of them at once replace what is there, and so does any superset
        ([A, C, A | B | C | D], "ok ok ok"),
        ([A, A | B, C | D], "ok ok ok"),
        # partial overlap is ignored; the missing one comes alone
        ([A | B, B | C, C, D], "ok overlap ok ok"),
        ([A | B | C, C | D, D], "ok overlap ok"),
    ],
)
def test_every_worker_counts_once(bitmaps, reasons):
    table = Table()
    got, answered = table.take(*[(1, bitmap) for bitmap in bitmaps])
    assert [reason.label for reason in got] == reasons.split()
    assert answered == [1]
    assert table.sum(1) == [1111, -1111]
    assert table.completed[0] == 1


def test_duplicates_after_completion_are_answered():
    table = Table()
    table.take((1, FULL))
    assert table.take((1, B), (1, A | C)) == ([Drop.DUPLICATE] * 2, [1, 1])
    assert table.completed[0] == 1


def test_a_place_goes_to_the_next_fragment_two_windows_on_and_never_back():
    table = Table()
    table.take((1, FULL))
    assert table.take((5, A)) == ([Drop.OK], [])
    assert table.take((1, B)) == ([Drop.STALE_SEQUENCE], [])
    assert table.take((5, B | C | D)) == ([Drop.OK], [1])
    assert table.sum(1) == [1111, -1111]


def test_marks_of_all_that_came_are_kept_even_of_what_was_not_added():
    table = Table()
    table.take((1, A), ecn=1)
    table.take((1, A), col=1)
    table.take((1, B | C | D))
    assert (table.leaves.ecn[1], table.leaves.col[1], table.leaves.collided[1]) == (1, 1, 0)
    table.take((5, A))
    assert (table.leaves.ecn[1], table.leaves.col[1]) == (0, 0)
