"""What a training script may have to catch. All carry the job, the rank and the round they concern."""


class InaError(RuntimeError):
    """Base of all errors of inanet. ``round`` is 0 outside of a round; ``ranks`` are other ranks that matter."""

    def __init__(
        self, message: str, *, job: str = "", rank: int = -1, round: int = 0, ranks: tuple[int, ...] = ()
    ) -> None:
        where = f"job {job!r}" if job else ""
        if rank >= 0:
            where += f", rank {rank}"
        if round:
            where += f", round {round}"
        super().__init__(f"{where}: {message}" if where else message)
        self.reason = message
        self.job = job
        self.rank = rank
        self.round = round
        self.ranks = ranks


class AgentUnavailable(InaError):
    """No worker agent answers on the socket, or the connection to it broke."""


class JoinTimeout(InaError):
    """The job did not get all its members in time; the message names who is missing."""


class JoinRefused(InaError):
    """The fabric does not take this rank, and says why."""


class NonFiniteError(InaError):
    """A rank's array holds NaN or infinity; the message names rank, tensor and element."""


class MismatchError(InaError):
    """Ranks called different collectives; the message has both values of what differs."""


class OverflowRefused(InaError):
    """An exact integer sum does not fit its dtype."""


class WorkerLostError(InaError):
    """A rank of the job is gone; every other rank gets this error."""


class RoundTimeout(InaError):
    """A round was not complete in time; the message names the ranks that were waited for."""


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
    cause: str, message: str, *, job: str, rank: int, round: int = 0, ranks: tuple[int, ...] = ()
) -> InaError:
    """The typed error for a cause; :class:`FabricError` for causes that need no type of their own."""
    return BY_CAUSE.get(cause, FabricError)(message, job=job, rank=rank, round=round, ranks=ranks)
