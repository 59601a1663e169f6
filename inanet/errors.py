"""What a training script may have to catch. All carry the job, the rank and the round they concern."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from inanet.proto.common.local import Refusal


def _rest(message: str, job: str, round: int) -> str:
    """What follows the place in a text: the message, without the job and the round if it begins with the same ones, as a
    coordinator's does, which its log and all nodes have as well.
    """
    same = re.match(rf"job {re.escape(repr(job))}(, round {round}(?!\d))?(?=[:, ])", message) if job else None
    rest = message[same.end() :] if same else message
    return rest if same and rest.startswith((":", " (")) else f": {rest.lstrip(', ')}"


class InaError(RuntimeError):
    """Base of all errors of inanet.

    ``job``, ``rank`` (of the process that got the error, -1 if it has none yet) and ``round`` (0 outside of a
    round) say where it happened, ``ranks`` which ranks it is about, ``reason`` the sentence without the
    where.
    """

    #: attributes of this kind of error beyond those of all, for the way from the agent to the process
    DETAILS: tuple[str, ...] = ()

    def __init__(
        self, message: str, *, job: str = "", rank: int = -1, round: int = 0, ranks: tuple[int, ...] = ()
    ) -> None:
        where = f"job {job!r}" if job else ""
        if rank >= 0:
            where += f", rank {rank}"
        if round:
            where += f", round {round}"
        super().__init__(f"{where.lstrip(', ')}{_rest(message, job, round)}" if where else message)
        self.reason = message
        self.job = job
        self.rank = rank
        self.round = round
        self.ranks = ranks

    def details(self) -> dict[str, Any]:
        """The attributes named in :attr:`DETAILS`."""
        return {name: getattr(self, name) for name in self.DETAILS}

    def at(self, *, job: str, rank: int, round: int = 0) -> Self:
        """The same error for another place; ``round`` only if it has none of its own.

        An exception that is raised more than once, in several threads perhaps, must be a new one every time.
        """
        return type(self)(
            self.reason, job=job, rank=rank, round=self.round or round, ranks=self.ranks, **self.details()
        )


class AgentUnavailable(InaError):
    """No worker agent answers on the socket, or the connection to it broke.

    ``searched`` has the paths that were tried.
    """

    DETAILS = ("searched",)

    def __init__(self, message: str, *, searched: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.searched = searched


class JoinTimeout(InaError):
    """The job did not get all its members in time; the message says who is missing, ``ranks`` where known."""


class JoinRefused(InaError):
    """The fabric does not take this rank, and says why."""


class NonFiniteError(InaError):
    """A rank's array holds NaN or infinity: ``tensor`` on ``ranks``, which names one rank.

    ``index`` is the element in the flattened tensor; None where only the message has it.
    """

    DETAILS = ("tensor", "index")

    def __init__(self, message: str, *, tensor: str = "", index: int | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.tensor = tensor
        self.index = index


class MismatchError(InaError):
    """Ranks called different collectives: they differ in ``field``, which has ``values`` on ``ranks``.

    ``field`` is empty and ``values`` are, too, where only the message has them: disagreement between hosts.
    """

    DETAILS = ("field", "values")

    def __init__(self, message: str, *, field: str = "", values: Sequence[str] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.field = field
        self.values = tuple(values)


class OverflowRefused(InaError):
    """An exact integer sum does not fit its dtype."""


class WorkerLostError(InaError):
    """A rank of the job is gone; every other rank gets this error. ``ranks`` are those that are gone."""


class RoundTimeout(InaError):
    """A round was not complete in time; ``ranks`` are those that were waited for, where known."""


class FabricError(InaError):
    """The fabric cannot carry the round or the job: memory, lost root, unsupported tensor, protocol."""


#: Which error a coordinator's or an agent's word for a failure becomes.
BY_CAUSE: dict[str, type[InaError]] = {
    "nonfinite": NonFiniteError,
    "mismatch": MismatchError,
    "overflow": OverflowRefused,
    "worker_lost": WorkerLostError,
    "timeout": RoundTimeout,
    "join_timeout": JoinTimeout,
    "rejected": JoinRefused,
}


def error_of(
    cause: str,
    message: str,
    *,
    job: str,
    rank: int,
    round: int = 0,
    ranks: tuple[int, ...] = (),
    details: Mapping[str, Any] | None = None,
) -> InaError:
    """The typed error for a cause; :class:`FabricError` for causes that need no type of their own.

    ``details`` are attributes of that type; those it does not have are left out.
    """
    kind = BY_CAUSE.get(cause, FabricError)
    known = {name: value for name, value in (details or {}).items() if name in kind.DETAILS}
    return kind(message, job=job, rank=rank, round=round, ranks=ranks, **known)


def cause_of(error: InaError) -> str:
    """The inverse of :func:`error_of`; ``fabric`` for errors that have no cause of their own."""
    return next((cause for cause, kind in BY_CAUSE.items() if type(error) is kind), "fabric")


def refusal_error(refusal: "Refusal", ranks: Sequence[int], round: int) -> InaError:
    """Why a collective of the ranks ``ranks``, all of one host, has no result."""
    if refusal.position < 0:
        return OverflowRefused(f"{refusal.text} (tensor {refusal.tensor!r})", round=round)
    rank = ranks[refusal.position]
    return NonFiniteError(
        f"rank {rank} {refusal.text}", tensor=refusal.tensor, index=refusal.index, round=round, ranks=(rank,)
    )
