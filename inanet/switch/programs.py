"""The programs that a switch can run, built from the systems that users select them by, and their jobs.

Light to import: a program brings its kernels along only when it is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inanet.proto.slots.systems import PROGRAMS, SPARSE

if TYPE_CHECKING:
    from inanet.proto.common.plan import Switched
    from inanet.switch.registration import Registration


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a program: its number in the framing, its workers' endpoints by rank, its PS (0: none).

    ``slots`` is a share of its own; without one it uses the shared slots, ``quota`` of them at most.
    """

    number: int
    workers: tuple[int, ...]
    ps: int = 0
    slots: int | None = None
    quota: int | None = None
    #: of a job that is summed in several switches: what its plan says, this switch's number, the job's secret
    facts: Switched | None = None
    node: int = 0
    key: int = 0
    #: rings of its own that it has
    rings: int = 1


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
    from inanet.switch.registration import Registration

    if system not in PROGRAMS:
        raise ValueError(f"there is no program {system!r}; there are {', '.join(PROGRAMS)}")
    facts = PROGRAMS[system]
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
        except MemoryError as error:
            raise ValueError(f"program {registration.name}: {error}") from None
    return registration


def admit(registration: Registration, job: Job) -> None:
    """Have a program serve a job from now on.

    Raises ``ValueError`` for one that it cannot serve, and ``MemoryError`` for one that it has no slots for.
    """
    from inanet.proto.slots.tenants import Tenant

    if job.facts is not None and job.facts.sparse is not None:
        _admit_sparse(registration, job, job.facts)
        return
    if registration.program.name in SPARSE:
        raise ValueError(
            f"job {job.number} of program {registration.name}: jobs that push and pull keys come from a coordinator"
        )
    if job.facts is not None:
        _admit_site(registration, job, job.facts)
        return
    members = {worker: 1 << rank for rank, worker in enumerate(job.workers)}
    if len(members) < len(job.workers):
        raise ValueError(
            f"job {job.number} of program {registration.name}: two workers have the same address"
        )
    registration.program.add_job(
        Tenant(job.number, members, job.number, job.ps, job.slots, job.quota, job.rings)
    )
    registration.uplinks.update(dict.fromkeys(job.workers, job.ps))
    if job.ps:
        registration.uplinks.setdefault(job.ps, 0)
    registration.users[job.number] = (*job.workers, job.ps)
    registration.groups[job.number] = job.workers


def _admit_site(registration: Registration, job: Job, facts: Switched) -> None:
    """:func:`admit` at one of several switches: its neighbours are workers, other switches, perhaps the PS."""
    from inanet.proto.slots.goat.routes import below, neighbours, tenant

    site = facts.sites[job.node - 1]
    registration.program.add_job(tenant(facts, job.node, job.key))
    registration.users[job.number] = around = neighbours(site)
    registration.uplinks.update(dict.fromkeys(around, 0))
    registration.groups[job.number] = below(site)


def _admit_sparse(registration: Registration, job: Job, facts: Switched) -> None:
    """:func:`admit` of a sparse job: its neighbours are ranks and shards."""
    if set(facts.servers) & set(facts.workers):
        raise ValueError(f"job {job.number} of program {registration.name}: a rank has a shard's address")
    registration.program.serve(facts, job.key)
    registration.users[job.number] = around = (*facts.workers, *facts.servers)
    registration.uplinks.update(dict.fromkeys(around, 0))
    registration.groups[job.number] = facts.workers


def dismiss(registration: Registration, job: Job) -> None:
    """Have a program forget a job: its slots are free, and nothing is taken from its workers any more."""
    registration.program.remove_job(job.number)
    del registration.groups[job.number]
    around = registration.users.pop(job.number)
    # other jobs have the same PS or switches beside them, or an address that was this job's before
    for neighbour in set(around).difference(*registration.users.values()):
        registration.uplinks.pop(neighbour, None)
