"""A collective whose ranks are all on one host: the number formats without a network, and therefore the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.layout import POISON, ROW_WORDS
from inanet.proto.common.encoding import NOTHING
from inanet.proto.common.formats import Format, make_format
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.quantised import carried_over

#: fragments quantised, summed and dequantised at a time: few enough to stay in the cache, enough for threads not to
#: spend their time handing the interpreter to each other
CHUNK = 1024

Arrays = Sequence[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no result: the rank to blame by its position, -1 if it is no rank's fault, and the element."""

    position: int
    index: int
    tensor: str
    text: str


@dataclass(slots=True)
class Part:
    """A range of fragments that one thread takes through a round. No two parts share anything they write."""

    low: int
    high: int
    #: its own, because it notes overflows
    format: Format
    #: the part was given up at this fragment, because it or one soon after holds NaN or infinity; -1 if it was not
    refused: int = -1


class LocalTensor:
    """One tensor of a single-host job, with the exponents that its next round carries (carried exponents).

    Raises ``ValueError`` for what no format can do. Rounds follow each other; within a round, parts may be worked on
    in any order and by several threads at once: bits do not depend on it.
    """

    def __init__(self, spec: TensorSpec, ranks: int) -> None:
        self.spec = spec
        self.ranks = ranks
        self.carried: NDArray[np.uint8] | None = None
        self._formats = [make_format(spec, ranks)]

    @property
    def fragments(self) -> int:
        """Data fragments of the tensor."""
        return self._formats[0].fragments

    def formats(self, count: int) -> list[Format]:
        """One format for each of ``count`` parts."""
        while len(self._formats) < count:
            self._formats.append(make_format(self.spec, self.ranks))
        return self._formats[:count]

    def begin(self, arrays: Arrays, parts: int = 1) -> "LocalRound":
        """Start a round, to be done in at most ``parts`` parts. ``arrays``: every rank's own, 1-D."""
        return LocalRound(self, arrays, parts)

    def reduce(self, arrays: Arrays) -> Refusal | None:
        """A whole round at once: overwrite every rank's 1-D array with the result.

        Returns None, or why there is no result; the arrays are undefined then.
        """
        round_ = self.begin(arrays)
        for part in round_.parts:
            round_.work(part)
        return round_.finish()


@dataclass(slots=True)
class LocalRound:
    """One round: :meth:`work` on every one of ``parts``, then :meth:`finish`.

    The exponent of a block is what a round over the network would have agreed on, so the bits are the same.
    """

    tensor: LocalTensor
    arrays: Arrays
    most_parts: int
    parts: list[Part] = field(init=False)
    _exponents: NDArray[np.uint8] = field(init=False)
    #: what blocks need, in carried mode
    _needs: NDArray[np.uint8] | None = field(init=False, default=None)
    #: exponents are agreed first, every block has its own largest
    _prologue: bool = field(init=False)

    def __post_init__(self) -> None:
        tensor = self.tensor
        count = max(1, min(self.most_parts, tensor.fragments))
        formats = tensor.formats(count)
        edges = [tensor.fragments * k // count for k in range(count + 1)]
        self.parts = [Part(edges[k], edges[k + 1], form) for k, form in enumerate(formats)]
        for form in formats:
            form.clear()
        self._exponents = formats[0].initial_exponents()
        mode = tensor.spec.mode
        carry = formats[0].uses_exponents and mode is ExponentMode.CARRIED
        if carry:
            self._needs = formats[0].initial_exponents()
        if tensor.carried is not None:
            self._exponents[:] = tensor.carried
        self._prologue = (
            formats[0].uses_exponents and mode is not ExponentMode.FIXED and tensor.carried is None
        )

    def work(self, part: Part) -> None:
        """Take one part through quantising, summing and dequantising, or give it up (:attr:`Part.refused`)."""
        form, exponents = part.format, self._exponents
        needs = self._needs if self._needs is not None else NOTHING
        given_up = form.together(self.arrays, part.low, part.high, exponents, needs, prologue=self._prologue)
        if given_up is not None:
            part.refused = given_up
            return
        rows = np.empty((min(CHUNK, part.high - part.low), ROW_WORDS), np.int32)
        for low in range(part.low, part.high, CHUNK):
            high = min(low + CHUNK, part.high)
            if not self._encode(form, low, high, rows):
                part.refused = low
                return
            fragments = np.arange(low, high)
            slots = fragments - low
            form.decode(rows, slots, fragments, exponents, self.arrays)

    def _encode(self, form: Format, low: int, high: int, rows: NDArray[np.int32]) -> bool:
        """Sum fragments into rows under exponents that suit all ranks; False if one holds what is not to be summed."""
        refuses = not self.tensor.spec.propagate
        exponents = self._exponents
        if not form.uses_exponents:
            if refuses and form.locate_nonfinite(self.arrays, low, high)[0] >= 0:
                return False
            form.encode(self.arrays, low, high, exponents, rows, 0)
            return True
        needs = np.zeros((high - low) * form.blocks, np.uint8)
        form.exponents(self.arrays, low, high, needs)
        if refuses and (needs == POISON).any():
            return False
        where = slice(low * form.blocks, high * form.blocks)
        if self._needs is not None:
            self._needs[where] = needs
        # carried, or the factor of fixed mode, does not suit the misfits: they get what they need (exponent agreement)
        again = slice(None) if self._prologue else form.misfits(needs, exponents[where])
        exponents[where][again] = needs[again]
        form.encode(self.arrays, low, high, exponents, rows, 0)
        return True

    def finish(self) -> Refusal | None:
        """End the round once all parts are done. Returns None, or why there is no result."""
        spec = self.tensor.spec
        given_up = [part for part in self.parts if part.refused >= 0]
        # as over the network: after a refused round nothing is carried over
        self.tensor.carried = None
        if self._needs is not None and not given_up:
            self.tensor.carried = carried_over(self._needs, self._exponents)
        # what lies before is the result by now
        places = [part.format.locate_nonfinite(self.arrays, part.refused, part.high) for part in given_up]
        if places:
            position, index = min(places)
            return nonfinite(spec, position, index, self.arrays[position][index])
        overflows = [part.format.overflow for part in self.parts if part.format.overflow >= 0]
        if overflows:
            index = min(overflows)
            return Refusal(
                -1, index, _title(spec), f"the exact sum of element {index} does not fit its dtype"
            )
        return None


def nonfinite(spec: TensorSpec, position: int, index: int, value: Any) -> Refusal:
    """The refusal of a NaN or infinity in element ``index`` of the rank at ``position``."""
    name = _title(spec)
    text = f"has {_shown(value, spec.dtype)} at element {index} of tensor {name!r}"
    return Refusal(position, index, name, f"{text}; pass nan='propagate' to let it through")


def _title(spec: TensorSpec) -> str:
    return spec.name or f"{spec.dtype}{list(spec.shape)}"


def _shown(value: Any, dtype: str) -> str:
    if dtype == "bf16":
        value = np.array([int(value) << 16], np.uint32).view(np.float32)[0]
    return str(value)
