"""Rounds of tensors as messages: what they carry, and where results go.

Integers and floats under block exponents are the streams of the other switched systems, with a message for a fragment, so
their bits are the same (number format). Exponents need no root here: a switch that keeps packets compares bytes as well as it
adds, so they are messages of their own in front of the data. *Raw* floats are float32, added in the order of ranks, as the FPGA
did.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.slots.exponents import GROUP, ExponentClient, Question
from inanet.proto.slots.source import Arrays, Index, Source, Tensor
from inanet.proto.slots.stream import Stream
from inanet.wire.batch import U8
from inanet.wire.netreduce import Operation


class RawStream(Source):
    """A round of float32 as it is; NaN and infinities go through, as in any IEEE sum. ``width`` values make a message.

    Raises ``ValueError`` for other types.
    """

    def __init__(self, tensor: Tensor, round_: int, arrays: Arrays, width: int) -> None:
        super().__init__(tensor, round_, arrays)
        spec = tensor.spec
        if spec.dtype != "f32":
            raise ValueError(
                f"tensor {spec.name!r}: raw floats are f32, not {spec.dtype}; use the int32 format"
            )
        tensor.format.bind(arrays)
        self.width = width
        self._values: NDArray[np.float32] = np.zeros(spec.elements, np.float32)
        self._messages = max(1, -(-spec.elements // width))
        self._taken = 0

    def open(self) -> None:
        """Nothing is agreed first."""
        self.opened = True
        self._values[:] = self.arrays[0]
        for array in self.arrays[1:]:
            self._values += array
        self.ready = self.count = self._messages

    def advance(self, client: ExponentClient | None, now: float) -> None:
        """Everything may leave at once."""

    def place(self, fragments: Index, arena: NDArray[np.uint8], at: int, stride: int) -> None:
        """See :class:`~inanet.proto.slots.source.Source`; little-endian."""
        for k, fragment in enumerate(fragments.tolist()):
            part = self._values[fragment * self.width : (fragment + 1) * self.width]
            begin = at + k * stride
            arena[begin : begin + part.nbytes] = part.view(np.uint8)
            arena[begin + part.nbytes : begin + 4 * self.width] = 0

    def take(self, arena: NDArray[np.uint8], ats: Index, fragments: Index) -> None:
        """See :class:`~inanet.proto.slots.source.Source`; little-endian."""
        self._taken += len(fragments)
        for at, fragment in zip(ats.tolist(), fragments.tolist(), strict=True):
            part = self._values[fragment * self.width : (fragment + 1) * self.width]
            part.view(np.uint8)[:] = arena[at : at + part.nbytes]

    @property
    def finished(self) -> bool:
        """Whether all results are here."""
        return self.opened and self._taken == self._messages

    def finish(self) -> None:
        """Write sums or means."""
        if self.tensor.spec.op == "mean":
            self._values /= np.float32(self.tensor.format.ranks)
        for array in self.arrays:
            array[:] = self._values


class Agreement(ExponentClient):
    """Exponents as messages of the ring: what a stream offers is collected here until it leaves, ``size`` bytes a message."""

    def __init__(self, job: int, size: int) -> None:
        super().__init__(job, 0, 0, 0)
        self._size = size
        self._offered: dict[int, tuple[Question, U8]] = {}
        #: what was offered last
        self.question: Question | None = None

    @property
    def room(self) -> int:
        """All groups at once: they are a message or two."""
        return 1 << 30

    def offer(self, question: Question, group: int, exponents: NDArray[np.uint8], now: float) -> None:
        """Collect this host's exponents of a group."""
        _, mine = self._offered.setdefault(id(question), (question, np.zeros(len(question.table), np.uint8)))
        mine[group * GROUP : group * GROUP + len(exponents)] = exponents
        self.question = question

    def messages(self, question: Question) -> int:
        """How many messages they take."""
        return -(-len(question.table) // self._size)

    def place(self, question: Question, message: int, out: U8) -> None:
        """Write one of them."""
        _, mine = self._offered[id(question)]
        part = mine[message * self._size : (message + 1) * self._size]
        out[: len(part)] = part
        out[len(part) :] = 0

    def take(self, question: Question, message: int, values: U8) -> None:
        """What all hosts have agreed on, of one message; in order."""
        part = question.table[message * self._size : (message + 1) * self._size]
        part[:] = values[: len(part)]
        if message + 1 == self.messages(question):
            question.agreed[:] = True
            del self._offered[id(question)]


class Round:
    """A round of one tensor: its messages in order, those of exponents first. ``values`` are 32-bit values of a message."""

    def __init__(
        self, tensor: Tensor, round_: int, arrays: Sequence[NDArray[Any]], values: int, *, raw: bool
    ) -> None:
        self.source: Source = (
            RawStream(tensor, round_, arrays, values)
            if raw and tensor.format.uses_exponents
            else Stream(tensor, round_, arrays, values)
        )
        self._swaps = isinstance(self.source, Stream)
        self._question: Question | None = None
        self._sent = 0
        #: the message after its last, over all rounds, once that has left; and since when it has all results
        self.end: int | None = None
        self.since: float | None = None

    def advance(self, agreement: Agreement, now: float) -> None:
        """See what may leave by now."""
        agreement.question = None
        self.source.advance(agreement, now)
        self._question = self._question or agreement.question

    def _exponents(self, agreement: Agreement) -> int:
        return 0 if self._question is None else agreement.messages(self._question)

    def can_send(self, agreement: Agreement) -> bool:
        """Whether its next message is known."""
        return self.source.opened and self._sent < self._exponents(agreement) + self.source.ready

    def has_sent(self, agreement: Agreement) -> bool:
        """Whether all its messages have left."""
        count = self.source.count
        return count is not None and self._sent == self._exponents(agreement) + count

    def unsent(self, agreement: Agreement) -> int:
        """Messages that have not left, as far as their number is known."""
        return self._exponents(agreement) + (self.source.count or 0) - self._sent

    def put(self, agreement: Agreement, out: U8) -> tuple[Operation, int]:
        """Write the next message's values; its operation, and its number within the round."""
        number, first = self._sent, self._exponents(agreement)
        self._sent += 1
        if self._question is not None and number < first:
            agreement.place(self._question, number, out)
            return Operation.MAX8, number
        self.source.place(np.array([number - first], np.int64), out, 0, len(out))
        if not self._swaps:
            return Operation.ADD_FLOAT, number
        # streams are made for framings with big-endian values
        out.view(np.int32).byteswap(inplace=True)
        return Operation.ADD, number

    def take(self, agreement: Agreement, number: int, values: U8) -> None:
        """The result of a message."""
        first = self._exponents(agreement)
        if self._question is not None and number < first:
            agreement.take(self._question, number, values)
            return
        if self._swaps:
            values.view(np.int32).byteswap(inplace=True)
        self.source.take(values, np.zeros(1, np.int64), np.array([number - first], np.int64))
