"""The invariant CRC of RoCEv2 packets, sixteen bytes a step, or sixty-four where the processor helps.

The format is that of :mod:`inanet.wire.roce`: a packet is IPv4 without options, UDP, and InfiniBand's headers, payload and
four bytes of CRC at its end. The CRC is Ethernet's (polynomial 0x04C11DB7, reflected), computed with sixteen tables of 256
entries ("slicing": Kounavis and Berry, A Systematic Approach to Building High Performance Software-Based CRC Generators,
2005), so that only four of sixteen look-ups wait for the step before; payloads by carry-less multiplication, where the processor has it.

*Folding*: a 128-bit value x at distance d (bits) from the end contributes the same remainder as its two halves times x^(d+32) and
x^(d-32), modulo the polynomial, at the end. So 64 bytes are carried forward over the next 64 by eight multiplications, four
chains side by side, until 16 bytes are left whose CRC is that of them all. Source: Gopal et al., Fast CRC Computation for
Generic Polynomials Using PCLMULQDQ Instruction (Intel, 2009), with bits reflected as in its section on that.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from inanet.kernels.jit import njit

#: remainders of x^(512+32), x^(512-32), x^(128+32), x^(128-32) for Ethernet's polynomial, reflected
_ACROSS_FOUR = (0x154442BD4, 0x1C6E41596)
_ACROSS_ONE = (0x1751997D0, 0x0CCAA009E)

_I64, _PAIR = ir.IntType(64), ir.VectorType(ir.IntType(64), 2)

#: whether kernels are compiled for a processor with the instruction
AVAILABLE = (
    not config.CPU_NAME and not config.CPU_FEATURES and bool(binding.get_host_cpu_features().get("pclmul"))
)


def _multiply(builder: Any, value: Any, constants: tuple[int, int]) -> Any:
    """Both halves of a value times their constants, added without carry."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_PAIR, [_PAIR, _PAIR, ir.IntType(8)]), "llvm.x86.pclmulqdq"
    )
    factors = ir.Constant(_PAIR, list(constants))
    low = builder.call(function, [value, factors, ir.Constant(ir.IntType(8), 0x00)])
    high = builder.call(function, [value, factors, ir.Constant(ir.IntType(8), 0x11)])
    return builder.xor(low, high)


def _load(builder: Any, address: Any, block: Any) -> Any:
    """16 bytes as a pair of little-endian words; ``block`` counts from ``address``."""
    place = builder.add(address, builder.shl(block, ir.Constant(_I64, 4)))
    return builder.load(builder.inttoptr(place, ir.PointerType(_PAIR)), align=1)


@intrinsic
def fold(
    typingctx: Any, address: types.Type, blocks: types.Type, state: types.Type
) -> tuple[Any, Callable[..., Any]]:
    """``fold(address, blocks, state)``: 16 bytes, as two little-endian uint64, with the CRC of ``blocks`` times 16 bytes.

    ``address`` (int64) is where they lie in memory, ``blocks`` (int64) at least 4; ``state`` (uint64) is the CRC's state
    before. Go on with state 0 from the 16 bytes. Only to be compiled where it is :data:`AVAILABLE`.
    """
    signature = types.UniTuple(types.uint64, 2)(types.int64, types.int64, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, blocks, state = arguments

        def number(value: int) -> Any:
            return ir.Constant(_I64, value)

        chains = [cgutils.alloca_once(builder, _PAIR) for _ in range(4)]
        for i, chain in enumerate(chains):
            builder.store(_load(builder, address, number(i)), chain)
        seed = builder.insert_element(ir.Constant(_PAIR, [0, 0]), state, ir.Constant(ir.IntType(32), 0))
        builder.store(builder.xor(builder.load(chains[0]), seed), chains[0])

        rounds = builder.sub(builder.lshr(blocks, number(2)), number(1))
        with cgutils.for_range(builder, rounds) as loop:
            first = builder.shl(builder.add(loop.index, number(1)), number(2))
            for i, chain in enumerate(chains):
                carried = _multiply(builder, builder.load(chain), _ACROSS_FOUR)
                fresh = _load(builder, address, builder.add(first, number(i)))
                builder.store(builder.xor(carried, fresh), chain)

        total = builder.load(chains[0])
        for chain in chains[1:]:
            total = builder.xor(_multiply(builder, total, _ACROSS_ONE), builder.load(chain))
        builder.store(total, chains[0])
        done = builder.and_(blocks, number(-4))
        with cgutils.for_range(builder, builder.sub(blocks, done)) as loop:
            fresh = _load(builder, address, builder.add(done, loop.index))
            carried = _multiply(builder, builder.load(chains[0]), _ACROSS_ONE)
            builder.store(builder.xor(carried, fresh), chains[0])

        total = builder.load(chains[0])
        halves = [builder.extract_element(total, ir.Constant(ir.IntType(32), i)) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, halves)

    return signature, generate


_POLYNOMIAL = 0xEDB88320
_SLICES = 16
#: state after eight bytes of ones, which stand for the local route header
_SEED = 0xDEBB20E3
#: blocks of 16 bytes that folding needs at least
_FEWEST_BLOCKS = 4


def _tables() -> NDArray[np.uint32]:
    """uint32[16, 256]: the CRC of a byte followed by 0 to 15 zero bytes."""
    tables = np.zeros((_SLICES, 256), np.uint32)
    state = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        state = np.where(state & 1, state >> 1 ^ _POLYNOMIAL, state >> 1).astype(np.uint32)
    tables[0] = state
    for i in range(1, _SLICES):
        tables[i] = tables[i - 1] >> 8 ^ tables[0][tables[i - 1] & 0xFF]
    return tables


_T = _tables()


@njit("uint32(uint8[::1], uint64)", cache=True, nogil=True, _nrt=False, inline="always")
def _word(arena: NDArray[np.uint8], at: np.uint64) -> np.uint32:
    """The little-endian 32-bit word at ``at``; compilers make one load of it."""
    return np.uint32(
        np.uint32(arena[at])
        | np.uint32(arena[at + np.uint64(1)]) << np.uint32(8)
        | np.uint32(arena[at + np.uint64(2)]) << np.uint32(16)
        | np.uint32(arena[at + np.uint64(3)]) << np.uint32(24)
    )


@njit("uint32(uint32, uint32)", cache=True, nogil=True, _nrt=False, inline="always")
def _step4(state: np.uint32, word: np.uint32) -> np.uint32:
    """The state after the four bytes of a little-endian word."""
    mixed = np.uint32(state ^ word)
    return np.uint32(
        _T[3, mixed & 0xFF] ^ _T[2, mixed >> 8 & 0xFF] ^ _T[1, mixed >> 16 & 0xFF] ^ _T[0, mixed >> 24]
    )


@njit("uint32(uint32, uint8[::1], uint64, uint64)", cache=True, nogil=True, _nrt=False)
def advance(state: np.uint32, arena: NDArray[np.uint8], begin: np.uint64, end: np.uint64) -> np.uint32:
    """The CRC's state after ``arena[begin:end]``; a multiple of four bytes."""
    at = begin
    four, eight, twelve, sixteen = np.uint64(4), np.uint64(8), np.uint64(12), np.uint64(16)
    while at + sixteen <= end:
        a = np.uint32(state ^ _word(arena, at))
        b, c, d = _word(arena, at + four), _word(arena, at + eight), _word(arena, at + twelve)
        rest = _T[11, b & 0xFF] ^ _T[10, b >> 8 & 0xFF] ^ _T[9, b >> 16 & 0xFF] ^ _T[8, b >> 24]
        rest ^= _T[7, c & 0xFF] ^ _T[6, c >> 8 & 0xFF] ^ _T[5, c >> 16 & 0xFF] ^ _T[4, c >> 24]
        rest ^= _T[3, d & 0xFF] ^ _T[2, d >> 8 & 0xFF] ^ _T[1, d >> 16 & 0xFF] ^ _T[0, d >> 24]
        state = np.uint32(
            rest ^ _T[15, a & 0xFF] ^ _T[14, a >> 8 & 0xFF] ^ _T[13, a >> 16 & 0xFF] ^ _T[12, a >> 24]
        )
        at += sixteen
    while at < end:
        state = _step4(state, _word(arena, at))
        at += four
    return state


def _advance_folding(
    state: np.uint32, arena: NDArray[np.uint8], begin: np.uint64, end: np.uint64
) -> np.uint32:
    """As :func:`advance`, five times as fast for payloads, on processors with carry-less multiplication."""
    blocks = np.int64(end - begin) >> 4
    if blocks < _FEWEST_BLOCKS:
        return np.uint32(advance(state, arena, begin, end))
    low, high = fold(np.int64(arena.ctypes.data + begin), blocks, np.uint64(state))
    thirty_two = np.uint64(32)
    state = _step4(np.uint32(0), np.uint32(low))
    state = _step4(state, np.uint32(low >> thirty_two))
    state = _step4(state, np.uint32(high))
    state = _step4(state, np.uint32(high >> thirty_two))
    return np.uint32(advance(state, arena, begin + (np.uint64(blocks) << np.uint64(4)), end))


#: the faster one of both on this processor
advance_fast = (
    njit("uint32(uint32, uint8[::1], uint64, uint64)", cache=True, nogil=True, _nrt=False)(_advance_folding)
    if AVAILABLE
    else advance
)


@njit("uint32(uint8[::1], int64, int64)", cache=True, nogil=True, _nrt=False)
def invariant_crc(arena: NDArray[np.uint8], at: int, length: int) -> np.uint32:
    """ICRC of the packet ``arena[at : at + length]``; ``length`` is 44 bytes or more, and a multiple of four."""
    base, four = np.uint64(at), np.uint64(4)
    state = np.uint32(_SEED)
    for word in range(10):
        mask = np.uint32(0)
        # type of service; time to live and IPv4 checksum; UDP checksum; FECN and BECN
        if word == 0:
            mask = np.uint32(0x0000FF00)
        elif word == 2:
            mask = np.uint32(0xFFFF00FF)
        elif word == 6:
            mask = np.uint32(0xFFFF0000)
        elif word == 8:
            mask = np.uint32(0x000000FF)
        state = _step4(state, np.uint32(_word(arena, base) | mask))
        base += four
    state = advance_fast(state, arena, base, np.uint64(at + length - 4))
    return np.uint32(~state)


@njit("void(uint8[::1], int64, int64)", cache=True, nogil=True, _nrt=False)
def seal(arena: NDArray[np.uint8], at: int, length: int) -> None:
    """Write the ICRC into the last four bytes of a packet."""
    value = invariant_crc(arena, at, length)
    for j in range(4):
        arena[at + length - 4 + j] = np.uint8(value >> np.uint32(8 * j) & np.uint32(0xFF))


@njit("void(uint8[::1], int64[::1], int64[::1])", cache=True, nogil=True, _nrt=False)
def seal_packets(arena: NDArray[np.uint8], offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Write the ICRC of every packet; lengths as for :func:`invariant_crc`."""
    for i in range(len(offsets)):
        seal(arena, offsets[i], lengths[i])


@njit("boolean(uint8[::1], int64, int64)", cache=True, nogil=True, _nrt=False)
def is_sound(arena: NDArray[np.uint8], at: int, length: int) -> bool:
    """Whether a packet ends with its ICRC. Lengths that no packet has are unsound."""
    if length < 44 or length & 3:
        return False
    return bool(invariant_crc(arena, at, length) == _word(arena, np.uint64(at + length - 4)))
