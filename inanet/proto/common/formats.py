"""How tensors become rows of integers and back: one :class:`Format` per tensor (exponent agreement, number format).

=============== ========= ===== ======== ====================================================================
dtype           op        fold  elements payload of a fragment
=============== ========= ===== ======== ====================================================================
f32, f16, bf16  sum, mean SUM   256      a block of quantised integers, :mod:`inanet.proto.common.quantised`
i32             sum       SUM   128      limbs of 16 and 16 bits, :mod:`inanet.kernels.limbs`
i64             sum       SUM   85       limbs of 22, 22 and 20 bits
f32, f16, bf16  max, min  MAX32 256      ordered keys, :mod:`inanet.kernels.ordered`
i32             max, min  MAX32 256      the values (complemented for min)
i64             max, min  MAX64 128      the values as two words, low one first
=============== ========= ===== ======== ====================================================================

:func:`make_format` is the one way to get a :class:`~inanet.proto.common.encoding.Format`.
"""

from inanet.kernels import limbs
from inanet.proto.common.encoding import Format as Format
from inanet.proto.common.exact import Extremum, IntegerSum
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.quantised import FIXED_FACTOR as FIXED_FACTOR
from inanet.proto.common.quantised import MAX_FACTOR, MAX_RANKS, FloatSum

FLOATS = ("f32", "f16", "bf16")
INTEGERS = ("i32", "i64")
SUPPORTED = "f32, f16, bf16 with sum, mean, max, min; i32, i64 with sum, max, min"


def needs_exponents(dtype: str, op: str) -> bool:
    """Whether a tensor of this kind needs an :class:`ExponentMode` other than ``NONE``."""
    return dtype in FLOATS and op in ("sum", "mean")


def make_format(spec: TensorSpec, ranks: int) -> Format:
    """The format of a tensor that ``ranks`` ranks (over all hosts: *n* of the number format) contribute to.

    Raises ``ValueError``, saying what is supported, for other dtypes and operations, for an exponent mode or
    factor that does not suit them, and for more ranks than 32-bit sums can hold.
    """
    name = f"tensor {spec.name!r}"
    if spec.dtype == "f64":
        raise ValueError(
            f"{name}: f64 is not supported, sums travel as 32-bit integers and would lose half of its"
            f" precision; convert it to f32. Supported: {SUPPORTED}"
        )
    if spec.dtype not in FLOATS + INTEGERS or spec.op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"{name}: {spec.op} of {spec.dtype} is not supported. Supported: {SUPPORTED}")
    if spec.dtype in INTEGERS and spec.op == "mean":
        raise ValueError(
            f"{name}: mean of {spec.dtype} is not supported, it is no integer; sum and divide."
            f" Supported: {SUPPORTED}"
        )
    most = limbs.MAX_RANKS64 if (spec.dtype, spec.op) == ("i64", "sum") else MAX_RANKS
    if not 1 <= ranks <= most:
        raise ValueError(f"{name}: {spec.op} of {spec.dtype} takes 1 to {most} ranks, not {ranks}")
    if needs_exponents(spec.dtype, spec.op) != (spec.mode is not ExponentMode.NONE):
        raise ValueError(
            f"{name}: {spec.op} of {spec.dtype} does not go with exponent mode {spec.mode.name.lower()};"
            " sum and mean of floats need prologue, carried or fixed, everything else needs none"
        )
    if spec.mode is ExponentMode.FIXED and not 1 / MAX_FACTOR <= spec.factor <= MAX_FACTOR:
        raise ValueError(f"{name}: the fixed factor must be between 2**-100 and 2**100, not {spec.factor}")
    if needs_exponents(spec.dtype, spec.op):
        return FloatSum(spec, ranks)
    if spec.op == "sum":
        return IntegerSum(spec, ranks)
    return Extremum(spec, ranks)
