"""What hosts begin and finish, and how rounds and jobs end."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from inanet.messages.fields import (
    MAX_RANKS,
    Cause,
    Count,
    Frozen,
    JobId,
    Label,
    Rank,
    Ranks,
    RoundNumber,
    SpecData,
    Text,
)


class Begin(Frozen):
    """This host starts a collective. Sent for every all-reduce: a host's first round is 1, then it counts up
    by one, also over rounds that failed.
    """

    kind: Literal["begin"] = "begin"
    job: JobId
    round: RoundNumber
    spec: SpecData


class Refuse(Frozen):
    """A rank cannot contribute: NaN or Inf (``nonfinite``), an integer sum that could overflow
    (``overflow``), or another collective than a second rank of the same host (``mismatch``).

    ``index`` is the flat index of the first such element, None if unknown; ``detail`` shows the value, or says
    what differs.
    """

    kind: Literal["refuse"] = "refuse"
    job: JobId
    round: RoundNumber
    rank: Rank
    tensor: Label
    index: Count | None
    reason: Literal["nonfinite", "overflow", "mismatch"]
    detail: Text = ""


class Finished(Frozen):
    """This host has the whole result. From a parameter server: everybody in its tree has confirmed the round,
    so no packet of it will be needed again.
    """

    kind: Literal["finished"] = "finished"
    job: JobId
    round: RoundNumber


class RoundFailed(Frozen):
    """The round is over without a result, on every rank, with this text. Array contents are undefined; the
    job lives.

    ``tensors`` are the ids of the tensors that were begun for it, as far as they have one. ``rank`` is the
    rank that caused it if one did; ``missing`` are ranks that were waited for. A host may receive it before
    it begins the round, and again when it does.
    """

    kind: Literal["round_failed"] = "round_failed"
    job: JobId
    round: RoundNumber
    error: Cause
    message: Text
    tensors: Annotated[tuple[Count, ...], Strict(), Field(max_length=MAX_RANKS)] = ()
    rank: Rank | None = None
    missing: Ranks = ()
    #: of the element that was refused, if one was
    tensor: Label = ""
    index: Count | None = None


class JobFailed(Frozen):
    """The job is over, on every rank, with this text. ``round`` is the oldest unfinished round, if there
    was one.

    ``job`` is None if it failed before it had all its members.
    """

    kind: Literal["job_failed"] = "job_failed"
    job: JobId | None
    error: Cause
    message: Text
    round: RoundNumber | None = None
    ranks: Ranks = ()


class JobEnded(Frozen):
    """Aggregators and parameter servers forget everything about this job."""

    kind: Literal["job_ended"] = "job_ended"
    job: JobId
    reason: Text


class Judge(Frozen):
    """To a root, when a worker of an elastic job is lost (elastic rounds): does it have every contribution to this round, of
    one of these tensors? If not, it gives the round up, so that it cannot be completed any more.
    """

    kind: Literal["judge"] = "judge"
    job: JobId
    round: RoundNumber
    tensors: Annotated[tuple[Count, ...], Strict(), Field(max_length=MAX_RANKS)]


class Judged(Frozen):
    """Answer to :class:`Judge`: whether this root has every contribution. If not, it has given the round up."""

    kind: Literal["judged"] = "judged"
    job: JobId
    round: RoundNumber
    complete: Annotated[bool, Strict()]
