"""What a node must know to take part in a job: its view of the plan, and the shards laid out over it.

Plans are data. The coordinator computes them, ``control/`` carries them, and :class:`inanet.proto.tree.node.Node` applies
one version atomically between two batches. A *tree* spans a set of nodes; a *shard* is a part of a tensor carried by
one tree; a job may use several trees at once, one per root.
"""

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Self

from inanet.proto.common.checks import are_endpoints, in_range, need

#: bits of a bitmap
MAX_WORKERS = 32


class Fold(IntEnum):
    """How contributions to a slot are combined."""

    #: signed 32-bit addition; never wraps, by choice of scale (number format)
    SUM = 0
    #: signed 32-bit maximum
    MAX32 = 1
    #: maximum of signed 64-bit pairs (low word first)
    MAX64 = 2
    #: unsigned maximum of each of the 1024 bytes: block exponents
    MAX8 = 3


class Part(IntEnum):
    """What the slots of a shard hold."""

    DATA = 0
    #: one byte per 256-element block of the data shard it belongs to, 1024 blocks a fragment (prologue)
    EXPONENTS = 1


class ExponentMode(IntEnum):
    """How ranks agree on block exponents (exponent agreement)."""

    #: the format needs none (integers, maxima)
    NONE = 0
    #: max-reduce them first, every round
    PROLOGUE = 1
    #: prologue in a tensor's first round, then the last result's exponent plus some headroom
    CARRIED = 2
    #: a constant factor; blocks that do not fit are restarted with their exponent
    FIXED = 3


@dataclass(frozen=True, slots=True)
class Parent:
    """The hop towards the root. ``bit`` is this node's own one-hot id there."""

    name: str
    endpoint: int
    bit: int
    #: fragments this node may have in flight towards the parent
    window: int
    #: endpoint of the IP multicast group to which the parent may send results as well; 0: none
    group: int = 0


@dataclass(frozen=True, slots=True)
class Child:
    """A hop away from the root. ``bit`` is never reused within a round (child ids)."""

    name: str
    endpoint: int
    bit: int
    #: plan version that issued the bit; packets under an older one are ``stale_plan``
    since: int
    #: result fragments this node may have in flight towards the child
    window: int
    #: it is told to join the group of the placement
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Retired:
    """A child id that left the plan mid-round: its bit stands for the bits in ``mask`` (re-parenting)."""

    bit: int
    mask: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One node's place in one tree. A root has no parent, a worker has no children."""

    tree: int
    parent: Parent | None = None
    children: tuple[Child, ...] = ()
    retired: tuple[Retired, ...] = ()
    #: endpoint of the IP multicast group that children join for the results of this node (multicast results); 0: none
    group: int = 0
    #: a child is sent results by multicast only once it has answered a probe; otherwise from the start
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sub-model (GOAT): ``count`` fragments of a tensor from ``first`` on that are scheduled as a whole.

    ``number`` is its own in the job. Worker *k* sends it to node ``nodes[k]`` (0: the PS, *i* + 1: site *i*), where it has
    slots from ``bases[i]`` on (-1: none).
    """

    number: int
    first: int
    count: int
    nodes: tuple[int, ...]
    bases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwitchedJob:
    """What all nodes of a job whose sums are made in a switch know of it beside its tree; the same for all of them.

    Every system has a type of its own with what else its nodes need: :attr:`inanet.proto.slots.systems.System.job`. ``system``, a
    name of :data:`inanet.proto.slots.systems.SYSTEMS`, tells which. Addresses are endpoints (:mod:`inanet.wire.endpoint`). Raises
    ``ValueError`` for values out of range.
    """

    system: str
    #: the job's in the framing, 1 to 255
    number: int
    #: worker *k*, whose bit is ``1 << k``, sends from and receives at ``workers[k]``
    workers: tuple[int, ...]
    #: where contributions are sent to
    switch: int

    def __post_init__(self) -> None:
        in_range("number", self.number, 1, 255)
        in_range("workers", len(self.workers), 1, MAX_WORKERS)
        need(len(set(self.workers)) == len(self.workers), "two workers have one endpoint")
        are_endpoints((*self.workers, self.switch))

    def without(self, worker: int) -> "SwitchedJob | None":
        """The job after a worker, by index, has left it; ``None``: nodes need not know."""
        return None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a switch and a parameter server have for a job, and its workers with them: endpoints of answers (``results``), of the
    system's PS (0: none) and of the root that agrees on ``exponents``; fragments of a ``window``; ``slots``, the job's
    ``own`` or shared with at most ``quota`` at a time (0: no limit); ``values`` in a packet (0: always the same); ``rings``.
    """

    results: int
    ps: int
    exponents: int
    window: int
    slots: int
    own: bool
    quota: int = 0
    values: int = 0
    rings: int = 1


@dataclass(frozen=True, slots=True)
class TensorJob(SwitchedJob):
    """A job that sums tensors, on one switch or several."""

    #: where answers come from
    results: int
    #: who agrees on exponents of floats
    exponents: int
    #: fragments a worker may have in flight
    window: int

    def __post_init__(self) -> None:
        SwitchedJob.__post_init__(self)
        are_endpoints((self.results, self.exponents))
        in_range("window", self.window, 1, (1 << 31) - 1)

    @classmethod
    def on(cls, system: str, number: int, workers: tuple[int, ...], switch: int, terms: Terms) -> Self:
        """The job on one switch under these terms: fields of this type that terms have are theirs."""
        names = {one.name for one in fields(terms)}
        own = {one.name: getattr(terms, one.name) for one in fields(cls) if one.name in names}
        return cls(system=system, number=number, workers=workers, switch=switch, **own)

    def way(self, worker: int) -> tuple[int, int]:
        """Where a worker, by index, sends its contributions, and where answers to it come from."""
        return self.switch, self.results


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node's view of one plan version of a job."""

    job: int
    #: increases by one with every change; travels modulo 256
    version: int
    #: 64-bit secret of this membership epoch, for header tags
    key: int
    #: contributing ranks over all hosts: *n* of the number format
    ranks: int
    placements: tuple[Placement, ...] = ()
    #: fragments each neighbour may have in flight towards this node, so that it returns credit in time; 0: not known
    window: int = 0
    #: the job's sums are made in a switch
    switched: SwitchedJob | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous range of a tensor's fragments, carried by one tree."""

    shard: int
    tensor: int
    tree: int
    part: Part
    fold: Fold
    #: index within the tensor (of its data fragments, or of its exponent fragments) of fragment 0 of this shard
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What all ranks must agree on for a collective; compared field by field, never only hashed.

    ``dtype`` is one of ``f32 f16 bf16 i32 i64``, ``op`` one of ``sum mean max min``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    mode: ExponentMode
    #: factor of ``ExponentMode.FIXED``, 0 otherwise
    factor: float = 0.0
    #: what cannot be summed passes instead of being refused: NaN and Inf as in float32 addition, integer sums wrap round
    propagate: bool = False

    @property
    def elements(self) -> int:
        """Number of elements, as an unbounded integer."""
        total = 1
        for extent in self.shape:
            total *= extent
        return total


def tensor_spec(
    name: str, dtype: str, shape: tuple[int, ...], op: str, mode: str, factor: float, propagate: bool
) -> TensorSpec:
    """What a rank calls for: ``mode`` (``prologue carried fixed``) and ``factor`` count only where sums are rounded.

    Calls without a name may be of different tensors: they carry nothing over. Raises ``ValueError`` for other modes.
    """
    if mode not in ("prologue", "carried", "fixed"):
        raise ValueError(f"impossible mode {mode!r}")
    exact = dtype in ("i32", "i64") or op in ("max", "min")
    if mode == "carried" and not name:
        mode = "prologue"
    kind = ExponentMode.NONE if exact else ExponentMode[mode.upper()]
    return TensorSpec(name, dtype, shape, op, kind, 0.0 if exact else factor, propagate)


def difference(first: TensorSpec, second: TensorSpec) -> tuple[str, str, str] | None:
    """The first field in which two collectives differ, with both values in words; None if they agree."""
    if first is second or first == second:
        return None
    for name in ("name", "dtype", "shape", "op", "mode", "factor", "propagate"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            return name, _word(one), _word(other)
    raise AssertionError("specs differ in a field that is not compared")


def _word(value: Any) -> str:
    name = getattr(value, "name", None)
    return name.lower() if name is not None else repr(value)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor admitted to a job: its id and its shards, data before exponents."""

    tensor: int
    spec: TensorSpec
    shards: tuple[Shard, ...] = field(default=())
    #: sub-models in order, where the tensor's sums are made in several switches
    scheduled: tuple[Scheduled, ...] = field(default=())
