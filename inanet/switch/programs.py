"""The programs that a switch can run, by the names users select them by.

Light to import: a program brings its kernels along only when it is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inanet.switch.registration import Registration


@dataclass(frozen=True, slots=True)
class System:
    """Where a system's program is, and the packets that are its unless told otherwise.

    ``module`` and ``attribute`` name a class made with ``budget`` (bytes of registers) and ``age`` (seconds), and the
    further ``options``. ``ports`` are UDP ports; with ``raw`` it also has raw frames (ethertype 0x0700).
    """

    module: str
    attribute: str
    ports: range
    raw: bool = False
    options: tuple[str, ...] = ()


SYSTEMS: Mapping[str, System] = {
    "switchml": System(
        "inanet.proto.switchml.program",
        "SwitchMLProgram",
        range(0xBEE0, 0xBEF0),
        options=("values", "values_per_pass"),
    ),
    "atp": System("inanet.proto.atp.program", "AtpProgram", range(7410, 7411), raw=True, options=("shared",)),
    "esa": System("inanet.proto.esa.program", "EsaProgram", range(7411, 7412), options=("shared",)),
    "a2tp": System(
        "inanet.proto.a2tp.program", "A2tpProgram", range(7412, 7413), raw=True, options=("shared",)
    ),
}


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
    from inanet.proto.switched.tenants import Tenant
    from inanet.switch.registration import Registration

    if system not in SYSTEMS:
        raise ValueError(f"there is no program {system!r}; there are {', '.join(SYSTEMS)}")
    facts = SYSTEMS[system]
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in facts.options:
            raise ValueError(
                f"program {system} has no option {key}; it has {', '.join(facts.options) or 'none'}"
            )
    program = getattr(importlib.import_module(facts.module), facts.attribute)(budget=memory, age=age, **given)
    uplinks: dict[int, int] = {}
    groups: dict[int, tuple[int, ...]] = {}
    for job in jobs:
        members = {worker: 1 << rank for rank, worker in enumerate(job.workers)}
        if len(members) < len(job.workers):
            raise ValueError(
                f"job {job.number} of program {name or system}: two workers have the same address"
            )
        try:
            program.add_job(Tenant(job.number, members, job.number, job.ps, job.slots, job.quota))
        except MemoryError as error:
            raise ValueError(f"program {name or system}: {error}") from None
        uplinks |= dict.fromkeys(job.workers, job.ps)
        if job.ps:
            uplinks.setdefault(job.ps, 0)
        groups[job.number] = job.workers
    return Registration(
        name=name or system,
        program=program,
        ports=(facts.ports,) if ports is None else ports,
        raw=facts.raw if raw is None else raw,
        uplinks=uplinks,
        groups=groups,
        passes=program.passes,
        share=memory,
    )
