"""Whether a node is there, which plans it follows, and how it fares."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from inanet.messages.fields import (
    Count,
    Frozen,
    Integer,
    JobId,
    Key,
    Label,
    Seconds,
)


class Ping(Frozen):
    """Are you there? Answered at once by a :class:`Pong` with the same nonce."""

    kind: Literal["ping"] = "ping"
    nonce: Count


class Follows(Frozen):
    """The version of a job's plan that a node acts on."""

    job: JobId
    key: Key
    version: Annotated[Integer, Field(ge=1, lt=1 << 63)]


class Pong(Frozen):
    """Answer to a :class:`Ping`; everything received before that ping has been acted on.

    A node says with it which plans it follows, so that one with an old version can be told.
    """

    kind: Literal["pong"] = "pong"
    nonce: Count
    plans: Annotated[tuple[Follows, ...], Strict(), Field(max_length=1 << 14)] = ()


class Stats(Frozen):
    """Counters of a node, by metric name; replaces the ones sent before."""

    kind: Literal["stats"] = "stats"
    counters: Annotated[dict[Label, Count], Field(max_length=4096)]


class Performed(Frozen):
    """How a worker's host fared in the job's first step (XAgg, section V): seconds until its gradients were there (t1)
    and seconds that sending them took (t2).
    """

    kind: Literal["performed"] = "performed"
    job: JobId
    training: Seconds
    transmission: Seconds
