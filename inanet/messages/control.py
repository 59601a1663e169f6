"""Control messages: one frozen model per kind, told apart by ``kind``.

A node (worker host, aggregator, parameter server) holds one connection to its coordinator. Each side trusts
nothing it reads: unknown kinds and unknown fields are refused, every number has a range, and types are
exact where bytes become messages (:mod:`inanet.messages.codec`). The plan data of :mod:`inanet.proto.common.plan`
travels as it is, so the two never need translating.

By what they are about: :mod:`~inanet.messages.handshake`, :mod:`~inanet.messages.rounds`,
:mod:`~inanet.messages.plans`, :mod:`~inanet.messages.rates`, :mod:`~inanet.messages.sparse`,
:mod:`~inanet.messages.liveness`;
those of standing connections are in :mod:`inanet.messages.registration`.

How a connection goes::

    node -> Hello                     coordinator -> Welcome (or Reject, and the connection is closed)
                                      coordinator -> Waiting ... Plan (the job is complete)
    worker -> Begin(round, spec)      coordinator -> Layout (the first time for a spec)
    aggregator, ps -> LayoutReady     (they get the Layout first; workers follow when all slots exist)
    worker -> Finished(round)         coordinator -> RoundFailed (instead, if the round cannot be had)
    worker -> Leave                   coordinator -> JobEnded (to aggregators and parameter servers)

Ping and Pong go both ways. A node that comes back to a restarted coordinator says what it still holds (coordinator restart)::

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

A worker of an elastic job is lost (:mod:`inanet.coordinator.epoch_change`). A plan under another key begins a new epoch, in
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
from typing import get_args

from inanet.messages.fields import Frozen
from inanet.messages.handshake import (
    PROTOCOL,
    Hello,
    Known,
    Leave,
    Reject,
    Resume,
    Stop,
    Waiting,
    Welcome,
)
from inanet.messages.liveness import (
    Follows,
    Performed,
    Ping,
    Pong,
    Stats,
)
from inanet.messages.plans import (
    Held,
    Hold,
    Layout,
    LayoutDrop,
    LayoutReady,
    PeerSilent,
    Plan,
)
from inanet.messages.rates import (
    RateDone,
    RateGrant,
    RateLoss,
    RateReady,
)
from inanet.messages.registration import Overview, Query, Register, Registered, Report
from inanet.messages.rounds import (
    Begin,
    Finished,
    JobEnded,
    JobFailed,
    Judge,
    Judged,
    Refuse,
    RoundFailed,
)
from inanet.messages.sparse import Gather, Gathered, Kept

__all__ = [
    "KINDS",
    "PROTOCOL",
    "Begin",
    "CoordinatorMessage",
    "Finished",
    "Follows",
    "Frozen",
    "Gather",
    "Gathered",
    "Held",
    "Hello",
    "Hold",
    "JobEnded",
    "JobFailed",
    "Judge",
    "Judged",
    "Kept",
    "Known",
    "Layout",
    "LayoutDrop",
    "LayoutReady",
    "Leave",
    "Message",
    "NodeMessage",
    "Overview",
    "PeerSilent",
    "Performed",
    "Ping",
    "Plan",
    "Pong",
    "Query",
    "RateDone",
    "RateGrant",
    "RateLoss",
    "RateReady",
    "Refuse",
    "Register",
    "Registered",
    "Reject",
    "Report",
    "Resume",
    "RoundFailed",
    "Stats",
    "Stop",
    "Waiting",
    "Welcome",
]

NodeMessage = (
    Hello
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
