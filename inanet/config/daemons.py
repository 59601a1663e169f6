"""Configuration files of the daemons: what may stand in them, with defaults that work on one machine.

One TOML file per daemon. Every section is strict: unknown keys, wrong types and values out of range are
refused, all at once (:mod:`inanet.config.file`). Sizes, rates and durations carry units
(:mod:`inanet.units`). Relative paths are relative to the file. Defaults listen on loopback only;
anything else must be written down, and then certificates are required too, or a word that they are not wanted.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from inanet import units
from inanet.config.control import ClientControl, PsControl, WorkerControl
from inanet.config.fields import (
    AbsolutePath,
    Bytes,
    DataAddress,
    FileMode,
    Name,
    Rate,
    Span,
    SystemName,
    between,
    span,
)
from inanet.config.file import SYSTEM_DIRECTORY, ConfigError, Problem, find_file, read_toml, validate
from inanet.config.manager import ManagerConfig
from inanet.config.sections import Impair, Log, Metrics, Section
from inanet.config.switch import SwitchConfig
from inanet.config.topology import Topology
from inanet.proto.slots.systems import TREES
from inanet.service.addresses import HostPort, check_socket_path

Role: TypeAlias = Literal["worker", "agg", "ps", "switch", "manager"]
#: The programs, by role.
PROGRAMS: Mapping[Role, str] = {
    "worker": "ina-worker",
    "agg": "ina-agg",
    "ps": "ina-ps",
    "switch": "ina-switch",
    "manager": "ina-manager",
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
    #: asked of the kernel for each data socket
    send_buffer: Annotated[Bytes, between(64 << 10, 1 << 30)] = 512 << 10
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


class Local(Section):
    """``[local]``: the Unix socket on which a worker daemon serves the training processes of its host."""

    socket: AbsolutePath = Field(description="path of the Unix socket that training processes connect to")
    #: permission bits of the socket
    mode: FileMode = 0o600
    #: user names or ids that may connect, and groups whose members may; without both: everybody whom ``mode`` lets in
    allow_users: Annotated[tuple[str | int, ...], Field(strict=False)] = ()
    #: names or ids of groups whose members may connect, beside ``allow_users``
    allow_groups: Annotated[tuple[str | int, ...] | None, Field(strict=False)] = None
    #: what carries jobs that do not choose themselves; all but ``xagg`` need a switch that runs it
    system: SystemName = TREES
    #: processors that sum and convert; empty: all that this process may use
    cpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()

    @field_validator("socket")
    @classmethod
    def _short_enough(cls, path: str) -> str:
        return check_socket_path(path)


class A2tp(Section):
    """``[a2tp]``: how this host's workers behave in jobs of that system; the same on all hosts of a job."""

    #: constants: ``paper``, or ``artifact`` for those of the public program, which also marks packets that bypass the switch so
    #: that a real switch with that program understands
    profile: Literal["paper", "artifact"] = "paper"
    #: by which the aggregator window grows in a round trip: jobs share slots in the proportion of their weights
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    #: whether a job with a straggler leaves slots to others; false everywhere: equal shares
    straggling: bool = True


class TimingSection(Section):
    """``[timing]``: timers of the data plane, in seconds."""

    #: how long a packet may be overtaken before it counts as lost
    reorder_window: Span = span("2 ms")
    #: first retransmission; doubles up to ``retransmit_max``
    retransmit: Span = span("20 ms")
    #: no retransmission waits longer
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


class DaemonConfig(Section):
    """What every daemon has."""

    node: Node = Field(default_factory=Node)
    log: Log = Field(default_factory=Log)
    metrics: Metrics = Field(default_factory=Metrics)
    timing: TimingSection = Field(default_factory=TimingSection)
    impair: Impair = Field(default_factory=Impair)


class WorkerNode(Node):
    """``[node]`` of a worker."""

    #: take results from the driver into memory that is read without system calls. ``auto`` finds the mode, or says why
    #: there is none; the others are errors where they cannot be had
    xdp: Literal["auto", "native", "generic", "off"] = "off"


class WorkerConfig(DaemonConfig):
    """``ina-worker``."""

    node: WorkerNode = Field(default_factory=WorkerNode)
    control: WorkerControl = Field(default_factory=WorkerControl)
    local: Local = Field(description="the section with the socket for training processes")
    a2tp: A2tp = Field(default_factory=A2tp)


class AggNode(Node):
    """``[node]`` of an aggregator."""

    #: fold and forward in the kernel, taking ``memory`` at the start. ``auto`` finds the mode, or says why there is
    #: none; the others are errors where they cannot be had
    xdp: Literal["auto", "native", "generic", "off"] = "off"


class AggConfig(DaemonConfig):
    """``ina-agg``."""

    node: AggNode = Field(default_factory=AggNode)
    control: ClientControl = Field(description="the section with the coordinator's address")


class PsNode(Node):
    """``[node]`` of a parameter server."""

    #: folder for models of sparse jobs that have one; not set: there are none
    models: AbsolutePath | None = None


class PsConfig(DaemonConfig):
    """``ina-ps``."""

    node: PsNode = Field(default_factory=PsNode)
    control: PsControl = Field(default_factory=PsControl)
    topology: Topology | None = Field(default=None, validate_default=True)

    @field_validator("control")
    @classmethod
    def _can_multicast(cls, control: PsControl, info: ValidationInfo) -> PsControl:
        transport = info.data["node"].transport if "node" in info.data else "udp"
        if control.downlink == "multicast" and transport not in GROUP_TRANSPORTS:
            raise ValueError(
                f"downlink is multicast and node.transport is {transport}, which carries none; allowed: the "
                f"transports {' and '.join(GROUP_TRANSPORTS)}, or downlink = 'unicast' or 'auto'"
            )
        return control

    @field_validator("topology")
    @classmethod
    def _sound(cls, topology: Topology | None, info: ValidationInfo) -> Topology | None:
        control = info.data.get("control")
        managed = control is not None and control.coordinator is not None
        if topology is None and control is not None and not managed:
            raise ValueError(
                "missing; required: the section with the fabric's nodes, or control.coordinator where ina-manager has it"
            )
        if topology is not None and managed:
            raise ValueError("control.coordinator is set, which has the trees; allowed: one of the two")
        if topology is not None and "node" in info.data:
            topology.fabric(info.data["node"].name)
        return topology


#: The configuration of a node of the fabric.
AnyConfig: TypeAlias = WorkerConfig | AggConfig | PsConfig
#: The configuration of any daemon.
DaemonFile: TypeAlias = AnyConfig | SwitchConfig | ManagerConfig
MODELS: Mapping[
    Role, type[WorkerConfig] | type[AggConfig] | type[PsConfig] | type[SwitchConfig] | type[ManagerConfig]
] = {
    "worker": WorkerConfig,
    "agg": AggConfig,
    "ps": PsConfig,
    "switch": SwitchConfig,
    "manager": ManagerConfig,
}


def detect_role(data: Mapping[str, Any]) -> Role | None:
    """Whose file this is, told from its sections: ``None`` if they do not tell."""
    control = data.get("control")
    if "switch" in data:
        return "switch"
    if "fabric" in data or "planning" in data:
        return "manager"
    if "topology" in data or (isinstance(control, Mapping) and "listen" in control):
        return "ps"
    if "local" in data:
        return "worker"
    return "agg" if isinstance(control, Mapping) and "coordinator" in control else None


def possible_roles(data: Mapping[str, Any]) -> tuple[Role, ...]:
    """Whose file this may be: what :func:`detect_role` says first, and a PS under a manager where that says aggregator, as
    both then have the same sections.
    """
    role = detect_role(data)
    return ("agg", "ps") if role == "agg" else () if role is None else (role,)


def unit_variables(role: Role) -> dict[str, str]:
    """What systemd's variables stand for, outside a unit that sets them: where its credentials and its state come from."""
    return {
        "CREDENTIALS_DIRECTORY": str(SYSTEM_DIRECTORY),
        "STATE_DIRECTORY": f"/var/lib/{PROGRAMS[role]}",
    }


def load(
    name: str | Path,
    role: Role | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    from_outside: bool = False,
) -> DaemonFile:
    """Read and validate a daemon's file; ``role=None`` tells the role from the sections.

    ``overrides`` maps sections to keys that replace the file's (command-line options). ``from_outside``: by somebody who
    looks at a service from a shell, where :func:`unit_variables` are not set. Raises
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
        for section in ("local", "a2tp", "topology", "switch", "fabric", "planning")
        if section not in MODELS[role].model_fields
    }
    return validate(MODELS[role], data, file, foreign, unit_variables(role) if from_outside else None)
