"""The linear checksum is linear, agrees with the framing's, and sees every flipped bit."""

import numpy as np
import pytest

from inanet.kernels.checksum import checksum_at, row_checksum, seal_rows, verify_rows
from inanet.kernels.layout import CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS, ROW_WORDS
from inanet.wire import xagg
from inanet.wire.integrity import checksum


def random_rows(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(-(2**31), 2**31, (count, ROW_WORDS)).astype(np.int32)


def test_layout_is_the_framings() -> None:
    assert (HEADER_WORDS, PAYLOAD_WORDS, CHECKSUM_WORD, ROW_WORDS) == (
        xagg.HEADER_WORDS,
        xagg.VALUES,
        xagg.CHECKSUM_WORD,
        xagg.ROW_WORDS,
    )


@pytest.mark.parametrize("count", [1, 2, 32, 255, 256])
def test_agrees_with_the_framing(count: int) -> None:
    words = random_rows(1, count)[0]
    expected = checksum(words[3 : 3 + count].tobytes(), "<")
    assert row_checksum(words, 3, count) == expected
    big = words.astype(">i4").view(np.uint8)
    assert checksum_at(big, 4 * 3, count) == expected


def test_checksum_of_a_sum_is_the_sum_of_checksums() -> None:
    rows = random_rows(2, 1)
    seal_rows(rows, np.arange(2), HEADER_WORDS, PAYLOAD_WORDS)
    total = np.add(rows[0], rows[1], dtype=np.int32)
    ok = np.zeros(1, np.uint8)
    assert verify_rows(total[np.newaxis], np.zeros(1, np.int64), HEADER_WORDS, PAYLOAD_WORDS, ok) == 0
    assert ok[0] == 1


def test_every_single_flipped_bit_is_found() -> None:
    row = random_rows(1, 2)
    seal_rows(row, np.zeros(1, np.int64), HEADER_WORDS, PAYLOAD_WORDS)
    words = PAYLOAD_WORDS + 1
    damaged = np.repeat(row, words * 32, axis=0).view(np.uint32)
    flips = np.arange(words * 32)
    damaged[flips, HEADER_WORDS + flips // 32] ^= np.uint32(1) << (flips % 32).astype(np.uint32)
    ok = np.ones(len(flips), np.uint8)
    assert verify_rows(damaged.view(np.int32), flips, HEADER_WORDS, PAYLOAD_WORDS, ok) == len(flips)
    assert not ok.any()


def test_seal_touches_only_the_checksum_of_the_rows_named() -> None:
    rows = random_rows(4, 3)
    before = rows.copy()
    seal_rows(rows, np.array([2, 0]), HEADER_WORDS, PAYLOAD_WORDS)
    changed = np.argwhere(rows != before)
    assert changed.tolist() == [[0, CHECKSUM_WORD], [2, CHECKSUM_WORD]]


def test_verify_reports_each_row_by_its_place_in_the_index() -> None:
    rows = random_rows(3, 4)
    seal_rows(rows, np.arange(3), HEADER_WORDS, PAYLOAD_WORDS)
    rows[1, HEADER_WORDS + 7] += 1
    ok = np.zeros(3, np.uint8)
    assert verify_rows(rows, np.array([1, 2, 1]), HEADER_WORDS, PAYLOAD_WORDS, ok) == 2
    assert ok.tolist() == [0, 1, 0]
