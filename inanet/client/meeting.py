"""Compiled code of :mod:`inanet.client.exchange`: copies and counters in shared memory, waiting, sums.

``lines`` is the address of the shared memory: a line of 64 bytes for all, then one per rank (words of
:class:`~inanet.messages.segments.Word`). A word is written once what it speaks of is in memory, and read before that, on any
processor. ``word`` and ``total`` are byte offsets in a line: who counts up a rank's ``word`` and finds that all others have
counted as far writes the line for all as well, and wakes who sleeps there: one call of futex(2) for a collective.
"""

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from inanet.kernels.jit import njit
from inanet.kernels.layout import BLOCK
from inanet.kernels.pointers import pointer_to
from inanet.kernels.together import reduce_together
from inanet.messages.segments import DATA_OFFSET, LINE_BYTES, Word

#: futex(2) in the kernel's table of system calls, of processors that keep stores, and loads, in order: Python has no fences
SYS_FUTEX = {"x86_64": 202, "s390x": 238}.get(os.uname().machine, -1)
#: what :func:`sum32` returns if all is well, and if ranks have called different things
SUMMED, DIFFERENT = -1, -2
#: what :func:`sum_share` returns if it could not read a rank
FAILED = -3
#: waits without giving the processor away after a stranger has had it, at first and at most
FEW, MANY = 8, 1024

_i64, _I = types.int64, types.int64[::1]
_syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_process_vm_readv = types.ExternalFunction(
    "process_vm_readv", _i64(types.int32, types.uintp, types.uint64, types.uintp, types.uint64, types.uint64)
)
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())
_memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_memcmp = types.ExternalFunction("memcmp", types.int32(types.uintp, types.uintp, types.uintp))
_WORD = ir.IntType(32)
_LINE, _DATA, _SYS_FUTEX = LINE_BYTES, DATA_OFFSET, SYS_FUTEX
_ARRIVED, _READ, _CALLED = (4 * int(word) for word in (Word.ARRIVED, Word.READ, Word.CALLED))
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 0x7FFFFFFF
_HALF, _SECOND, _MONOTONIC = 1 << 31, 10**9, 1
#: nanoseconds after which the processor was with somebody else than a rank that has something to do here
_LONG = 200_000
_TABLES, _ROW, _EINTR, _EFAULT = 6, 4 * BLOCK, 4, 14


@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    """A word, before anything that is read after it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _WORD.as_pointer()), "acquire", 4)

    return types.uint32(types.int64), generate


@intrinsic
def store(typing_context: Any, address: Any, value: Any) -> Any:
    """Write a word, after everything that was written before it, and before anything is read after it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        builder.store_atomic(arguments[1], pointer, "seq_cst", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32), generate


@intrinsic
def _compare_and_store(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write a word if it is what is expected."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32, types.uint32), generate


_bytes, _floats, _doubles = (pointer_to(kind) for kind in (types.uint8, types.float32, types.float64))


def kernel(signature: Any) -> Any:
    """``_nrt`` is said, because numba takes it over from whatever caller is compiled first."""
    return njit(signature, cache=True, nogil=True, _nrt=True)


@kernel(types.boolean(types.uint32, _i64))
def reached(count: int, number: int) -> Any:
    """Whether a counter modulo 2^32 has come to ``number`` or further."""
    return ((np.int64(count) - number) & 0xFFFFFFFF) < _HALF


@kernel(_i64(_i64, _i64, _i64, _i64))
def late(lines: int, ranks: int, word: int, number: int) -> Any:
    """Position of a rank that has not counted as far as ``number``; -1: all have."""
    for position in range(ranks):
        if not reached(load(lines + (1 + position) * _LINE + word), number):
            return position
    return -1


@kernel(types.void(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
def count_up(lines: int, ranks: int, mine: int, word: int, total: int, value: int, number: int) -> None:
    """Write ``value`` to a counter of the rank at ``mine``; the last rank to come as far as ``number`` wakes the others."""
    store(lines + (1 + mine) * _LINE + word, np.uint32(value))
    if late(lines, ranks, word, number) < 0:
        store(lines + total, np.uint32(number))
        _syscall(_SYS_FUTEX, lines + total, _FUTEX_WAKE, _ALL, 0, 0, 0)


@kernel(types.boolean(*[_i64] * 11))
def post(
    lines: int,
    ranks: int,
    mine: int,
    floor: int,
    number: int,
    seq: int,
    entry: int,
    description: int,
    length: int,
    source: int,
    size: int,
) -> Any:
    """Put collective ``number`` into an ``entry`` of the rank at ``mine``: its description, and ``size`` bytes at ``source``.

    False, and nothing was done, if not all ranks have read as far as ``floor``: what is there is still needed.
    """
    if floor > 0 and late(lines, ranks, _READ, floor) >= 0:
        return False
    _memcpy(entry, description, length)
    _memcpy(entry + _DATA, source, size)
    count_up(lines, ranks, mine, _ARRIVED, _ARRIVED, number, number)
    # in this order: who sees that this rank has called it looks once more whether it has arrived
    store(lines + (1 + mine) * _LINE + _CALLED, np.uint32(seq))
    return True


@kernel(_i64(_I))
def clock(room: Any) -> Any:
    """Nanoseconds; ``room`` is int64[2]."""
    _clock_gettime(np.int32(_MONOTONIC), room.ctypes.data)
    return room[0] * _SECOND + room[1]


@kernel(_i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64, _I))
def wait(
    lines: int,
    ranks: int,
    word: int,
    total: int,
    number: int,
    looks: int,
    yields: int,
    nanoseconds: int,
    patience: Any,
) -> Any:
    """Wait until all ranks have counted as far as ``number``; -1, or after some ``nanoseconds``, and after signals, who has not.

    First it looks ``looks`` times, then it gives the processor to others ``yields`` times, then it sleeps. Among ranks alone, giving
    it away costs least. A stranger keeps it for milliseconds, while who sleeps is woken at once: ``patience`` is for how many
    waits it is not given away any more, and how many it will be when that next happens.
    """
    room = np.empty(2, np.int64)
    if patience[0] > 0:
        patience[0] -= 1
        yields = 0
    turn = 0
    before = np.int64(0)
    position = late(lines, ranks, word, number)
    while position >= 0:
        turn += 1
        if turn > looks + yields:
            seen = load(lines + total)
            position = late(lines, ranks, word, number)
            if position < 0:
                break
            room[0], room[1] = nanoseconds // _SECOND, nanoseconds % _SECOND
            woken = _syscall(_SYS_FUTEX, lines + total, _FUTEX_WAIT, np.int64(seen), room.ctypes.data, 0, 0)
            if woken < 0 and load(lines + total) == seen:
                return late(lines, ranks, word, number)
        elif turn > looks:
            if turn == looks + 1:
                before = clock(room)
            _sched_yield()
            after = clock(room)
            if after - before > _LONG:
                patience[0] = patience[1]
                patience[1] = min(2 * patience[1], MANY)
                yields = 0
            before = after
        # whoever was late is the first to look at
        if reached(load(lines + (1 + position) * _LINE + word), number):
            position = late(lines, ranks, word, number)
    if yields > 0 and turn > looks:
        patience[1] = FEW
    return -1


@kernel(_i64(_i64, _i64, _i64, _i64, _i64, _i64, _I, types.uint8[::1], types.boolean, _i64))
def sum32(
    entry: int,
    stride: int,
    ranks: int,
    description: int,
    length: int,
    count: int,
    form: Any,
    exponents: Any,
    refuse: bool,
    out: int,
) -> Any:
    """Sum ``count`` float32 of all ranks' entries, the first of which is at ``entry``, into ``out``, with exponents of their own.

    ``form``: the addresses of :func:`tables_of`, clamp, fragments, blocks; ``exponents`` is room for a table of them. Returns
    :data:`SUMMED`; :data:`DIFFERENT`, if a description differs from this rank's; or with ``refuse`` a fragment with NaN or
    infinity.
    """
    for rank in range(ranks):
        if _memcmp(entry + rank * stride, description, length) != 0:
            return DIFFERENT
    bases, outs = np.empty(ranks, np.uint64), np.empty(1, np.uint64)
    for rank in range(ranks):
        bases[rank] = entry + rank * stride + _DATA
    outs[0] = out
    return reduce32(bases, outs, count, 0, form[_TABLES + 1], form, exponents, refuse)


@kernel(_i64(types.uint64[::1], types.uint64[::1], _i64, _i64, _i64, _I, types.uint8[::1], types.boolean))
def reduce32(
    bases: Any, outs: Any, count: int, lo: int, hi: int, form: Any, exponents: Any, refuse: bool
) -> Any:
    """:func:`~inanet.kernels.together.reduce_together` with a prologue and a ``form`` of addresses."""
    return reduce_together(
        bases,
        outs,
        count,
        lo,
        hi,
        True,
        refuse,
        exponents,
        form[_TABLES + 2],
        exponents[:0],
        carray(_bytes(form[0]), (256,), np.uint8),
        exponents[:0],
        form[_TABLES],
        carray(_doubles(form[1]), (256,), np.float64),
        carray(_floats(form[2]), (256,), np.float32),
        carray(_doubles(form[3]), (256,), np.float64),
        carray(_doubles(form[4]), (256,), np.float64),
        carray(_floats(form[5]), (256,), np.float32),
    )


@kernel(types.boolean(_i64, _i64, types.boolean))
def decide(address: int, number: int, wanted: bool) -> Any:
    """Decide upon collective ``number``, once for all ranks, by the word at ``address``: twice the number of the last one that was
    decided upon, plus the decision. Who comes when a later one has been decided upon has been decided against.
    """
    decision = np.uint32(2 * number + wanted)
    while True:
        found = load(address)
        if reached(found, 2 * number):
            return found == np.uint32(2 * number + 1)
        _compare_and_store(address, found, decision)


@kernel(_i64(_i64, _i64, _i64, _i64))
def read_process(pid: int, remote: int, local: int, size: int) -> Any:
    """Copy memory of another process; 0, or errno."""
    vectors = np.empty(4, np.int64)
    done = np.int64(0)
    while done < size:
        vectors[0], vectors[1] = local + done, size - done
        vectors[2], vectors[3] = remote + done, size - done
        at = vectors.ctypes.data
        read = _process_vm_readv(np.int32(pid), at, np.uint64(1), at + 16, np.uint64(1), np.uint64(0))
        if read < 0:
            code = carray(_errno_location(), 1)[0]
            if code == _EINTR:
                continue
            return np.int64(code)
        if read == 0:
            return _EFAULT
        done += read
    return 0


@kernel(_i64(_I, _I, _i64, _i64, _i64, _i64, _i64, _I, types.uint8[::1], types.boolean, types.uint8[::1], _I))
def sum_share(
    pids: Any,
    addresses: Any,
    mine: int,
    lo: int,
    hi: int,
    count: int,
    piece: int,
    form: Any,
    exponents: Any,
    refuse: bool,
    scratch: Any,
    failed: Any,
) -> Any:
    """Sum fragments ``lo`` to ``hi - 1`` of tensors of ``count`` float32 at ``addresses`` in the processes ``pids`` into that of the
    rank at ``mine``, ``piece`` fragments at a time.

    ``scratch`` has room for a piece of each of the other ranks, ``exponents`` for those of a piece. Returns :data:`SUMMED`; with
    ``refuse`` a fragment with NaN or infinity, from which on nothing was written; or :data:`FAILED`, with a position and errno in
    ``failed``.
    """
    ranks = len(addresses)
    bases, outs = np.empty(ranks, np.uint64), np.empty(1, np.uint64)
    at = lo
    while at < hi:
        stop = min(at + piece, hi)
        size = min(stop * _ROW, count * 4) - at * _ROW
        room: Any = np.int64(scratch.ctypes.data)
        for position in range(ranks):
            where = addresses[position] + at * _ROW
            if position != mine:
                code = read_process(pids[position], where, room, size)
                if code:
                    failed[0], failed[1] = position, code
                    return FAILED
                where = room
                room += piece * _ROW
            bases[position] = where
        outs[0] = addresses[mine] + at * _ROW
        bad = reduce32(bases, outs, size // 4, 0, stop - at, form, exponents, refuse)
        if bad >= 0:
            return at + bad
        at = stop
    return SUMMED
