"""SwitchML on a switch: static shares, two versions of every slot, results from the switch itself."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.program import Neighbours, Verdicts
from inanet.proto.slots.program import SwitchProgram
from inanet.proto.slots.registers import DEFAULT_BUDGET, RegisterFile
from inanet.proto.slots.switchml import policy
from inanet.proto.slots.switchml.job import SwitchMLJob
from inanet.proto.slots.tenants import Tenant, members_of
from inanet.wire.batch import PacketBatch
from inanet.wire.switchml import MAX_SLOTS, SIZES


class SwitchMLProgram(SwitchProgram):
    """Packets of ``values`` (64 or 256) values under a ``budget`` of register bytes.

    Every job has a share of its own (:attr:`~inanet.proto.slots.tenants.Tenant.slots`): collisions cannot happen. A
    partial sum that nobody adds to for ``age`` seconds is forgotten; workers who still want it send their values again. 64
    values are one pass, 256 take the four of the folded pipeline.
    """

    name = "switchml"

    def __init__(
        self,
        *,
        values: int = 256,
        budget: int = DEFAULT_BUDGET,
        age: float = 10.0,
        values_per_pass: int = 64,
    ) -> None:
        if values not in SIZES:
            raise ValueError(f"SwitchML packets carry {list(SIZES)} values, not {values}")
        file = RegisterFile(values, budget=budget, sets=2, limit=MAX_SLOTS)
        super().__init__(file, age=age, values_per_pass=values_per_pass)
        self._code = SIZES[values]

    def add_job(self, tenant: Tenant) -> None:
        """Serve a job from now on. Raises as :meth:`SwitchProgram.add_job`, and ``ValueError`` for a member that stands for
        several workers: packets say nothing of who is in a sum, so a switch below is one member.
        """
        for bits in tenant.members.values():
            if bits & (bits - 1):
                raise ValueError(
                    f"job {tenant.job}: SwitchML's packets have no bitmap; give a switch below one bit, not {bits:#x}"
                )
        super().add_job(tenant)

    def serve(self, job: SwitchMLJob, key: int, here: int) -> Neighbours:
        """Serve a job of a plan, in a share of its own."""
        return self._bind(Tenant(job.number, members_of(job.workers), job.number, slots=job.slots))

    def _run(self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float) -> None:
        policy.run(
            self.file.registers,
            self.tenants.bindings,
            batch.arena,
            batch.offsets,
            batch.lengths,
            batch.sources,
            verdicts.action,
            verdicts.target,
            verdicts.reason,
            self.counts,
            self._code,
            now,
        )

    def _expire(self, slots: NDArray[np.int64], now: float) -> None:
        policy.expire(self.file.registers, slots, self.counts)
