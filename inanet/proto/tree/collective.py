"""A worker's own part in a round: the source of its contributions and the sink of the results.

A collective holds the arrays of the host's local ranks and turns fragments into slot rows and rows into results, range
by range and only when asked, so that encoding, sending and receiving overlap without a whole-tensor temporary. It
decides which exponents a fragment uses (exponent agreement); it knows nothing of links and groups.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.layout import EXPONENTS_PER_FRAGMENT, POISON
from inanet.proto.common.encoding import MISFIT
from inanet.proto.common.formats import Format
from inanet.proto.common.plan import ExponentMode, Part, Shard, TensorLayout
from inanet.proto.common.quantised import carried_over
from inanet.proto.tree.leaf import AHEAD, Shared
from inanet.proto.tree.slots import HEAD, LeafColumn, Work
from inanet.wire.xagg import INDEX_BITS, INDEX_WORD

Arrays = Sequence[NDArray[Any]]


def address_of(array: NDArray[Any]) -> int:
    """Where an array's first element lies. The array must outlive every use of the number."""
    return int(array.__array_interface__["data"][0])


class TensorState:
    """What outlives a round: the number format, and in ``carried`` mode the exponents of the next round."""

    def __init__(self, layout: TensorLayout, form: Format) -> None:
        self.layout = layout
        self.format = form
        self._carried: NDArray[np.uint8] | None = None
        self._carried_from = 0
        self._failed: set[int] = set()
        #: this host takes part in rounds of the tensor
        self.used = False

    def carry(self, round_: int, exponents: NDArray[np.uint8] | None) -> None:
        """A round has ended well and leaves these exponents to the next."""
        self._carried, self._carried_from = exponents, round_
        self._failed = {number for number in self._failed if number > round_}

    def fail(self, round_: int) -> None:
        """A round has failed: the one after it starts from nothing, on every host, whatever it has seen of this one."""
        if self.used and round_ >= self._carried_from:
            self._failed.add(round_)

    def carried(self, round_: int) -> NDArray[np.uint8] | None:
        """Exponents for this round, if the one before it has left any. Rounds must be asked for in order."""
        failed = {number for number in self._failed if number < round_}
        if not failed:
            return self._carried
        # one of them is enough to remember
        self._failed -= failed
        self._failed.add(min(failed))
        return None


class Collective:
    """One round of one tensor on one host.

    ``arrays`` are 1-D, one per local rank, in rank order, and are overwritten with the result fragment by fragment. Raises
    ``ValueError`` for arrays that are not the tensor's.
    """

    def __init__(self, state: TensorState, round_: int, arrays: Arrays) -> None:
        self.state = state
        self.round = round_
        form = state.format
        self.arrays = form.bind(arrays)
        state.used = True
        spec = state.layout.spec
        #: exponent shards take part in this round
        self.uses_prologue = False
        self.decided = False
        self.exponents: NDArray[np.uint8] = form.initial_exponents()
        #: what blocks need over all ranks, as their results say
        self._needs: NDArray[np.uint8] | None = (
            np.zeros(form.fragments, np.uint8)
            if form.uses_exponents and spec.mode is ExponentMode.CARRIED
            else None
        )
        #: per exponent fragment: agreed by all ranks
        self.agreed: NDArray[np.bool_] = np.zeros(form.exponent_fragments, np.bool_)
        #: fragments of which an attempt has begun whose exponent this host was never told
        self._untold: set[int] = set()
        #: see :class:`~inanet.proto.tree.leaf.Shared`; kernels count here as well
        self.shared: NDArray[np.int64] = np.zeros(len(Shared), np.int64)
        self.shared[Shared.REMAINING] = sum(
            shard.count for shard in state.layout.shards if shard.part is Part.DATA
        )
        self.shared[Shared.AHEAD] = AHEAD
        #: addresses of the format's tables, if kernels have been told of them
        self._tables: NDArray[np.int64] | None = None
        #: this host holds NaN or Inf that are not to be propagated
        self.refused = False
        #: range of fragments in which they were found: what lies outside may hold results by now
        self._suspects: tuple[int, int | None] = (0, None)
        if not form.uses_exponents and not spec.propagate:
            self.refused = form.locate_nonfinite(arrays)[0] >= 0

    def decide(self) -> None:
        """Choose the exponents, once every earlier round of this tensor is over here.

        Not before: all hosts must come to the same decision, however many rounds they have begun by then (exponent agreement).
        """
        spec, form = self.state.layout.spec, self.state.format
        carried = self.state.carried(self.round) if spec.mode is ExponentMode.CARRIED else None
        self.uses_prologue = form.uses_exponents and spec.mode is not ExponentMode.FIXED and carried is None
        self.agreed[:] = not self.uses_prologue
        if carried is not None:
            self.exponents[:] = carried
        form.clear()
        self.decided = True

    @property
    def finished(self) -> bool:
        """Whether every result has reached the arrays."""
        return bool(self.shared[Shared.REMAINING] == 0)

    def place(self, shard: Shard, leaf: NDArray[np.int64]) -> None:
        """Fill the row of a shard's part, once exponents are decided on (:class:`~inanet.proto.tree.slots.LeafColumn`)."""
        form = self.state.format
        tables = form.tables
        leaf[:] = 0
        leaf[LeafColumn.WORK] = Work.OTHER
        if tables is None or not self.uses_prologue or self._needs is not None:
            return
        if not all(array.flags.writeable for array in self.arrays):
            # behind an address nothing is read-only: this is refused when the first result comes
            return
        if self._tables is None:
            self._tables = np.array([address_of(array) for array in tables.arrays], np.int64)
        bases = self.arrays.bases
        leaf[LeafColumn.WORK] = Work.EXPONENTS if shard.part is Part.EXPONENTS else Work.DATA
        leaf[LeafColumn.FIRST] = shard.first
        leaf[LeafColumn.BASES], leaf[LeafColumn.RANKS] = address_of(bases), len(bases)
        leaf[LeafColumn.ELEMENTS] = form.elements
        leaf[LeafColumn.TABLE], leaf[LeafColumn.TABLE_SIZE] = address_of(self.exponents), len(self.exponents)
        leaf[LeafColumn.AGREED], leaf[LeafColumn.AGREED_SIZE] = address_of(self.agreed), len(self.agreed)
        leaf[LeafColumn.SHARE] = form.share
        leaf[LeafColumn.WAITS] = 1
        leaf[LeafColumn.REFUSES] = not self.state.layout.spec.propagate
        leaf[LeafColumn.LIMIT], leaf[LeafColumn.FORMAT] = tables.limit, address_of(self._tables)
        leaf[LeafColumn.SHARED] = address_of(self.shared)

    def refuse(self, low: int, high: int) -> None:
        """Blocks ``low`` to ``high - 1`` hold what is not to be summed."""
        if not self.refused:
            self.refused = True
            self._suspects = (low, high)

    def ready(self, shard: Shard, start: int, most: int, data_position: int) -> int:
        """How many fragments from ``start`` on can be encoded now, at most ``most``.

        Data waits for its exponents; exponents stay a few groups ahead of ``data_position`` (fragments already
        encoded) instead of scanning the whole tensor before the first byte leaves.
        """
        stop = min(start + most, shard.count)
        if self.refused:
            return 0
        if shard.part is Part.EXPONENTS:
            return max(
                0,
                min(stop, (data_position + int(self.shared[Shared.AHEAD])) // self.state.format.share)
                - start,
            )
        if not self.uses_prologue:
            return stop - start
        position = start
        while position < stop:
            share = self.state.format.share
            group = (shard.first + position) // share
            if not self.agreed[group]:
                break
            position = min(stop, (group + 1) * share - shard.first)
        return position - start

    def encode(
        self, shard: Shard, fragments: NDArray[np.int64], rows: NDArray[np.int32], slot0: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Fill payload and checksum of the rows of fragments, in ascending order.

        Returns what their blocks need and what they are under their exponents
        (:meth:`~inanet.proto.common.encoding.Format.judge`); both are 0 where exponents were agreed before.
        """
        form = self.state.format
        count = len(fragments)
        low, high = shard.first + int(fragments[0]), shard.first + int(fragments[-1]) + 1
        slots = slot0 + fragments
        needs, verdicts = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
        if shard.part is Part.EXPONENTS:
            self._encode_exponents(low, high, rows, int(slots[0]))
            return needs, verdicts
        checks = form.uses_exponents and not self.uses_prologue
        if high - low == count:
            form.encode(
                self.arrays, low, high, self.exponents, rows, int(slots[0]), needs if checks else None
            )
        else:
            form.encode_some(
                self.arrays, shard.first + fragments, self.exponents, rows, slots, needs if checks else None
            )
        if checks:
            verdicts = form.judge(needs, self.exponents[shard.first + fragments])
            for k in self._positions_untold(shard, fragments):
                # never 0, which would mean that it fits
                needs[k], verdicts[k] = max(int(needs[k]), 1), MISFIT
            if not self.state.layout.spec.propagate:
                self._judge(low, high, needs)
        return needs, verdicts

    def _positions_untold(self, shard: Shard, fragments: NDArray[np.int64]) -> list[int]:
        if not self._untold:
            return []
        return [k for k, fragment in enumerate(fragments.tolist()) if shard.first + fragment in self._untold]

    def _judge(self, low: int, high: int, exponents: NDArray[np.uint8]) -> None:
        """Refuse the round if a block of fragments ``low`` to ``high - 1`` needs the exponent of NaN or Inf."""
        if (exponents == POISON).any():
            self.refuse(low, high)

    def _encode_exponents(self, low: int, high: int, rows: NDArray[np.int32], row0: int) -> None:
        form = self.state.format
        view = rows.view(np.uint8)
        for index in range(low, high):
            first = index * form.share
            last = min(first + form.share, form.fragments)
            body = view[row0 + index - low, HEAD * 4 : HEAD * 4 + EXPONENTS_PER_FRAGMENT]
            body[:] = 0
            form.exponents(self.arrays, first, last, body)
            if not self.state.layout.spec.propagate:
                self._judge(first, last, body)
        form.seal(rows, row0, high - low)

    def restart(
        self,
        shard: Shard,
        fragments: NDArray[np.int64],
        exponents: NDArray[np.uint8],
        follows: NDArray[np.bool_],
    ) -> None:
        """A later attempt of fragments begins with new exponents, or for 0 with that of the attempt before it.

        ``follows``: this host took part in the attempt before. Otherwise it does not know that exponent and has to
        propose one (EXPONENT), unless all have been agreed before.
        """
        if shard.part is not Part.DATA or not self.state.format.uses_exponents or self.uses_prologue:
            return
        told = exponents != 0
        blocks = shard.first + fragments
        self.exponents[blocks[told]] = exponents[told]
        if self._untold:
            self._untold.difference_update(blocks[told].tolist())
        self._untold.update(blocks[~told & ~follows].tolist())

    def decode(
        self, shard: Shard, rows: NDArray[np.int32], slots: NDArray[np.int64], fragments: NDArray[np.int64]
    ) -> None:
        """Take results: ``slots`` are rows, ``fragments`` their indices within the shard."""
        form = self.state.format
        if shard.part is Part.EXPONENTS:
            view = rows.view(np.uint8)
            for slot, fragment in zip(slots.tolist(), fragments.tolist(), strict=True):
                first = (shard.first + fragment) * EXPONENTS_PER_FRAGMENT
                last = min(first + EXPONENTS_PER_FRAGMENT, len(self.exponents))
                self.exponents[first:last] = view[slot, HEAD * 4 : HEAD * 4 + last - first]
                self.agreed[shard.first + fragment] = True
            return
        blocks = fragments + shard.first
        form.decode(rows, slots, blocks, self.exponents, self.arrays)
        self.shared[Shared.REMAINING] -= len(fragments)
        if self._needs is not None:
            told = rows[slots, INDEX_WORD].view(np.uint32) >> INDEX_BITS
            self._needs[blocks] = self.exponents[blocks] if self.uses_prologue else told

    def finish(self) -> None:
        """Every result has reached the arrays: what the next round carries."""
        following = None if self._needs is None else carried_over(self._needs, self.exponents)
        self.state.carry(self.round, following)

    def where_refused(self) -> tuple[int, int]:
        """Local rank (position in ``arrays``) and element index of the first NaN or Inf, once :attr:`refused`."""
        return self.state.format.locate_nonfinite(self.arrays, *self._suspects)

    @property
    def overflow(self) -> int:
        """First element whose exact integer sum does not fit the dtype, or -1."""
        return self.state.format.overflow
