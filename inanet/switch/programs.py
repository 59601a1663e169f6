"""The programs that a switch can run, built from the systems that users select them by, and their jobs.

Light to import: a program brings its kernels along only when it is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from inanet.proto.common.refusal import NoRoom
from inanet.proto.slots.systems import SYSTEMS, sparse_systems
from inanet.wire.batch import I64, U64

#: ethertype of the raw frames of A2TP's and ATP's public programs
RAW_ETHERTYPE = 0x0700


@dataclass(frozen=True, slots=True)
class Registration:
    """A program and its packets.

    ``name`` is unique in the switch. Its packets are UDP datagrams to one of ``ports`` and, if ``raw``, frames with
    ethertype :data:`RAW_ETHERTYPE`. They are taken from the endpoints in ``uplinks`` alone (bound endpoints); an uplink is where a
    packet of that endpoint goes when the program lets it pass and the frame itself has no destination (ports over UDP),
    or 0 if nowhere. ``groups`` are the endpoints of each group that the program may name. ``passes`` is how often its
    packets go through the pipeline, ``share`` the most register bytes it may take.
    """

    name: str
    #: a :class:`~inanet.proto.common.program.Program`; those of systems, :class:`~inanet.proto.common.program.SystemProgram`, are told of jobs
    program: Any
    ports: tuple[range, ...] = ()
    raw: bool = False
    uplinks: dict[int, int] = field(default_factory=dict)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: neighbours by job, where jobs may share them
    users: dict[int, tuple[int, ...]] = field(default_factory=dict)
    passes: int = 1
    share: int | None = None


def check_ports(registrations: list[Registration]) -> None:
    """Refuse packets that two programs claim. Raises ``ValueError`` naming both."""
    taken: list[tuple[range, str]] = []
    raw: str | None = None
    for one in registrations:
        if any(other.name == one.name for other in registrations if other is not one):
            raise ValueError(f"two programs are named {one.name}; names are used once")
        if one.raw and raw is not None:
            raise ValueError(f"programs {raw} and {one.name} both claim raw frames; set raw = false for one")
        raw = one.name if one.raw else raw
        for ports in one.ports:
            for other, name in taken:
                # port 0 is whichever the kernel finds
                if max(ports.start, other.start, 1) < min(ports.stop, other.stop):
                    raise ValueError(
                        f"programs {name} and {one.name} both claim UDP ports "
                        f"{max(ports.start, other.start, 1)} to {min(ports.stop, other.stop) - 1}; give one others"
                    )
            taken.append((ports, one.name))


def matches(registrations: Sequence[Registration], where: Mapping[int, int]) -> tuple[I64, int, U64]:
    """What :func:`inanet.switch.parse.find_packets` knows of programs: UDP ports, whose raw frames are, members.

    ``where`` says at which port endpoints must come in.
    """
    ports = [
        (ports.start, ports.stop - 1, number)
        for number, one in enumerate(registrations)
        for ports in one.ports
    ]
    raw = next((number for number, one in enumerate(registrations) if one.raw), -1)
    members = [
        (number, endpoint, where.get(endpoint, -1) + 1)
        for number, one in enumerate(registrations)
        for endpoint in one.uplinks
    ]
    return (
        np.array(ports, np.int64).reshape(len(ports), 3),
        raw,
        np.array(members, np.uint64).reshape(len(members), 3),
    )


if TYPE_CHECKING:
    from inanet.proto.common.plan import SwitchedJob
    from inanet.proto.common.program import Neighbours


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a configuration file: its number in the framing, its workers' endpoints by rank, its PS (0: none).

    ``slots`` is a share of its own; without one it uses the shared slots, ``quota`` of them at most.
    """

    number: int
    workers: tuple[int, ...]
    ps: int = 0
    slots: int | None = None
    quota: int | None = None


def build(
    system: str,
    jobs: Iterable[Job],
    *,
    name: str = "",
    memory: int,
    age: float,
    ports: tuple[range, ...] | None = None,
    raw: bool | None = None,
    **options: Any,
) -> Registration:
    """The program of a system in ``memory`` bytes of registers, with its jobs.

    ``options`` that are ``None`` are left to the program. Raises ``ValueError`` for a system that does not exist, an option
    it does not have, or jobs that do not fit; the message says which.
    """
    if system not in SYSTEMS:
        raise ValueError(f"there is no program {system!r}; there are {', '.join(SYSTEMS)}")
    facts = SYSTEMS[system]
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in facts.options:
            raise ValueError(
                f"program {system} has no option {key}; it has {', '.join(facts.options) or 'none'}"
            )
    program = facts.make_program(budget=memory, age=age, **given)
    registration = Registration(
        name=name or system,
        program=program,
        ports=(facts.ports,) if ports is None else ports,
        raw=facts.raw if raw is None else raw,
        passes=program.passes,
        share=memory,
    )
    for job in jobs:
        try:
            admit(registration, job)
        except NoRoom as error:
            raise ValueError(f"program {registration.name}: {error}") from None
    return registration


def admit(registration: Registration, job: Job) -> None:
    """Have a program serve a job of a configuration file from now on.

    Raises ``ValueError`` for one that it cannot serve, and :class:`~inanet.proto.common.refusal.NoRoom` for one that it has no slots
    for.
    """
    from inanet.proto.slots.tenants import Tenant, members_of

    if registration.program.name in sparse_systems():
        raise ValueError(
            f"job {job.number} of program {registration.name}: jobs that push and pull keys come from a coordinator"
        )
    members = members_of(job.workers)
    if len(members) < len(job.workers):
        raise ValueError(
            f"job {job.number} of program {registration.name}: two workers have the same address"
        )
    tenant = Tenant(job.number, members, job.number, job.ps, job.slots, job.quota)
    registration.program.add_job(tenant)
    _connect(registration, job.number, tenant.neighbours)


def serve(registration: Registration, job: SwitchedJob, key: int, here: int) -> None:
    """Have a program at the endpoint ``here`` serve a job of a plan, whose secret is ``key``. Raises as :func:`admit`."""
    _connect(registration, job.number, registration.program.serve(job, key, here))


def _connect(registration: Registration, job: int, neighbours: Neighbours) -> None:
    """Take packets of a job's neighbours, and send to them."""
    for endpoint, uplink in neighbours.uplinks.items():
        # the PS of one job may be a worker of another
        if uplink:
            registration.uplinks[endpoint] = uplink
        else:
            registration.uplinks.setdefault(endpoint, 0)
    registration.users[job] = tuple(neighbours.uplinks)
    registration.groups[job] = neighbours.group


def dismiss(registration: Registration, job: int) -> None:
    """Have a program forget a job: its slots are free, and nothing is taken from its workers any more."""
    registration.program.remove_job(job)
    del registration.groups[job]
    around = registration.users.pop(job)
    # other jobs have the same PS or switches beside them, or an address that was this job's before
    for neighbour in set(around).difference(*registration.users.values()):
        registration.uplinks.pop(neighbour, None)
