"""A collective whose ranks are all on one host: the number formats without a network, and therefore the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.layout import ROW_WORDS
from inanet.proto.formats import make_format
from inanet.proto.plan import ExponentMode, TensorSpec

#: fragments quantised, summed and dequantised at a time; they stay in the cache
CHUNK = 64


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no result: the rank to blame by its position, -1 if it is no rank's fault, and the element."""

    position: int
    index: int
    text: str


class LocalTensor:
    """One tensor of a single-host job, with the exponents that its next round carries (R1)."""

    def __init__(self, spec: TensorSpec, ranks: int) -> None:
        self.spec = spec
        self.format = make_format(spec, ranks)
        self._carried: NDArray[np.uint8] | None = None
        self._rows: NDArray[np.int32] = np.zeros((CHUNK, ROW_WORDS), np.int32)
        self._needed: NDArray[np.uint8] = np.zeros(CHUNK, np.uint8)

    def reduce(self, arrays: Sequence[NDArray[Any]]) -> Refusal | None:
        """Overwrite every rank's 1-D array with the result.

        Returns None, or why there is no result.
        The exponent of a block is what a round over the network would have agreed on, so the bits are the same.
        """
        form = self.format
        form.clear()
        if not self.spec.propagate:
            position, index = form.locate_nonfinite(arrays)
            if position >= 0:
                value = arrays[position][index]
                text = f"has {value} at element {index} of tensor {self.spec.name!r}"
                return Refusal(position, index, text)
        exponents = form.initial_exponents()
        following = form.initial_exponents()
        carry = form.uses_exponents and self.spec.mode is ExponentMode.CARRIED
        if carry and self._carried is not None:
            exponents[:] = self._carried
        prologue = (
            form.uses_exponents
            and self.spec.mode is not ExponentMode.FIXED
            and not (carry and self._carried is not None)
        )
        for low in range(0, form.fragments, CHUNK):
            high = min(low + CHUNK, form.fragments)
            fragments = np.arange(low, high)
            if prologue:
                form.exponents(arrays, low, high, exponents[low:high])
            else:
                self._raise_misfits(arrays, low, high, exponents)
            form.encode(arrays, low, high, exponents, self._rows, 0)
            if carry:
                form.carried(self._rows, fragments - low, fragments, exponents, following)
            form.decode(self._rows, fragments - low, fragments, exponents, arrays)
        if carry:
            self._carried = following
        if form.overflow >= 0:
            text = f"the exact sum of element {form.overflow} does not fit its dtype"
            return Refusal(-1, form.overflow, text)
        return None

    def _raise_misfits(
        self, arrays: Sequence[NDArray[Any]], low: int, high: int, exponents: NDArray[np.uint8]
    ) -> None:
        """Blocks that do not fit the carried exponent, or the fixed factor, get the one they need."""
        if not self.format.uses_exponents:
            return
        needed = self._needed[: high - low]
        self.format.encode(arrays, low, high, exponents, self._rows, 0, needed)
        misfits = np.flatnonzero(needed)
        exponents[low + misfits] = needed[misfits]
