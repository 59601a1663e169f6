"""Control messages: one frozen model per kind, told apart by ``kind``.

A node (worker host, aggregator, parameter server) holds one connection to its coordinator. Each side trusts
nothing it reads: unknown kinds and unknown fields are refused, every number has a range, and types are
exact where bytes become messages (:mod:`inanet.messages.codec`). The plan data of :mod:`inanet.proto.common.plan`
travels as it is, so the two never need translating.

Those of standing connections are in :mod:`inanet.messages.registration`.

How a connection goes::

    node -> Hello                     coordinator -> Welcome (or Reject, and the connection is closed)
                                      coordinator -> Waiting ... Plan (the job is complete)
    worker -> Begin(round, spec)      coordinator -> Layout (the first time for a spec)
    aggregator, ps -> LayoutReady     (they get the Layout first; workers follow when all slots exist)
    worker -> Finished(round)         coordinator -> RoundFailed (instead, if the round cannot be had)
    worker -> Leave                   coordinator -> JobEnded (to aggregators and parameter servers)

Ping and Pong go both ways. A connection that breaks between two processes that live is continued over another one
(:mod:`inanet.messages.delivery`)::

    node -> Away                      (if it can, before it closes a connection that it gives up)
    node -> Continue(session, heard)  coordinator -> Continued(known, heard), then both: what the other end lacks

A node that comes back to a restarted coordinator says what it still holds (coordinator restart)::

    node -> Hello(resume=(Resume, ...)), then for each Resume: Known * layouts, Begin * open
    coordinator -> Welcome, Layout (for tensors it lacks), Plan(attach=...)

Rates, for nodes that negotiate them (:mod:`inanet.planning.negotiation`)::

    worker -> RateReady ... RateLoss ... RateDone
                                      coordinator -> RateGrant (to every node whose rate changes with that)

Registration is a connection of its own, which every daemon holds as long as it runs; a manager plans with what it hears
there (:mod:`inanet.messages.registration`). Whoever only wants to look asks once::

    daemon -> Register                coordinator -> Registered (or Reject)
    daemon -> Report, Stats           (every heartbeat)
    anybody -> Query                  coordinator -> Overview

A change of the tree for later rounds only (an aggregator returns) needs a moment in which no round is on
its way::

    coordinator -> Hold(before)       worker -> Held; it begins no round from ``before`` on
    coordinator -> Plan               releases the hold, whatever the reason for the plan

A worker of an elastic job is lost (:class:`inanet.coordinator.job.EpochChange`). A plan under another key begins a new epoch, in
which nothing counts that was sent before::

    coordinator -> Judge (to roots)   root -> Judged
    coordinator -> Hold               worker -> Held
    coordinator -> JobEnded, Plan (to aggregators and roots), Plan (to workers)

A sparse job that begins with a model that its servers keep (:mod:`inanet.coordinator.sparse.model`)::

    coordinator -> Plan (to all but workers)  ps -> Kept (every shard)
    coordinator -> Plan (to all), which says with which iteration

One that finds its hot keys while it trains (:mod:`inanet.coordinator.sparse.hot_keys`), after every so many iterations::

    ps -> Gathered                    (every shard)
    coordinator -> Gather (to the switch)  switch -> Gathered
    coordinator -> Plan (to all if other keys are hot, else to shards, of which one waits for it)
"""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field, Strict

from inanet.messages.fields import (
    MAX_RANKS,
    MAX_TREES,
    Cause,
    Count,
    Frozen,
    Integer,
    JobId,
    Key,
    Label,
    LayoutData,
    Name,
    PlanData,
    Rank,
    Ranks,
    Role,
    RoundNumber,
    Seconds,
    SparseData,
    SpecData,
    String,
    SystemName,
    TallyData,
    Text,
)
from inanet.messages.registration import Overview, Query, Register, Registered, Report
from inanet.messages.services import Service
from inanet.proto.slots.systems import TREES

# ---------- who a node is, and whether it is let in


#: Version of this protocol; a node with another one is refused with a sentence naming both.
PROTOCOL = 7


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
    admissions of jobs. ``evaluate``: the coordinator would like to have :class:`Performed`. ``session``: the secret with
    which this node may go on over another connection (:class:`Continue`); empty if it may not.
    """

    kind: Literal["welcome"] = "welcome"
    job: JobId | None = None
    silence: Seconds
    deadline: Seconds = 0.0
    epoch: Count = 0
    evaluate: Annotated[bool, Strict()] = False
    session: Label = ""


class Continue(Frozen):
    """First message on another connection of a node whose last one broke, or had nothing to say for too long: go on with
    ``session``. ``heard``: messages of the coordinator that came over all its connections. Answered by :class:`Continued`.
    """

    kind: Literal["continue"] = "continue"
    session: Label
    heard: Count


class Continued(Frozen):
    """What each end lacks follows; ``heard`` messages of the node have come. Not ``known``: there is no such session, and the
    node may say Hello.
    """

    kind: Literal["continued"] = "continued"
    known: Annotated[bool, Strict()]
    heard: Count = 0


class Heard(Frozen):
    """So many messages have come over all connections of a session, this kind, Continue, Continued and Away not counted."""

    kind: Literal["heard"] = "heard"
    count: Count


class Away(Frozen):
    """The connection is about to be closed by a node that lives, and will call again."""

    kind: Literal["away"] = "away"


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


# ---------- rounds and jobs, and how they end


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


# ---------- plans, tensors, and moments in which a plan may change


class Plan(Frozen):
    """A version of the plan as this node sees it.

    ``attach``: trees in which its parent knows nothing of the rounds that run, because it is another one
    than before (re-parenting) or has lost its memory (root restart); announce them and resend what it lacks.
    """

    kind: Literal["plan"] = "plan"
    plan: PlanData
    attach: Annotated[tuple[Integer, ...], Strict(), Field(max_length=MAX_TREES)] = ()


class Layout(Frozen):
    """A tensor's id and shards. Aggregators and parameter servers make slots and answer
    :class:`LayoutReady`; workers may send as soon as they have it. ``last_round``: its slots are open for
    rounds after this one.
    """

    kind: Literal["layout"] = "layout"
    job: JobId
    layout: LayoutData
    last_round: RoundNumber


class LayoutReady(Frozen):
    """An aggregator or parameter server made the slots of a tensor, or says why not (``refused``), and the cause.

    Workers say it only to refuse.
    """

    kind: Literal["layout_ready"] = "layout_ready"
    job: JobId
    tensor: Count
    refused: Text = ""
    cause: Cause = "memory"


class LayoutDrop(Frozen):
    """Free this tensor. A worker that has begun a round on it meanwhile waits for the :class:`Layout` that
    follows.
    """

    kind: Literal["layout_drop"] = "layout_drop"
    job: JobId
    tensor: Count


class Hold(Frozen):
    """Begin no round from ``before`` on until a :class:`Plan` comes; answer :class:`Held`."""

    kind: Literal["hold"] = "hold"
    job: JobId
    nonce: Count
    before: RoundNumber


class Held(Frozen):
    """Answer to :class:`Hold`, with its nonce: this host holds, and has said Begin for what it began
    before.
    """

    kind: Literal["held"] = "held"
    job: JobId
    nonce: Count


class PeerSilent(Frozen):
    """A neighbour on the data plane has not answered for ``seconds``; the coordinator decides what that
    means (re-parenting).
    """

    kind: Literal["peer_silent"] = "peer_silent"
    job: JobId
    name: Name
    seconds: Seconds


# ---------- what hosts may send


class RateReady(Frozen):
    """This host has a gradient to send, and can send ``maximum`` bits per second (0: its link has no limit).

    Of all messages about rates the one with the highest ``sequence`` counts.
    """

    kind: Literal["rate_ready"] = "rate_ready"
    job: JobId
    sequence: Count
    maximum: Count = 0


class RateDone(Frozen):
    """This host has sent everything that its parents lacked."""

    kind: Literal["rate_done"] = "rate_done"
    job: JobId
    sequence: Count


class RateLoss(Frozen):
    """Fragments that this host has ``sent`` in a period, and how many of them it had ``lost`` and sent again."""

    kind: Literal["rate_loss"] = "rate_loss"
    job: JobId
    sequence: Count
    sent: Count
    lost: Count


class RateGrant(Frozen):
    """What this node may send for a job from now on, in bits per second as on the wire: ``up`` to its parents, ``down``
    to its children; None: no limit. Of several the one with the highest ``sequence`` counts.
    """

    kind: Literal["rate_grant"] = "rate_grant"
    job: JobId
    sequence: Count
    up: Count | None
    down: Count | None


# ---------- what machines of a sparse job have


class Gather(Frozen):
    """To the switch, when all shards have counted: how often were hot keys updated in the iterations up to this one? Answered by
    :class:`Gathered`.
    """

    kind: Literal["gather"] = "gather"
    job: JobId
    #: from 1, as those of tallies
    iteration: Annotated[RoundNumber, Field(ge=1)]


class Gathered(Frozen):
    """What a switch or a shard has counted. A shard says it by itself, and again until a plan says what has been decided."""

    kind: Literal["gathered"] = "gathered"
    job: JobId
    tally: TallyData


class Kept(Frozen):
    """A shard says after how many iterations its part of a job's model is, 0 if there is none, and a number of the job that began
    it. Again until a plan says with which iteration the job begins.
    """

    kind: Literal["kept"] = "kept"
    job: JobId
    iteration: RoundNumber
    origin: Count = 0


# ---------- whether a node is there, and how it fares


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


# ---------- all of them


NodeMessage = (
    Hello
    | Continue
    | Heard
    | Away
    | Known
    | Begin
    | LayoutReady
    | Refuse
    | Finished
    | PeerSilent
    | Held
    | Judged
    | Gathered
    | Kept
    | Leave
    | RateReady
    | RateDone
    | RateLoss
    | Stats
    | Register
    | Report
    | Performed
    | Query
    | Ping
    | Pong
)
CoordinatorMessage = (
    Welcome
    | Continued
    | Heard
    | Waiting
    | Reject
    | Plan
    | Layout
    | LayoutDrop
    | RateGrant
    | Hold
    | Judge
    | Gather
    | RoundFailed
    | JobFailed
    | JobEnded
    | Stop
    | Registered
    | Overview
    | Ping
    | Pong
)
Message = NodeMessage | CoordinatorMessage
#: Every message class by its ``kind``.
KINDS: Mapping[str, type[Message]] = {
    message.model_fields["kind"].default: message for message in get_args(Message)
}
