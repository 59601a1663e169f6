"""Eight neighbouring elements at a time, as LLVM vectors.

Blocks that share an exponent may be as short as a vector register. Loops that short are not vectorised by the compiler: it
would have to know that no arrays overlap. Here the vectors are written down. LLVM maps them to what the processor has.

All functions are for compiled code and work on 1-D contiguous arrays. ``at`` is the index, uint64, of the first of the
:data:`LANES` elements, which have to exist: nothing is checked, and nothing has to be aligned. A tensor may be given by its
address in bytes, uint64, in place of an array, where kernels cannot have as many arrays as there are ranks; it is float32 then,
or its bit patterns.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: elements taken at a time
LANES = 8

_I32 = ir.VectorType(ir.IntType(32), LANES)
_F32 = ir.VectorType(ir.FloatType(), LANES)
_F64 = ir.VectorType(ir.DoubleType(), LANES)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, element: Any) -> Any:
    """A pointer to element ``at`` of ``array``, whose numba type ``kind`` says whether it is an array or an address."""
    if isinstance(kind, types.Array):
        return builder.gep(context.make_array(kind)(context, builder, array).data, [at])
    return builder.gep(builder.inttoptr(array, element.as_pointer()), [at])


def _load(context: Any, builder: Any, kind: Any, array: Any, at: Any, element: Any) -> Any:
    """Elements ``at`` to ``at + LANES - 1`` as a vector, by an unaligned load."""
    where = _pointer(context, builder, kind, array, at, element)
    vector = ir.VectorType(element, LANES)
    return builder.load(builder.bitcast(where, vector.as_pointer()), align=_size(element))


def _store(context: Any, builder: Any, kind: Any, array: Any, at: Any, value: Any) -> None:
    where = _pointer(context, builder, kind, array, at, value.type.element)
    builder.store(value, builder.bitcast(where, value.type.as_pointer()), align=_size(value.type.element))


def _size(element: Any) -> int:
    return int({ir.FloatType(): 4, ir.DoubleType(): 8}.get(element) or element.width // 8)


def _spread(builder: Any, scalar: Any) -> Any:
    """A vector with ``scalar`` in all lanes."""
    vector = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    zeros = ir.Constant(_I32, None)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _largest(builder: Any, rows: list[Any]) -> Any:
    """The largest element of each of :data:`LANES` vectors of unsigned integers, as one vector in the order of ``rows``.

    A transposition on the way: elements next to each other are compared, the larger ones of two vectors become one, and again.
    """
    lanes = range(2 * LANES)
    while len(rows) > 1:
        pairs = []
        for low, high in zip(rows[::2], rows[1::2], strict=True):
            left, right = (
                builder.shuffle_vector(low, high, ir.Constant(_I32, list(lanes[odd::2]))) for odd in (0, 1)
            )
            pairs.append(builder.select(builder.icmp_unsigned(">", left, right), left, right))
        rows = pairs
    return rows[0]


@intrinsic
def raise_peaks8(typing_context: Any, bits: Any, at: Any, peaks: Any, to: Any) -> Any:
    """``raise_peaks8(bits, at, peaks, to)``: raise ``peaks[to + k]`` to the largest magnitude of block ``k``.

    There are :data:`LANES` blocks of as many elements; the first one begins at ``at``: 64 elements are read in all. ``bits``
    holds IEEE bit patterns, uint32 or uint16, or is the address of uint32; ``peaks``, uint32, gets them without sign bits.
    """
    width = bits.dtype.bitwidth if isinstance(bits, types.Array) else 32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits_, at_, peaks_, to_ = arguments
        rows = []
        for k in range(LANES):
            value = _load(
                context, builder, bits, bits_, builder.add(at_, at_.type(k * LANES)), ir.IntType(width)
            )
            rows.append(builder.and_(value, _spread(builder, ir.IntType(width)((1 << (width - 1)) - 1))))
        found = _largest(builder, rows)
        if width != 32:
            found = builder.zext(found, _I32)
        known = _load(context, builder, peaks, peaks_, to_, _I32.element)
        found = builder.select(builder.icmp_unsigned(">", found, known), found, known)
        _store(context, builder, peaks, peaks_, to_, found)
        return context.get_dummy_value()

    return types.void(bits, types.uint64, peaks, types.uint64), generate


@intrinsic
def add_scaled8(typing_context: Any, values: Any, at: Any, factor: Any, bound: Any, sums: Any) -> Any:
    """``add_scaled8(values, at, factor, bound, sums)``: ``sums += rint(values * factor)``, at most ``bound`` either way.

    Here floats become integers. ``values`` is float32 or the address of such, ``sums`` int32; both are indexed by ``at``.
    ``factor`` and ``bound`` are both float32 or both float64, and the product is taken in their type.
    """
    double = factor == types.float64
    signature_ = types.void(values, types.uint64, factor, factor, sums)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_, at_, factor_, bound_, sums_ = arguments
        value = _load(context, builder, values, values_, at_, _F32.element)
        vector, name = (_F64, "f64") if double else (_F32, "f32")
        if double:
            value = builder.fpext(value, vector)
        value = builder.fmul(value, _spread(builder, factor_))
        value = _call(builder, f"llvm.rint.v{LANES}{name}", vector, value)
        above, below = _spread(builder, bound_), _spread(builder, builder.fneg(bound_))
        value = builder.select(builder.fcmp_ordered("<", value, above), value, above)
        value = builder.select(builder.fcmp_ordered(">", value, below), value, below)
        total = builder.add(
            _load(context, builder, sums, sums_, at_, _I32.element), builder.fptosi(value, _I32)
        )
        _store(context, builder, sums, sums_, at_, total)
        return context.get_dummy_value()

    return signature_, generate


@intrinsic
def write_scaled8(typing_context: Any, sums: Any, at: Any, factor: Any, out: Any) -> Any:
    """``write_scaled8(sums, at, factor, out)``: ``out = sums * factor``, in the type of ``factor``, then rounded to ``out``'s.

    Here integers become floats. ``sums`` is int32, ``factor`` float32 or float64, ``out`` of the same type or float32, or the
    address of float32; ``sums`` and ``out`` are indexed by ``at``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, at_, factor_, out_ = arguments
        value = _load(context, builder, sums, sums_, at_, _I32.element)
        value = builder.sitofp(value, _F64 if factor == types.float64 else _F32)
        value = builder.fmul(value, _spread(builder, factor_))
        if factor == types.float64 and (not isinstance(out, types.Array) or out.dtype == types.float32):
            value = builder.fptrunc(value, _F32)
        _store(context, builder, out, out_, at_, value)
        return context.get_dummy_value()

    return types.void(sums, types.uint64, factor, out), generate


@intrinsic
def write_quotient8(typing_context: Any, sums: Any, at: Any, multiply: Any, divide: Any, out: Any) -> Any:
    """``write_quotient8(sums, at, multiply, divide, out)``: ``out = sums * multiply / divide`` in float64.

    ``sums`` is int32, ``out`` float32, to which the quotient is rounded, or float64.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, at_, multiply_, divide_, out_ = arguments
        value = builder.sitofp(_load(context, builder, sums, sums_, at_, _I32.element), _F64)
        value = builder.fmul(value, _spread(builder, multiply_))
        value = builder.fdiv(value, _spread(builder, divide_))
        if out.dtype == types.float32:
            value = builder.fptrunc(value, _F32)
        _store(context, builder, out, out_, at_, value)
        return context.get_dummy_value()

    return types.void(sums, types.uint64, types.float64, types.float64, out), generate
