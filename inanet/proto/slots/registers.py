"""The register file of a switch: slots as arrays, under a budget of bytes.

A slot is one aggregator entry: the sum so far, whose it is, who is in it, and marks. That a slot is free is said by its
owner (-1) and by nothing else: no job, sequence number or bitmap stands for "free". What a packet may do to a slot is what
a stage of the hardware may do in one pass, one read-modify-write of each register; kernels count these accesses.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.proto.common.refusal import NoRoom

#: a switch's memory, as in the papers' hardware
DEFAULT_BUDGET = 20_000_000
#: bytes of a slot beside its values: bitmap, owner and key, counter, marks and priority, timestamp
META_BYTES = 24
FREE = -1
JOBS = 256


class Register(IntEnum):
    """Columns of the access counts: the registers that a packet can touch, each at most once in a pass."""

    KEY = 0
    BITMAP = 1
    MARKS = 2
    VALUES = 3


class Registers(NamedTuple):
    """The arrays as kernels see them; one entry per slot (and set) unless the comment says otherwise."""

    #: int32[n, width]: sums, in the host's byte order
    values: NDArray[np.int32]
    #: job that holds the slot, :data:`FREE` if none does
    owner: NDArray[np.int32]
    #: which of the job's fragments: the number that travels, as the policy understands it
    key: NDArray[np.uint32]
    bitmap: NDArray[np.uint32]
    #: 1: every contribution is in it and the sum has left
    complete: NDArray[np.uint8]
    ecn: NDArray[np.uint8]
    #: A2TP: another fragment wanted this slot
    col: NDArray[np.uint8]
    #: ESA
    priority: NDArray[np.uint8]
    #: int8[n, 2], SwitchML: largest exponents of the contributions
    exponents: NDArray[np.int8]
    #: when a packet of the slot's fragment last came
    touched: NDArray[np.float64]
    #: int64[256], per job: slots held
    occupied: NDArray[np.int64]
    #: int64, per :class:`Register`
    accesses: NDArray[np.int64]


_u8, _u32, _i64 = types.uint8[::1], types.uint32[::1], types.int64[::1]
REGISTERS: Any = types.NamedTuple(
    (
        types.int32[:, ::1],
        types.int32[::1],
        _u32,
        _u32,
        _u8,
        _u8,
        _u8,
        _u8,
        types.int8[:, ::1],
        types.float64[::1],
        _i64,
        _i64,
    ),
    Registers,
)


class OutOfRegisters(NoRoom):
    """The register file has no room for a job's share; says how much it asks for and how much there is."""


class RegisterFile:
    """Slots of ``width`` values within ``budget`` bytes; ``sets`` entries each (SwitchML has two versions of a slot).

    The first ``shared`` slots are for every job that has no share of its own; the others are given out as shares. ``limit``
    bounds the number of slots where a framing cannot name more. Raises ``ValueError`` when not one slot fits.
    """

    def __init__(
        self, width: int, *, budget: int = DEFAULT_BUDGET, sets: int = 1, shared: int = 0, limit: int = 65536
    ) -> None:
        self.width, self.sets, self.budget = width, sets, budget
        self.slot_bytes = sets * (4 * width + META_BYTES)
        self.slots = min(budget // self.slot_bytes, limit)
        if self.slots < 1 or not 0 <= shared <= self.slots:
            raise ValueError(
                f"a register file of {budget} B holds {self.slots} slots of {self.slot_bytes} B;"
                f" at least one is needed, and {shared} of them are to be shared"
            )
        self.shared = shared
        count = self.slots * sets
        self.registers = Registers(
            values=np.zeros((count, width), np.int32),
            owner=np.full(count, FREE, np.int32),
            key=np.zeros(count, np.uint32),
            bitmap=np.zeros(count, np.uint32),
            complete=np.zeros(count, np.uint8),
            ecn=np.zeros(count, np.uint8),
            col=np.zeros(count, np.uint8),
            priority=np.zeros(count, np.uint8),
            exponents=np.zeros((count, 2), np.int8),
            touched=np.zeros(count),
            occupied=np.zeros(JOBS, np.int64),
            accesses=np.zeros(len(Register), np.int64),
        )
        self._free = [(shared, self.slots - shared)] if self.slots > shared else []

    @property
    def free(self) -> int:
        """Slots that are neither shared nor given out."""
        return sum(size for _, size in self._free)

    def take(self, job: int, count: int) -> int:
        """First slot of a share of ``count``. Raises :class:`OutOfRegisters` if they are not free in one piece."""
        for position, (start, size) in enumerate(self._free):
            if size >= count:
                self._free[position : position + 1] = [(start + count, size - count)] if size > count else []
                return start
        raise OutOfRegisters(
            f"job {job} asks for {count} slots of {self.slot_bytes} B; {self.free} of {self.slots}"
            " are not given out: take fewer, share them, or raise the switch's register budget"
        )

    def give(self, start: int, count: int) -> None:
        """Take a share back."""
        free = sorted([*self._free, (start, count)])
        self._free = free[:1]
        for begin, size in free[1:]:
            last, length = self._free[-1]
            if last + length == begin:
                self._free[-1] = (last, length + size)
            else:
                self._free.append((begin, size))

    def clear(self, job: int) -> None:
        """Free every slot that a job holds, sums and all."""
        held = self.registers.owner == job
        self.registers.owner[held] = FREE
        self.registers.values[held] = 0
        self.registers.occupied[job] = 0

    def bytes(self) -> int:
        """Bytes that the slots take of the switch's memory; never more than the budget."""
        return self.slots * self.slot_bytes
