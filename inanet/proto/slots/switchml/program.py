"""SwitchML on a switch: static shares, two versions of every slot, results from the switch itself.

Pool index and version name a slot in the job's own share; a newer packet clears what was there.

resolve: job, address (which says whose contribution it is), pool index. admit: the packet id (replay horizon) tells a new
fragment from a late one; a bit of the bitmap tells a duplicate; a contribution to one version takes the worker's bit out of the
other one, as the paper has it: the worker has its result. fold: add, and maxima of the two exponents. emit: the last
contribution leaves with the sum, to all; a duplicate of a complete slot is answered to its sender alone.
"""

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.bigendian import add_in, copy_in, copy_out, load16
from inanet.kernels.header import newer32
from inanet.kernels.jit import njit
from inanet.proto.common.program import Action, Neighbours, Verdicts
from inanet.proto.slots.program import Count, SwitchProgram
from inanet.proto.slots.registers import DEFAULT_BUDGET, FREE, REGISTERS, Register, RegisterFile, Registers
from inanet.proto.slots.switchml.job import SwitchMLJob
from inanet.proto.slots.tenants import BINDINGS, Bindings, Tenant, members_of
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.switchml import DATA, EXPONENTS_AT, MAX_SLOTS, SIZES, SLOT_MASK, VALUES_AT

OK, SHORT, OVERSIZED, BAD_TYPE = int(Drop.OK), int(Drop.SHORT), int(Drop.OVERSIZED), int(Drop.BAD_TYPE)
FOREIGN_JOB, FOREIGN_HOST = int(Drop.FOREIGN_JOB), int(Drop.FOREIGN_HOST)
BAD_SLOT, STALE, DUPLICATE = int(Drop.BAD_SLOT), int(Drop.STALE_SEQUENCE), int(Drop.DUPLICATE)
DROP, GROUP, REPLY = int(Action.DROP), int(Action.GROUP), int(Action.REPLY)
FOLDED, COMPLETED, ANSWERED = int(Count.FOLDED), int(Count.COMPLETED), int(Count.ANSWERED)
ALONE = int(Count.FIRST)
KEY, BITMAP, VALUES = int(Register.KEY), int(Register.BITMAP), int(Register.VALUES)
_AT, _EXPONENTS, _SLOT_MASK, _KIND = VALUES_AT, EXPONENTS_AT, SLOT_MASK, DATA << 4

#: what admit says of a packet: its values are the first in the slot, one more, or already there
FIRST, MORE, AGAIN, LATE = 0, 1, 2, 3
_INLINE = {"cache": True, "nogil": True, "_nrt": False, "inline": "always"}


@njit(
    types.UniTuple(types.int64, 2)(
        BINDINGS, types.uint8[::1], types.int64, types.int64, types.int64, types.int64, types.int64
    ),
    **_INLINE,
)
def resolve(t: Bindings, arena: Any, at: int, length: int, source: int, code: int, width: int) -> Any:
    """Entry of a packet and the worker it is from; or minus the reason why it has none."""
    if length < _AT:
        return -SHORT, 0
    if arena[at] & 0xF7 != _KIND | code:
        return -BAD_TYPE, 0
    if length != _AT + 4 * width:
        return (-SHORT if length < _AT + 4 * width else -OVERSIZED), 0
    job = np.int64(arena[at + 1])
    if not t.known[job]:
        return -FOREIGN_JOB, 0
    worker = 0
    while worker < 32 and t.source[job, worker] != source:
        worker += 1
    if worker == 32:
        return -FOREIGN_HOST, 0
    index = np.int64(load16(arena, at + 6))
    slot = index & _SLOT_MASK
    if slot >= t.share[job]:
        return -BAD_SLOT, 0
    return 2 * (t.first[job] + slot) + (index >> 15), worker


@njit(types.int64(REGISTERS, types.int64, types.int64, types.uint32, types.uint32), **_INLINE)
def admit(r: Registers, entry: int, job: int, packet: int, bit: int) -> Any:
    """What a packet is to its slot; a new fragment takes the entry over."""
    if r.owner[entry] != job or newer32(packet, r.key[entry]):
        if r.owner[entry] != job or r.complete[entry]:
            r.occupied[job] += 1
        r.owner[entry] = job
        r.key[entry] = packet
        r.bitmap[entry] = bit
        r.complete[entry] = 0
        r.bitmap[entry ^ 1] &= ~bit
        return FIRST
    if packet != r.key[entry]:
        return LATE
    if r.complete[entry] or r.bitmap[entry] & bit:
        return AGAIN
    r.bitmap[entry] |= bit
    r.bitmap[entry ^ 1] &= ~bit
    return MORE


@njit(
    types.void(
        REGISTERS,
        BINDINGS,
        types.uint8[::1],
        types.int64[::1],
        types.int64[::1],
        types.uint64[::1],
        types.uint8[::1],
        types.int64[::1],
        types.uint8[::1],
        types.int64[::1],
        types.int64,
        types.float64,
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def run(
    r: Registers,
    t: Bindings,
    arena: Any,
    offsets: Any,
    lengths: Any,
    sources: Any,
    action: Any,
    target: Any,
    reason: Any,
    counts: Any,
    code: int,
    now: float,
) -> None:
    """The four stages over a batch. ``code`` is the size code of the framing that the program serves."""
    width = r.values.shape[1]
    for i in range(offsets.size):
        at = offsets[i]
        action[i] = DROP
        entry, worker = resolve(t, arena, at, lengths[i], np.int64(sources[i]), code, width)
        if entry < 0:
            reason[i] = np.uint8(-entry)
            continue
        job = np.int64(arena[at + 1])
        packet = (
            np.uint32(arena[at + 2])
            | np.uint32(arena[at + 3]) << np.uint32(8)
            | np.uint32(arena[at + 4]) << np.uint32(16)
            | np.uint32(arena[at + 5]) << np.uint32(24)
        )
        r.accesses[KEY] += 1
        r.accesses[BITMAP] += 1
        how = admit(r, entry, job, packet, np.uint32(1) << np.uint32(worker))
        if how == LATE:
            reason[i] = STALE
            continue
        if how == AGAIN and not r.complete[entry]:
            reason[i] = DUPLICATE
            continue
        r.accesses[VALUES] += 1
        r.touched[entry] = now
        for k in range(2):
            mine = np.int8(arena[at + _EXPONENTS + k])
            if how == FIRST or (how == MORE and mine > r.exponents[entry, k]):
                r.exponents[entry, k] = mine
            arena[at + _EXPONENTS + k] = np.uint8(r.exponents[entry, k])
        if how == FIRST:
            counts[ALONE] += 1
            copy_in(r.values, entry, arena, at + _AT)
        elif how == MORE:
            add_in(r.values, entry, arena, at + _AT)
        if how == AGAIN:
            copy_out(r.values, entry, arena, at + _AT)
            counts[ANSWERED] += 1
            action[i] = REPLY
            continue
        counts[FOLDED] += 1
        if r.bitmap[entry] == t.full[job]:
            r.complete[entry] = 1
            r.occupied[job] -= 1
            counts[COMPLETED] += 1
            copy_out(r.values, entry, arena, at + _AT)
            action[i] = GROUP
            target[i] = t.group[job]


@njit(types.void(REGISTERS, types.int64[::1], types.int64[::1]), cache=True, nogil=True, _nrt=False)
def expire(r: Registers, slots: Any, counts: Any) -> None:
    """Forget partial sums. What is complete stays for those who have not heard: its memory is the job's own anyway."""
    for k in range(slots.size):
        entry = slots[k]
        if not r.complete[entry]:
            r.occupied[r.owner[entry]] -= 1
            r.owner[entry] = FREE
            counts[Count.AGED] += 1


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
        run(
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
        expire(self.file.registers, slots, self.counts)
