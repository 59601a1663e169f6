"""A switch's pass over a batch of gradients: the exact-match table, the ledger, the registers."""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.bigendian import load32
from inanet.kernels.jit import njit
from inanet.proto.zebra.ledger import FRESH, note
from inanet.proto.zebra.logsum import TABLE, add_logs, floats_of, to_log
from inanet.wire.batch import I64
from inanet.wire.drops import Drop
from inanet.wire.zebra import HEADER_BYTES

_BAD_SLOT, _PASSES = int(Drop.BAD_SLOT), int(Drop.TOO_MANY_PASSES)
_HEAD = HEADER_BYTES


class Registers(NamedTuple):
    """One job's part of a switch.

    ``position`` int64[k]: register * depth + slot of every rank, the exact-match table's action; -1: no entry.
    ``values`` int32[registers * depth, width]: integers, or words of logarithms. ``touched`` uint8[k] by rank, this
    iteration; ``updates`` int64[k], contributions since counts were last fetched. ``seen`` uint8[workers, packets],
    ``received`` and ``expected`` int64[workers] are the ledger. ``mark`` and ``several`` int64[registers] are scratch.
    """

    position: Any
    values: Any
    touched: Any
    updates: Any
    seen: Any
    received: Any
    expected: Any
    mark: Any
    several: Any


_i64 = types.int64[::1]
REGISTERS: Any = types.NamedTuple(
    (_i64, types.int32[:, ::1], types.uint8[::1], _i64, types.uint8[:, ::1], _i64, _i64, _i64, _i64),
    Registers,
)


@njit(
    types.void(
        REGISTERS,
        TABLE,
        types.uint8[::1],
        _i64,
        _i64,
        _i64,
        _i64,
        types.uint8[::1],
        types.int64,
        types.int64,
        types.boolean,
        _i64,
        types.uint8[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def gather(
    r: Registers,
    tables: Any,
    arena: Any,
    offsets: Any,
    workers: Any,
    sequences: Any,
    pairs: Any,
    ends: Any,
    depth: int,
    most_passes: int,
    floats: bool,
    passes: Any,
    reason: Any,
) -> None:
    """Add up sound gradients of the iteration that is open. ``passes[i]``: passes through the pipeline that packet *i* took;
    ``reason[i]`` 0: its gradients are in the registers. One that is refused has changed nothing.
    """
    width = r.values.shape[1]
    for i in range(offsets.size):
        first = offsets[i] + _HEAD
        stride = 4 + 4 * width
        passes[i] = 1
        reason[i] = 0
        needed = 1
        for j in range(pairs[i]):
            rank = np.int64(load32(arena, first + j * stride))
            if rank >= r.position.size or r.position[rank] < 0:
                reason[i] = _BAD_SLOT
                break
            register = r.position[rank] // depth
            # a number for every packet, so that the scratch need not be cleared
            if r.mark[register] != i:
                r.mark[register] = i
                r.several[register] = 0
            r.several[register] += 1
            needed = max(needed, r.several[register])
        for j in range(pairs[i]):
            rank = np.int64(load32(arena, first + j * stride))
            if rank < r.position.size and r.position[rank] >= 0:
                r.mark[r.position[rank] // depth] = -1
        if reason[i]:
            continue
        if needed > most_passes:
            reason[i] = _PASSES
            continue
        how = note(r.seen, r.received, r.expected, workers[i], sequences[i], ends[i] != 0)
        if how != FRESH:
            reason[i] = how
            continue
        passes[i] = needed
        for j in range(pairs[i]):
            at = first + j * stride
            rank = np.int64(load32(arena, at))
            row = r.position[rank]
            r.touched[rank] = 1
            r.updates[rank] += 1
            for c in range(width):
                bits = load32(arena, at + 4 + 4 * c)
                if floats:
                    r.values[row, c] = add_logs(tables, r.values[row, c], to_log(tables, bits))
                else:
                    r.values[row, c] += np.int32(bits)


def empty(r: Registers, floats: bool) -> tuple[I64, NDArray[np.uint32]]:
    """Ranks that were touched, int64[n], and their sums' bits, uint32[n, width]; their slots are zero again."""
    ranks: I64 = np.flatnonzero(r.touched)
    rows = r.position[ranks]
    words: NDArray[np.int32] = r.values[rows]
    r.values[rows] = 0
    r.touched[ranks] = 0
    return ranks, floats_of(words) if floats else words.view(np.uint32)
