"""What a node does to its slots by itself, between batches: contribute, start again, mend, and look for what is missing."""

from typing import Any

import numba
import numpy as np
from numba import types

from inanet.kernels.header import tag_of
from inanet.kernels.jit import njit
from inanet.proto.common.encoding import MISFIT
from inanet.proto.tree.engine import (
    ACTIVE,
    BIT,
    COLLECT,
    COUNT_,
    FREE,
    JOB,
    RESULT,
    SENT,
    SLOT0,
    TABLES,
    TREE,
    Tables,
    blank,
    claim,
    emit_up,
    row_is_sound,
    stamp,
)
from inanet.proto.tree.slots import LEFT_DOWN, LEFT_UP
from inanet.proto.tree.xagg.policy import effective, exponent_row
from inanet.wire.xagg import ROW_BYTES, Flag, Kind

_LEFT_UP, _LEFT_DOWN = LEFT_UP, LEFT_DOWN
#: flags are the high nibble of a header's second byte
_END = int(Flag.GROUP_END) << 12
K_DATA, K_EXPONENT, K_RESULT = int(Kind.DATA), int(Kind.EXPONENT), int(Kind.RESULT)


@njit(
    numba.void(
        TABLES,
        types.int64,
        types.int64[::1],
        types.uint8[::1],
        types.uint8[::1],
        types.int64[:, ::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def contribute(
    t: Tables, row: int, fragments: Any, needs: Any, verdicts: Any, events: Any, used: Any
) -> None:
    """A worker's own fragments, already encoded in their rows, enter the emission log.

    ``needs`` are the exponents of their blocks. With a verdict of ``MISFIT`` one asks for that exponent instead of sending
    data (exponent agreement); ``LARGE`` leaves with the data.
    """
    shard = t.shards[row]
    round_ = np.uint32(shard[ACTIVE])
    for k in range(len(fragments)):
        fragment = fragments[k]
        slot = shard[SLOT0] + fragment
        claim(t, slot, round_)
        t.misfit[slot] = verdicts[k]
        t.exponent[slot] = needs[k]
        if verdicts[k] & MISFIT:
            exponent_row(t.rows, slot, needs[k])
            emit_up(t, row, fragment, K_EXPONENT, events, used)
        else:
            emit_up(t, row, fragment, K_DATA, events, used)


@njit(
    numba.void(TABLES, types.int64, types.int64[::1], types.uint8[::1], types.uint8[::1]),
    cache=True,
    nogil=True,
    _nrt=False,
)
def restart(t: Tables, row: int, fragments: Any, attempts: Any, exponents: Any) -> None:
    """Empty slots for a later attempt with a new exponent, 0: the same one; nothing is in them any more."""
    shard = t.shards[row]
    for i in range(len(fragments)):
        slot = shard[SLOT0] + fragments[i]
        claim(t, slot, np.uint32(shard[ACTIVE]))
        t.state[slot] = COLLECT
        t.bitmap[slot] = 0
        t.misfit[slot] = 0
        t.attempt[slot] = attempts[i]
        t.exponent[slot] = 0
        t.announced[slot] = exponents[i]
        blank(t, slot)


@njit(numba.void(TABLES, types.int64), cache=True, nogil=True, _nrt=False)
def restamp(t: Tables, row: int) -> None:
    """New headers for everything not yet answered: this node has a new parent, id or plan version (re-parenting)."""
    shard = t.shards[row]
    round_ = np.uint32(shard[ACTIVE])
    host = np.uint32(t.trees[shard[TREE], BIT])
    for fragment in range(shard[COUNT_]):
        slot = shard[SLOT0] + fragment
        if t.round[slot] == round_ and t.state[slot] == SENT:
            stamp(t, row, fragment, K_EXPONENT if t.misfit[slot] & MISFIT else K_DATA, host)


@njit("void(int32[:, ::1], int64, uint64)", cache=True, nogil=True, _nrt=False)
def ask_for_check(rows: Any, slot: int, key: int) -> None:
    """Mark a row as the last of its group, whatever follows: its receiver then looks at what is missing of the group.

    A header that was damaged in memory keeps its wrong tag, or it would leave as a sound one (header tag).
    """
    r = rows[slot]
    if np.uint32(r[5]) != tag_of(
        np.uint32(r[0]), np.uint32(r[1]), np.uint32(r[2]), np.uint32(r[3]), np.uint32(r[4]), key
    ):
        return
    r[0] |= np.int32(_END)
    r[5] = np.int32(
        tag_of(np.uint32(r[0]), np.uint32(r[1]), np.uint32(r[2]), np.uint32(r[3]), np.uint32(r[4]), key)
    )


@njit(types.int64(TABLES, types.int64, types.int64), cache=True, nogil=True, _nrt=False)
def mend(t: Tables, row: int, fragment: int) -> Any:
    """Check a row in memory before it is sent again (linear checksum): 0 sound, 1 its header was damaged and is written anew, 2
    its payload is damaged. Only for slots that are SENT or RESULT.
    """
    shard = t.shards[row]
    slot = shard[SLOT0] + fragment
    if not row_is_sound(t.rows, slot):
        return 2
    r = t.rows[slot]
    tag = tag_of(
        np.uint32(r[0]),
        np.uint32(r[1]),
        np.uint32(r[2]),
        np.uint32(r[3]),
        np.uint32(r[4]),
        t.keys[shard[JOB]],
    )
    if tag == np.uint32(r[5]):
        return 0
    if t.state[slot] == RESULT:
        stamp(t, row, fragment, K_RESULT, np.uint32(0))
    else:
        stamp(
            t,
            row,
            fragment,
            K_EXPONENT if t.misfit[slot] & MISFIT else K_DATA,
            np.uint32(t.trees[shard[TREE], BIT]),
        )
    return 1


@njit(
    types.int64(TABLES, types.int64, types.int64, types.int64, types.uint8[::1]),
    cache=True,
    nogil=True,
    _nrt=False,
)
def missing_from_child(t: Tables, row: int, child: int, group: int, bits: Any) -> Any:
    """Which fragments of a group a child still owes: sets one bit each in ``bits`` (128 bytes), returns how many."""
    shard = t.shards[row]
    tree = shard[TREE]
    round_ = np.uint32(shard[ACTIVE])
    host = np.uint32(1) << np.uint32(child)
    start = group << 10
    stop = min(start + 1024, shard[COUNT_])
    bits[:] = 0
    missing = 0
    for fragment in range(start, stop):
        slot = shard[SLOT0] + fragment
        here = t.round[slot] == round_ and t.state[slot] != FREE
        if here and (t.state[slot] == RESULT or effective(t, tree, t.bitmap[slot]) & host):
            continue
        bits[(fragment - start) >> 3] |= np.uint8(1 << ((fragment - start) & 7))
        missing += 1
    return missing


@njit(types.int64(TABLES, types.int64, types.int64, types.uint8[::1]), cache=True, nogil=True, _nrt=False)
def missing_results(t: Tables, row: int, group: int, bits: Any) -> Any:
    """Which results of a group this node still lacks; as :func:`missing_from_child`."""
    shard = t.shards[row]
    round_ = np.uint32(shard[ACTIVE])
    start = group << 10
    stop = min(start + 1024, shard[COUNT_])
    bits[:] = 0
    missing = 0
    for fragment in range(start, stop):
        slot = shard[SLOT0] + fragment
        if t.round[slot] == round_ and t.state[slot] == RESULT:
            continue
        bits[(fragment - start) >> 3] |= np.uint8(1 << ((fragment - start) & 7))
        missing += 1
    return missing


@njit(
    types.int64(TABLES, types.int64, types.int64, types.int64, types.boolean, types.int64[::1]),
    cache=True,
    nogil=True,
    _nrt=False,
)
def logged_rows(t: Tables, row: int, start: int, stop: int, up: bool, out: Any) -> Any:
    """Entries ``start`` to ``stop - 1`` of an emission log as byte offsets of their rows; returns how many.

    Left out are slots that were emptied again since, for what is in them is no more than a partial sum, and what another
    data path has sent already.
    """
    slot0 = t.shards[row, SLOT0]
    log = t.up_log if up else t.down_log
    wanted = SENT if up else RESULT
    left = _LEFT_UP if up else _LEFT_DOWN
    found = 0
    for entry in range(slot0 + start, slot0 + stop):
        slot = slot0 + np.int64(log[entry])
        if t.state[slot] == wanted and not t.logged[slot] & left:
            out[found] = slot * ROW_BYTES
            found += 1
    return found
