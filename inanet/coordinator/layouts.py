"""A job's tensors: ids, shards over the trees, and who still has to make slots before workers may send."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from inanet.messages.fields import SHARD_IDS
from inanet.planning.topology import split
from inanet.proto.common.plan import Fold, Part, Scheduled, Shard, TensorLayout, TensorSpec
from inanet.wire.xagg import INDEX_BITS

#: of a shard, as far as an index in a header reaches: 17 GB
MOST_FRAGMENTS = 1 << INDEX_BITS


class FormatFacts(Protocol):
    """What a layout needs to know of a tensor's number format; :func:`inanet.proto.common.formats.make_format` has
    it.
    """

    @property
    def fragments(self) -> int:
        """Data fragments of the tensor."""

    @property
    def exponent_fragments(self) -> int:
        """Fragments with block exponents, 0 if it never has any."""

    @property
    def fold(self) -> Fold:
        """How data fragments combine."""


class LayoutError(ValueError):
    """A tensor that cannot be laid out; the text says which limit it meets."""


@dataclass(slots=True)
class Tensor:
    """A tensor of the job. Workers have been told once ``waiting`` is empty."""

    layout: TensorLayout
    last_round: int
    #: aggregators and parameter servers that have not made its slots yet
    waiting: set[str] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        """Whether everybody has slots for it."""
        return not self.waiting


class LayoutBook:
    """All tensors of one job, the least recently begun first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_spec: dict[TensorSpec, Tensor] = {}
        self._by_id: dict[int, Tensor] = {}
        self._next_tensor = 0
        self._next_shard = 0
        self._shard_ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(list(self._by_id.values()))

    def find(self, spec: TensorSpec) -> Tensor | None:
        """The tensor of a spec, which becomes the most recently begun one."""
        tensor = self._by_spec.pop(spec, None)
        if tensor is not None:
            self._by_spec[spec] = tensor
        return tensor

    def get(self, tensor: int) -> Tensor | None:
        """The tensor with an id."""
        return self._by_id.get(tensor)

    def spare(self, busy: Collection[TensorSpec]) -> Tensor | None:
        """When the book is full: the least recently begun tensor without an open round, which may be
        dropped.
        """
        if len(self._by_id) < self.most:
            return None
        return next((tensor for spec, tensor in self._by_spec.items() if spec not in busy), None)

    def create(
        self,
        spec: TensorSpec,
        facts: FormatFacts,
        trees: int,
        last_round: int,
        scheduled: tuple[Scheduled, ...] = (),
    ) -> Tensor:
        """Lay a tensor out over the trees, evenly, in contiguous shards; empty shards are left out. ``scheduled`` are its
        sub-models where several switches sum.

        Raises :class:`LayoutError` if the job has too many tensors or shards.
        """
        if len(self._by_id) >= self.most:
            raise LayoutError(f"the job uses more than {self.most} different tensors in rounds not finished")
        parts = [
            (Part.DATA, facts.fold, facts.fragments),
            (Part.EXPONENTS, Fold.MAX8, facts.exponent_fragments),
        ]
        pieces = [
            (part, fold, tree, first, count)
            for part, fold, fragments in parts
            for tree, (first, count) in enumerate(split(fragments, trees))
            if count
        ]
        if max((count for *_, count in pieces), default=0) > MOST_FRAGMENTS:
            raise LayoutError(
                f"{facts.fragments} fragments over {trees} trees, each can number {MOST_FRAGMENTS}"
            )
        if len(self._shard_ids) + len(pieces) > SHARD_IDS:
            raise LayoutError(f"the job has {len(self._shard_ids)} shards, at most {SHARD_IDS} are possible")
        shards = [
            Shard(self._shard_id(), self._next_tensor, tree, part, fold, first, count)
            for part, fold, tree, first, count in pieces
        ]
        tensor = Tensor(TensorLayout(self._next_tensor, spec, tuple(shards), scheduled), last_round)
        self.adopt(tensor)
        return tensor

    def adopt(self, tensor: Tensor) -> None:
        """Enter a tensor that has its ids already."""
        self._by_spec[tensor.layout.spec] = tensor
        self._by_id[tensor.layout.tensor] = tensor
        self._next_tensor = max(self._next_tensor, tensor.layout.tensor + 1)
        for shard in tensor.layout.shards:
            self._shard_ids.add(shard.shard)
            self._next_shard = max(self._next_shard, (shard.shard + 1) % SHARD_IDS)

    def drop(self, tensor: Tensor) -> None:
        """Forget a tensor. Its shard ids come round again only after all others."""
        del self._by_id[tensor.layout.tensor]
        self._by_spec.pop(tensor.layout.spec, None)
        self._shard_ids -= {shard.shard for shard in tensor.layout.shards}

    def _shard_id(self) -> int:
        while self._next_shard in self._shard_ids:
            self._next_shard = (self._next_shard + 1) % SHARD_IDS
        shard = self._next_shard
        self._shard_ids.add(shard)
        self._next_shard = (shard + 1) % SHARD_IDS
        return shard
