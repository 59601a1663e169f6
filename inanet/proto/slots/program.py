"""What every switch program does beside its policy: jobs, batches, ageing, figures.

A system adds a kernel that strings resolve, admit, fold and emit together over a batch, and says what becomes of a slot
that nobody has touched for too long.
"""

from abc import abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import Scheduled
from inanet.proto.common.program import Neighbours, Offer, Verdicts
from inanet.proto.slots.registers import JOBS, Register, RegisterFile
from inanet.proto.slots.tenants import Tenant, Tenants
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop


class Count(IntEnum):
    """Counters that policies keep."""

    #: contributions taken into a slot
    FOLDED = 0
    #: slots that got their last contribution
    COMPLETED = 1
    #: duplicates of complete slots that were answered from them
    ANSWERED = 2
    #: packets that found another fragment in their slot
    COLLISIONS = 3
    #: partial sums that left with a packet which was repeated or bypasses the switch
    FLUSHED = 4
    #: partial sums that gave way to a fragment of higher priority (ESA)
    EVICTED = 5
    #: slots given up because nobody had touched them for too long
    AGED = 6
    #: packets that their sender has kept out of the slots
    BYPASSED = 7
    #: contributions that were the first in their slot, so that nothing was summed
    FIRST = 8


class SwitchProgram:
    """``file`` is the memory, ``age`` the seconds after which a slot that nobody touches is given up.

    ``values_per_pass`` is what the hardware's stages add in one pass; a packet with more is recirculated, and the passes are
    in its verdict. Every pass of a packet accesses each register once at most; the sums of accesses are in :meth:`stats`.
    """

    name = ""

    def __init__(self, file: RegisterFile, *, age: float, values_per_pass: int) -> None:
        if age <= 0 or values_per_pass < 1:
            raise ValueError("slots age in a positive time, and a pass adds at least one value")
        self.file = file
        self.age = age
        self.passes = -(-file.width // values_per_pass)
        self.tenants = Tenants()
        self.counts: NDArray[np.int64] = np.zeros(len(Count), np.int64)
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._packets = self._recirculations = 0
        self._check: float | None = None

    # ---------------------------------------------------------------- jobs

    def add_job(self, tenant: Tenant) -> None:
        """Serve a job from now on. Raises :class:`~inanet.proto.slots.registers.OutOfRegisters` or ``ValueError``."""
        if tenant.job in self.tenants.by_job:
            raise ValueError(f"job {tenant.job} is served already; remove it first")
        if tenant.slots is not None:
            first, count = self.file.take(tenant.job, tenant.slots), tenant.slots
        elif self.file.shared:
            first, count = 0, self.file.shared
        else:
            raise ValueError(
                f"job {tenant.job}: this switch shares no slots; the job needs a share of its own"
            )
        self.tenants.bind(tenant, first, count)

    @abstractmethod
    def serve(self, job: Any, key: int, here: int) -> Neighbours:
        """Serve a job of a plan; see :class:`~inanet.proto.common.program.SystemProgram`."""

    def _bind(self, tenant: Tenant) -> Neighbours:
        """:meth:`add_job`; the job's neighbours are its workers and its PS."""
        self.add_job(tenant)
        return tenant.neighbours

    def follow(self, job: Any) -> None:
        """Later versions of a plan have nothing that concerns slots."""

    def hold(self, job: int, scheduled: Sequence[Scheduled]) -> None:
        """Tensors have no slots of their own."""

    def offer(self, limit: int | None, most_passes: int) -> Offer:
        file = self.file
        if file.shared:
            return Offer(file.shared, own=False, quota=limit or 0, values=file.width)
        return Offer(min(file.free, limit or file.free), values=file.width)

    def remove_job(self, job: int) -> None:
        """Forget a job: its slots are free, its packets foreign. Raises ``KeyError`` if it is not served."""
        first, count = int(self.tenants.bindings.first[job]), int(self.tenants.bindings.share[job])
        tenant = self.tenants.unbind(job)
        self.file.clear(job)
        if tenant.slots is not None:
            self.file.give(first, count)

    # ---------------------------------------------------------------- packets

    def process(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None:
        """Judge a batch of this system's packets, each beginning at its INA header, and edit them in place."""
        count = len(batch)
        verdicts.length[:count] = batch.lengths
        verdicts.mark[:count] = congested[:count]
        verdicts.reason[:count] = Drop.OK
        verdicts.passes[:count] = self.passes
        self._run(batch, congested, verdicts, now)
        self._packets += count
        self._recirculations += (self.passes - 1) * count
        if verdicts.reason[:count].any():
            self.drops += np.bincount(verdicts.reason[:count], minlength=DROP_CODES)
        if self._check is None and self.file.registers.occupied.any():
            self._check = now + self.age / 2

    @abstractmethod
    def _run(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None: ...

    def spilled(self) -> list[Transmission]:
        """Packets that leave beside those of the batches since the last call."""
        return []

    # ---------------------------------------------------------------- time

    def timer(self) -> float | None:
        """When slots are looked at next; None while none is held."""
        return self._check

    def on_timer(self, now: float) -> None:
        """Give up slots that nobody has touched for :attr:`age` seconds."""
        if self._check is None or now < self._check:
            return
        registers = self.file.registers
        stale = np.flatnonzero((registers.owner >= 0) & (registers.touched < now - self.age))
        self._expire(stale, now)
        self._check = now + self.age / 2 if registers.occupied.any() else None

    @abstractmethod
    def _expire(self, slots: NDArray[np.int64], now: float) -> None: ...

    # ---------------------------------------------------------------- figures

    def register_bytes(self) -> int:
        return self.file.bytes()

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``occupied_<job>`` is what a job holds now."""
        registers = self.file.registers
        return {
            "packets": self._packets,
            "recirculations": self._recirculations,
            **{count.name.lower(): int(self.counts[count]) for count in Count},
            "contributions_summed": int(self.counts[Count.FOLDED] - self.counts[Count.FIRST]),
            **{f"accesses_{r.name.lower()}": int(registers.accesses[r]) for r in Register},
            **{f"drop_{r.label}": int(self.drops[r]) for r in Drop if r is not Drop.OK and self.drops[r]},
            **{
                f"occupied_{job}": int(registers.occupied[job])
                for job in range(JOBS)
                if job in self.tenants.by_job
            },
        }
