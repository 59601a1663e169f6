"""How tensors become rows of integers and back: one :class:`Format` per tensor (R1, R2).

=============== ==================== ========= ======== ===============================================================
dtype           op                   fold      elements payload of a fragment
=============== ==================== ========= ======== ===============================================================
f32, f16, bf16  sum, mean            SUM       256      one block of quantised integers, see below
i32             sum                  SUM       128      limbs of 16 and 16 bits, :mod:`inanet.kernels.limbs`
i64             sum                  SUM       85       limbs of 22, 22 and 20 bits
f32, f16, bf16  max, min             MAX32     256      ordered keys, :mod:`inanet.kernels.ordered`
i32             max, min             MAX32     256      the values (complemented for min)
i64             max, min             MAX64     128      the values as two words, low one first
=============== ==================== ========= ======== ===============================================================

**Floating-point sums.** A fragment is a block of 256 elements that share an exponent ``E`` with ``|x| < 2**e``,
``e = E - 126``. With ``n`` contributing ranks and ``L = ceil(log2 n)`` an element becomes ``q = rint(x * 2**s)``,
``s = 31 - L - e``, and the sum ``R`` of the ``q`` becomes ``R * 2**-s`` (divided by ``n`` for a mean).

*Nothing wraps.* ``|q|`` is clamped to ``floor((2**31 - 1) / n)``, so that ``|R| <= 2**31 - 1``.

*Error bound*, for ``n <= 256``: ``|result - exact| <= n * 2**(L - 32) * 2**e``, plus half a unit in the last place of
the result for its one rounding to the element type; for a mean the first term is divided by ``n``. Proof. Multiplying
by ``2**s`` is exact, so without the clamp each rank is off by at most half an integer, ``2**-s / 2 = 2**(L - 32 + e)``,
and errors add up over ``n`` ranks. The clamp bites only if ``n = 2**L``: otherwise ``n <= 2**L - 1`` and
``n * 2**(31 - L) <= 2**31 - 1``, so the limit is at least ``2**(31 - L) >= |q|``. If ``n = 2**L`` the limit is
``2**(31 - L) - 1``, and elements have 24 significant bits, so ``|x * 2**s| <= (1 - 2**-24) * 2**(31 - L)``, which
exceeds the limit by ``1 - 2**(7 - L)``: nothing for ``L <= 7``, half an integer for ``L = 8``. (Beyond 256 ranks it is
less than one integer, and the bound doubles.) ``R`` and ``R * 2**-s`` are exact in float64, so the conversion to the
element type is the only rounding of a sum. A mean is divided in float64 first. That rounding is harmless: ``R / n`` is
either exactly half-way between two elements or further than ``2**-40`` of itself away from there, while float64 is off
by ``2**-53``. A sum beyond the element type's range becomes infinite, as IEEE addition would.

*Order independence.* Integer addition commutes, exponents are maxima, and ``E`` is a function of values alone: all
ranks get the same bits whatever the arrival order, topology and placement of ranks.

**Exponent tables** are uint8, one entry per block of the tensor. 255 means that the block holds a NaN or infinity: it
contributes zeros and its result is NaN throughout. Under ``ExponentMode.FIXED`` the entry :data:`FIXED_FACTOR` (0)
means "use the factor" and any other a power of two as above. The two cannot clash: a block that does not fit the factor
is never one of zeros and denormals only, because factors are limited to ``2**100``. With the factor the bound is
``n * (1/2 + 2**-22) / factor`` plus rounding.

**Misfits.** A block that does not fit its table entry (R1, carried and fixed) reports the exponent it needs, which is
never 0; 0 means that it fits. The largest exponent announced by any rank suits all of them: ranks that fitted are
smaller.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import ldexp
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from inanet.kernels import limbs, ordered
from inanet.kernels.checksum import seal_rows
from inanet.kernels.dequantise import copy_fragments, dequantise16, dequantise32
from inanet.kernels.exponents import block_exponents, block_misfits, carried_exponents, first_nonfinite
from inanet.kernels.layout import BLOCK, EXPONENTS_PER_FRAGMENT, HEADER_WORDS, PAYLOAD_WORDS, POISON
from inanet.kernels.quantise import quantise
from inanet.proto.plan import ExponentMode, Fold, TensorSpec

#: entry of an exponent table that stands for the factor of ``ExponentMode.FIXED``
FIXED_FACTOR = 0
#: contributing ranks a format can serve
MAX_RANKS = 1 << 15
#: the factor of ``ExponentMode.FIXED`` and its inverse are at most this
MAX_FACTOR = 2.0**100

FLOATS = ("f32", "f16", "bf16")
INTEGERS = ("i32", "i64")
SUPPORTED = "f32, f16, bf16 with sum, mean, max, min; i32, i64 with sum, max, min"

Array = NDArray[Any]
Arrays = Sequence[Array]
Rows = NDArray[np.int32]
Index = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_BITS: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.uint32),
    "f16": np.dtype(np.uint16),
    "bf16": np.dtype(np.uint16),
    "i32": np.dtype(np.uint32),
    "i64": np.dtype(np.uint64),
}
#: names of the numpy dtypes an array may have, the natural one first
_NUMPY = {
    "f32": ("float32",),
    "f16": ("float16", "uint16"),
    "bf16": ("uint16", "bfloat16"),
    "i32": ("int32",),
    "i64": ("int64",),
}
#: per float: mask of exponent and fraction, infinity, canonical NaN
_PATTERNS = {
    "f32": (0x7FFFFFFF, 0x7F800000, 0x7FC00000),
    "f16": (0x7FFF, 0x7C00, 0x7E00),
    "bf16": (0x7FFF, 0x7F80, 0x7FC0),
}
_NONE = np.iinfo(np.int64).max


class Format(ABC):
    """Encoding of one tensor for ``ranks`` contributions; made by :func:`make_format`.

    ``arrays`` arguments hold one 1-D C-contiguous array of the whole tensor per local rank: float32, float16 (or its
    uint16 view), uint16 for bf16, int32, int64. Fragments are numbered over the tensor. Methods touch nothing outside
    the fragments they are given, so ranges can be processed as they come and by several threads. Wrong arrays raise
    ``ValueError``.
    """

    #: whether :meth:`encode` and :meth:`decode` read the exponent table
    uses_exponents: ClassVar[bool] = False

    def __init__(self, spec: TensorSpec, ranks: int, fold: Fold, values: int) -> None:
        self.spec = spec
        self.ranks = ranks
        #: how contributions combine in slots
        self.fold = fold
        #: elements a full fragment carries
        self.values = values
        self.elements = spec.elements
        #: data fragments of the tensor
        self.fragments = -(-self.elements // values)
        #: fragments that carry the exponents of a prologue, 1024 blocks each; 0 if the tensor never has one
        self.exponent_fragments = 0
        self._overflow = np.full(1, _NONE, np.int64)
        self._poisoned = np.full(1, _NONE, np.int64)

    @property
    def overflow(self) -> int:
        """Lowest element decoded since :meth:`clear` whose exact integer sum exceeds the dtype, or -1."""
        return _index(self._overflow)

    @property
    def poisoned(self) -> int:
        """Lowest element decoded since :meth:`clear` that is NaN by poisoning, or -1.

        For sums it is the first element of a block that held a NaN or infinity on some rank. For maxima it is an
        element that was NaN on some rank, or infinite where the tensor does not propagate.
        """
        return _index(self._poisoned)

    def clear(self) -> None:
        """Forget :attr:`overflow` and :attr:`poisoned`; call it when a round begins."""
        self._overflow[0] = _NONE
        self._poisoned[0] = _NONE

    def initial_exponents(self) -> Bytes:
        """The exponent table to start from: zeros, one per block (none if the format has no exponents)."""
        return np.zeros(self.fragments if self.uses_exponents else 0, np.uint8)

    def exponents(self, arrays: Arrays, lo: int, hi: int, out: Bytes) -> None:
        """Set ``out[: hi - lo]`` to the largest exponent of blocks ``lo`` to ``hi - 1`` over the local ranks."""
        out[: hi - lo] = 0

    @abstractmethod
    def encode(
        self, arrays: Arrays, lo: int, hi: int, exps: Bytes, rows: Rows, row0: int, misfit: Bytes | None = None
    ) -> None:
        """Write payload and checksum of fragments ``lo`` to ``hi - 1`` into rows ``row0`` onwards.

        The rows hold the sum (or maximum) over the local ranks. ``exps`` is the table of the whole tensor.
        ``misfit[i]`` becomes 0, or the exponent that fragment ``lo + i`` needs; the payload of such a fragment is that
        exponent and zeros, so it can leave as a request for it. Without ``misfit`` every block is taken to fit, as
        after a prologue.
        """

    @abstractmethod
    def decode(self, rows: Rows, slots: Index, fragments: Index, exps: Bytes, arrays: Arrays) -> None:
        """Write the result of fragment ``fragments[k]``, in row ``slots[k]``, into every local rank's array."""

    def carried(self, rows: Rows, slots: Index, fragments: Index, exps: Bytes, out: Bytes) -> None:
        """Set ``out[f]``, for every ``f`` in ``fragments``, to the next round's exponent of block ``f`` (R1, carried).

        It is the exponent field of the largest sum in row ``slots[k]`` plus one, at most 254; 0 if the sum is zero or
        the block is poisoned. ``out`` is a table like ``exps``. Every rank computes the same. Formats that carry
        nothing over write zeros.
        """
        out[fragments] = 0

    def first_nonfinite(self, array: Array) -> int:
        """Index of the first NaN or infinity in one rank's array, or -1."""
        return -1

    def locate_nonfinite(self, arrays: Arrays) -> tuple[int, int]:
        """Position in ``arrays`` and element index of the first NaN or infinity, ``(-1, -1)`` if there is none."""
        for position, array in enumerate(arrays):
            index = self.first_nonfinite(array)
            if index >= 0:
                return position, index
        return -1, -1

    def seal(self, rows: Rows, row0: int, count: int) -> None:
        """Write the checksum word of rows ``row0`` to ``row0 + count - 1``."""
        seal_rows(rows, np.arange(row0, row0 + count), HEADER_WORDS, PAYLOAD_WORDS)

    def _bits(self, array: Array) -> Array:
        """Unsigned view of one rank's array, checked."""
        dtype = self.spec.dtype
        if array.dtype.name not in _NUMPY[dtype] or array.shape != (self.elements,) or not array.flags.c_contiguous:
            raise ValueError(
                f"tensor {self.spec.name!r} needs a contiguous 1-D {_NUMPY[dtype][0]} array of {self.elements} elements,"
                f" got {array.dtype.name} of shape {array.shape} and strides {array.strides}"
            )
        return array.view(_BITS[dtype])

    def _spread(self, views: Sequence[Array], fragments: Index) -> None:
        """Copy decoded fragments from the first local rank's array to the others'."""
        for view in views[1:]:
            copy_fragments(views[0], view, fragments, self.values)


class FloatSum(Format):
    """Sum or mean of floats, in blocks of 256 that share an exponent (R2)."""

    uses_exponents = True

    def __init__(self, spec: TensorSpec, ranks: int) -> None:
        super().__init__(spec, ranks, Fold.SUM, BLOCK)
        self._brain = spec.dtype == "bf16"
        self._limit = (2**31 - 1) // ranks
        self._factor = spec.factor if spec.mode is ExponentMode.FIXED else 0.0
        self._log2 = (ranks - 1).bit_length()
        if spec.mode is not ExponentMode.FIXED:
            self.exponent_fragments = -(-self.fragments // EXPONENTS_PER_FRAGMENT)
        self._tables()

    def _tables(self) -> None:
        """What an exponent ``E`` means, as arrays indexed by it: kernels know no modes."""
        shifts = [157 - self._log2 - exponent for exponent in range(POISON)]
        halves = [(ldexp(1.0, shift // 2), ldexp(1.0, shift - shift // 2)) for shift in shifts]
        self._scales = np.ascontiguousarray(np.array([*halves, (0.0, 0.0)], np.float32).T)
        #: largest magnitude, as float32 bits, that fits
        self._largest = np.array([*(e << 23 | 0x7FFFFF for e in range(POISON)), 2**32 - 1], np.uint32)
        self._multiply = np.array([*(ldexp(1.0, -shift) for shift in shifts), np.nan])
        self._divide = np.ones(POISON + 1)
        if self._factor:
            self._largest[FIXED_FACTOR] = _largest_fixed(self._factor, self._limit)
            self._multiply[FIXED_FACTOR] = 1.0
            self._divide[FIXED_FACTOR] = self._factor
        if self.spec.op == "mean":
            self._divide *= self.ranks
            if self.ranks.bit_count() == 1 and not self._factor:
                # exact, and spares a division per element
                self._multiply /= self._divide
                self._divide[:] = 1.0

    def exponents(self, arrays: Arrays, lo: int, hi: int, out: Bytes) -> None:
        super().exponents(arrays, lo, hi, out)
        for array in arrays:
            block_exponents(self._bits(array), self._brain, lo, hi, out)

    def encode(
        self, arrays: Arrays, lo: int, hi: int, exps: Bytes, rows: Rows, row0: int, misfit: Bytes | None = None
    ) -> None:
        views = [self._bits(array) for array in arrays]
        if misfit is None:
            misfit = np.zeros(hi - lo, np.uint8)
        else:
            misfit[: hi - lo] = 0
            for bits in views:
                block_misfits(bits, self._brain, lo, hi, exps, self._largest, misfit)
        last = len(views) - 1
        for k, bits in enumerate(views):
            values = bits.view(np.float32) if self.spec.dtype == "f32" else bits
            quantise(
                values,
                self._brain,
                lo,
                hi,
                exps,
                self._scales,
                self._factor,
                self._limit,
                misfit,
                rows,
                row0,
                k == 0,
                k == last,
            )

    def decode(self, rows: Rows, slots: Index, fragments: Index, exps: Bytes, arrays: Arrays) -> None:
        views = [self._bits(array) for array in arrays]
        if self.spec.dtype == "f32":
            out = views[0].view(np.float32)
            dequantise32(rows, slots, fragments, exps, self._multiply, self._divide, out)
        else:
            dequantise16(rows, slots, fragments, exps, self._multiply, self._divide, self._brain, views[0])
        poisoned = fragments[exps[fragments] == POISON]
        if len(poisoned):
            self._poisoned[0] = min(self._poisoned[0], int(poisoned.min()) * BLOCK)
        self._spread(views, fragments)

    def carried(self, rows: Rows, slots: Index, fragments: Index, exps: Bytes, out: Bytes) -> None:
        if self._factor:
            super().carried(rows, slots, fragments, exps, out)
        else:
            carried_exponents(rows, slots, fragments, exps, self._log2 - 30, out)

    def first_nonfinite(self, array: Array) -> int:
        return int(first_nonfinite(self._bits(array), self._brain))


class IntegerSum(Format):
    """Exact sum of integers, in limbs."""

    def __init__(self, spec: TensorSpec, ranks: int) -> None:
        self._wide = spec.dtype == "i64"
        super().__init__(spec, ranks, Fold.SUM, limbs.VALUES64 if self._wide else limbs.VALUES32)

    def encode(
        self, arrays: Arrays, lo: int, hi: int, exps: Bytes, rows: Rows, row0: int, misfit: Bytes | None = None
    ) -> None:
        if misfit is not None:
            misfit[: hi - lo] = 0
        last = len(arrays) - 1
        for k, array in enumerate(arrays):
            bits = self._bits(array)
            if self._wide:
                limbs.split64(bits.view(np.int64), lo, hi, rows, row0, k == 0, k == last)
            else:
                limbs.split32(bits.view(np.int32), lo, hi, rows, row0, k == 0, k == last)

    def decode(self, rows: Rows, slots: Index, fragments: Index, exps: Bytes, arrays: Arrays) -> None:
        views = [self._bits(array) for array in arrays]
        if self._wide:
            limbs.merge64(rows, slots, fragments, views[0].view(np.int64), self._overflow)
        else:
            limbs.merge32(rows, slots, fragments, views[0].view(np.int32), self._overflow)
        self._spread(views, fragments)


class Extremum(Format):
    """Maximum or minimum of anything, as ordered integer keys.

    Floats follow IEEE 754-2019 ``maximum`` and ``minimum``: -0.0 is below 0.0 and NaN wins. Unless the tensor
    propagates them, NaN and infinities poison their element, so that every rank learns of the refusal.
    """

    def __init__(self, spec: TensorSpec, ranks: int) -> None:
        self._wide = spec.dtype == "i64"
        if self._wide:
            super().__init__(spec, ranks, Fold.MAX64, ordered.VALUES64)
        else:
            super().__init__(spec, ranks, Fold.MAX32, ordered.VALUES32)
        self._flip = -1 if spec.op == "min" else 0
        self._magnitude, infinity, self._nan = _PATTERNS.get(spec.dtype, (0, 0, 0))
        #: largest magnitude, as bits, that is not poison
        self._accepted = infinity if spec.propagate or not infinity else infinity - 1

    def _signed(self, bits: Array) -> Array:
        return bits.view(f"i{bits.itemsize}")

    def encode(
        self, arrays: Arrays, lo: int, hi: int, exps: Bytes, rows: Rows, row0: int, misfit: Bytes | None = None
    ) -> None:
        if misfit is not None:
            misfit[: hi - lo] = 0
        last = len(arrays) - 1
        for k, array in enumerate(arrays):
            words = self._signed(self._bits(array))
            ends = (k == 0, k == last)
            if self._wide:
                ordered.order64(words, lo, hi, self._flip, rows, row0, *ends)
            else:
                ordered.order32(words, lo, hi, self._magnitude, self._accepted, self._flip, rows, row0, *ends)

    def decode(self, rows: Rows, slots: Index, fragments: Index, exps: Bytes, arrays: Arrays) -> None:
        views = [self._bits(array) for array in arrays]
        out = self._signed(views[0])
        if self._wide:
            ordered.restore64(rows, slots, fragments, self._flip, out)
        else:
            nan, flip = self._nan, self._flip
            ordered.restore32(rows, slots, fragments, self._magnitude, nan, flip, out, self._poisoned)
        self._spread(views, fragments)

    def first_nonfinite(self, array: Array) -> int:
        if self.spec.dtype in INTEGERS:
            return -1
        return int(first_nonfinite(self._bits(array), self.spec.dtype == "bf16"))


def needs_exponents(dtype: str, op: str) -> bool:
    """Whether a tensor of this kind needs an :class:`ExponentMode` other than ``NONE``."""
    return dtype in FLOATS and op in ("sum", "mean")


def make_format(spec: TensorSpec, ranks: int) -> Format:
    """The format of a tensor that ``ranks`` ranks (over all hosts, R2) contribute to.

    Raises ``ValueError``, saying what is supported, for other dtypes and operations, for an exponent mode or factor
    that does not suit them, and for more ranks than 32-bit sums can hold.
    """
    name = f"tensor {spec.name!r}"
    if spec.dtype == "f64":
        raise ValueError(
            f"{name}: f64 is not supported, sums travel as 32-bit integers and would lose half of its precision;"
            f" convert it to f32. Supported: {SUPPORTED}"
        )
    if spec.dtype not in FLOATS + INTEGERS or spec.op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"{name}: {spec.op} of {spec.dtype} is not supported. Supported: {SUPPORTED}")
    if spec.dtype in INTEGERS and spec.op == "mean":
        raise ValueError(
            f"{name}: mean of {spec.dtype} is not supported, it is no integer; sum and divide. Supported: {SUPPORTED}"
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


def _index(lowest: Index) -> int:
    return -1 if lowest[0] == _NONE else int(lowest[0])


def _largest_fixed(factor: float, limit: int) -> int:
    """Bits of the largest finite float32 ``x`` with ``rint(x * factor) <= limit``."""
    low, high = 0, 0x7F7FFFFF
    while low < high:
        middle = (low + high + 1) // 2
        value = float(np.uint32(middle).view(np.float32))
        if round(value * factor) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
