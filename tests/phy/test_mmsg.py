"""The kernels around the message tables, against plain Python models."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.phy.mmsg import (
    CONTROL_BYTES,
    SOL_UDP,
    UDP_GRO,
    SendTable,
    address_in_memory,
    expand,
    gather,
    segment_sizes,
)
from inanet.wire.endpoint import endpoint

STRIDE = 65536


def control(*entries: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("=QiiI4x", 20, level, kind, value) for level, kind, value in entries)


def unpack(messages: list[tuple[int, bytes, int]]) -> list[tuple[int, int, int]]:
    """(offset, length, source) of what the kernels see in messages of (length, control bytes, source
    endpoint)."""
    count = len(messages)
    words = np.zeros((count, 8), np.uint64)
    headers = words.view(np.uint32)
    controls = np.zeros((count, CONTROL_BYTES // 4), np.uint32)
    names = np.zeros((count, 16), np.uint8)
    for i, (length, extra, source) in enumerate(messages):
        headers[i, 14] = length
        words[i, 5] = len(extra)
        controls[i].view(np.uint8)[: len(extra)] = np.frombuffer(extra, np.uint8)
        name = struct.pack("=H", 2) + struct.pack(">HI", source & 0xFFFF, source >> 16)
        names[i, :8] = np.frombuffer(name, np.uint8)
    sizes = np.zeros(count, np.int64)
    total = segment_sizes(headers, words, controls, count, sizes)
    offsets, lengths = np.full(total, -1, np.int64), np.full(total, -1, np.int64)
    sources = np.zeros(total, np.uint64)
    expand(headers, names, count, STRIDE, sizes, offsets, lengths, sources)
    return [tuple(map(int, row)) for row in zip(offsets, lengths, sources, strict=True)]  # type: ignore[misc]


def gro(size: int) -> bytes:
    return control((SOL_UDP, UDP_GRO, size))


@given(
    st.lists(
        st.tuples(st.integers(0, 65507), st.none() | st.integers(1, 65535), st.integers(0, 2**48 - 1)),
        max_size=8,
    )
)
def test_super_frames_are_cut_where_the_kernel_merged_them(
    messages: list[tuple[int, int | None, int]],
) -> None:
    expected = []
    for i, (length, size, source) in enumerate(messages):
        step = size or length or 1
        for done in range(0, max(length, 1), step):
            expected.append((i * STRIDE + done, min(step, length - done), source))
    got = unpack([(length, gro(size) if size else b"", source) for length, size, source in messages])
    assert got == expected


def test_other_control_messages_are_passed_over() -> None:
    extra = control((1, 40, 7), (SOL_UDP, UDP_GRO, 400))
    assert [length for _, length, _ in unpack([(1000, extra, 5)])] == [400, 400, 200]


def test_a_control_message_that_makes_no_sense_ends_the_search() -> None:
    extra = struct.pack("=QiiI4x", 0, 0, 0, 0) + gro(400)
    assert [length for _, length, _ in unpack([(1000, extra, 5)])] == [1000]


@given(
    offsets=st.lists(st.integers(0, 40), max_size=60).map(lambda units: [10 * unit for unit in units]),
    start=st.integers(0, 5),
    segments=st.integers(1, 7),
    messages=st.integers(1, 9),
)
def test_gather_covers_each_packet_once_in_order(
    offsets: list[int], start: int, segments: int, messages: int
) -> None:
    words = np.zeros((messages, 8), np.uint64)
    iovecs = np.zeros((messages * segments, 2), np.uint64)
    arena = np.zeros(max(offsets, default=0) + 10, np.uint8)
    base, table = address_in_memory(arena), 1 << 41
    used = gather(arena, np.array(offsets, np.int64), start, 10, segments, words, iovecs, table)
    wanted = offsets[start:][: messages * segments]
    assert used == -(-len(wanted) // segments)
    got = []
    for i in range(used):
        first = (int(words[i, 2]) - table) // 16
        runs = iovecs[first : first + int(words[i, 3])].tolist()
        # consecutive packets share an iovec: no run continues where the one before it ended
        assert all(runs[j][0] + runs[j][1] != runs[j + 1][0] for j in range(len(runs) - 1))
        cut = [at for address, size in runs for at in range(address - base, address - base + size, 10)]
        assert len(cut) == min(segments, len(wanted) - len(got))
        got += cut
    assert got == wanted


@pytest.mark.parametrize("offset", [-1, 91, 1 << 40])
def test_gather_refuses_what_lies_outside_the_arena(offset: int) -> None:
    words, iovecs = np.zeros((4, 8), np.uint64), np.zeros((16, 2), np.uint64)
    arena, offsets = np.zeros(100, np.uint8), np.array([0, 90, offset], np.int64)
    assert gather(arena, offsets, 0, 10, 4, words, iovecs, 0) == -1
    assert gather(arena, offsets[:2], 0, 10, 4, words, iovecs, 0) == 1


def test_an_uncut_shard_leaves_with_one_iovec_per_super_frame() -> None:
    table = SendTable(4, 64)
    arena = np.zeros(200 * 1052, np.uint8)
    assert table.gather(arena, np.arange(200, dtype=np.int64) * 1052, 0, 1052, 62) == 4
    assert table.words[:, 3].tolist() == [1, 1, 1, 1]


def test_aim_writes_address_and_segment_size() -> None:
    table = SendTable(2, 4)
    table.aim(endpoint("10.1.2.3", 0x1234), 1052)
    assert table.words[:, 5].tolist() == [24, 24]
    assert table.name[2:8].tolist() == [0x12, 0x34, 10, 1, 2, 3]
    assert struct.unpack("=QiiH", table._control.tobytes()[:18]) == (18, SOL_UDP, 103, 1052)
    table.aim(endpoint("10.1.2.3", 1), 0)
    assert table.words[:, 5].tolist() == [0, 0]
    assert table.words[:, 4].tolist() == [address_in_memory(table._control)] * 2
