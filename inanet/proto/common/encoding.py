"""The interface between tensors and rows: what every number format does, and the arrays it accepts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.checksum import seal_rows
from inanet.kernels.dequantise import copy_fragments
from inanet.kernels.layout import EXPONENTS_PER_FRAGMENT, HEADER_WORDS, PAYLOAD_WORDS, ROW_WORDS
from inanet.proto.common.plan import Fold, TensorSpec

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
#: the same as dtypes, where numpy has them: asking a dtype for its name takes longer than all of encoding a small tensor
_DTYPES = {
    form: frozenset(np.dtype(name) for name in names if name != "bfloat16") for form, names in _NUMPY.items()
}
_NONE = np.iinfo(np.int64).max
#: fragments encoded at a time where only some of them are wanted
_WINDOW = 256
#: verdicts about a contribution's block: it does not fit its exponent; it is large enough for its exponent to be right
MISFIT, LARGE = 1, 2
#: a table of exponents that nobody wants
NOTHING: Bytes = np.zeros(0, np.uint8)


class Bound(tuple[Array, ...]):
    """One array of a tensor per local rank, checked once by :meth:`Format.bind` instead of for every range."""

    #: unsigned views of the arrays
    views: list[Array]
    #: where they lie in memory
    bases: NDArray[np.uint64]


class FloatTables(NamedTuple):
    """What kernels need to encode and decode float32 by themselves; see :mod:`inanet.proto.common.quantised`."""

    top: Bytes
    scale: NDArray[np.float64]
    scale32: NDArray[np.float32]
    multiply: NDArray[np.float64]
    divide: NDArray[np.float64]
    multiply32: NDArray[np.float32]
    #: lowest element that is poisoned
    poisoned: Index
    limit: int

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All tables, in order."""
        return self[:-1]


class Format(ABC):
    """Encoding of one tensor for ``ranks`` contributions; made by ``formats.make_format``.

    ``arrays`` arguments hold one 1-D C-contiguous array of the whole tensor per local rank: float32, float16
    (or its uint16 view), uint16 for bf16, int32, int64; whoever calls often binds them first (:meth:`bind`).
    Fragments are numbered over the tensor. Methods touch nothing outside the fragments they are given, so ranges can be
    processed as they come and by several threads. Wrong arrays raise ``ValueError``.
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
        #: Data fragments of the tensor. One without elements has an empty one, so that its rounds too need every host: none
        #: may have finished before all have said that they reduce the same.
        self.fragments = max(1, -(-self.elements // values))
        #: exponents of a fragment: entries of the table
        self.blocks = 1
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
        """Lowest element decoded since :meth:`clear` that is poisoned, or -1.

        For sums it is an element that was NaN or infinite on some rank. For maxima it is an element that was NaN on some
        rank, or infinite where the tensor does not propagate.
        """
        return _index(self._poisoned)

    @property
    def tables(self) -> FloatTables | None:
        """Where kernels can do without :meth:`encode` and :meth:`decode`."""
        return None

    def clear(self) -> None:
        """Forget :attr:`overflow` and :attr:`poisoned`; call it when a round begins."""
        self._overflow[0] = _NONE
        self._poisoned[0] = _NONE

    def initial_exponents(self) -> Bytes:
        """The exponent table to start from: zeros, one per block (none if the format has no exponents)."""
        return np.zeros(self.fragments * self.blocks if self.uses_exponents else 0, np.uint8)

    @property
    def share(self) -> int:
        """Fragments of data whose exponents one fragment of exponents carries."""
        return EXPONENTS_PER_FRAGMENT // self.blocks

    def exponents(self, arrays: Arrays, lo: int, hi: int, out: Bytes) -> None:
        """Set ``out`` to the exponents of fragments ``lo`` to ``hi - 1``, the largest over the local ranks.

        They are :attr:`blocks` for each fragment.
        """
        out[: (hi - lo) * self.blocks] = 0

    @abstractmethod
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
        """Write payload and checksum of fragments ``lo`` to ``hi - 1`` into rows ``row0`` onwards.

        The rows hold the sum (or maximum) over the local ranks. ``exps`` is the table of the whole tensor.
        ``needs[i]`` becomes the exponent of fragment ``lo + i`` over the local ranks (0: zeros only, or a format without
        exponents). Where that is too large for the table (:meth:`judge`), the payload is that exponent and zeros, so it
        can leave as a request for it. Without ``needs`` every block is taken to fit, as after a prologue.
        """

    def encode_some(
        self,
        arrays: Arrays,
        fragments: Index,
        exps: Bytes,
        rows: Rows,
        slots: Index,
        needs: Bytes | None = None,
    ) -> None:
        """As :meth:`encode`, for fragments in ascending order with gaps: fragment ``fragments[k]`` goes into row ``slots[k]``."""
        start = 0
        while start < len(fragments):
            lo = int(fragments[start])
            stop = int(np.searchsorted(fragments, lo + _WINDOW))
            hi = int(fragments[stop - 1]) + 1
            room = np.empty((hi - lo, ROW_WORDS), np.int32)
            found = None if needs is None else np.zeros(hi - lo, np.uint8)
            self.encode(arrays, lo, hi, exps, room, 0, found)
            which = fragments[start:stop] - lo
            rows[slots[start:stop], HEADER_WORDS:] = room[which, HEADER_WORDS:]
            if needs is not None and found is not None:
                needs[start:stop] = found[which]
            start = stop

    def judge(self, needs: Bytes, exps: Bytes) -> Bytes:
        """What blocks that need exponents ``needs`` are under ``exps``: :data:`MISFIT`, :data:`LARGE` or neither.

        If no rank has a block that is :data:`LARGE`, and some have one that is not zeros only, it is a misfit as well.
        """
        return np.zeros(len(needs), np.uint8)

    def misfits(self, needs: Bytes, exps: Bytes) -> NDArray[np.bool_]:
        """Which blocks have to go again under ``needs``, the largest over all ranks, if they went under ``exps``."""
        verdicts = self.judge(needs, exps)
        again: NDArray[np.bool_] = (verdicts == MISFIT) | (
            (verdicts == 0) & (needs != 0) & self.uses_exponents
        )
        return again

    @abstractmethod
    def decode(
        self,
        rows: Rows,
        slots: Index,
        fragments: Index,
        exps: Bytes,
        arrays: Arrays,
    ) -> None:
        """Write the result of fragment ``fragments[k]``, in row ``slots[k]``, into every local array."""

    def together(
        self, arrays: Arrays, lo: int, hi: int, exps: Bytes, needs: Bytes, *, prologue: bool
    ) -> int | None:
        """A whole round of fragments ``lo`` to ``hi - 1`` at once, for a job whose ranks all are on this host.

        The same bits as :meth:`exponents` (with ``prologue``), :meth:`encode` and :meth:`decode`. ``needs``, a table like
        ``exps``, gets what the blocks need, unless it is empty. Returns -1, the first fragment that holds what is not to be summed
        (from there on nothing has been written), or None: nothing was done, this format does it step by step.
        """
        return None

    def first_nonfinite(self, array: Array, lo: int = 0, hi: int | None = None) -> int:
        """Index of the first NaN or infinity in fragments ``lo`` to ``hi - 1`` of one rank's array, or -1."""
        return -1

    def locate_nonfinite(self, arrays: Arrays, lo: int = 0, hi: int | None = None) -> tuple[int, int]:
        """Position in ``arrays`` and element index of the first NaN or infinity, else ``(-1, -1)``.

        Only fragments ``lo`` to ``hi - 1`` are looked at (default: all): others may hold results by now.
        """
        for position, array in enumerate(arrays):
            index = self.first_nonfinite(array, lo, hi)
            if index >= 0:
                return position, index
        return -1, -1

    def _part(self, array: Array, lo: int, hi: int | None) -> Array:
        """Unsigned view of fragments ``lo`` to ``hi - 1`` of one rank's array."""
        return self._bits(array)[lo * self.values : None if hi is None else hi * self.values]

    def seal(self, rows: Rows, row0: int, count: int) -> None:
        """Write the checksum word of rows ``row0`` to ``row0 + count - 1``."""
        seal_rows(rows, np.arange(row0, row0 + count), HEADER_WORDS, PAYLOAD_WORDS)

    def bind(self, arrays: Arrays) -> Bound:
        """Check arrays, for use as ``arrays`` of all methods of this tensor's formats."""
        if isinstance(arrays, Bound):
            return arrays
        bound = Bound(arrays)
        bound.views = [self._bits(array) for array in arrays]
        bound.bases = np.array([view.ctypes.data for view in bound.views], np.uint64)
        return bound

    def _bits(self, array: Array) -> Array:
        """Unsigned view of one rank's array, checked."""
        dtype = self.spec.dtype
        if (
            (array.dtype not in _DTYPES[dtype] and array.dtype.name not in _NUMPY[dtype])
            or array.shape != (self.elements,)
            or not array.flags.c_contiguous
        ):
            raise ValueError(
                f"tensor {self.spec.name!r} needs a contiguous 1-D {_NUMPY[dtype][0]} array of"
                f" {self.elements} elements, got {array.dtype.name} of shape {array.shape},"
                f" strides {array.strides}"
            )
        return array.view(_BITS[dtype])

    def _spread(self, views: Sequence[Array], fragments: Index) -> None:
        """Copy decoded fragments from the first local rank's array to the others'."""
        for view in views[1:]:
            copy_fragments(views[0], view, fragments, self.values)


def _index(lowest: Index) -> int:
    return -1 if lowest[0] == _NONE else int(lowest[0])


def shifted(start: int, index: int) -> int:
    """An index found in a part that begins at ``start``, for the whole; -1 stays -1."""
    return start + int(index) if index >= 0 else -1
