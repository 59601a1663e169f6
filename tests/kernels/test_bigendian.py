"""Payloads in network byte order, against numpy, at every alignment."""

import numpy as np
import pytest

from inanet.kernels import bigendian as be
from inanet.kernels.layout import CHECKSUM_WORD, HEADER_WORDS, ROW_WORDS

LOW, HIGH = -(2**31), 2**31


def words(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(LOW, HIGH, count).astype(np.int32)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("width", [1, 62, 64, 256])
def test_slots_and_packets(at, width):
    slots, packet = words(3 * width, 1).reshape(3, width), words(width, 2)
    before = slots.copy()
    arena = np.full(at + 4 * width + 5, 0x5A, np.uint8)
    arena[at : at + 4 * width] = packet.astype(">i4").view(np.uint8)

    be.add_in(slots, 1, arena, at)
    np.testing.assert_array_equal(slots[1], np.add(before[1], packet, dtype=np.int32))
    np.testing.assert_array_equal(slots[[0, 2]], before[[0, 2]])
    be.copy_out(slots, 0, arena, at)
    np.testing.assert_array_equal(arena[at : at + 4 * width].copy().view(">i4"), before[0])
    be.copy_in(slots, 2, arena, at)
    np.testing.assert_array_equal(slots[2], before[0])
    assert set(arena[:at].tolist()) | set(arena[at + 4 * width :].tolist()) == {0x5A}


@pytest.mark.parametrize("at", range(4))
def test_header_words(at):
    arena = np.zeros(12, np.uint8)
    be.store32(arena, at, np.uint32(0x89ABCDEF))
    assert arena[at : at + 4].tobytes().hex() == "89abcdef"
    assert be.load32(arena, at) == 0x89ABCDEF
    be.store16(arena, at + 4, np.uint32(0x1FEDC))
    assert arena[at + 4 : at + 6].tobytes().hex() == "fedc"
    assert be.load16(arena, at + 4) == 0xFEDC


@pytest.mark.parametrize("width", [62, 64, 250, 256])
@pytest.mark.parametrize("total", [1, 61, 256, 257, 1000, 1024])
def test_a_tensor_is_cut_into_fragments_and_put_together_again(width, total):
    rows = np.zeros((-(-total // 256), ROW_WORDS), np.int32)
    payload = rows[:, HEADER_WORDS:CHECKSUM_WORD]
    payload[:] = words(payload.size, 3).reshape(payload.shape)
    flat = payload.reshape(-1)[:total].copy()
    count, head = -(-total // width), 15
    stride = head + 4 * width + 12
    arena = np.full(count * stride, 0x5A, np.uint8)
    fragments = np.random.default_rng(4).permutation(count)

    be.place(rows, total, fragments, width, arena, head, stride)
    frames = arena.reshape(count, stride)
    padded = np.zeros(count * width, np.int32)
    padded[:total] = flat
    got = np.ascontiguousarray(frames[:, head : head + 4 * width]).view(">i4")
    np.testing.assert_array_equal(got, padded.reshape(count, width)[fragments])
    assert set(np.delete(frames, np.s_[head : head + 4 * width], axis=1).reshape(-1).tolist()) == {0x5A}

    back = np.full_like(rows, 7)
    be.take(arena, np.arange(count) * stride + head, fragments, width, total, back)
    np.testing.assert_array_equal(back[:, HEADER_WORDS:CHECKSUM_WORD].reshape(-1)[:total], flat)
    # neither headers nor what lies behind the tensor's last word
    assert set(back[:, :HEADER_WORDS].reshape(-1).tolist()) == {7}
    assert set(back[:, HEADER_WORDS:CHECKSUM_WORD].reshape(-1)[total:].tolist()) <= {7}


def test_headers_are_gathered_from_anywhere():
    arena = np.arange(100, dtype=np.uint8)
    out = np.zeros((3, 4), np.uint8)
    be.gather(arena, np.array([7, 0, 96]), out)
    assert out.tolist() == [[7, 8, 9, 10], [0, 1, 2, 3], [96, 97, 98, 99]]
