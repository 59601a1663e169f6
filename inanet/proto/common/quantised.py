"""Sums of floats as integers under shared exponents: the number format, and the proof of its error bound.

A fragment is a block of 256 elements that share an exponent ``E`` with ``|x| < 2**e``, ``e = E - 126``. With
``n`` contributing ranks and ``L = ceil(log2 n)`` an element becomes ``q = rint(x * 2**s)``, ``s = 31 - L -
e``, and the sum ``R`` of the ``q`` becomes ``R * 2**-s`` (divided by ``n`` for a mean).

*Nothing wraps.* ``|q|`` is clamped to ``floor((2**31 - 1) / n)``, so that ``|R| <= 2**31 - 1``.

*Error bound*, for ``n <= 256``: ``|result - exact| <= n * 2**(L - 32) * 2**e``, plus half a unit in the
last place of the result for its one rounding to the element type; for a mean the first term is divided by
``n``. Proof. Multiplying by ``2**s`` is exact, so without the clamp each rank is off by at most half an
integer, ``2**-s / 2 = 2**(L - 32 + e)``, and errors add up over ``n`` ranks. The clamp bites only if ``n =
2**L``: otherwise ``n <= 2**L - 1`` and ``n * 2**(31 - L) <= 2**31 - 1``, so the limit is at least ``2**(31
- L) >= |q|``. If ``n = 2**L`` the limit is ``2**(31 - L) - 1``, and elements have 24 significant bits, so
``|x * 2**s| <= (1 - 2**-24) * 2**(31 - L)``, which exceeds the limit by ``1 - 2**(7 - L)``: nothing for ``L
<= 7``, half an integer for ``L = 8``. (Beyond 256 ranks it is less than one integer, and the bound
doubles.) ``R`` and ``R * 2**-s`` are exact in float64, so the conversion to the element type is the only
rounding of a sum. A mean is divided in float64 first (or multiplied by ``1 / n`` where that gives the
same). That rounding is harmless: ``R / n`` is either exactly half-way between two elements or further than
``2**-40`` of itself away from there, while float64 is off by ``2**-53``. A sum beyond the element type's
range becomes infinite, as IEEE addition would.

*Order independence.* Integer addition commutes, exponents are maxima, and ``E`` is a function of values
alone: all ranks get the same bits whatever the arrival order, topology and placement of ranks.

**Exponent tables** are uint8, one entry per block of the tensor. 255 means that the block holds a NaN or
infinity: it contributes zeros and its result is NaN throughout. Under ``ExponentMode.FIXED`` the entry
:data:`FIXED_FACTOR` (0) means "use the factor" and any other a power of two as above. The two cannot clash: a
block that does not fit the factor is never one of zeros and denormals only, because factors are limited to
``2**100``. With the factor the bound is ``n * (1/2 + 2**-22) / factor`` plus rounding.

**Misfits.** A block that does not fit its table entry (carried and fixed exponents) reports the exponent it needs,
which is never 0; 0 means that it fits. The largest exponent announced by any rank suits all of them: ranks
that fitted are smaller.
"""

from fractions import Fraction
from math import ldexp

import numpy as np

from inanet.kernels.dequantise import dequantise16, dequantise32
from inanet.kernels.exponents import block_exponents, block_misfits, first_nonfinite
from inanet.kernels.layout import BLOCK, EXPONENTS_PER_FRAGMENT, POISON
from inanet.kernels.quantise import quantise
from inanet.kernels.together import quantise_together, reduce_together
from inanet.proto.common.encoding import NOTHING, Array, Arrays, Bytes, Format, Index, Rows, shifted
from inanet.proto.common.plan import ExponentMode, Fold, TensorSpec

#: entry of an exponent table that stands for the factor of ``ExponentMode.FIXED``
FIXED_FACTOR = 0
#: contributing ranks a format can serve
MAX_RANKS = 1 << 15
#: the factor of ``ExponentMode.FIXED`` and its inverse are at most this
MAX_FACTOR = 2.0**100


class FloatSum(Format):
    """Sum or mean of floats, in blocks of 256 that share an exponent (number format)."""

    uses_exponents = True

    def __init__(self, spec: TensorSpec, ranks: int) -> None:
        super().__init__(spec, ranks, Fold.SUM, BLOCK)
        self._brain = spec.dtype == "bf16"
        self._single = spec.dtype == "f32"
        self._limit = (2**31 - 1) // ranks
        self._factor = spec.factor if spec.mode is ExponentMode.FIXED else 0.0
        self._log2 = (ranks - 1).bit_length()
        if spec.mode is not ExponentMode.FIXED:
            self.exponent_fragments = -(-self.fragments // EXPONENTS_PER_FRAGMENT)
        self._tables()

    def _tables(self) -> None:
        """What an exponent ``E`` means, as arrays indexed by it: kernels know no modes."""
        shifts = [157 - self._log2 - exponent for exponent in range(POISON)]
        self._scale = np.array([*(ldexp(1.0, shift) for shift in shifts), 0.0])
        #: largest magnitude, as float32 bits, that fits
        self._largest = np.array([*(e << 23 | 0x7FFFFF for e in range(POISON)), 2**32 - 1], np.uint32)
        self._multiply = np.array([*(ldexp(1.0, -shift) for shift in shifts), np.nan])
        self._divide = np.ones(POISON + 1)
        if self._factor:
            self._largest[FIXED_FACTOR] = _largest_fixed(self._factor, self._limit)
            self._scale[FIXED_FACTOR] = self._factor
            self._multiply[FIXED_FACTOR] = 1.0
            self._divide[FIXED_FACTOR] = self._factor
        if self.spec.op == "mean":
            self._divide *= self.ranks
            if not self._factor and _reciprocal_suffices(self.ranks):
                self._multiply *= 1.0 / self.ranks
                self._divide[:] = 1.0
        self._fast_tables()

    def _fast_tables(self) -> None:
        """What of the tables float32 can do with the same bits, 0 elsewhere.

        *Quantising*: ``x * 2**s`` is exact in float32 if it neither overflows nor becomes too small to be halved
        exactly, which then rounds to 0 either way; and up to 128 ranks the clamp changes nothing (see above).
        *Dequantising*: ``R`` rounded to float32, times a power of two, is the product rounded once, if no product
        overflows or is denormal.
        """
        scale, multiply = self._scale, self._multiply
        exact = (scale >= 2.0**-126) & (scale < 2.0**127) & (np.frexp(scale)[0] == 0.5)
        fits = exact & (self._log2 <= 7)
        self._scale32 = np.where(fits, scale, 0.0).astype(np.float32)
        exact = (multiply >= 2.0**-126) & (multiply <= 2.0**96) & (np.frexp(multiply)[0] == 0.5)
        fits = exact & (self._divide == 1.0)
        self._multiply32 = np.where(fits, multiply, 0.0).astype(np.float32)

    def exponents(self, arrays: Arrays, lo: int, hi: int, out: Bytes) -> None:
        super().exponents(arrays, lo, hi, out)
        for view in self.bind(arrays).views:
            block_exponents(view, self._brain, lo, hi, out)

    def encode(
        self,
        arrays: Arrays,
        lo: int,
        hi: int,
        exps: Bytes,
        rows: Rows,
        row0: int,
        misfit: Bytes | None = None,
    ) -> None:
        check = misfit is not None
        if misfit is None:
            misfit = np.empty(hi - lo, np.uint8)
        bound = self.bind(arrays)
        if self._single:
            quantise_together(
                bound.bases,
                self.elements,
                lo,
                hi,
                check,
                exps,
                self._largest,
                self._limit,
                self._scale,
                self._scale32,
                misfit,
                rows,
                row0,
            )
            return
        views = bound.views
        misfit[: hi - lo] = 0
        for bits in views if check else ():
            block_misfits(bits, self._brain, lo, hi, exps, self._largest, misfit)
        for k, bits in enumerate(views):
            quantise(
                bits,
                self._brain,
                lo,
                hi,
                exps,
                self._scale,
                self._scale32,
                self._limit,
                misfit,
                rows,
                row0,
                k == 0,
                k == len(views) - 1,
            )

    def decode(
        self,
        rows: Rows,
        slots: Index,
        fragments: Index,
        exps: Bytes,
        arrays: Arrays,
        following: Bytes = NOTHING,
    ) -> None:
        views = self.bind(arrays).views
        tables = self._multiply, self._divide
        shift = self._log2 - 30
        if self._factor:
            following = NOTHING
        if self._single:
            out = views[0].view(np.float32)
            poisoned = dequantise32(
                rows, slots, fragments, exps, *tables, self._multiply32, out, shift, following
            )
        else:
            poisoned = dequantise16(
                rows, slots, fragments, exps, *tables, self._brain, views[0], shift, following
            )
        if poisoned < self.fragments:
            self._poisoned[0] = min(self._poisoned[0], int(poisoned) * BLOCK)
        self._spread(views, fragments)

    def together(
        self, arrays: Arrays, lo: int, hi: int, exps: Bytes, following: Bytes, *, prologue: bool
    ) -> int | None:
        if not self._single:
            return None
        if not all(array.flags.writeable for array in arrays):
            # the kernel is told addresses, behind which nothing is read-only
            raise ValueError(f"tensor {self.spec.name!r} needs arrays that its result can be written into")
        refuse = not self.spec.propagate
        return int(
            reduce_together(
                self.bind(arrays).bases,
                self.elements,
                lo,
                hi,
                prologue,
                refuse,
                self._log2 - 30,
                exps,
                following,
                self._largest,
                self._limit,
                self._scale,
                self._scale32,
                self._multiply,
                self._divide,
                self._multiply32,
                np.empty(BLOCK, np.int32),
            )
        )

    def first_nonfinite(self, array: Array, lo: int = 0, hi: int | None = None) -> int:
        return shifted(lo * self.values, first_nonfinite(self._part(array, lo, hi), self._brain))


def _reciprocal_suffices(ranks: int) -> bool:
    """Whether multiplying by ``1 / ranks`` in float64 rounds every mean like a division, in less time.

    With ``1 / ranks`` off by the factor ``1 + d``, quotients that lie away from a half-way point stay on
    their side. One exactly on it has 25 significant bits; the product rounds to it, and then to even, if
    ``|d| <= 2**-54``.
    """
    return abs(Fraction(1 / ranks) * ranks - 1) <= Fraction(1, 2**54)


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
