"""Jobs that are not complete yet: who has joined, who is missing, and whom they cannot take."""

from collections.abc import Collection
from dataclasses import dataclass, field

from inanet.coordinator.round_ledger import Host
from inanet.messages.control import Hello, Waiting
from inanet.messages.text import show_ranks
from inanet.planning.topology import Fabric, TopologyError
from inanet.proto.slots.systems import TREES
from inanet.wire.endpoint import show


class Refused(Exception):
    """A Hello that cannot be accepted; ``retry_after`` seconds later it might be."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


def check_ranks(hello: Hello) -> None:
    """Raise :class:`Refused` if a worker's ranks are not distinct ranks of its world."""
    if not hello.job:
        raise Refused(f"host {hello.name!r} does not say which job it belongs to")
    if not hello.ranks:
        raise Refused(f"host {hello.name!r} brings no rank")
    if len(set(hello.ranks)) != len(hello.ranks):
        raise Refused(f"host {hello.name!r} names a rank twice: {hello.ranks}")
    beyond = [rank for rank in hello.ranks if rank >= hello.world]
    if beyond:
        world = f"has {hello.world} ranks (0 to {hello.world - 1})"
        raise Refused(f"host {hello.name!r} brings {show_ranks(beyond)}, but job {hello.job!r} {world}")


@dataclass(slots=True)
class Members:
    """Worker hosts that mean to be one job, by host name."""

    job: str
    hellos: dict[str, Hello] = field(default_factory=dict)
    #: ranks that a job which resumes still had; None: all of its world
    left: int | None = None

    def admit(self, hello: Hello, fabric: Fabric) -> None:
        """Take a host in. Raises :class:`Refused` if it does not fit the ones already there."""
        check_ranks(hello)
        if hello.name in self.hellos:
            raise Refused(
                f"a host called {hello.name!r} has joined job {self.job!r} already; give each its own name"
            )
        for other in self.hellos.values():
            if other.world != hello.world:
                counts = f"{hello.world} ranks on host {hello.name!r} but {other.world} on {other.name!r}"
                raise Refused(f"job {self.job!r} was started for {counts}; give all the same number")
            if other.system != hello.system:
                raise Refused(
                    f"job {self.job!r} was started with system {hello.system} on host {hello.name!r} but {other.system} "
                    f"on {other.name!r}; choose the same on all"
                )
            if hello.system != TREES and other.endpoint == hello.endpoint:
                raise Refused(
                    f"host {hello.name!r} of job {self.job!r} receives at {show(hello.endpoint)}, as host {other.name!r} does: "
                    "others could not tell them apart; set node.listen of one of them to an address of its own"
                )
            shared = set(other.ranks) & set(hello.ranks)
            if shared:
                raise Refused(
                    f"{show_ranks(shared)} of job {self.job!r} is on host {other.name!r} already; "
                    f"host {hello.name!r} needs ranks of its own"
                )
        try:
            fabric.fits([*self.hellos, hello.name])
        except TopologyError as error:
            raise Refused(f"host {hello.name!r} cannot join job {self.job!r}: {error}") from None
        self.hellos[hello.name] = hello

    @property
    def world(self) -> int:
        """Ranks of the job, 0 if nobody has joined."""
        return next((hello.world for hello in self.hellos.values()), 0)

    @property
    def ranks(self) -> int:
        """Ranks that contribute (*n* of the number format)."""
        return self.world if self.left is None else self.left

    @property
    def system(self) -> str:
        """What the job has chosen."""
        return next((hello.system for hello in self.hellos.values()), TREES)

    @property
    def joined(self) -> set[int]:
        """Ranks that are here."""
        return {rank for hello in self.hellos.values() for rank in hello.ranks}

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that are not."""
        if len(self.joined) == self.left:
            # an elastic job had gone on without the others
            return ()
        return tuple(sorted(set(range(self.world)) - self.joined))

    def missing(self, fabric: Fabric, connected: Collection[str]) -> tuple[str, ...]:
        """What the job waits for, in words: ranks, aggregators, parameter servers."""
        words = [show_ranks(self.missing_ranks)] if self.missing_ranks else []
        return (*words, *fabric.awaited(self.hellos, connected))

    def hosts(self) -> dict[str, Host]:
        """The hosts, by name."""
        return {name: Host(name, tuple(sorted(h.ranks))) for name, h in sorted(self.hellos.items())}


@dataclass(slots=True)
class Forming:
    """A job that waits for its members since the first one joined."""

    members: Members
    number: int
    key: int
    epoch: int
    deadline: float
    next_waiting: float

    def waiting(self, missing: tuple[str, ...]) -> Waiting:
        """The progress line for those who wait."""
        return Waiting(joined=len(self.members.joined), expected=self.members.world, missing=missing)
