"""What a worker sends from: a round of a tensor as numbered fragments, and where their results go."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import Participation
from inanet.proto.common.formats import Format, make_format
from inanet.proto.common.plan import Fold, TensorSpec
from inanet.proto.slots.exponents import Agreement

Arrays = Sequence[NDArray[Any]]
Index = NDArray[np.int64]


class Tensor:
    """What outlives a round: the format, and the exponents that the next round carries over.

    Raises ``ValueError`` for what no format can do, and for maxima: switch programs add.
    """

    def __init__(self, tensor: int, spec: TensorSpec, ranks: int) -> None:
        self.tensor = tensor
        self.spec = spec
        self.format: Format = make_format(spec, ranks)
        if self.format.fold is not Fold.SUM:
            raise ValueError(
                f"tensor {spec.name!r}: switches add, {spec.op} of {spec.dtype} needs an aggregator that compares"
                " (system xagg)"
            )
        self.carried: NDArray[np.uint8] | None = None
        #: what a switch that evicts goes by (ESA)
        self.priority = 0


class Source(ABC):
    """``arrays``: one per local rank, 1-D; overwritten by :meth:`finish`.

    ``first`` is the number of its first fragment, once :meth:`start` has set it; ``ready`` fragments may leave, ``count`` is
    how many there are, once that is known.
    """

    def __init__(self, tensor: Tensor, round_: int, arrays: Arrays) -> None:
        self.tensor, self.round, self.arrays = tensor, round_, arrays
        self.first: int | None = None
        self.ready = 0
        self.count: int | None = None
        self.opened = False
        #: local rank (-1: another host's) and element of the NaN or Inf for which the round is refused
        self.refusal: tuple[int, int] | None = None
        #: what it took part in (asynchronous training)
        self.participation: Participation | None = None

    def detach(self) -> bool:
        """Go on with a copy of the arrays, whose owner may have other plans for them. False: do not go on at all."""
        self.arrays = [array.copy() for array in self.arrays]
        return True

    @property
    def overflow(self) -> int:
        """The first element whose exact integer sum does not fit its dtype, or -1."""
        return self.tensor.format.overflow

    def start(self, first: int) -> None:
        """Number the fragments from here on."""
        self.first = first

    @abstractmethod
    def open(self) -> None:
        """Begin, once every earlier round of the tensor is finished here."""

    @abstractmethod
    def advance(self, client: Agreement | None, now: float) -> None:
        """See which fragments may leave by now; ``client`` is the way to the root that agrees on exponents."""

    @abstractmethod
    def place(self, fragments: Index, arena: NDArray[np.uint8], at: int, stride: int) -> None:
        """Write values of fragments, in ascending order, big-endian, ``stride`` bytes apart from byte ``at`` of an arena on."""

    @abstractmethod
    def take(self, arena: NDArray[np.uint8], ats: Index, fragments: Index) -> None:
        """Take results, each fragment once: the values of ``fragments[k]`` begin at byte ``ats[k]``."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether everything is here that :meth:`finish` needs."""

    @abstractmethod
    def finish(self) -> None:
        """Turn the sums into the result, in every local array."""
