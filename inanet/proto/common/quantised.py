"""Sums of floats as integers under shared exponents: the number format, and the proof of its error bound.

A fragment has 256 elements. Blocks of them share an exponent ``E``: 8 elements where exponents are agreed on for every
round (prologue), 256 where they are carried over or fixed. In a block ``|x| < 2**e``, ``e = E - 126``. With
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

**Exponent tables** are uint8, one entry per block of the tensor. 255 means that the block holds a NaN or infinity on some
rank: its integers are marks (:mod:`inanet.kernels.quantise`), by which such elements become infinity or NaN, as float32
addition would make them, and all others 0. Under ``ExponentMode.FIXED`` the entry :data:`FIXED_FACTOR` (0) means "use the
factor" and any other a power of two as above. The two cannot clash: no block but one of zeros needs exponent 0. With the
factor the bound is ``n * (1/2 + 2**-22) / factor`` plus rounding.

**Misfits** (carried and fixed exponents), in both directions. Let ``N`` be the largest exponent that any rank's block needs.
The block goes again under ``N`` if its table entry ``E`` is less, and if it is so much more that the largest element
would keep too few bits: under carried exponents if ``E > N +`` :data:`SLACK`, under a factor if fewer than
:data:`FACTOR_BITS` were left. (Zeros fit anything.) So the bound above holds in these modes as well, relative to the
largest element of *this* sum's block, times ``2**SLACK``; under a factor it is ``n * 2**-FACTOR_BITS * 2**e``. Which
blocks go again follows from ``N`` and ``E`` alone, and so do the bits of the result.
"""

from fractions import Fraction
from math import ldexp

import numpy as np

from inanet.kernels.dequantise import dequantise16, dequantise32
from inanet.kernels.exponents import block_exponents, first_nonfinite
from inanet.kernels.layout import BLOCK, POISON, PROLOGUE_BLOCK
from inanet.kernels.quantise import quantise
from inanet.kernels.together import quantise_together, reduce_together
from inanet.proto.common.encoding import (
    LARGE,
    MISFIT,
    Array,
    Arrays,
    Bytes,
    FloatTables,
    Format,
    Index,
    Rows,
    shifted,
)
from inanet.proto.common.plan import ExponentMode, Fold, TensorSpec

#: entry of an exponent table that stands for the factor of ``ExponentMode.FIXED``
FIXED_FACTOR = 0
#: contributing ranks a format can serve
MAX_RANKS = 1 << 15
#: the factor of ``ExponentMode.FIXED`` and its inverse are at most this
MAX_FACTOR = 2.0**100
#: bits that a carried exponent may lie above what the block needs
SLACK = 8
#: bits that the largest element of a block keeps at least under a factor
FACTOR_BITS = 15
#: bits that the next round's exponent lies above what a block needed, at least and at most
HEADROOM = 2
MOST_HEADROOM = 6


class FloatSum(Format):
    """Sum or mean of floats, in blocks that share an exponent (number format): of 8 elements with a prologue in every round,
    else of 256.
    """

    uses_exponents = True

    def __init__(self, spec: TensorSpec, ranks: int) -> None:
        super().__init__(spec, ranks, Fold.SUM, BLOCK)
        self._brain = spec.dtype == "bf16"
        self._single = spec.dtype == "f32"
        self._limit = (2**31 - 1) // ranks
        self._factor = spec.factor if spec.mode is ExponentMode.FIXED else 0.0
        self._log2 = (ranks - 1).bit_length()
        if spec.mode is ExponentMode.PROLOGUE:
            self.blocks = BLOCK // PROLOGUE_BLOCK
        if spec.mode is not ExponentMode.FIXED:
            self.exponent_fragments = -(-self.fragments // self.share)
        self._tables()

    def _tables(self) -> None:
        """What an exponent ``E`` means, as arrays indexed by it: kernels know no modes."""
        shifts = [157 - self._log2 - exponent for exponent in range(POISON)]
        self._scale = np.array([*(ldexp(1.0, shift) for shift in shifts), 0.0])
        #: what a block may need to fit, and what some rank's has to need for enough bits to be kept
        self._top = np.arange(POISON + 1, dtype=np.uint8)
        self._least = np.array([*(max(e - SLACK, 0) for e in range(POISON)), 0], np.uint8)
        self._multiply = np.array([*(ldexp(1.0, -shift) for shift in shifts), np.nan])
        self._divide = np.ones(POISON + 1)
        if self._factor:
            self._top[FIXED_FACTOR] = _top_fixed(self._factor, self._limit)
            slack = max(31 - FACTOR_BITS - self._log2, SLACK)
            self._least[FIXED_FACTOR] = np.argmax(self._scale <= ldexp(self._factor, slack))
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
        if not self._factor:
            # zeros are zeros under any factor
            self._scale32[0] = 1.0
        exact = (multiply >= 2.0**-126) & (multiply <= 2.0**96) & (np.frexp(multiply)[0] == 0.5)
        fits = exact & (self._divide == 1.0)
        self._multiply32 = np.where(fits, multiply, 0.0).astype(np.float32)
        if not self._factor and (self._divide == 1.0).all():
            self._multiply32[0] = 1.0

    @property
    def tables(self) -> FloatTables | None:
        if not self._single:
            return None
        return FloatTables(
            self._top,
            self._scale,
            self._scale32,
            self._multiply,
            self._divide,
            self._multiply32,
            self._poisoned,
            self._limit,
        )

    def exponents(self, arrays: Arrays, lo: int, hi: int, out: Bytes) -> None:
        super().exponents(arrays, lo, hi, out)
        for view in self.bind(arrays).views:
            block_exponents(view, self._brain, BLOCK // self.blocks, lo * self.blocks, hi * self.blocks, out)

    def judge(self, needs: Bytes, exps: Bytes) -> Bytes:
        verdicts = np.where(needs > self._top[exps], MISFIT, 0).astype(np.uint8)
        verdicts[(needs >= self._least[exps]) & (needs != 0) & (verdicts == 0)] = LARGE
        return verdicts

    def encode(
        self,
        arrays: Arrays,
        lo: int,
        hi: int,
        exps: Bytes,
        rows: Rows,
        row0: int,
        needs: Bytes | None = None,
    ) -> None:
        check = needs is not None
        if check and self.blocks > 1:
            raise ValueError(
                f"tensor {self.spec.name!r}: its exponents are agreed on before, none can be asked for"
            )
        if needs is None:
            needs = np.zeros(hi - lo, np.uint8)
        bound = self.bind(arrays)
        if self._single:
            quantise_together(
                bound.bases,
                self.elements,
                lo,
                hi,
                check,
                exps,
                self.blocks,
                self._top,
                self._limit,
                self._scale,
                self._scale32,
                needs,
                rows,
                row0,
            )
            return
        views = bound.views
        misfit = np.zeros(hi - lo, np.uint8)
        if check:
            self.exponents(bound, lo, hi, needs)
            misfit = np.where(needs[: hi - lo] > self._top[exps[lo:hi]], needs[: hi - lo], misfit)
        for k, bits in enumerate(views):
            quantise(
                bits,
                self._brain,
                lo,
                hi,
                exps,
                self.blocks,
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
    ) -> None:
        views = self.bind(arrays).views
        tables = self._multiply, self._divide
        if self._single:
            out = views[0].view(np.float32)
            poisoned = dequantise32(rows, slots, fragments, exps, self.blocks, *tables, self._multiply32, out)
        else:
            poisoned = dequantise16(rows, slots, fragments, exps, self.blocks, *tables, self._brain, views[0])
        if poisoned < self.elements:
            self._poisoned[0] = min(self._poisoned[0], int(poisoned))
        self._spread(views, fragments)

    def together(
        self, arrays: Arrays, lo: int, hi: int, exps: Bytes, needs: Bytes, *, prologue: bool
    ) -> int | None:
        if not self._single:
            return None
        if not all(array.flags.writeable for array in arrays):
            # the kernel is told addresses, behind which nothing is read-only
            raise ValueError(f"tensor {self.spec.name!r} needs arrays that its result can be written into")
        refuse = not self.spec.propagate
        bases = self.bind(arrays).bases
        return int(
            reduce_together(
                bases,
                bases,
                self.elements,
                lo,
                hi,
                prologue,
                refuse,
                exps,
                self.blocks,
                needs,
                self._top,
                self._least,
                self._limit,
                self._scale,
                self._scale32,
                self._multiply,
                self._divide,
                self._multiply32,
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


def _top_fixed(factor: float, limit: int) -> int:
    """The largest exponent whose elements all fit a factor: ``rint(x * factor) <= limit``."""
    return max(
        (
            e
            for e in range(POISON)
            if round(float(np.uint32(e << 23 | 0x7FFFFF).view(np.float32)) * factor) <= limit
        ),
        default=0,
    )


def carried_over(needs: Bytes, used: Bytes) -> Bytes:
    """The exponents of a tensor's next round, by what its blocks needed over all ranks and what they were sent under.

    :data:`HEADROOM` bits above the need, or one bit less than this time if that is more, but never more than
    :data:`MOST_HEADROOM` bits above it: 254 at most. Blocks of zeros keep what they had, less one bit; those with NaN or
    infinity begin anew.
    """
    need, last = needs.astype(np.int16), used.astype(np.int16)
    following = np.maximum(need + HEADROOM, np.minimum(last - 1, need + MOST_HEADROOM))
    following[need == 0] = np.maximum(last - 1, 0)[need == 0]
    following[last == POISON] = 0
    return np.minimum(following, POISON - 1).astype(np.uint8)
