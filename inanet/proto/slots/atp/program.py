"""ATP on a switch: hashed slots that jobs share, sums to the PS, answers back to all workers."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.program import Neighbours, Verdicts
from inanet.proto.slots.atp import policy
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.atp.policy import Spill, Variant
from inanet.proto.slots.program import SwitchProgram
from inanet.proto.slots.registers import DEFAULT_BUDGET, RegisterFile
from inanet.proto.slots.tenants import Tenant, members_of
from inanet.wire.atp import HEADER_BYTES, TRAILER_BYTES, VALUES, VALUES_PER_PASS
from inanet.wire.batch import PacketBatch, Transmission

ATP = Variant(head=HEADER_BYTES, marks=False, preempts=False)


class AtpProgram(SwitchProgram):
    """Slots of 62 values under a ``budget`` of register bytes, of which ``shared`` are for all jobs (default: all).

    A slot that nobody touches for ``age`` seconds is given up, and its partial sum sent to the PS. 62 values take two passes.
    """

    name = "atp"
    variant = ATP

    def __init__(self, *, budget: int = DEFAULT_BUDGET, shared: int | None = None, age: float = 1.0) -> None:
        file = RegisterFile(VALUES, budget=budget)
        if shared is None or shared:
            file = RegisterFile(VALUES, budget=budget, shared=file.slots if shared is None else shared)
        super().__init__(file, age=age, values_per_pass=VALUES_PER_PASS)
        self._frame = self.variant.head + 4 * VALUES + TRAILER_BYTES
        self._out: list[Transmission] = []
        self._nothing = self._spill(0)

    def add_job(self, tenant: Tenant) -> None:
        """Serve a job from now on; ``tenant.ps`` is needed. Raises as :meth:`SwitchProgram.add_job`."""
        if not tenant.ps:
            raise ValueError(f"job {tenant.job}: {self.name} needs the address of a PS")
        super().add_job(tenant)

    def serve(self, job: AtpJob, key: int, here: int) -> Neighbours:
        """Serve a job of a plan, in slots of its own or, as a rule, in shared ones."""
        slots, quota = (job.slots, None) if job.own else (None, job.quota or None)
        return self._bind(Tenant(job.number, members_of(job.workers), job.number, job.ps, slots, quota))

    def _spill(self, capacity: int) -> Spill:
        return Spill(
            np.empty(capacity * self._frame, np.uint8), np.empty(capacity, np.int64), np.zeros(1, np.int64)
        )

    def _run(self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float) -> None:
        # without evictions nothing is spilled here
        spill = self._spill(len(batch)) if self.variant.preempts else self._nothing
        policy.run(
            self.file.registers,
            self.tenants.bindings,
            self.variant,
            spill,
            batch.arena,
            batch.offsets,
            batch.lengths,
            batch.sources,
            congested,
            verdicts.action,
            verdicts.target,
            verdicts.reason,
            self.counts,
            now,
        )
        self._collect(spill)

    def _expire(self, slots: NDArray[np.int64], now: float) -> None:
        spill = self._spill(len(slots))
        policy.expire(self.file.registers, self.tenants.bindings, self.variant, spill, slots, self.counts)
        self._collect(spill)

    def _collect(self, spill: Spill) -> None:
        used = int(spill.used[0])
        if not used:
            return
        for destination in np.unique(spill.to[:used]).tolist():
            offsets = np.flatnonzero(spill.to[:used] == destination) * self._frame
            self._out.append(Transmission(destination, spill.arena, offsets, self._frame))

    def spilled(self) -> list[Transmission]:
        """Partial sums of slots that were given up or evicted, to their jobs' PS."""
        out, self._out = self._out, []
        return out
