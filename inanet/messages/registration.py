"""Messages of standing connections: daemons register and report, and whoever wants to know asks.

They are taken and checked like all of :mod:`inanet.messages.control`.
"""

from typing import Annotated, Literal

from pydantic import Field, Strict

from inanet.messages.fields import (
    Count,
    Frozen,
    Integer,
    Label,
    Name,
    NodeRole,
    Ranks,
    Seconds,
    String,
    Text,
)


class Register(Frozen):
    """First message of a daemon that is there, whether or not it has a job.

    ``address`` is where its data plane receives, for people. ``memory`` is the machine's, in bytes; ``link_bps`` the
    rate of its link, 0 if nobody knows. ``software`` is the version it runs.
    """

    kind: Literal["register"] = "register"
    protocol: Integer
    name: Name
    role: NodeRole
    token: Annotated[String, Field(max_length=1024)]
    address: Label = ""
    cores: Annotated[Integer, Field(ge=1, le=1 << 20)] = 1
    memory: Count = 0
    link_bps: Count = 0
    software: Label = ""


class Report(Frozen):
    """What a machine has to spare: idle cores (2.5 of 4, say), bytes of memory in use, bits per second on its link."""

    kind: Literal["report"] = "report"
    idle_cores: Seconds
    memory_used: Count
    send_bps: Count = 0
    receive_bps: Count = 0


class Query(Frozen):
    """Asks for an :class:`Overview`, instead of a Hello. With a ``nonce``, also for a datagram to :attr:`Overview.group`
    that carries it, sent out of the interface on which this came: to see whether multicast gets here.
    """

    kind: Literal["query"] = "query"
    protocol: Integer
    token: Annotated[String, Field(max_length=1024)]
    nonce: Count = 0


class Registered(Frozen):
    """The Register is accepted; report every ``heartbeat`` seconds. ``epoch`` is that of the last job admitted."""

    kind: Literal["registered"] = "registered"
    heartbeat: Seconds
    epoch: Count = 0


class NodeState(Frozen):
    """A node as the coordinator knows it: as registered, with its last report, ``age`` seconds old.

    ``serves``: it holds slots for whatever jobs need it (aggregators and parameter servers). ``counters``: those of
    :data:`inanet.coordinator.registry.FIGURES` that it has.
    """

    name: Name
    role: NodeRole
    registered: Annotated[bool, Strict()]
    serves: Annotated[bool, Strict()]
    address: Label = ""
    software: Label = ""
    cores: Count = 0
    memory: Count = 0
    link_bps: Count = 0
    idle_cores: Seconds | None = None
    memory_used: Count | None = None
    send_bps: Count = 0
    receive_bps: Count = 0
    age: Seconds = 0.0
    counters: Annotated[dict[Label, Count], Field(max_length=64)]


class JobState(Frozen):
    """A job: its ranks by host, its trees as parents by node, and what it waits for while it is not running."""

    name: Annotated[String, Field(max_length=128)]
    state: Literal["forming", "resuming", "running"]
    epoch: Count = 0
    version: Count = 0
    rounds: Count = 0
    world: Count = 0
    ranks: dict[Name, Ranks]
    roots: Annotated[tuple[Name, ...], Strict()] = ()
    trees: Annotated[tuple[dict[Name, Name], ...], Strict()] = ()
    absent: Annotated[tuple[Name, ...], Strict()] = ()
    missing: Annotated[tuple[Text, ...], Strict()] = ()
    reason: Text = ""


class Overview(Frozen):
    """Answer to a :class:`Query`. ``missing``: nodes that are expected and have not registered. ``refused``: why somebody
    was turned away, of late. ``downlink`` is how results go down, ``group`` (``address:port``) where probes of multicast
    do.
    """

    kind: Literal["overview"] = "overview"
    epoch: Count
    nodes: Annotated[tuple[NodeState, ...], Strict()] = ()
    jobs: Annotated[tuple[JobState, ...], Strict()] = ()
    missing: Annotated[tuple[Name, ...], Strict()] = ()
    refused: Annotated[tuple[Text, ...], Strict(), Field(max_length=64)] = ()
    downlink: Label = ""
    group: Label = ""
