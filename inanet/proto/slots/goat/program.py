"""GOAT on a switch: slots of sub-models at the addresses that the controller has published."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import MAX_WORKERS, Scheduled
from inanet.proto.common.program import Neighbours, Verdicts
from inanet.proto.slots.goat import policy
from inanet.proto.slots.goat.job import GoatJob, below, neighbours
from inanet.proto.slots.goat.policy import Routes
from inanet.proto.slots.program import SwitchProgram
from inanet.proto.slots.registers import (
    DEFAULT_BUDGET,
    FREE,
    JOBS,
    META_BYTES,
    OutOfRegisters,
    RegisterFile,
)
from inanet.proto.slots.tenants import Tenant
from inanet.wire.batch import PacketBatch
from inanet.wire.goat import MAX_NODES, WORDS

#: slots of a register file, which a fragment's 32-bit number could name
MOST_SLOTS = 1 << 20


@dataclass(frozen=True, slots=True)
class SiteTenant(Tenant):
    """A job at one of its switches. ``members`` maps neighbours to the bits of the workers behind them, the next hop to the
    PS left out where none is; ``ps`` is that next hop.

    ``node`` is this switch's number in the job, ``to_nodes`` the next hops to nodes 1, 2 and so on (0: none), ``key`` the
    job's secret.
    """

    node: int = 0
    to_nodes: tuple[int, ...] = ()
    key: int = 0


def tenant_at(job: GoatJob, node: int, key: int) -> SiteTenant:
    """A job at its switch number ``node`` (1 for the first)."""
    site = job.sites[node - 1]
    members: dict[int, int] = {}
    for worker, way in enumerate(site.ways):
        members[way] = members.get(way, 0) | 1 << worker
    return SiteTenant(job.number, members, job.number, site.to_ps, node=node, to_nodes=site.to_sites, key=key)


class GoatProgram(SwitchProgram):
    """Slots of 64 values and their checksum under a ``budget`` of register bytes.

    Memory is given to sub-models (:meth:`hold`), not to jobs. What lies in a slot stays until the next round of its fragment
    or the end of its job, because late workers have to find it: ``age`` is there for all programs, and nothing ages here.
    64 values are one pass.
    """

    name = "goat"
    #: register bytes of a slot beside those that all programs have
    extra = 0

    def __init__(self, *, budget: int = DEFAULT_BUDGET, age: float = 1.0) -> None:
        most = min(MOST_SLOTS, budget // (4 * WORDS + META_BYTES + self.extra))
        super().__init__(RegisterFile(WORDS, budget=budget, limit=most), age=age, values_per_pass=WORDS)
        self.routes = _empty()
        self._held: dict[int, list[tuple[int, int, int]]] = {}

    # ---------------------------------------------------------------- jobs

    def add_job(self, tenant: Tenant) -> None:
        """Serve a job from now on. Raises ``ValueError`` for one without routes: jobs come from a coordinator."""
        if not isinstance(tenant, SiteTenant):
            raise ValueError(
                f"job {tenant.job}: goat's jobs come from a coordinator, which schedules their sub-models"
            )
        job, table = tenant.job, self.routes
        if job in self.tenants.by_job:
            raise ValueError(f"job {job} is served already; remove it first")
        if not 0 < tenant.node < MAX_NODES or len(tenant.to_nodes) >= MAX_NODES or not tenant.ps:
            raise ValueError(
                f"job {job}: {len(tenant.to_nodes)} switches, this one is node {tenant.node}; at most {MAX_NODES - 1} "
                "are possible, and each needs a way to the PS"
            )
        self.tenants.by_job[job] = tenant
        table.key[job], table.own[job], table.to_ps[job] = tenant.key, tenant.node, tenant.ps
        table.group[job] = tenant.group
        table.to_node[job] = 0
        table.to_node[job, 1 : 1 + len(tenant.to_nodes)] = tenant.to_nodes
        table.way[job] = -1
        for neighbour, bits in tenant.members.items():
            for bit in range(MAX_WORKERS):
                if bits >> bit & 1:
                    table.way[job, bit] = neighbour
        self._held[job] = []
        self._lay_out()
        self.routes.known[job] = 1

    def serve(self, job: GoatJob, key: int, here: int) -> Neighbours:
        """Serve a job at this switch: its neighbours are workers, other switches, perhaps the PS."""
        node = job.node_at(here)
        self.add_job(tenant_at(job, node, key))
        site = job.sites[node - 1]
        return Neighbours(dict.fromkeys(neighbours(site), 0), below(site))

    def remove_job(self, job: int) -> None:
        del self.tenants.by_job[job], self._held[job]
        self.routes.known[job] = 0
        self.file.clear(job)
        self._lay_out()

    def hold(self, job: int, scheduled: Sequence[Scheduled]) -> None:
        """Have the job's next sub-models, in the order of their numbers; those without a base here are only counted.

        Raises :class:`~inanet.proto.slots.registers.OutOfRegisters` for slots that this switch does not have, or that
        another sub-model has, ``ValueError`` for numbers that do not follow.
        """
        tenant = self.tenants.by_job[job]
        assert isinstance(tenant, SiteTenant)
        held = list(self._held[job])
        taken = [(base, count) for its in self._held.values() for base, count, _ in its if base >= 0]
        for its in scheduled:
            if its.number != len(held):
                raise ValueError(f"job {job}: sub-model {its.number} after {len(held)} others")
            base = its.bases[tenant.node - 1]
            if base >= 0:
                if base + its.count > self.file.slots:
                    raise OutOfRegisters(
                        f"job {job}, sub-model {its.number}: slots up to {base + its.count} of {self.file.slots}"
                    )
                if any(base < start + size and start < base + its.count for start, size in taken):
                    raise OutOfRegisters(f"job {job}, sub-model {its.number}: its slots are another's")
                taken.append((base, its.count))
            workers = sum(1 << k for k, node in enumerate(its.nodes) if node == tenant.node)
            held.append((base, its.count, workers))
        self._held[job] = held
        self._lay_out()

    def _lay_out(self) -> None:
        """Put the sub-models of all jobs one after the other."""
        rows = [row for job in sorted(self._held) for row in self._held[job]]
        table = np.array(rows, np.int64).reshape(len(rows), 3)
        at = self.routes.at
        first = 0
        for job in sorted(self._held):
            at[job], self.routes.many[job] = first, len(self._held[job])
            first += len(self._held[job])
        self.routes = self.routes._replace(
            base=np.ascontiguousarray(table[:, 0]),
            size=np.ascontiguousarray(table[:, 1]),
            full=table[:, 2].astype(np.uint32),
        )

    # ---------------------------------------------------------------- packets

    def _run(self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float) -> None:
        policy.run(
            self.file.registers,
            self.routes,
            batch.arena,
            batch.offsets,
            batch.lengths,
            batch.sources,
            verdicts.action,
            verdicts.target,
            verdicts.reason,
            self.counts,
            now,
        )

    def timer(self) -> float | None:
        """Never: slots do not age."""
        return None

    def _expire(self, slots: NDArray[np.int64], now: float) -> None:
        self.file.registers.owner[slots] = FREE

    # ---------------------------------------------------------------- figures

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``held_slots`` are those that sub-models have."""
        held = sum(count for its in self._held.values() for base, count, _ in its if base >= 0)
        return {**super().stats(), "held_slots": held}


def _empty() -> Routes:
    nothing = np.zeros(0, np.int64)
    return Routes(
        known=np.zeros(JOBS, np.uint8),
        key=np.zeros(JOBS, np.uint64),
        own=np.zeros(JOBS, np.int64),
        to_ps=np.zeros(JOBS, np.int64),
        to_node=np.zeros((JOBS, MAX_NODES), np.int64),
        way=np.full((JOBS, MAX_WORKERS), -1, np.int64),
        group=np.zeros(JOBS, np.int64),
        at=np.zeros(JOBS, np.int64),
        many=np.zeros(JOBS, np.int64),
        base=nothing,
        size=nothing,
        full=np.zeros(0, np.uint32),
    )
