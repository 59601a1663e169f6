"""Shared memory: sealed, found by address, reused, and gone with the last array."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.client.memory import Memory, Piece, rounded
from inanet.messages import segments
from inanet.messages.session import SessionError
from tests.open_files import mapped_inodes, open_files

F_ADD_SEALS = 1033
SEAL_SHRINK, SEAL_GROW, SEAL_WRITE = 2, 4, 8


@pytest.fixture
def fd() -> Iterator[int]:
    """A memfd of 8192 bytes without any seal."""
    number = os.memfd_create("inanet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, 8192)
    yield number
    os.close(number)


def test_both_sides_see_the_same_bytes() -> None:
    fd, mine = segments.create(10000)
    with closing(os.fdopen(fd, "rb")):
        theirs = segments.adopt(fd, 10000)
    np.frombuffer(mine, np.uint8)[9999] = 7
    assert np.frombuffer(theirs, np.uint8)[9999] == 7


def test_memory_cannot_be_made_smaller() -> None:
    fd, _ = segments.create(8192)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, F_ADD_SEALS, SEAL_WRITE)
    finally:
        os.close(fd)


def test_a_mapping_keeps_no_descriptor_and_ends_with_its_last_array() -> None:
    before = open_files()
    fd, memory = segments.create(4096)
    inode = os.fstat(fd).st_ino
    os.close(fd)
    tail = np.frombuffer(memory, np.uint8)[4000:]
    del memory
    assert open_files() <= before
    assert inode in mapped_inodes("memfd:inanet")
    tail[:] = 1
    del tail
    assert inode not in mapped_inodes("memfd:inanet")


def test_memory_without_the_seal_is_refused(fd: int) -> None:
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_GROW)
    with pytest.raises(SessionError, match="not sealed against shrinking"):
        segments.adopt(fd, 8192)


@pytest.mark.parametrize("size", [0, -1, 8193])
def test_memory_of_another_size_than_announced_is_refused(fd: int, size: int) -> None:
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK)
    with pytest.raises(SessionError, match="has 8192 B, not the"):
        segments.adopt(fd, size)


def test_memory_that_cannot_be_written_is_refused(fd: int) -> None:
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_WRITE)
    with pytest.raises(SessionError, match="cannot map"):
        segments.adopt(fd, 8192)


def test_descriptors_of_other_things_are_refused() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(SessionError, match="cannot map"):
            segments.adopt(reading, 4096)
    finally:
        os.close(reading)
        os.close(writing)
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        with pytest.raises(SessionError):
            segments.adopt(file.fileno(), 8192)


def test_running_out_of_descriptors_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()

    def full(*_: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(segments, "_map", full)
    with pytest.raises(OSError, match="allocate"):
        segments.create(4096)
    assert open_files() <= before


@given(st.integers(0, 1 << 45))
def test_sizes_are_rounded_to_few_classes_with_little_waste(size: int) -> None:
    given_ = rounded(size)
    assert given_ % 4096 == 0
    assert size <= given_ <= max(size + size // 8 + 4096, 4096)
    assert rounded(given_) == given_


def make(memory: Memory, size: int, findable: bool = False) -> Piece:
    piece, fd = memory.create(size, findable=findable)
    os.close(fd)
    return piece


class TestFinding:
    """Arrays in shared memory are recognised by where they are."""

    def test_every_part_of_every_piece(self) -> None:
        memory = Memory()
        arrays = [make(memory, 8192, True).view(np.dtype(np.float32), (2048,)) for _ in range(5)]
        for number, array in enumerate(arrays, start=1):
            assert memory.find(array) == (number, 0)
            assert memory.find(array[1000:1001]) == (number, 4000)
            assert memory.find(array[:0]) == (number, 0)

    def test_nothing_else(self) -> None:
        memory = Memory()
        staging = make(memory, 4096)
        kept = make(memory, 4096, True)
        assert memory.find(np.zeros(10)) is None
        assert memory.find(staging.root) is None
        before = np.lib.stride_tricks.as_strided(kept.root, (8192,), (1,), writeable=False)
        assert memory.find(before) is None

    def test_a_dead_piece_is_forgotten_though_its_address_is_used_again(self) -> None:
        memory = Memory()
        array = make(memory, 1 << 20, True).root
        address = array.ctypes.data
        del array
        fd, again = segments.create(rounded(1 << 20))
        os.close(fd)
        other = np.frombuffer(again, np.uint8)
        # the kernel gives the same place again, which is what makes this matter
        assert other.ctypes.data == address
        assert memory.find(other) is None
        assert memory.dead() == [1]


class TestReuse:
    """Staging pieces go round."""

    def test_a_piece_serves_again(self) -> None:
        memory = Memory()
        piece = make(memory, 50_000)
        assert memory.take(50_000) is None
        memory.give(piece)
        assert memory.take(40_000) is piece
        assert memory.take(40_000) is None

    def test_the_smallest_that_fits_is_taken(self) -> None:
        memory = Memory()
        pieces = {size: make(memory, size) for size in (1 << 22, 1 << 20, 1 << 21)}
        for piece in pieces.values():
            memory.give(piece)
        assert memory.take(1_000_000) is pieces[1 << 20]
        assert memory.take(1_000_000) is pieces[1 << 21]

    def test_a_huge_piece_does_not_serve_small_requests(self) -> None:
        memory = Memory()
        memory.give(make(memory, 64 << 20))
        assert memory.take(4096) is None
        assert memory.take(20 << 20) is not None

    def test_only_so_many_are_kept(self) -> None:
        memory = Memory()
        pieces = [make(memory, 4096) for _ in range(70)]
        for piece in pieces:
            memory.give(piece)
        del piece
        pieces.clear()
        assert memory.dead() == [1, 2, 3, 4, 5, 6]
        assert memory.dead() == []
        assert memory.alive == 64
