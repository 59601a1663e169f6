"""Packets of GOAT's framing in batches: what every node checks first, and what every sender writes last."""

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.bigendian import gather, load32, store32
from inanet.kernels.checksum import checksum_at
from inanet.kernels.header import tag_at
from inanet.kernels.jit import njit
from inanet.proto.slots.ps import check_number
from inanet.proto.slots.registers import JOBS
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.goat import (
    CHECKSUM_AT,
    FRAME,
    FRAME_BYTES,
    MAGIC_VERSION,
    MAX_JOB,
    TAG_AT,
    VALUES,
    VALUES_AT,
    EpochKind,
    Kind,
)

_SHORT, _OVERSIZED, _MAGIC = int(Drop.SHORT), int(Drop.OVERSIZED), int(Drop.BAD_MAGIC)
_TYPE, _JOB = int(Drop.BAD_TYPE), int(Drop.FOREIGN_JOB)
_BAD_TAG, _BAD_CHECKSUM = int(Drop.BAD_TAG), int(Drop.BAD_CHECKSUM)
_SIZE, _FIRST, _LAST, _TAG_AT = FRAME_BYTES, MAGIC_VERSION, int(max(Kind)), TAG_AT
#: the last kind that nodes of asynchronous training take
LAST_OF_EPOCHS = int(max(EpochKind))
_VALUES, _VALUES_AT, _CHECKSUM_AT = VALUES, VALUES_AT, CHECKSUM_AT
OPTIONS = {"cache": True, "nogil": True, "_nrt": False}
INLINE = OPTIONS | {"inline": "always"}
ARENA = types.uint8[::1]
_i64 = types.int64


@njit(types.int64(ARENA, _i64, _i64, types.uint8[::1], types.uint64[::1], _i64), **OPTIONS)
def examine_up_to(arena: Any, at: int, length: int, known: Any, keys: Any, last: int) -> Any:
    """Why a packet is none that any node takes, or 0. ``known`` and ``keys`` are by job number, ``last`` is the highest kind."""
    if length != _SIZE:
        return _SHORT if length < _SIZE else _OVERSIZED
    if arena[at] != _FIRST:
        return _MAGIC
    if arena[at + 1] < 1 or arena[at + 1] > last:
        return _TYPE
    job = np.int64(arena[at + 2])
    if not known[job]:
        return _JOB
    if load32(arena, at + _TAG_AT) != tag_at(arena, at, keys[job]):
        return _BAD_TAG
    if load32(arena, at + _CHECKSUM_AT) != checksum_at(arena, at + _VALUES_AT, _VALUES):
        return _BAD_CHECKSUM
    return 0


@njit(types.int64(ARENA, _i64, _i64, types.uint8[::1], types.uint64[::1]), **OPTIONS)
def examine(arena: Any, at: int, length: int, known: Any, keys: Any) -> Any:
    """:func:`examine_up_to` the last kind that there is in synchronous training."""
    return examine_up_to(arena, at, length, known, keys, _LAST)


@njit(
    types.void(ARENA, types.int64[::1], types.int64[::1], types.uint8[::1], types.uint64[::1], _i64, ARENA),
    **OPTIONS,
)
def inspect_up_to(
    arena: Any, offsets: Any, lengths: Any, known: Any, keys: Any, last: int, reason: Any
) -> None:
    """:func:`examine_up_to` for a batch; ``reason[k]`` of packet *k*."""
    for k in range(offsets.size):
        reason[k] = np.uint8(examine_up_to(arena, offsets[k], lengths[k], known, keys, last))


@njit(types.void(types.uint8[:, ::1], types.uint64), **OPTIONS)
def seal(frames: Any, key: int) -> None:
    """Write checksums and tags of complete frames, side by side."""
    for k in range(frames.shape[0]):
        frame = frames[k]
        store32(frame, _CHECKSUM_AT, checksum_at(frame, _VALUES_AT, _VALUES))
        store32(frame, _TAG_AT, tag_at(frame, 0, key))


@njit(types.void(types.uint8[:, ::1], types.uint64, ARENA), **OPTIONS)
def stamp(frames: Any, key: int, sound: Any) -> None:
    """Write tags of frames whose checksums have been added up with their values; ``sound[k]``: these agree."""
    for k in range(frames.shape[0]):
        frame = frames[k]
        sound[k] = load32(frame, _CHECKSUM_AT) == checksum_at(frame, _VALUES_AT, _VALUES)
        store32(frame, _TAG_AT, tag_at(frame, 0, key))


#: the fields of a packet before its values
HEAD = np.dtype(FRAME.descr[:10])
assert HEAD.itemsize == VALUES_AT


class FrameChecks:
    """What a node checks of every packet first: the jobs that it serves, with their keys, and the highest kind that it takes."""

    def __init__(self, last: int = _LAST) -> None:
        self._last = last
        self._known: NDArray[np.uint8] = np.zeros(JOBS, np.uint8)
        self._keys: NDArray[np.uint64] = np.zeros(JOBS, np.uint64)

    def add(self, job: int, key: int) -> None:
        """Take packets of a job. Raises ``ValueError`` for a number that the framing has no room for."""
        check_number(job, MAX_JOB)
        self._known[job], self._keys[job] = 1, key

    def remove(self, job: int) -> None:
        """Take them no longer."""
        self._known[job] = 0

    def reasons(self, batch: PacketBatch, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Why packets ``index`` of a batch are not taken, uint8[n] (:class:`~inanet.wire.drops.Drop`; 0: they are)."""
        reasons = np.zeros(len(index), np.uint8)
        inspect_up_to(
            batch.arena,
            batch.offsets[index],
            batch.lengths[index],
            self._known,
            self._keys,
            self._last,
            reasons,
        )
        return reasons


def heads_of(batch: PacketBatch, index: NDArray[np.int64]) -> NDArray[Any]:
    """The heads of packets that have been checked, :data:`HEAD` [n]."""
    heads = np.empty((len(index), VALUES_AT), np.uint8)
    gather(batch.arena, batch.offsets[index], heads)
    return heads.view(HEAD)[:, 0]
