"""Versions of plans, the tensors that have slots, and the moments in which a plan may change."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from inanet.messages.fields import (
    MAX_TREES,
    Count,
    Frozen,
    Integer,
    JobId,
    LayoutData,
    Name,
    PlanData,
    RoundNumber,
    Seconds,
    Text,
)


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
    """An aggregator or parameter server made the slots of a tensor, or says why not (``refused``).

    Workers say it only to refuse.
    """

    kind: Literal["layout_ready"] = "layout_ready"
    job: JobId
    tensor: Count
    refused: Text = ""


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
