"""What a node tells its driver: typed events, drained with :meth:`inanet.proto.tree.node.Node.events`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Participation:
    """The epoch of asynchronous training that a step took part in: its number from 1 on, the workers in it, by index, how many
    were waited for (K_t), and how many epochs lie between this one and the one in which this worker got its last model.
    """

    epoch: int
    workers: tuple[int, ...]
    awaited: int
    staleness: int


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Every result of a round has reached this host's arrays. ``overflow`` is the first element whose exact integer
    sum does not fit its dtype, or -1. ``part``: in asynchronous training."""

    job: int
    round: int
    tensor: int
    overflow: int
    part: Participation | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """This host holds a NaN or Inf: ``local_rank`` is a position in its arrays, ``index`` an element."""

    job: int
    round: int
    tensor: int
    local_rank: int
    index: int


@dataclass(frozen=True, slots=True)
class RoundCommitted:
    """A root has heard from its whole tree that a shard's round is complete everywhere."""

    job: int
    round: int
    tensor: int
    shard: int


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """A neighbour has not answered for ``seconds``; what to do about it is for the coordinator to decide."""

    job: int
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Tally:
    """Updates of a sparse job's keys that a machine has counted in the iterations from ``first`` to ``iteration``: of ``keys``,
    hottest first, ``counts``, and of all others together ``others``.
    """

    iteration: int
    first: int
    keys: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    others: int = 0


@dataclass(frozen=True, slots=True)
class Counted:
    """A PS shard of a sparse job has counted updates, and hot keys may change."""

    job: int
    tally: Tally


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A server's part of a model: the ``iteration`` that it is of (0: there is none yet), and a number of the job that began it."""

    iteration: int = 0
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """A sparse job cannot go on at this PS: its model cannot be written down."""

    job: int
    reason: str


NodeEvent = RoundDone | Refused | RoundCommitted | PeerSilent | Counted | Broken
