"""Who works on the tables: the kernel program, or user space with the gate closed.

The program enters by counting itself in and then looks whether the gate is closed; user space closes it and then waits
until nobody is in. Both use operations that the processor does not reorder, so one of them sees the other. The program
never waits: while the gate is closed it passes every packet up the stack. User space waits for the packets that are
being worked on, microseconds.
"""

import os
from types import TracebackType
from typing import Any, Self

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from inanet.kernels.jit import njit
from inanet.xdp.memory import MAX_CPUS, TABLES, SharedMemory, processors

_WORD = ir.IntType(64)
#: looks at the counters before giving the processor away, and how often that is done before it is an error
_LOOKS, _TURNS = 20_000, 10_000


@intrinsic  # type: ignore[untyped-decorator]
def exchange(_: Any, address: Any, value: Any) -> Any:
    """Atomically write a 64-bit word, in order with everything before and after."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("xchg", pointer, arguments[1], "seq_cst")

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_word(_: Any, address: Any) -> Any:
    """Atomically read a 64-bit word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def compare_exchange(_: Any, address: Any, expected: Any, value: Any) -> Any:
    """Atomically write a 64-bit word if it is ``expected``; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        found = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 0)

    return types.uint64(types.uint64, types.uint64, types.uint64), generate


@njit("uint64(uint64, uint64)", cache=True, nogil=True)
def swap(address: int, value: int) -> Any:
    """Write a word of shared memory; returns what was there."""
    return exchange(address, value)


@njit("boolean(uint64, uint64, int64, int64)", cache=True, nogil=True)
def _shut(closed: int, inside: int, cpus: int, looks: int) -> Any:
    exchange(closed, np.uint64(1))
    for _ in range(looks):
        busy = np.uint64(0)
        for cpu in range(cpus):
            busy |= load_word(inside + np.uint64(cpu * 64))
        if busy == 0:
            return True
    return False


class Gate:
    """Closed inside a ``with`` block; blocks may be nested."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        base = memory.tables.ctypes.data
        fields = TABLES.fields
        assert fields is not None
        self._closed = base + fields["closed"][1]
        self._woken = base + fields["woken"][1]
        self._inside = base + fields["busy"][1]
        self._cpus = min(MAX_CPUS, processors())
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth > 1:
            return self
        for _ in range(_TURNS):
            if _shut(self._closed, self._inside, self._cpus, _LOOKS):
                return self
            # a virtual processor may stand still in the middle of a packet
            os.sched_yield()
        self.__exit__(None, None, None)
        raise RuntimeError(
            "the XDP program does not leave the tables: detach it ('ip link set DEVICE xdp off')"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            swap(self._closed, 0)

    def awake(self) -> None:
        """From now on the program says again that there is work."""
        swap(self._woken, 0)
