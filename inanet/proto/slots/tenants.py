"""Who may use a switch: jobs, the addresses that speak for their workers, and their part of the slots.

Public framings prove nothing about their sender, so the control plane binds them (bound endpoints): a packet counts for a
worker only when it comes from the address that the worker has, and for the PS only from the PS. Two jobs on the same slots are
kept apart by the owner that every slot carries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.proto.common.plan import MAX_WORKERS
from inanet.proto.common.program import Neighbours
from inanet.proto.slots.registers import JOBS


@dataclass(frozen=True, slots=True)
class Tenant:
    """One job at one switch. ``job`` is its number in the framing, 0 to 255.

    ``members`` maps addresses (:mod:`inanet.wire.endpoint`) to the bits they may set: one for a worker, those of a whole
    rack for the switch below. ``group`` is the number of the group that results go to, ``ps`` the address of the PS where the
    system has one. ``slots`` is a share of the job's own; without it the job uses the shared ones, at most ``quota`` of them
    at a time.
    """

    job: int
    members: Mapping[int, int]
    group: int
    ps: int = 0
    slots: int | None = None
    quota: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.job < JOBS:
            raise ValueError(f"job {self.job}: switch framings have room for job numbers 0 to {JOBS - 1}")
        seen = 0
        for bits in self.members.values():
            if bits <= 0 or bits >> MAX_WORKERS or bits & seen:
                raise ValueError(f"job {self.job}: {MAX_WORKERS} workers at most, each with a bit of its own")
            seen |= bits
        if not seen:
            raise ValueError(f"job {self.job} has no workers")

    @property
    def full(self) -> int:
        """Bits of all workers below this switch."""
        return sum(self.members.values())

    @property
    def neighbours(self) -> Neighbours:
        """Workers, whose packets go on to the PS if they pass, and the PS."""
        uplinks = dict.fromkeys(self.members, self.ps)
        if self.ps:
            uplinks.setdefault(self.ps, 0)
        return Neighbours(uplinks, tuple(self.members))


def members_of(workers: Sequence[int]) -> dict[int, int]:
    """The bit of every worker, by its endpoint."""
    return {worker: 1 << index for index, worker in enumerate(workers)}


class Bindings(NamedTuple):
    """The tenants as kernels see them, one entry per job number."""

    known: NDArray[np.uint8]
    full: NDArray[np.uint32]
    first: NDArray[np.int64]
    share: NDArray[np.int64]
    quota: NDArray[np.int64]
    group: NDArray[np.int64]
    ps: NDArray[np.int64]
    #: int64[256, 32]: address that may set a bit, and all bits that it may set
    source: NDArray[np.int64]
    allowed: NDArray[np.uint32]


_i64 = types.int64[::1]
BINDINGS: Any = types.NamedTuple(
    (
        types.uint8[::1],
        types.uint32[::1],
        _i64,
        _i64,
        _i64,
        _i64,
        _i64,
        types.int64[:, ::1],
        types.uint32[:, ::1],
    ),
    Bindings,
)


class Tenants:
    """The table of jobs. Changed between batches only."""

    def __init__(self) -> None:
        self.by_job: dict[int, Tenant] = {}
        self.bindings = Bindings(
            known=np.zeros(JOBS, np.uint8),
            full=np.zeros(JOBS, np.uint32),
            first=np.zeros(JOBS, np.int64),
            share=np.zeros(JOBS, np.int64),
            quota=np.zeros(JOBS, np.int64),
            group=np.zeros(JOBS, np.int64),
            ps=np.full(JOBS, -1, np.int64),
            source=np.full((JOBS, MAX_WORKERS), -1, np.int64),
            allowed=np.zeros((JOBS, MAX_WORKERS), np.uint32),
        )

    def bind(self, tenant: Tenant, first: int, count: int) -> None:
        """Let a job use ``count`` slots from ``first`` on."""
        table, job = self.bindings, tenant.job
        table.full[job] = tenant.full
        table.first[job], table.share[job] = first, count
        table.quota[job] = count if tenant.quota is None else tenant.quota
        table.group[job], table.ps[job] = tenant.group, tenant.ps or -1
        table.source[job] = -1
        table.allowed[job] = 0
        for address, bits in tenant.members.items():
            for bit in range(MAX_WORKERS):
                if bits >> bit & 1:
                    table.source[job, bit] = address
                    table.allowed[job, bit] = bits
        table.known[job] = 1
        self.by_job[job] = tenant

    def unbind(self, job: int) -> Tenant:
        """Forget a job. Raises ``KeyError`` if it is not known."""
        tenant = self.by_job.pop(job)
        self.bindings.known[job] = 0
        return tenant
