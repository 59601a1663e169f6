"""What a topology file says, checked strictly.

The file is TOML. Unknown keys are errors, and :func:`load` reports every error of the file at once. Relations between
parts (names, switches that exist, loops) are checked once all parts are well formed by themselves.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inanet.lab.units import Duration, Rate, Size

#: Two UDP super-frames of 67,580 B as tbf counts them. A smaller bucket makes tbf cut every super-frame into packets,
#: which costs more than twice the CPU and up to three times the time.
LEAST_BURST = 140_000
#: tc's 32-bit rate field, in bits per second.
GREATEST_RATE = 32 * 10**9
#: One address block per switch, and the interface of a switch takes one address.
MOST_HOSTS = 64

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,10}$")]
LabName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]
Role = Literal["worker", "aggregator", "ps", "idle"]


class TopologyError(ValueError):
    """A topology that cannot be used; ``problems`` names every one found, each with its place in the file."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.source = source
        self.problems = problems


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Strict):
    """Properties of a link, the same in both directions; ``None`` falls back to the topology's default."""

    #: bits per second; absent in the default as well: not limited
    rate: Annotated[Rate, Field(ge=10**6, le=GREATEST_RATE)] | None = None
    #: token bucket depth, bytes
    burst: Annotated[Size, Field(ge=LEAST_BURST, le=64 * 2**20)] | None = None
    #: longest a packet may wait in the shaper's queue, seconds: sets the queue's length
    latency: Annotated[Duration, Field(gt=0, le=10)] | None = None
    mtu: Annotated[int, Field(ge=1100, le=65535)] | None = None

    def over(self, default: "Link") -> "Link":
        """This link with what it leaves open taken from ``default``."""
        return Link(**(default.model_dump(exclude_none=True) | self.model_dump(exclude_none=True)))


#: Links that say nothing: not limited, ordinary Ethernet.
BASE_LINK = Link(burst=160 * 1024, latency=0.02, mtu=1500)


class Multicast(_Strict):
    """How the switches treat multicast. Without snooping they flood it to every port."""

    snooping: bool = True
    #: a switch must ask who listens, else snooping switches flood after all
    querier: bool = True

    @model_validator(mode="after")
    def _querier_needs_snooping(self) -> "Multicast":
        if self.querier and not self.snooping:
            raise ValueError("querier = true needs snooping = true")
        return self


class Switch(_Strict):
    """An ordinary switch."""

    name: Name


class Host(_Strict):
    """A machine, or ``count`` equal ones named ``<name>0``, ``<name>1``, ..."""

    name: Name
    count: Annotated[int, Field(ge=1, le=MOST_HOSTS)] | None = None
    role: Role = "worker"
    switch: Name
    link: Link = Link()
    #: ranks (processes) of the job on this host; workers only
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    #: host this one sends its sums to; absent: the planner decides
    parent: Name | None = None
    #: how much later than the others this worker has its tensor, in units of the time the tensor takes on its link
    lateness: Annotated[float, Field(ge=0, le=100)] = 0.0


class Trunk(_Strict):
    """A link between two switches."""

    between: Annotated[tuple[Name, Name], Field(strict=False)]
    link: Link = Link()


class Topology(_Strict):
    """A whole topology file."""

    schema_version: Literal[1] = Field(alias="schema")
    name: LabName
    #: one line for people
    summary: str
    #: ``bridged``: one Ethernet segment, switches form a tree. ``routed``: one subnet per switch, loops carry
    #: equal-cost multipath, multicast stays within a switch.
    fabric: Literal["bridged", "routed"] = "bridged"
    link: Link = Link()
    multicast: Multicast = Multicast()
    switch: Annotated[tuple[Switch, ...], Field(min_length=1, max_length=32, strict=False)]
    host: Annotated[tuple[Host, ...], Field(min_length=1, max_length=MOST_HOSTS, strict=False)]
    trunk: Annotated[tuple[Trunk, ...], Field(strict=False)] = ()

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

    def workers(self) -> tuple[Host, ...]:
        """The hosts that run ranks; ranks are numbered over them in this order."""
        return tuple(host for host in self.hosts() if host.role == "worker")


def _names(host: Host) -> list[str]:
    return [host.name] if host.count is None else [f"{host.name}{index}" for index in range(host.count)]


def load(path: Path) -> Topology:
    """Read a topology file. Raises :class:`TopologyError` with all problems found in it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(str(path), [f"is not TOML: {error}"]) from error
    return parse(data, str(path))


def parse(data: dict[str, Any], source: str) -> Topology:
    """A topology from decoded TOML; ``source`` names it in errors. Raises :class:`TopologyError`."""
    try:
        topology = Topology.model_validate(data)
    except ValidationError as error:
        problems = [f"{_place(item['loc'])}: {item['msg'].removeprefix('Value error, ')}" for item in error.errors()]
        raise TopologyError(source, problems) from error
    problems = list(_contradictions(topology))
    if problems:
        raise TopologyError(source, problems)
    return topology


def _place(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "file"


def _contradictions(topology: Topology) -> Iterator[str]:
    """Every relation between parts that does not hold."""
    hosts = topology.hosts()
    switches = {switch.name for switch in topology.switch}
    yield from _repeated([switch.name for switch in topology.switch] + [host.name for host in hosts])
    if len(hosts) > MOST_HOSTS:
        yield f"host: {len(hosts)} hosts, at most {MOST_HOSTS} are supported"
    for host in topology.host:
        if host.switch not in switches:
            yield f"host {host.name!r}: switch {host.switch!r} does not exist (there is {_listed(switches)})"
        if host.role != "worker" and (host.ranks != 1 or host.lateness):
            yield f"host {host.name!r}: ranks and lateness belong to workers, it is {host.role!r}"
    if sum(host.role == "ps" for host in hosts) > 1:
        yield "host: more than one host has the role 'ps'; a lab runs one job with one coordinator"
    yield from _bad_parents(hosts)
    for trunk in topology.trunk:
        for end in trunk.between:
            if end not in switches:
                yield f"trunk {'-'.join(trunk.between)}: switch {end!r} does not exist (there is {_listed(switches)})"
    yield from _bad_fabric(topology, switches)


def _repeated(names: list[str]) -> Iterator[str]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"name {name!r} is used more than once; every switch and host needs its own"


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _bad_parents(hosts: tuple[Host, ...]) -> Iterator[str]:
    by_name = {host.name: host for host in hosts}
    for host in hosts:
        if host.parent is None:
            continue
        if host.parent not in by_name:
            yield f"host {host.name!r}: parent {host.parent!r} does not exist"
        elif by_name[host.parent].role not in ("aggregator", "ps"):
            yield f"host {host.name!r}: parent {host.parent!r} is neither aggregator nor ps"
        else:
            seen = {host.name}
            above: str | None = host.parent
            while above is not None and above in by_name and above not in seen:
                seen.add(above)
                above = by_name[above].parent
            if above == host.name:
                yield f"host {host.name!r}: its parents lead back to itself"


def _bad_fabric(topology: Topology, switches: set[str]) -> Iterator[str]:
    """Loops in a bridged fabric (they would flood for ever), repeated trunks, switches that cannot be reached."""
    group = {name: name for name in switches}

    def find(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    pairs: set[frozenset[str]] = set()
    for trunk in topology.trunk:
        first, second = trunk.between
        label = f"trunk {first}-{second}"
        if not {first, second} <= switches:
            continue
        if first == second:
            yield f"{label}: joins a switch with itself"
            continue
        if frozenset(trunk.between) in pairs:
            yield f"{label}: there is one already between these switches"
            continue
        pairs.add(frozenset(trunk.between))
        if find(first) == find(second) and topology.fabric == "bridged":
            yield f'{label}: closes a loop; use fabric = "routed", or leave it out'
        group[find(first)] = find(second)
    if len({find(name) for name in switches}) > 1:
        yield "trunk: the switches do not form one network; join them with trunks"
