"""Formats that lose nothing: integer sums in limbs, and maxima and minima of anything."""

import numpy as np

from inanet.kernels import limbs, ordered
from inanet.kernels.exponents import first_nonfinite
from inanet.proto.common.encoding import Array, Arrays, Bytes, Format, Index, Rows, shifted
from inanet.proto.common.plan import Fold, TensorSpec

#: per float: mask of exponent and fraction, infinity, canonical NaN
_PATTERNS = {
    "f32": (0x7FFFFFFF, 0x7F800000, 0x7FC00000),
    "f16": (0x7FFF, 0x7C00, 0x7E00),
    "bf16": (0x7FFF, 0x7F80, 0x7FC0),
}


class IntegerSum(Format):
    """Exact sum of integers, in limbs; of a tensor that propagates, modulo the size of its dtype."""

    def __init__(self, spec: TensorSpec, ranks: int) -> None:
        self._wide = spec.dtype == "i64"
        super().__init__(spec, ranks, Fold.SUM, limbs.VALUES64 if self._wide else limbs.VALUES32)

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
        if needs is not None:
            needs[: hi - lo] = 0
        last = len(arrays) - 1
        for k, bits in enumerate(self.bind(arrays).views):
            if self._wide:
                limbs.split64(bits.view(np.int64), lo, hi, rows, row0, k == 0, k == last)
            else:
                limbs.split32(bits.view(np.int32), lo, hi, rows, row0, k == 0, k == last)

    def decode(
        self,
        rows: Rows,
        slots: Index,
        fragments: Index,
        exps: Bytes,
        arrays: Arrays,
    ) -> None:
        views = self.bind(arrays).views
        if self._wide:
            limbs.merge64(rows, slots, fragments, views[0].view(np.int64), self._overflow)
        else:
            limbs.merge32(rows, slots, fragments, views[0].view(np.int32), self._overflow)
        self._spread(views, fragments)

    @property
    def overflow(self) -> int:
        return -1 if self.spec.propagate else super().overflow


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
        self,
        arrays: Arrays,
        lo: int,
        hi: int,
        exps: Bytes,
        rows: Rows,
        row0: int,
        needs: Bytes | None = None,
    ) -> None:
        if needs is not None:
            needs[: hi - lo] = 0
        last = len(arrays) - 1
        for k, view in enumerate(self.bind(arrays).views):
            words = self._signed(view)
            ends = (k == 0, k == last)
            if self._wide:
                ordered.order64(words, lo, hi, self._flip, rows, row0, *ends)
            else:
                ordered.order32(words, lo, hi, self._magnitude, self._accepted, self._flip, rows, row0, *ends)

    def decode(
        self,
        rows: Rows,
        slots: Index,
        fragments: Index,
        exps: Bytes,
        arrays: Arrays,
    ) -> None:
        views = self.bind(arrays).views
        out = self._signed(views[0])
        if self._wide:
            ordered.restore64(rows, slots, fragments, self._flip, out)
        else:
            nan, flip = self._nan, self._flip
            ordered.restore32(rows, slots, fragments, self._magnitude, nan, flip, out, self._poisoned)
        self._spread(views, fragments)

    def first_nonfinite(self, array: Array, lo: int = 0, hi: int | None = None) -> int:
        if not self._magnitude:
            return -1
        return shifted(
            lo * self.values, first_nonfinite(self._part(array, lo, hi), self.spec.dtype == "bf16")
        )
