"""What the coordinator tells the process around it, for logs and metrics."""

from dataclasses import dataclass

from inanet.messages.fields import Cause, NodeRole, Role


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A node said Hello and was accepted."""

    peer: int
    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    """A daemon has registered; ``known`` have by now."""

    peer: int
    name: str
    role: NodeRole
    known: int


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A Reject is on its way to ``peer``; close the connection once it has left."""

    peer: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerFrozen:
    """A node has not answered for so many seconds, and its host's kernel still acknowledges: its process is stopped, not dead."""

    peer: int
    name: str
    role: Role
    seconds: float


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A node is gone, on purpose (``left``: it has said so) or not. If its connection is still open, close it. ``told``: of the
    node's two connections, the other one's loss tells it, or has told it.
    """

    peer: int
    name: str
    role: NodeRole
    reason: str
    left: bool = False
    told: bool = False


@dataclass(frozen=True, slots=True)
class JobStarted:
    """A job has all its members and its first plan; or has been taken over from an earlier coordinator
    (``resumed``). ``epoch`` counts such moments.
    """

    job: int
    name: str
    ranks: int
    resumed: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class PlanChosen:
    """The planner has chosen a job's trees, or found that they are well as they are."""

    job: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """A job has a new plan version."""

    job: int
    name: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """An elastic job goes on with fewer ``ranks``, in a new ``epoch``."""

    job: int
    name: str
    ranks: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """A job goes on with all its ranks under another key, in a new ``epoch``."""

    job: int
    name: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class PlanRepeated:
    """A node followed an old version although it had been sent a newer one, and was sent that again."""

    job: int
    name: str
    node: str
    held: int
    version: int


@dataclass(frozen=True, slots=True)
class RootMissed:
    """A job's parameter server ``node`` is gone; the job waits ``seconds`` for it to come back."""

    job: int
    name: str
    node: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class ReturnDelayed:
    """``names`` are to come into a job, or ``*`` other trees, and could not: hosts held in vain. It is tried again, later each time."""

    job: int
    name: str
    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RoundLost:
    """A round of a job failed on all ranks."""

    job: int
    name: str
    round: int
    error: Cause
    message: str


@dataclass(frozen=True, slots=True)
class JobOver:
    """A job has ended; ``error`` is None if all its workers left in good order."""

    job: int
    name: str
    error: Cause | None
    message: str


@dataclass(frozen=True, slots=True)
class ProbeAsked:
    """``peer`` wants to know whether multicast gets to it: a datagram with ``nonce`` is to go to ``group``, at ``port``."""

    peer: int
    group: str
    port: int
    nonce: int


@dataclass(frozen=True, slots=True)
class StatsReceived:
    """Counters of a node, by metric name."""

    name: str
    counters: dict[str, int]


ControlEvent = (
    PeerJoined
    | NodeRegistered
    | PeerRefused
    | PeerFrozen
    | PeerLost
    | JobStarted
    | PlanChosen
    | PlanChanged
    | MembershipChanged
    | KeyChanged
    | PlanRepeated
    | RootMissed
    | ReturnDelayed
    | RoundLost
    | JobOver
    | ProbeAsked
    | StatsReceived
)
