"""Folding bytes for a reflected CRC-32 with carry-less multiplication, where the processor has it.

A 128-bit value x at distance d (bits) from the end contributes the same remainder as its two halves times x^(d+32) and
x^(d-32), modulo the polynomial, at the end. So 64 bytes are carried forward over the next 64 by eight multiplications, four
chains side by side, until 16 bytes are left whose CRC is that of them all. Source: Gopal et al., Fast CRC Computation for
Generic Polynomials Using PCLMULQDQ Instruction (Intel, 2009), with bits reflected as in its section on that.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

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
