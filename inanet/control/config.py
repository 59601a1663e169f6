"""Configuration files of the daemons: what may stand in them, with defaults that work on one machine.

One TOML file per daemon. Every section is strict: unknown keys, wrong types and values out of range are
refused, all at once (:mod:`inanet.control.config_file`). Sizes, rates and durations carry units
(:mod:`inanet.control.units`). Relative paths are relative to the file. Defaults listen on loopback only;
anything else must be written down, and then a token is required too.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator

from inanet.control import units
from inanet.control.addresses import HostPort, check_socket_path
from inanet.control.config_fields import (
    COORDINATOR_PORT,
    GROUP_PORT,
    GROUP_RANGE,
    AbsolutePath,
    Bytes,
    CoordinatorAddress,
    DataAddress,
    FileMode,
    GroupRange,
    Name,
    Parents,
    Probability,
    Rate,
    Span,
    between,
    check_token,
    read_token,
    span,
)
from inanet.control.config_file import ConfigError, Problem, SeveralErrors, find_file, read_toml, validate
from inanet.control.config_sections import Impair, Log, Metrics, Section
from inanet.control.config_switch import SwitchConfig

if TYPE_CHECKING:
    # imported where they are used: they bring numpy, which ``--help`` of a daemon need not wait for
    from inanet.control.plans import Downlink
    from inanet.control.selection import Selection
    from inanet.control.topology import Topology as Fabric

Role: TypeAlias = Literal["worker", "agg", "ps", "switch"]
#: The programs, by role.
PROGRAMS: Mapping[Role, str] = {
    "worker": "ina-worker",
    "agg": "ina-agg",
    "ps": "ina-ps",
    "switch": "ina-switch",
}


#: Transports that can receive IP multicast.
GROUP_TRANSPORTS = ("udp", "packet")


class Node(Section):
    """``[node]``: who this node is and its data plane. Sizes in bytes."""

    name: Name = Field(
        default_factory=lambda: os.uname().nodename, description="the node's name, unique in its fabric"
    )
    #: where data packets arrive; a node is known to its peers by this address, so it must be one address
    listen: DataAddress = HostPort("127.0.0.1", 0)
    #: ``packet``: past the kernel's IP stack; ``tun``: ``listen`` is an address of the node's own
    transport: Literal["udp", "rawip", "packet", "tun"] = "udp"
    #: asked of the kernel for each data socket; what it grants limits the windows of the senders
    receive_buffer: Annotated[Bytes, between(64 << 10, 1 << 30)] = 4 << 20
    send_buffer: Annotated[Bytes, between(64 << 10, 1 << 30)] = 128 << 10
    #: sent at most, in bits per second, IP and Ethernet headers counted; not set: as fast as the network takes it
    rate: Rate | None = None
    #: sent at once after a pause, if ``rate`` is set; not set: what the rate carries in 1 ms, at least two
    #: super-frames (140 kB), below which shapers of the kernel cost CPU time
    burst: Annotated[Bytes, between(10 * 10**3, 64 << 20)] | None = None
    #: follow the rate that the PS works out for this node, ``rate`` being its link's; set it on all nodes
    rate_negotiation: bool = False
    #: for the slots of all jobs together; a tensor that does not fit is refused
    memory: Annotated[Bytes, between(1 << 20, 1 << 50)] = 1 << 30

    @field_validator("listen")
    @classmethod
    def _one_address(cls, listen: HostPort) -> HostPort:
        if listen.host == "0.0.0.0":
            raise ValueError(
                "0.0.0.0 is no address to be known by; allowed: the address or interface that the other "
                "nodes reach"
            )
        return listen


class Control(Section):
    """What both ends of a control connection have. Durations in seconds.

    Checks that involve two keys stand at the later one and see the earlier in ``info.data``, so that they
    are reported together with everything else.
    """

    token: SecretStr | None = None
    token_file: AbsolutePath | None = None
    heartbeat: Span = span("1 s")
    #: how long to wait for the other nodes of a job before giving up with their names
    join_timeout: Span = span("60 s")
    #: how long a round may take once it began, before every rank gets the same error
    round_timeout: Span = span("30 s")
    #: how long running rounds may go on after SIGTERM
    drain_timeout: Span = span("10 s")

    @field_validator("token")
    @classmethod
    def _long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            check_token(token.get_secret_value())
        return token

    @field_validator("token_file")
    @classmethod
    def _readable(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None:
            if info.data.get("token") is not None:
                raise ValueError("token is set as well; allowed: one of the two")
            check_token(read_token(path))
        return path

    @field_validator("round_timeout")
    @classmethod
    def _outlasts_heartbeats(cls, timeout: float, info: ValidationInfo) -> float:
        shortest = 3 * info.data.get("heartbeat", 0.0)
        if timeout < shortest:
            raise ValueError(
                f"{units.show_duration(timeout)} is shorter than three heartbeats, so a lost peer would "
                f"show only as a timeout; allowed: {units.show_duration(shortest)} or more, or a shorter "
                "heartbeat"
            )
        return timeout

    def secret(self) -> str:
        """The token that both ends must know; empty if none is set, which is allowed on loopback only.

        Raises ``OSError`` if the token file has vanished since the configuration was read.
        """
        if self.token is not None:
            return self.token.get_secret_value()
        return read_token(self.token_file) if self.token_file is not None else ""


class ClientControl(Control):
    """``[control]`` of workers and aggregators."""

    coordinator: CoordinatorAddress = Field(description="where ina-ps listens, host:port or unix:/path")


class CoordinatorControl(Control):
    """``[control]`` of the PS, which is the coordinator of its fabric."""

    listen: CoordinatorAddress = HostPort("127.0.0.1", COORDINATOR_PORT)
    #: how every parent sends results to its children: once to a multicast group, or to each by itself; ``auto``: by
    #: multicast to those children that have answered a probe. Switches that do not snoop flood multicast to all ports
    downlink: Literal["multicast", "unicast", "auto"] = "unicast"
    #: every parent of every job has a group of its own from this range
    group_range: GroupRange = GROUP_RANGE
    group_port: Annotated[int, Field(ge=1, le=65535)] = GROUP_PORT
    #: share of a worker's packets lost in 10 ms beyond which it is told to send less, if rates are negotiated
    loss_threshold: Probability = 0.01


class Local(Section):
    """``[local]``: the Unix socket on which a worker daemon serves the training processes of its host."""

    socket: AbsolutePath = Field(description="path of the Unix socket that training processes connect to")
    mode: FileMode = 0o600
    #: user names or ids that may connect; empty: everybody whom ``mode`` lets in
    allow_users: Annotated[tuple[str | int, ...], Field(strict=False)] = ()
    #: processors that sum and convert; empty: all that this process may use
    cpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()

    @field_validator("socket")
    @classmethod
    def _short_enough(cls, path: str) -> str:
        return check_socket_path(path)


class Timing(Section):
    """``[timing]``: timers of the data plane, in seconds."""

    #: how long a packet may be overtaken before it counts as lost
    reorder_window: Span = span("2 ms")
    #: first retransmission; doubles up to ``retransmit_max``
    retransmit: Span = span("20 ms")
    retransmit_max: Span = span("500 ms")

    @field_validator("retransmit", "retransmit_max")
    @classmethod
    def _ordered(cls, timer: float, info: ValidationInfo) -> float:
        before = "reorder_window" if info.field_name == "retransmit" else "retransmit"
        shortest = info.data.get(before, 0.0)
        if timer < shortest:
            raise ValueError(
                f"{units.show_duration(timer)} is shorter than {before}; allowed: "
                f"{units.show_duration(shortest)} or more"
            )
        return timer


class Aggregator(Section):
    """An aggregator, by name. Its address comes with its first message."""

    name: Name = Field(description="the node's name, as in its own [node] section")
    parent: Name = Field(description="name of the aggregator or PS it sends to")


class Worker(Section):
    """A worker, by name. Its address comes with its first message."""

    name: Name = Field(description="the node's name, as in its own [node] section")
    #: several parents, one in each tree, if there are several roots
    parent: Parents = Field(description="name of the aggregator or PS it sends to")


class Topology(Section):
    """``[topology]``: the fabric's trees as plain data; :meth:`fabric` gives them their meaning."""

    #: names of the parameter servers; empty: this one
    roots: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    aggregators: Annotated[tuple[Aggregator, ...], Field(strict=False)] = ()
    workers: Annotated[tuple[Worker, ...], Field(strict=False)] = Field(
        description="the worker nodes, e.g. [{ name = 'w0', parent = 'ps' }]"
    )
    #: ``configured``: the trees as they stand here; else the planner's cheapest of a kind, over the same nodes
    plan: Literal["configured", "auto", "ps", "sharded", "tree", "sharded-tree"] = "configured"
    #: what the planner reckons with: the size of a tensor, and rates of the nodes' links
    tensor: Annotated[Bytes, between(1, 1 << 40)] = 100 << 20
    rate: Rate = 10 * 10**9
    rates: dict[Name, Rate] = Field(default_factory=dict)

    def fabric(self, ps: str) -> "Fabric":
        """The fabric with the PS named ``ps`` among its roots: as configured, or as the planner would have it.

        Raises :class:`SeveralErrors`.
        """
        fabric = self._configured(ps)
        return fabric if self.plan == "configured" else self.selection(ps).plan.topology()

    def selection(self, ps: str, downlinks: "Sequence[Downlink]" = ("unicast",)) -> "Selection":
        """What the planner chooses for :attr:`plan`, and why. Raises :class:`SeveralErrors`."""
        from inanet.control.costs import load as load_costs
        from inanet.control.selection import select

        fabric = self._configured(ps)
        names = {*fabric.roots, *fabric.aggregators, *fabric.workers}
        if unknown := sorted(set(self.rates) - names):
            raise SeveralErrors([f"rates: there is no node {unknown[0]!r}; allowed: nodes of this section"])
        try:
            return select(
                fabric,
                ps,
                self.plan,
                rates=self.rates,
                default_rate=self.rate,
                size=self.tensor,
                downlinks=downlinks,
                costs=load_costs(),
            )
        except ValueError as error:
            raise SeveralErrors([str(error)]) from None

    def _configured(self, ps: str) -> "Fabric":
        from inanet.control.topology import Topology as Fabric
        from inanet.control.topology import TopologyError

        roots = self.roots or (ps,)
        problems = [] if ps in roots else [f"this node, {ps!r}, is not among the roots {', '.join(roots)}"]
        for nodes in (self.aggregators, self.workers):
            names = [node.name for node in nodes]
            repeated = sorted({name for name in names if names.count(name) > 1})
            problems += [f"{name!r} stands there twice; names are used once" for name in repeated]
        if not self.workers:
            problems.append("no workers; allowed: at least one { name, parent }")
        try:
            fabric = Fabric(
                roots=roots,
                aggregators={node.name: node.parent for node in self.aggregators},
                workers={node.name: node.parent for node in self.workers},
            )
            fabric.trees([worker.name for worker in self.workers])
        except TopologyError as error:
            problems += error.problems
        except ValidationError as error:
            for item in error.errors(include_url=False):
                found = item.get("ctx", {}).get("error")
                problems += found.problems if isinstance(found, TopologyError) else [item["msg"]]
        if problems:
            raise SeveralErrors(problems)
        return fabric


class DaemonConfig(Section):
    """What every daemon has."""

    node: Node = Node()
    log: Log = Log()
    metrics: Metrics = Metrics()
    timing: Timing = Timing()
    impair: Impair = Impair()


class WorkerConfig(DaemonConfig):
    """``ina-worker``."""

    control: ClientControl = Field(description="the section with the coordinator's address")
    local: Local = Field(description="the section with the socket for training processes")


class AggNode(Node):
    """``[node]`` of an aggregator."""

    #: fold and forward in the kernel, taking ``memory`` at the start. ``auto`` finds the mode, or says why there is
    #: none; the others are errors where they cannot be had
    xdp: Literal["auto", "native", "generic", "off"] = "off"


class AggConfig(DaemonConfig):
    """``ina-agg``."""

    node: AggNode = AggNode()
    control: ClientControl = Field(description="the section with the coordinator's address")


class PsConfig(DaemonConfig):
    """``ina-ps``."""

    control: CoordinatorControl = CoordinatorControl()
    topology: Topology = Field(description="the section with the fabric's nodes")

    @field_validator("control")
    @classmethod
    def _can_multicast(cls, control: CoordinatorControl, info: ValidationInfo) -> CoordinatorControl:
        transport = info.data["node"].transport if "node" in info.data else "udp"
        if control.downlink == "multicast" and transport not in GROUP_TRANSPORTS:
            raise ValueError(
                f"downlink is multicast and node.transport is {transport}, which carries none; allowed: the "
                f"transports {' and '.join(GROUP_TRANSPORTS)}, or downlink = 'unicast' or 'auto'"
            )
        return control

    @field_validator("topology")
    @classmethod
    def _sound(cls, topology: Topology, info: ValidationInfo) -> Topology:
        if "node" in info.data:
            topology.fabric(info.data["node"].name)
        return topology


#: The configuration of a node of the fabric.
AnyConfig: TypeAlias = WorkerConfig | AggConfig | PsConfig
#: The configuration of any daemon.
DaemonFile: TypeAlias = AnyConfig | SwitchConfig
MODELS: Mapping[Role, type[WorkerConfig] | type[AggConfig] | type[PsConfig] | type[SwitchConfig]] = {
    "worker": WorkerConfig,
    "agg": AggConfig,
    "ps": PsConfig,
    "switch": SwitchConfig,
}


def detect_role(data: Mapping[str, Any]) -> Role | None:
    """Whose file this is, told from its sections: ``None`` if they do not tell."""
    control = data.get("control")
    if "switch" in data:
        return "switch"
    if "topology" in data or (isinstance(control, Mapping) and "listen" in control):
        return "ps"
    if "local" in data:
        return "worker"
    return "agg" if isinstance(control, Mapping) and "coordinator" in control else None


def load(
    name: str | Path, role: Role | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> DaemonFile:
    """Read and validate a daemon's file; ``role=None`` tells the role from the sections.

    ``overrides`` maps sections to keys that replace the file's (command-line options). Raises
    :class:`ConfigError` with every problem at once, and ``PermissionError`` if the file may not be read.
    """
    file = find_file(name)
    data = read_toml(file)
    if role is None:
        role = detect_role(data)
    if role is None:
        raise ConfigError(
            file,
            [
                Problem(
                    "",
                    "cannot tell which daemon this file is for: no [control] or [topology]",
                    "give the role",
                )
            ],
        )
    for section, keys in (overrides or {}).items():
        if isinstance(data.setdefault(section, {}), dict):
            data[section].update(keys)
    foreign = {
        section: [PROGRAMS[other] for other, model in MODELS.items() if section in model.model_fields]
        for section in ("local", "topology", "switch")
        if section not in MODELS[role].model_fields
    }
    return validate(MODELS[role], data, file, foreign)
