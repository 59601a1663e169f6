"""What a topology file says, checked strictly.

The file is TOML. Unknown keys are errors, and :func:`load` reports every error of the file at once. Relations
between parts (names, switches that exist, loops) are checked once all parts are well formed by themselves.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from inanet import units
from inanet.config.fields import Bytes, Parents, Span, between
from inanet.config.file import SeveralErrors, read_toml, validate
from inanet.config.topology import Topology as Trees

#: Two UDP super-frames of 67,580 B as tbf counts them. A smaller bucket makes tbf cut every super-frame into
#: packets, which costs more than twice the CPU and up to three times the time.
LEAST_BURST = 140_000
#: tc's rate field has 32 bits of bytes per second.
LEAST_RATE, GREATEST_RATE = 10**6, 32 * 10**9
#: One address block holds the hosts of a switch, its gateway included.
MOST_HOSTS = 64

Role = Literal["worker", "aggregator", "ps", "idle"]


def _node_name(text: object) -> str:
    if not isinstance(text, str) or not re.fullmatch(r"[a-z][a-z0-9]{0,10}", text, re.ASCII):
        raise ValueError(f"{text!r} is not a name; allowed: up to 11 of a-z and 0-9, a letter first")
    return text


def check_lab_name(text: object) -> str:
    """The name of a lab. Raises ``ValueError``: no dots, which separate it from the names of its nodes."""
    if not isinstance(text, str) or not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", text, re.ASCII):
        raise ValueError(f"{text!r} is not a name; allowed: up to 41 of a-z, 0-9 and '-'")
    return text


def _rate_in_range(rate: int) -> int:
    if not LEAST_RATE <= rate <= GREATEST_RATE:
        raise ValueError(
            f"{units.show_rate(rate)} is out of range; allowed: {units.show_rate(LEAST_RATE)} to "
            f"{units.show_rate(GREATEST_RATE)}"
        )
    return rate


Name = Annotated[str, BeforeValidator(_node_name)]
#: Bits per second, as ``int``.
Rate = Annotated[int, BeforeValidator(units.parse_rate), AfterValidator(_rate_in_range)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Link(_Part):
    """Properties of a link, in both directions; ``None`` falls back to the topology's ``[link]``."""

    #: bits per second; absent there as well: not limited
    rate: Rate | None = None
    #: token bucket depth, bytes
    burst: Annotated[Bytes, between(LEAST_BURST, 64 << 20)] | None = None
    #: longest a packet may wait in the shaper's queue, seconds: sets the queue's length
    latency: Span | None = None
    mtu: Annotated[int, Field(ge=1100, le=65535)] | None = None

    def over(self, default: "Link") -> Self:
        """This link with what it leaves open taken from ``default``."""
        stated = {name: getattr(self, name) for name in type(self).model_fields}
        known = {name: getattr(default, name) for name in type(default).model_fields}
        return type(self).model_construct(
            **known | {name: value for name, value in stated.items() if value is not None}
        )


class HostLink(Link):
    """The link of a host, whose directions may differ: what a host sends and what it receives."""

    #: bits per second from the host to its switch; absent: ``rate``
    up: Rate | None = None
    #: bits per second from the switch to the host; absent: ``rate``
    down: Rate | None = None

    @property
    def sends(self) -> int | None:
        """Bits per second that the host can send; ``None``: not limited."""
        return self.rate if self.up is None else self.up

    @property
    def receives(self) -> int | None:
        """Bits per second that the host can receive; ``None``: not limited."""
        return self.rate if self.down is None else self.down


#: Links that say nothing: not limited, ordinary Ethernet. The fields are in base units already.
BASE_LINK = Link.model_construct(rate=None, burst=160 << 10, latency=0.02, mtu=1500)


class Switch(_Part):
    """An ordinary switch (``bridge``: the kernel's), or one that ``ina-switch`` is: nothing passes it until that runs.

    Without snooping it floods multicast to every port, as ``ina-switch`` always does.
    """

    name: Name = Field(description="the switch's name")
    kind: Literal["bridge", "ina"] = "bridge"
    snooping: bool = True
    #: somebody must ask who listens, else a snooping switch floods after all
    querier: bool = True

    @model_validator(mode="after")
    def _what_it_has(self) -> "Switch":
        if self.kind == "ina" and self.model_fields_set & {"snooping", "querier"}:
            raise ValueError("ina-switch has neither snooping nor querier; allowed: leave both out")
        if "querier" in self.model_fields_set and self.querier and not self.snooping:
            raise ValueError("querier = true needs snooping = true; allowed: set both, or neither")
        return self


class Host(_Part):
    """A machine, or ``count`` equal ones named ``<name>0``, ``<name>1``, ..."""

    name: Name = Field(description="the host's name")
    count: Annotated[int, Field(ge=1, le=MOST_HOSTS)] | None = None
    role: Role = "worker"
    switch: Name = Field(description="name of the switch it is plugged into")
    link: HostLink = HostLink()
    #: processes of the job on this host; workers only
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    #: hosts this one sends its sums to, one in each tree; absent: every ps (an aggregator: the first)
    parent: Parents | None = None
    #: how much later than the others this worker has its tensor, in units of the time which the tensor takes
    #: on its link; the lab hands it on to the command as INA_LATENESS
    lateness: Annotated[float, Field(ge=0, le=100, strict=False)] = 0.0


class Trunk(_Part):
    """A link between two switches."""

    between: Annotated[tuple[Name, Name], Field(strict=False, description="the two switches")]
    link: Link = Link()


class Topology(_Part):
    """A whole topology file."""

    name: Annotated[str, BeforeValidator(check_lab_name)] = Field(description="the topology's name")
    summary: str = Field(description="one line for people")
    #: ``bridged``: one Ethernet segment, switches form a tree. ``routed``: one subnet per switch, loops carry
    #: equal-cost multipath, multicast stays within a switch.
    fabric: Literal["bridged", "routed"] = "bridged"
    link: Link = Link()
    switch: Annotated[tuple[Switch, ...], Field(min_length=1, max_length=32, strict=False)] = Field(
        description="at least one [[switch]]"
    )
    host: Annotated[tuple[Host, ...], Field(min_length=1, max_length=MOST_HOSTS, strict=False)] = Field(
        description="at least one [[host]]"
    )
    trunk: Annotated[tuple[Trunk, ...], Field(strict=False)] = ()
    #: an ina-switch on a server beside the others, to which hosts have a route for the addresses of their rings
    detour: Name | None = None

    @model_validator(mode="after")
    def _sound(self) -> "Topology":
        problems = list(_contradictions(self))
        # trees are worth a look only where names are not in doubt
        problems = problems or list(_bad_trees(self))
        if problems:
            raise SeveralErrors(problems)
        return self

    def hosts(self) -> tuple[Host, ...]:
        """Every single host: counts unfolded, links complete, in the file's order."""
        default = self.link.over(BASE_LINK)
        return tuple(
            host.model_copy(update={"name": name, "count": None, "link": host.link.over(default)})
            for host in self.host
            for name in _names(host)
        )

    def trunks(self) -> tuple[Trunk, ...]:
        """Every trunk with its link complete."""
        default = self.link.over(BASE_LINK)
        return tuple(trunk.model_copy(update={"link": trunk.link.over(default)}) for trunk in self.trunk)

    def with_switches(self, kind: Literal["bridge", "ina"]) -> "Topology":
        """The same hosts and links, with this kind for every switch; bridges as they are without being told. Nothing is led
        through a detour then.
        """
        switches = tuple(
            switch if switch.kind == kind else Switch(name=switch.name, kind=kind) for switch in self.switch
        )
        return self.model_copy(update={"switch": switches, "detour": None})

    def workers(self) -> tuple[Host, ...]:
        """The hosts that run ranks; ranks are numbered over them in this order."""
        return tuple(host for host in self.hosts() if host.role == "worker")

    def roots(self) -> tuple[str, ...]:
        """The hosts with the role ``ps``, one tree each. The first is the coordinator."""
        return tuple(host.name for host in self.hosts() if host.role == "ps")

    def parents(self, host: Host) -> tuple[str, ...]:
        """Whom a worker or aggregator sends to, one in each of its trees."""
        if host.parent is not None:
            return host.parent
        return self.roots() if host.role == "worker" else self.roots()[:1]

    def trees(self) -> dict[str, Any]:
        """The ``[topology]`` section of the coordinator's configuration."""
        nodes = {host.name: host for host in self.hosts()}
        return {
            "roots": list(self.roots()),
            "aggregators": [
                {"name": name, "parent": self.parents(host)[0]}
                for name, host in nodes.items()
                if host.role == "aggregator"
            ],
            "workers": [
                {"name": name, "parent": list(self.parents(host))}
                for name, host in nodes.items()
                if host.role == "worker"
            ],
        }


def load(path: Path) -> Topology:
    """Read a topology file. Raises :class:`inanet.config.file.ConfigError` with all problems."""
    return validate(Topology, read_toml(path), path)


def _names(host: Host) -> list[str]:
    return [host.name] if host.count is None else [f"{host.name}{index}" for index in range(host.count)]


def _contradictions(topology: Topology) -> Iterator[str]:
    """Every relation between parts that does not hold."""
    hosts = topology.hosts()
    switches = {switch.name for switch in topology.switch}
    names = [switch.name for switch in topology.switch] + [host.name for host in hosts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"name {name!r} is used more than once; allowed: every switch and host has its own"
    for name in names:
        if len(name) > 11:
            yield f"host {name!r}: the name is too long with its number; allowed: 11 characters"
    if len(hosts) > MOST_HOSTS:
        yield f"{len(hosts)} hosts; allowed: {MOST_HOSTS}"
    for host in topology.host:
        if host.switch not in switches:
            yield f"host {host.name!r}: there is no switch {host.switch!r}; allowed: {_listed(switches)}"
        if host.role != "worker" and (host.ranks != 1 or host.lateness):
            yield f"host {host.name!r} is {host.role}; allowed: ranks and lateness for workers only"
        if host.role in ("ps", "idle") and host.parent is not None:
            yield f"host {host.name!r} is {host.role}; allowed: a parent for workers and aggregators only"
        if host.role == "aggregator" and host.parent is not None and len(host.parent) > 1:
            yield f"host {host.name!r} is an aggregator with several parents; allowed: one"
    if topology.fabric == "routed":
        for switch in topology.switch:
            if switch.kind == "ina":
                yield f"switch {switch.name!r} is ina-switch; allowed: fabric = 'bridged', or kind = 'bridge'"
    kinds = {switch.name: switch.kind for switch in topology.switch}
    if topology.detour is not None and kinds.get(topology.detour) != "ina":
        yield f"detour is {topology.detour!r}; allowed: a switch of kind 'ina'"
    yield from _bad_fabric(topology, switches)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _bad_trees(topology: Topology) -> Iterator[str]:
    """What the control plane would refuse. A topology without aggregators and ps is a network only."""
    roles = {host.role for host in topology.hosts()}
    if "ps" not in roles:
        if "aggregator" in roles or any(host.parent is not None for host in topology.host):
            yield "there is no host with the role 'ps'; allowed: one, or neither aggregators nor parents"
        return
    if "worker" not in roles:
        yield "there is no worker; allowed: at least one host with the role 'worker'"
        return
    try:
        Trees.model_validate(topology.trees()).fabric(topology.roots()[0])
    except SeveralErrors as error:
        yield from error.sentences


def _bad_fabric(topology: Topology, switches: set[str]) -> Iterator[str]:
    """Loops in a bridged fabric (they would flood for ever), repeated trunks, switches out of reach."""
    group = {name: name for name in switches}

    def find(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    pairs: set[frozenset[str]] = set()
    for trunk in topology.trunk:
        first, second = trunk.between
        label = f"trunk {first}-{second}"
        if unknown := {first, second} - switches:
            yield f"{label}: there is no switch {_listed(unknown)}; allowed: {_listed(switches)}"
            continue
        if first == second:
            yield f"{label} joins a switch with itself; allowed: two different ones"
            continue
        if frozenset(trunk.between) in pairs:
            yield f"{label} is there twice; allowed: one between two switches"
            continue
        pairs.add(frozenset(trunk.between))
        if find(first) == find(second) and topology.fabric == "bridged":
            yield f"{label} closes a loop; allowed: leave it out, or fabric = 'routed'"
        group[find(first)] = find(second)
    if len({find(name) for name in switches}) > 1:
        yield "the switches do not form one network; allowed: join them with trunks"
