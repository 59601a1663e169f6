"""What a member is told when it is made, and what it tells: who it is, who holds its rates, why something failed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from inanet.messages.services import Service
from inanet.planning.rates import Grant
from inanet.proto.slots.systems import TREES
from inanet.proto.zebra.plan import Sparse


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a round, or the whole job, ended without a result.

    ``cause`` is the coordinator's word for it: nonfinite, mismatch, timeout, worker_lost, memory, overflow, ... ;
    ``round`` is 0 if the job failed before its first one.
    """

    cause: str
    message: str
    round: int = 0
    rank: int | None = None
    missing: tuple[int, ...] = ()
    #: of the element that was refused, if one was
    tensor: str = ""
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """How a node introduces itself; see :class:`~inanet.messages.control.Hello`."""

    name: str
    role: str
    token: str
    endpoint: int
    rx_window: int
    job: str = ""
    ranks: tuple[int, ...] = ()
    world: int = 0
    groups: bool = False
    #: of its link, bits per second, if rates are negotiated; 0: not limited
    send_bps: int = 0
    receive_bps: int = 0
    system: str = TREES
    #: of a rank that is a node by itself, in a sparse job
    sparse: Sparse | None = None
    services: Mapping[str, Service] = field(default_factory=dict)


class Paced(Protocol):
    """Who holds the rates that the root grants to a node."""

    def granted(self, grant: Grant) -> None:
        """This may be sent for a job."""

    def released(self, job: int) -> None:
        """What was granted for it no longer stands."""
