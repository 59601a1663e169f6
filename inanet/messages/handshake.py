"""Who a node is, what it still holds of a job, and whether it is let in."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from inanet.messages.fields import (
    MAX_RANKS,
    Count,
    Frozen,
    Integer,
    JobId,
    Key,
    Label,
    LayoutData,
    Name,
    PlanData,
    Ranks,
    Role,
    RoundNumber,
    Seconds,
    SparseData,
    String,
    SystemName,
    Text,
)
from inanet.messages.services import Service
from inanet.proto.slots.systems import TREES

#: Version of this protocol; a node with another one is refused with a sentence naming both.
PROTOCOL = 5


class Resume(Frozen):
    """What a node still holds of a job whose coordinator it lost (coordinator restart).

    ``layouts`` and ``open`` announce how many :class:`Known` and :class:`Begin` messages of this job follow
    the Hello; one message each, so that no job is too large for a frame. ``next_round`` is the first round
    this host has not begun (1 from aggregators); ``open`` counts the rounds it has begun and has neither
    the result nor an error of.
    """

    job: JobId
    key: Key
    plan: PlanData
    next_round: RoundNumber = 1
    layouts: Count = 0
    open: Count = 0


class Hello(Frozen):
    """First message of a node.

    ``job`` is the job's name and ``ranks`` are the global ranks on this host, of ``world`` in all; empty,
    () and 0 for aggregators and parameter servers, which serve any job. ``endpoint`` is where its data
    plane receives (:mod:`inanet.wire.endpoint`), ``rx_window`` how many fragments its receive buffer holds,
    ``groups`` whether it can also receive IP multicast. ``send_bps`` and ``receive_bps`` are the rates of its link if
    it takes part in rate negotiation, 0 if they are not limited. ``system`` is what the job has chosen
    (:mod:`inanet.proto.slots.systems`), ``services`` what a switch or parameter server has for jobs on switches. ``sparse``: a rank of
    a job that pushes and pulls keys, which is a node by itself, and what that job has chosen.
    """

    kind: Literal["hello"] = "hello"
    protocol: Integer
    name: Name
    role: Role
    token: Annotated[String, Field(max_length=1024)]
    endpoint: Annotated[Integer, Field(ge=0, lt=1 << 48)]
    rx_window: Annotated[Integer, Field(ge=1, lt=1 << 31)]
    job: Annotated[String, Field(max_length=128)] = ""
    ranks: Ranks = ()
    world: Annotated[Integer, Field(ge=0, le=MAX_RANKS)] = 0
    groups: Annotated[bool, Strict()] = False
    send_bps: Count = 0
    receive_bps: Count = 0
    system: SystemName = TREES
    sparse: SparseData | None = None
    services: Annotated[dict[Label, Service], Field(max_length=64)] = Field(default_factory=dict)
    resume: Annotated[tuple[Resume, ...], Strict(), Field(max_length=64)] = ()


class Known(Frozen):
    """A tensor this node has slots or a buffer for; follows a Hello with :class:`Resume`."""

    kind: Literal["known"] = "known"
    job: JobId
    layout: LayoutData


class Welcome(Frozen):
    """The Hello is accepted. For workers ``job`` is the number of the job it joins, else None. The job's key comes with its
    plan, when everybody is there: who goes before that has never known it.

    ``silence``: after so many seconds without a word from the coordinator it may be taken for dead (it
    sends a Ping every third of that). ``deadline``: seconds until the job must be complete. ``epoch`` counts the
    admissions of jobs. ``evaluate``: the coordinator would like to have :class:`Performed`.
    """

    kind: Literal["welcome"] = "welcome"
    job: JobId | None = None
    silence: Seconds
    deadline: Seconds = 0.0
    epoch: Count = 0
    evaluate: Annotated[bool, Strict()] = False


class Waiting(Frozen):
    """Sent every few seconds while a job is incomplete: "joined 2 of 4, missing: rank 2, aggregator agg1"."""

    kind: Literal["waiting"] = "waiting"
    joined: Count
    expected: Count
    missing: Annotated[tuple[Text, ...], Strict()]


class Reject(Frozen):
    """The Hello, or a later message, is refused; the coordinator closes the connection.

    ``retry_after``: seconds after which the same Hello may succeed, None if it never will.
    """

    kind: Literal["reject"] = "reject"
    reason: Text
    retry_after: Seconds | None = None


class Leave(Frozen):
    """This node goes, on purpose. A worker leaves when it has all results it began, a daemon that is registered when it stops."""

    kind: Literal["leave"] = "leave"
    reason: Text = ""


class Stop(Frozen):
    """The coordinator shuts down in good order."""

    kind: Literal["stop"] = "stop"
    reason: Text
