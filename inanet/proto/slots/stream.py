"""One round of one tensor at a worker, as a stream of fragments of the framing's width.

The tensor is quantised into rows of 256 words (:mod:`inanet.proto.common.formats`); fragments are cut from the rows' payloads as if
these lay end to end, so blocks and their exponents are the same for every framing and so are the bits (number format). The rows
hold the contribution until a fragment's result comes, and the result from then on.

Exponents without a barrier (exponent agreement). In a tensor's first round (prologue) data of a group of 1024 blocks may leave when the
group's exponents are agreed. Later (carried), and with a fixed factor, data leaves at once, under the exponents that
everybody has, while every worker tells the root what its blocks need. When that is agreed, all workers know the same list
of misfits, blocks that are too large for their exponent and blocks that are far too small, and it goes out again under the
exponents it needs, as a *second pass* behind the tensor's own fragments. The list depends on values only, never on time; the
first results of those blocks are ignored.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import place, take
from inanet.kernels.layout import BLOCK, PAYLOAD_WORDS, POISON, ROW_WORDS
from inanet.proto.common.encoding import NOTHING
from inanet.proto.common.formats import Format
from inanet.proto.common.plan import ExponentMode
from inanet.proto.common.quantised import carried_over
from inanet.proto.slots.exponents import Agreement, Question
from inanet.proto.slots.source import Arrays, Index, Source, Tensor

#: fragments whose exponents are found at once: what is known leaves meanwhile
AT_ONCE = 16384


def words_of(form: Format) -> int:
    """Words of a tensor that are sent, whatever the width of the fragments that they are cut into."""
    return form.elements if form.values == PAYLOAD_WORDS else form.fragments * PAYLOAD_WORDS


class _Pass:
    """Rows, cut into fragments of ``width`` words."""

    def __init__(self, blocks: int, words: int, width: int) -> None:
        self.rows: NDArray[np.int32] = np.zeros((blocks, ROW_WORDS), np.int32)
        self.words, self.width = words, width
        self.count = -(-words // width)

    def fragments_of(self, blocks: int) -> int:
        """Fragments that lie in the first ``blocks`` blocks entirely."""
        words = min(blocks * PAYLOAD_WORDS, self.words)
        return self.count if words == self.words else words // self.width


class Stream(Source):
    """A round under block exponents (number format); ``width`` words make a fragment."""

    def __init__(self, tensor: Tensor, round_: int, arrays: Arrays, width: int) -> None:
        super().__init__(tensor, round_, arrays)
        form = tensor.format
        self.width = width
        self._main = _Pass(form.fragments, words_of(form), width)
        self._again: _Pass | None = None
        self._misfits: Index = np.zeros(0, np.int64)
        self._question: Question | None = None
        #: what blocks need over all workers, once that is agreed
        self._needs: NDArray[np.uint8] = NOTHING
        self._offered = self._encoded = 0
        self._table: NDArray[np.uint8] = form.initial_exponents()
        self._prologue = False
        self._taken = 0
        # nothing is encoded, but arrays that do not suit are refused here and not in the middle of the round
        form.encode(arrays, 0, 0, self._table, self._main.rows, 0)

    # ---------------------------------------------------------------- exponents

    def open(self) -> None:
        tensor, form = self.tensor, self.tensor.format
        self.opened = True
        form.clear()
        if not form.uses_exponents:
            self._encode(0, form.fragments)
            self.ready = self.count = self._main.count
            return
        carried = tensor.carried if tensor.spec.mode is ExponentMode.CARRIED else None
        if carried is not None:
            self._table[:] = carried
        self._prologue = tensor.spec.mode is not ExponentMode.FIXED and carried is None
        self._question = Question(tensor.tensor, self.round, form.initial_exponents())
        if self._prologue or not form.fragments:
            self.count = self._main.count

    def advance(self, client: Agreement | None, now: float) -> None:
        """Offer exponents as far as the root keeps up, and see which fragments may leave by now."""
        question = self._question
        if question is None:
            return
        assert client is not None, "floats need a root that agrees on exponents"
        form = self.tensor.format
        count = min(client.room, len(question.agreed) - self._offered, max(1, AT_ONCE // form.share))
        if count > 0:
            low, high = self._offered * form.share, min((self._offered + count) * form.share, form.fragments)
            exponents = np.zeros((high - low) * form.blocks, np.uint8)
            if self._prologue:
                form.exponents(self.arrays, low, high, exponents)
            else:
                # misfits that are too large leave as what they need and zeros: their first results are ignored
                form.encode(self.arrays, low, high, self._table, self._main.rows, low, exponents)
                self.ready = self._main.fragments_of(high)
            client.offer(question, self._offered, exponents, now)
            self._offered += count
        if self._prologue:
            self._encode_agreed(question)
        if question.done:
            self._settle(question)

    def _encode_agreed(self, question: Question) -> None:
        stop = question.agreed_from(self._encoded)
        if stop > self._encoded:
            form = self.tensor.format
            low, high = self._encoded * form.share, min(stop * form.share, form.fragments)
            where = slice(low * form.blocks, high * form.blocks)
            self._table[where] = question.table[where]
            self._encode(low, high)
            self._encoded = stop
            self.ready = self._main.fragments_of(high)

    def _encode(self, low: int, high: int) -> None:
        self.tensor.format.encode(self.arrays, low, high, self._table, self._main.rows, low)

    def _settle(self, question: Question) -> None:
        """All workers know the same now: who is refused, and what goes out a second time."""
        form, spec = self.tensor.format, self.tensor.spec
        self._question = None
        poisoned = np.flatnonzero(question.table == POISON)
        if len(poisoned) and not spec.propagate:
            position, index = form.locate_nonfinite(self.arrays)
            self.refusal = (
                (position, index) if position >= 0 else (-1, int(poisoned[0]) * (BLOCK // form.blocks))
            )
        self._needs = question.table
        if self._prologue:
            return
        self._misfits = np.flatnonzero(form.misfits(question.table, self._table))
        count = len(self._misfits)
        self._table[self._misfits] = question.table[self._misfits]
        again = self._again = _Pass(count, count * PAYLOAD_WORDS, self.width)
        form.encode_some(self.arrays, self._misfits, self._table, again.rows, np.arange(count))
        self.ready = self.count = self._main.count + again.count

    # ---------------------------------------------------------------- fragments

    def place(self, fragments: Index, arena: NDArray[np.uint8], at: int, stride: int) -> None:
        if self._again is None:
            place(self._main.rows, self._main.words, fragments, self.width, arena, at, stride)
            return
        # ascending: what belongs to the second pass comes last
        main = int(np.searchsorted(fragments, self._main.count))
        place(self._main.rows, self._main.words, fragments[:main], self.width, arena, at, stride)
        rest = fragments[main:] - self._main.count
        place(self._again.rows, self._again.words, rest, self.width, arena, at + main * stride, stride)

    def take(self, arena: NDArray[np.uint8], ats: Index, fragments: Index) -> None:
        self._taken += len(fragments)
        if self._again is None:
            take(arena, ats, fragments, self.width, self._main.words, self._main.rows)
            return
        main = fragments < self._main.count
        take(arena, ats[main], fragments[main], self.width, self._main.words, self._main.rows)
        rest = fragments[~main] - self._main.count
        take(arena, ats[~main], rest, self.width, self._again.words, self._again.rows)

    # ---------------------------------------------------------------- the end

    @property
    def finished(self) -> bool:
        return self._question is None and self.opened and self._taken == self.count

    def finish(self) -> None:
        form, spec, tensor = self.tensor.format, self.tensor.spec, self.tensor
        every = np.arange(form.fragments)
        parts = [(self._main.rows, every, every)]
        if self._again is not None:
            # over what their first pass has left
            parts.append((self._again.rows, np.arange(len(self._misfits)), self._misfits))
        for rows, slots, fragments in parts:
            form.decode(rows, slots, fragments, self._table, self.arrays)
        carries = spec.mode is ExponentMode.CARRIED and form.uses_exponents and self.refusal is None
        tensor.carried = carried_over(self._needs, self._table) if carries else None
