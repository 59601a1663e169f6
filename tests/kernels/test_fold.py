"""Folding a packet into a slot, against numpy."""

from collections.abc import Callable

import numpy as np
import pytest

from inanet.kernels import fold
from inanet.kernels.checksum import seal_rows, verify_rows
from inanet.kernels.layout import CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS, ROW_WORDS

SLOT = 2
#: the packet does not start where the arena does
OFFSET = 5
PAYLOAD = slice(HEADER_WORDS, CHECKSUM_WORD)
Words = np.ndarray


@pytest.fixture
def rows() -> Words:
    made = np.random.default_rng(5).integers(-(2**31), 2**31, (4, ROW_WORDS)).astype(np.int32)
    seal_rows(made, np.arange(4), HEADER_WORDS, PAYLOAD_WORDS)
    return made


@pytest.fixture
def packet(rows: Words) -> Words:
    made = np.random.default_rng(6).integers(-(2**31), 2**31, (1, ROW_WORDS)).astype(np.int32)
    # equal words and equal halves, for the comparisons of the maxima
    for same in (slice(6, 46), slice(46, 86, 2), slice(87, 127, 2)):
        made[0, same] = rows[SLOT, same]
    seal_rows(made, np.zeros(1, np.int64), HEADER_WORDS, PAYLOAD_WORDS)
    return made[0]


def in_arena(packet: Words) -> Words:
    arena = np.full(OFFSET + ROW_WORDS + 3, 0x5A5A5A5A, np.int32)
    arena[OFFSET : OFFSET + ROW_WORDS] = packet
    return arena


def sums(a: Words, b: Words) -> Words:
    return np.add(a, b, dtype=np.int32)


def maxima64(a: Words, b: Words) -> Words:
    return np.maximum(a.copy().view("<i8"), b.copy().view("<i8")).view(np.int32)


def maxima8(a: Words, b: Words) -> Words:
    return np.maximum(a.copy().view(np.uint8), b.copy().view(np.uint8)).view(np.int32)


@pytest.mark.parametrize(
    ("function", "oracle"),
    [
        (fold.fold_copy, lambda a, b: b),
        (fold.fold_add, sums),
        (fold.fold_max32, np.maximum),
        (fold.fold_max64, maxima64),
        (fold.fold_max8, maxima8),
    ],
)
def test_against_numpy(
    function: Callable[..., object], oracle: Callable[[Words, Words], Words], rows: Words, packet: Words
) -> None:
    before = rows.copy()
    function(rows, SLOT, in_arena(packet), OFFSET)
    expected = before.copy()
    expected[SLOT, PAYLOAD] = oracle(before[SLOT, PAYLOAD], packet[PAYLOAD])
    if function in (fold.fold_copy, fold.fold_add):
        expected[SLOT, CHECKSUM_WORD] = oracle(before[SLOT, CHECKSUM_WORD:], packet[CHECKSUM_WORD:])[0]
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("function", [fold.fold_copy, fold.fold_add])
def test_checksum_stays_true(function: Callable[..., object], rows: Words, packet: Words) -> None:
    function(rows, SLOT, in_arena(packet), OFFSET)
    ok = np.zeros(4, np.uint8)
    assert verify_rows(rows, np.arange(4), HEADER_WORDS, PAYLOAD_WORDS, ok) == 0
