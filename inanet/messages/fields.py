"""Types of the fields of control messages: exact types, and a range for every number.

Plan data of :mod:`inanet.proto.common.plan` is checked here too, since a node acts on it as it comes: a bit that
is not one-hot or a window of 0 must not get past the decoder.
"""

from collections.abc import Callable
from dataclasses import is_dataclass
from enum import IntEnum
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, create_model

from inanet.proto.common.checks import in_range, need
from inanet.proto.common.events import Tally
from inanet.proto.common.plan import (
    ExponentMode,
    NodePlan,
    Placement,
    Shard,
    SwitchedJob,
    TensorLayout,
    TensorSpec,
)
from inanet.proto.slots.systems import SYSTEMS, TREES
from inanet.proto.zebra.plan import MAX_HOT, Sparse
from inanet.wire.xagg import MAX_CHILDREN

DTYPES = ("f32", "f16", "bf16", "i32", "i64")
OPS = ("sum", "mean", "max", "min")
#: numpy's own limit, and far beyond any tensor in use
MAX_DIMENSIONS = 64
MAX_TREES = 256
#: Shard ids are 16 bit on the wire; 0xFFFF stands for "the link itself" in CREDIT packets.
SHARD_IDS = 0xFFFF
MAX_RANKS = 1 << 16
#: that a machine of a sparse job can count until it tells of them
MAX_UPDATES = 1 << 48


class Frozen(BaseModel):
    """A value: immutable, no unknown fields, every field in range (else pydantic's ``ValidationError``)."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


def _exact(value: Any, hint: Any) -> Any:
    """``value`` if its types are exactly those of ``hint``, else ``ValueError``.

    Pydantic's own strict mode would insist on ready-made dataclasses and enum members, which bytes cannot
    give; its lax mode takes ``"5"`` and ``True`` for 5. So maps are checked here and built by pydantic
    afterwards.
    """
    if isinstance(hint, UnionType):
        options = get_args(hint)
        if value is None and NoneType in options:
            return value
        hint = next(option for option in options if option is not NoneType)
    if hint is SwitchedJob:
        return _switched(value)
    if is_dataclass(hint):
        if isinstance(value, dict):
            hints: dict[str, Any] = _hints(hint)  # type: ignore[arg-type]
            return {
                name: _exact(part, hints[name]) if name in hints else part for name, part in value.items()
            }
        elif type(value) is not hint:
            raise ValueError(f"{type(value).__name__} instead of a map")
    elif get_origin(hint) is tuple:
        if type(value) is not tuple:
            raise ValueError(f"{type(value).__name__} instead of an array")
        for part in value:
            _exact(part, get_args(hint)[0])
    else:
        allowed = (hint, int) if issubclass(hint, IntEnum | float) else (hint,)
        if type(value) not in allowed:
            raise ValueError(f"{type(value).__name__} instead of {hint.__name__}")
    return value


def _switched(value: Any) -> Any:
    """What a plan says of a job on a switch, as its system's own type."""
    if isinstance(value, SwitchedJob):
        return value
    system = value.get("system") if isinstance(value, dict) else None
    if not isinstance(system, str) or system not in SYSTEMS:
        raise ValueError(f"system {system!r} is not one of {', '.join(SYSTEMS)}")
    job = SYSTEMS[system].load_job()
    if system not in _MODELS:
        _MODELS[system] = create_model("Switched", __base__=Frozen, job=(job, ...))
    return _MODELS[system].model_validate({"job": _exact(value, job)}).job


#: by system, a model with one field of its type: unknown fields are refused
_MODELS: dict[str, Any] = {}


@cache
def _hints(data: Any) -> dict[str, Any]:
    return get_type_hints(data)


def _plan_data(data: Any, check: Callable[[Any], Any]) -> Any:
    """Field type of a plan dataclass: exact types before pydantic builds it, ranges after."""
    return Annotated[data, BeforeValidator(lambda value: _exact(value, data)), AfterValidator(check)]


def _printable(text: str) -> str:
    need(text.isprintable(), "contains unprintable characters")
    return text


def _is_bit(value: int) -> bool:
    return 0 < value < 1 << MAX_CHILDREN and value & (value - 1) == 0


def check_spec(spec: TensorSpec) -> TensorSpec:
    """The spec itself, or ``ValueError`` saying which field is out of range."""
    need(len(spec.name) <= 256 and spec.name.isprintable(), "name: at most 256 printable characters")
    need(spec.dtype in DTYPES, f"dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}")
    need(spec.op in OPS, f"op {spec.op!r} is not one of {', '.join(OPS)}")
    need(len(spec.shape) <= MAX_DIMENSIONS, f"more than {MAX_DIMENSIONS} dimensions")
    need(all(0 <= extent < 1 << 48 for extent in spec.shape), "shape: extents go from 0 to 2^48 - 1")
    need(spec.elements < 1 << 40, "more than 2^40 elements")
    fixed = spec.mode is ExponentMode.FIXED
    need(0 < spec.factor < 1e300 if fixed else spec.factor == 0, "factor: positive with mode FIXED, else 0")
    return spec


def _check_shard(shard: Shard) -> None:
    in_range("shard", shard.shard, 0, SHARD_IDS - 1)
    in_range("tensor", shard.tensor, 0, (1 << 63) - 1)
    in_range("tree", shard.tree, 0, MAX_TREES - 1)
    in_range("first", shard.first, 0, (1 << 32) - 1)
    in_range("count", shard.count, 1, (1 << 32) - 1)


def check_layout(layout: TensorLayout) -> TensorLayout:
    """The layout itself, or ``ValueError`` saying which field is out of range."""
    in_range("tensor", layout.tensor, 0, (1 << 63) - 1)
    check_spec(layout.spec)
    for shard in layout.shards:
        _check_shard(shard)
        need(shard.tensor == layout.tensor, f"shard {shard.shard} belongs to tensor {shard.tensor}")
    need(len({shard.shard for shard in layout.shards}) == len(layout.shards), "two shards with one id")
    for part in layout.scheduled:
        in_range("sub-model", part.number, 0, (1 << 16) - 2)
        in_range("first", part.first, 0, (1 << 32) - 1)
        in_range("count", part.count, 1, (1 << 32) - 1)
        in_range("workers", len(part.nodes), 1, MAX_CHILDREN)
        for node in part.nodes:
            in_range("node", node, 0, len(part.bases))
            need(
                node == 0 or part.bases[node - 1] >= 0, f"sub-model {part.number} has no slots at node {node}"
            )
        for base in part.bases:
            in_range("base", base, -1, (1 << 31) - 1)
    return layout


def check_plan(plan: NodePlan) -> NodePlan:
    """The plan itself, or ``ValueError`` saying which field is out of range."""
    in_range("job", plan.job, 0, 0xFFFF)
    in_range("version", plan.version, 1, (1 << 63) - 1)
    in_range("key", plan.key, 0, (1 << 64) - 1)
    in_range("ranks", plan.ranks, 1, MAX_RANKS)
    in_range("window", plan.window, 0, (1 << 31) - 1)
    for place in plan.placements:
        _check_placement(place, plan.version)
    need(len({place.tree for place in plan.placements}) == len(plan.placements), "a tree has two placements")
    return plan


def check_tally(tally: Tally) -> Tally:
    """The tally itself, or ``ValueError`` saying which field is out of range."""
    in_range("iteration", tally.iteration, 1, (1 << 63) - 1)
    in_range("first", tally.first, 1, tally.iteration + 1)
    in_range("keys", len(tally.keys), 0, MAX_HOT)
    need(len(tally.counts) == len(tally.keys), "as many counts as keys")
    need(not tally.keys or 0 <= min(tally.keys) <= max(tally.keys) < 1 << 64, "keys have 64 bits")
    need(len(set(tally.keys)) == len(tally.keys), "a key is there twice")
    need(not tally.counts or min(tally.counts) > 0, "counts: from 1")
    in_range("others", tally.others, 0, MAX_UPDATES)
    # tallies are added up as integers of 64 bits, some on their way as floats
    in_range("all counts", sum(tally.counts) + tally.others, 0, MAX_UPDATES)
    return tally


def _check_placement(place: Placement, version: int) -> None:
    in_range("tree", place.tree, 0, MAX_TREES - 1)
    bits = [child.bit for child in place.children] + [retired.bit for retired in place.retired]
    need(len(bits) <= MAX_CHILDREN, f"tree {place.tree} has {len(bits)} children and retired ids")
    need(len(set(bits)) == len(bits), f"tree {place.tree} uses a bit twice")
    need(all(_is_bit(bit) for bit in bits), f"tree {place.tree} has a bit that is not one-hot")
    need(place.parent is None or _is_bit(place.parent.bit), f"tree {place.tree}: own bit is not one-hot")
    groups = [place.group] + ([place.parent.group] if place.parent else [])
    need(
        all(group == 0 or (0 < group < 1 << 48 and group >> 44 == 0xE) for group in groups),
        f"tree {place.tree} has a group that is no IP multicast address",
    )
    need(place.group != 0 or not any(child.joins for child in place.children), "children join no group")
    for hop in (*place.children, *((place.parent,) if place.parent else ())):
        in_range(f"endpoint of {hop.name!r}", hop.endpoint, 0, (1 << 48) - 1)
        in_range(f"window to {hop.name!r}", hop.window, 1, (1 << 31) - 1)
    for retired in place.retired:
        in_range("retired mask", retired.mask, 0, (1 << MAX_CHILDREN) - 1)
    for child in place.children:
        in_range(f"since of {child.name!r}", child.since, 1, version)


# The types of fields. Strict() refuses what only looks like the type.
Integer = Annotated[int, Strict()]
String = Annotated[str, Strict()]
Name = Annotated[String, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@+-]*$")]
Text = Annotated[String, Field(max_length=8192)]
Label = Annotated[String, Field(max_length=256), AfterValidator(_printable)]
JobId = Annotated[Integer, Field(ge=0, le=0xFFFF)]
Key = Annotated[Integer, Field(ge=0, lt=1 << 64)]
Rank = Annotated[Integer, Field(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[tuple[Rank, ...], Strict(), Field(max_length=MAX_RANKS)]
RoundNumber = Annotated[Integer, Field(ge=0, lt=1 << 63)]
Count = Annotated[Integer, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Strict(), Field(ge=0, le=1e9, allow_inf_nan=False)]
if TYPE_CHECKING:
    SpecData = TensorSpec
    LayoutData = TensorLayout
    PlanData = NodePlan
    SparseData = Sparse
    TallyData = Tally
else:
    SpecData = _plan_data(TensorSpec, check_spec)
    LayoutData = _plan_data(TensorLayout, check_layout)
    PlanData = _plan_data(NodePlan, check_plan)
    SparseData = _plan_data(Sparse, lambda sparse: sparse)
    TallyData = _plan_data(Tally, check_tally)
Role = Literal["worker", "aggregator", "ps", "switch"]


def _known_system(name: str) -> str:
    names = (TREES, *SYSTEMS)
    need(name in names, f"system {name!r} is not one of {', '.join(names)}")
    return name


SystemName = Annotated[String, AfterValidator(_known_system)]
#: Who registers: also nodes that take part in no plan.
NodeRole = Literal["worker", "aggregator", "ps", "switch"]
#: Why a round or a job failed, for programs.
Cause = Literal[
    "nonfinite",
    "overflow",
    "mismatch",
    "unsupported",
    "memory",
    "timeout",
    "worker_lost",
    "aggregator_lost",
    "root_lost",
    "protocol",
]
