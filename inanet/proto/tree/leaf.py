"""A host's own part in rounds, as kernels do it: contributions encoded just ahead of what leaves, results decoded as they come.

Each shard of a running round has a row that says where the host's tensors, exponents and tables lie
(:class:`~inanet.proto.tree.slots.LeafColumn`). What kernels do not do, all but float32 with a prologue, is marked as
:attr:`~inanet.proto.tree.slots.Work.OTHER` and done by :class:`~inanet.proto.tree.collective.Collective`, with the same bits.

Rows hold addresses: whoever fills one keeps the arrays alive until the row is cleared.

Arguments of the kernels: ``leaves`` is that table, int64[shards, columns]; ``row`` a shard's row in it and in ``t.shards``;
``rows`` slot memory, int32[slots, 263], in which ``slot0`` is the shard's first slot. Fragments ``lo``, ``hi`` and ``encoded``
are counted within the shard, and so are entries of its log of results. ``events`` takes reports, int64[n, 4]; ``used[0]`` says
how many there are.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numba import carray, types

from inanet.kernels.checksum import row_checksum
from inanet.kernels.dequantise import dequantise32
from inanet.kernels.exponents import block_exponents
from inanet.kernels.jit import njit
from inanet.kernels.layout import BLOCK, EXPONENTS_PER_FRAGMENT, POISON
from inanet.kernels.pointers import pointer_to
from inanet.kernels.together import quantise_together
from inanet.proto.tree.engine import (
    ACTIVE,
    COUNT_,
    DOWN_LOGGED,
    K_DATA,
    SLOT0,
    TABLES,
    Event,
    Tables,
    claim,
    emit_up,
    report,
)
from inanet.proto.tree.flow import FLOW, Flow, kernel
from inanet.proto.tree.slots import CHECK, GROUP, HEAD, UP_LINK, LeafColumn, Work

#: fragments that a host encodes at a time
CHUNK = 248
#: Exponents are sent this many fragments of data ahead of those that they belong to (prologue): at first, and at most. Each
#: time that data has to wait for them it becomes more; what is read long before it is quantised is not in a cache by then.
AHEAD, AHEAD_MOST = 3 * GROUP, 48 * GROUP
#: results that one call of the kernel decodes
PIECE = 512


class Shared(IntEnum):
    """What all shards of one collective count together."""

    #: how far data has been encoded, in fragments of the tensor
    POSITION = 0
    #: results that still lack
    REMAINING = 1
    #: how far exponents may be ahead of data, in fragments of the tensor
    AHEAD = 2
    #: how far data had been encoded when that last became more
    WIDENED = 3


#: what :func:`produce` adds to how many fragments it has encoded, if Python may have some to encode
OTHERS = 1 << 32

_i64, _I, _EVENTS, _LEAVES = types.int64, types.int64[::1], types.int64[:, ::1], types.int64[:, ::1]
_C = LeafColumn
_WORK, _ENCODED, _DECODED, _ENDED = int(_C.WORK), int(_C.ENCODED), int(_C.DECODED), int(_C.ENDED)
_FIRST, _BASES, _RANKS, _ELEMENTS = int(_C.FIRST), int(_C.BASES), int(_C.RANKS), int(_C.ELEMENTS)
_TABLE, _TABLE_SIZE, _SHARE = int(_C.TABLE), int(_C.TABLE_SIZE), int(_C.SHARE)
_AGREED, _AGREED_SIZE, _WAITS = int(_C.AGREED), int(_C.AGREED_SIZE), int(_C.WAITS)
_REFUSES, _LIMIT, _FORMAT, _SHARED = int(_C.REFUSES), int(_C.LIMIT), int(_C.FORMAT), int(_C.SHARED)
_DATA, _EXPONENTS, _OTHER = int(Work.DATA), int(Work.EXPONENTS), int(Work.OTHER)
_POSITION, _REMAINING, _AHEAD, _WIDENED = map(int, Shared)
_OTHERS = OTHERS
_UP, _HEAD, _CHECK, _BODY = UP_LINK, HEAD, CHECK, CHECK - HEAD
_CHUNK, _AHEAD_MOST, _PIECE, _CARRIED, _BLOCK = CHUNK, AHEAD_MOST, PIECE, EXPONENTS_PER_FRAGMENT, BLOCK
_POISON = np.uint8(POISON)
_E_REFUSED = int(Event.REFUSED)
#: in the order of :class:`~inanet.proto.common.encoding.FloatTables`
_TOP, _SCALE, _SCALE32, _MULTIPLY, _DIVIDE, _MULTIPLY32, _POISONED = range(7)


def whole(signature: Any) -> Any:
    """A kernel that makes arrays. ``_nrt`` is said, because numba takes it over from whatever caller is compiled first."""
    return njit(signature, cache=True, nogil=True, _nrt=True)


_byte, _word, _integer = pointer_to(types.uint8), pointer_to(types.uint64), pointer_to(types.int64)
_float, _double = pointer_to(types.float32), pointer_to(types.float64)


@whole(_I(_i64, _i64))
def integers_at(address: int, count: int) -> Any:
    """An array of ``count`` elements over memory at ``address`` that somebody else owns."""
    return carray(_integer(address), (count,), np.int64)


@whole(types.uint8[::1](_i64, _i64))
def bytes_at(address: int, count: int) -> Any:
    """As :func:`integers_at`."""
    return carray(_byte(address), (count,), np.uint8)


@whole(types.float32[::1](_i64, _i64))
def floats_at(address: int, count: int) -> Any:
    """As :func:`integers_at`."""
    return carray(_float(address), (count,), np.float32)


@whole(types.float64[::1](_i64, _i64))
def doubles_at(address: int, count: int) -> Any:
    """As :func:`integers_at`."""
    return carray(_double(address), (count,), np.float64)


@whole(types.void(_LEAVES, _i64, types.int32[:, ::1], _i64, _i64, _i64))
def encode_data(leaves: Any, row: int, rows: Any, slot0: int, lo: int, hi: int) -> None:
    """Write payload and checksum of fragments ``lo`` to ``hi - 1`` of a shard of data into their rows."""
    n = leaves[row]
    form = integers_at(n[_FORMAT], 7)
    quantise_together(
        carray(_word(n[_BASES]), (n[_RANKS],), np.uint64),
        n[_ELEMENTS],
        n[_FIRST] + lo,
        n[_FIRST] + hi,
        False,
        bytes_at(n[_TABLE], n[_TABLE_SIZE]),
        _CARRIED // n[_SHARE],
        bytes_at(form[_TOP], 256),
        n[_LIMIT],
        doubles_at(form[_SCALE], 256),
        floats_at(form[_SCALE32], 256),
        bytes_at(n[_TABLE], 0),
        rows,
        slot0 + lo,
    )


@whole(_i64(_LEAVES, _i64, types.int32[:, ::1], _i64, _i64, _i64))
def encode_exponents(leaves: Any, row: int, rows: Any, slot0: int, lo: int, hi: int) -> Any:
    """As :func:`encode_data`, for a shard of exponents: the largest over the local ranks, a byte each. Returns ``hi``, or the
    first fragment with an exponent of NaN or infinity where those are refused; from there on nothing may be sent.
    """
    n = leaves[row]
    bases = carray(_word(n[_BASES]), (n[_RANKS],), np.uint64)
    for fragment in range(lo, hi):
        payload = rows[slot0 + fragment, _HEAD:_CHECK].view(np.uint8)
        payload[:] = 0
        first = (n[_FIRST] + fragment) * _CARRIED
        last = min(first + _CARRIED, n[_TABLE_SIZE])
        for rank in range(len(bases)):
            values = floats_at(np.int64(bases[rank]), n[_ELEMENTS]).view(np.uint32)
            block_exponents(values, False, _BLOCK * n[_SHARE] // _CARRIED, first, last, payload)
        if n[_REFUSES]:
            for j in range(last - first):
                if payload[j] == _POISON:
                    return fragment
        rows[slot0 + fragment, _CHECK] = np.int32(row_checksum(rows[slot0 + fragment], _HEAD, _BODY))
    return hi


@whole(types.void(_LEAVES, _i64, types.int32[:, ::1], types.uint32[::1], _i64, _i64, _i64))
def decode(leaves: Any, row: int, rows: Any, log: Any, slot0: int, start: int, stop: int) -> None:
    """Take entries ``start`` to ``stop - 1`` of a shard's ``log`` of results (fragments, uint32[slots]): sums into the tensors
    of all local ranks, exponents into their table.
    """
    n = leaves[row]
    table = bytes_at(n[_TABLE], n[_TABLE_SIZE])
    if n[_WORK] == _EXPONENTS:
        agreed = bytes_at(n[_AGREED], n[_AGREED_SIZE])
        for entry in range(slot0 + start, slot0 + stop):
            fragment = np.int64(log[entry])
            first = (n[_FIRST] + fragment) * _CARRIED
            last = min(first + _CARRIED, n[_TABLE_SIZE])
            payload = rows[slot0 + fragment, _HEAD:_CHECK].view(np.uint8)
            for j in range(last - first):
                table[first + j] = payload[j]
            agreed[n[_FIRST] + fragment] = 1
        return
    form = integers_at(n[_FORMAT], 7)
    multiply, divide = doubles_at(form[_MULTIPLY], 256), doubles_at(form[_DIVIDE], 256)
    multiply32, lowest = floats_at(form[_MULTIPLY32], 256), integers_at(form[_POISONED], 1)
    bases = carray(_word(n[_BASES]), (n[_RANKS],), np.uint64)
    slots, fragments = np.empty(_PIECE, np.int64), np.empty(_PIECE, np.int64)
    at = start
    while at < stop:
        count = min(stop - at, _PIECE)
        for k in range(count):
            fragment = np.int64(log[slot0 + at + k])
            slots[k], fragments[k] = slot0 + fragment, n[_FIRST] + fragment
        for rank in range(len(bases)):
            out = floats_at(np.int64(bases[rank]), n[_ELEMENTS])
            poisoned = dequantise32(
                rows,
                slots[:count],
                fragments[:count],
                table,
                _CARRIED // n[_SHARE],
                multiply,
                divide,
                multiply32,
                out,
            )
            if poisoned < n[_ELEMENTS]:
                lowest[0] = min(lowest[0], poisoned)
        at += count
    integers_at(n[_SHARED], 4)[_REMAINING] -= stop - start


@whole(_i64(_LEAVES, _i64, _i64, _i64))
def ready(leaves: Any, row: int, encoded: int, stop: int) -> Any:
    """The fragment up to which a shard can be encoded now, ``stop`` at most. Data waits for its exponents; exponents stay
    :data:`AHEAD` fragments of data ahead instead of scanning the whole tensor before the first byte leaves.
    """
    n = leaves[row]
    shared = integers_at(n[_SHARED], 4)
    if n[_WORK] == _EXPONENTS:
        return min(stop, (shared[_POSITION] + shared[_AHEAD]) // n[_SHARE])
    if n[_WAITS] == 0:
        return stop
    agreed = bytes_at(n[_AGREED], n[_AGREED_SIZE])
    at = encoded
    while at < stop:
        group = (n[_FIRST] + at) // n[_SHARE]
        if agreed[group] == 0:
            break
        at = min(stop, (group + 1) * n[_SHARE] - n[_FIRST])
    if at == encoded and shared[_WIDENED] != shared[_POSITION]:
        # nothing can leave, and not because the round has just begun
        shared[_WIDENED] = shared[_POSITION]
        shared[_AHEAD] = min(2 * shared[_AHEAD], _AHEAD_MOST)
    return at


@whole(types.void(_LEAVES, _i64, _i64))
def advance(leaves: Any, row: int, encoded: int) -> None:
    """Note that the first ``encoded`` fragments of a shard have been encoded."""
    n = leaves[row]
    n[_ENCODED] = encoded
    if n[_WORK] == _DATA:
        shared = integers_at(n[_SHARED], 4)
        shared[_POSITION] = max(shared[_POSITION], n[_FIRST] + encoded)


@kernel(types.void(TABLES, _i64, _i64, _i64, _EVENTS, _I))
def contribute(t: Tables, row: int, lo: int, hi: int, events: Any, used: Any) -> None:
    """This host's fragments ``lo`` to ``hi - 1``, encoded in their rows under exponents that suit them, enter the emission log."""
    round_ = np.uint32(t.shards[row, ACTIVE])
    for fragment in range(lo, hi):
        slot = t.shards[row, SLOT0] + fragment
        claim(t, slot, round_)
        t.misfit[slot] = 0
        t.exponent[slot] = 0
        emit_up(t, row, fragment, K_DATA, events, used)


@kernel(_i64(TABLES, FLOW, _LEAVES, _i64, _i64, _EVENTS, _I))
def produce(t: Tables, f: Flow, leaves: Any, tree: int, most: int, events: Any, used: Any) -> Any:
    """Encode what can leave next by the link to the parent of ``tree``, up to ``most`` fragments of each shard, oldest round
    first. Returns how many, plus :data:`OTHERS` where Python may have some to encode.
    """
    made, other = np.int64(0), np.int64(0)
    row: Any = np.int64(f.first_row[tree])
    while row >= 0:
        work, encoded, count = leaves[row, _WORK], leaves[row, _ENCODED], t.shards[row, COUNT_]
        # each fragment may be reported
        fits = used[0] + _CHUNK < len(events)
        if fits and work and encoded < count and 0 <= encoded <= f.cursors[row, _UP]:
            if work == _OTHER:
                other = np.int64(_OTHERS)
            else:
                stop = ready(leaves, row, encoded, min(encoded + min(most, _CHUNK), count))
                if stop > encoded:
                    slot0 = t.shards[row, SLOT0]
                    end = stop
                    if work == _DATA:
                        encode_data(leaves, row, t.rows, slot0, encoded, stop)
                    else:
                        end = encode_exponents(leaves, row, t.rows, slot0, encoded, stop)
                    if end < stop:
                        leaves[row, _WORK] = _OTHER
                        first = leaves[row, _FIRST] + end
                        report(
                            events,
                            used,
                            _E_REFUSED,
                            row,
                            first * leaves[row, _SHARE],
                            (first + 1) * leaves[row, _SHARE],
                        )
                    else:
                        advance(leaves, row, stop)
                        contribute(t, row, encoded, stop, events, used)
                        made += stop - encoded
        row = np.int64(f.next_row[row])
    return made | other


@kernel(types.boolean(TABLES, _LEAVES, _i64))
def sink_shard(t: Tables, leaves: Any, row: int) -> Any:
    """Decode what has come of a shard. Returns whether Python is needed: all results are there, or it has to decode them."""
    needed = False
    logged, work = t.shards[row, DOWN_LOGGED], leaves[row, _WORK]
    if work and logged > leaves[row, _DECODED]:
        if work == _OTHER:
            needed = True
        else:
            decode(leaves, row, t.rows, t.down_log, t.shards[row, SLOT0], leaves[row, _DECODED], logged)
            leaves[row, _DECODED] = logged
    if logged == t.shards[row, COUNT_] and leaves[row, _ENDED] == 0:
        leaves[row, _ENDED] = 1
        needed = True
    return needed


@kernel(types.boolean(TABLES, FLOW, _LEAVES, _i64))
def sink(t: Tables, f: Flow, leaves: Any, tree: int) -> Any:
    """As :func:`sink_shard`, for all shards of a tree that have a round on its way."""
    needed = False
    row: Any = np.int64(f.first_row[tree])
    while row >= 0:
        needed |= sink_shard(t, leaves, row)
        row = np.int64(f.next_row[row])
    return needed
