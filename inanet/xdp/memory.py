"""A node's slots and tables in memory that the kernel program works on as well.

:class:`SharedMemory` loads the program and puts every array of a :class:`~inanet.proto.tree.slots.SlotMemory` where the
program looks for it; ``layout.h`` says where that is. The same kernels of :mod:`inanet.proto` then work on it unchanged.
Unlike private memory it is taken as a whole when it is made: one second per gigabyte and more.
"""

import mmap
import platform
import re
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree.slots import (
    GROUP,
    MAX_JOBS,
    MAX_SHARDS,
    MAX_SHARDS_PER_JOB,
    MAX_TREES,
    ROW_BYTES,
    JobColumn,
    ShardColumn,
    SlotMemory,
    TreeColumn,
)
from inanet.wire.endpoint import address_of
from inanet.xdp.build import OBJECT
from inanet.xdp.libbpf import Object, Program

#: processors that the program tells apart
MAX_CPUS = 1024
DROPS, COUNTS = 64, 16
#: bytes of a map's value that the verifier can address
MAX_VALUE = 1 << 29
#: banks of 2^17 rows are 138 MB
BANK_SHIFT = 17

#: processors that show their stores to others in the order in which they were made
_IN_ORDER = ("x86_64", "s390x")

Mode = Literal["native", "generic"]
PROGRAMS: dict[str, str] = {"native": "aggregate_frames", "generic": "aggregate_super_frames"}

EVENT = np.dtype([("code", "<i8"), ("row", "<i8"), ("a", "<i8"), ("b", "<i8")])
ROUTE = np.dtype(
    [
        ("up_sent", "<u8"),
        ("up_limit", "<u8"),
        ("down_sent", "<u8"),
        ("down_limit", "<u8"),
        ("group", "<u8"),
        ("credit_mask", "<u8"),
        ("parent_ifindex", "<u4"),
        ("parent_mac", "u1", 8),
        ("stands_for", "<u4", 32),
        ("ends_held", "<u4"),
    ]
)
BUSY = np.dtype([("inside", "<u8"), ("spare", "<u8", 7)])
FIGURES = np.dtype([("drops", "<u8", DROPS), ("counts", "<u8", COUNTS)])
TABLES = np.dtype(
    [
        ("closed", "<u8"),
        ("woken", "<u8"),
        ("spare", "<u8", 6),
        ("busy", BUSY, MAX_CPUS),
        ("figures", FIGURES, MAX_CPUS),
        ("routes", ROUTE, MAX_TREES),
        ("shards", "<i8", (MAX_SHARDS, len(ShardColumn))),
        ("trees", "<i8", (MAX_TREES, len(TreeColumn))),
        ("child_endpoint", "<i8", (MAX_TREES, 32)),
        ("jobs", "<i8", (MAX_JOBS, len(JobColumn))),
        ("keys", "<u8", MAX_JOBS),
        ("taken", "<i8", (MAX_TREES, 33)),
        ("job_row", "<i4", 1 << 16),
        ("shard_row", "<i4", (MAX_JOBS, MAX_SHARDS_PER_JOB)),
        ("mask", "<u4", (MAX_TREES, 32)),
        ("since", "u1", (MAX_TREES, 32)),
    ]
)
GEOMETRY = np.dtype(
    [
        (name, "<u4")
        for name in (
            *("capacity", "bank_rows", "bank_shift", "bitmap", "round", "up_log", "down_log", "up_left"),
            *("down_left", "state", "attempt", "exponent", "misfit", "announced", "logged", "groups"),
            *("address", "port", "ports", "reorders"),
        )
    ]
)
HOP = np.dtype([("ifindex", "<u4"), ("mac", "u1", 8)])
#: arrays with one element per slot, or per group, in the order in which they lie in the map ``slots``
_PER_SLOT = ("bitmap", "round", "up_log", "down_log")
_PER_GROUP = ("up_left", "down_left")
_BYTES = ("state", "attempt", "exponent", "misfit", "announced", "logged")


class KernelCount(IntEnum):
    """Counters of the program that user space has none for; those before are :class:`~inanet.proto.tree.engine.Count`."""

    FORWARDED = 8
    BROADCAST = 9
    ANSWERED = 10
    PASSED = 11
    UNREPORTED = 12
    FRAMES = 13
    BYTES = 14


class KernelEvent(IntEnum):
    """Reports of the program beside those of :class:`~inanet.proto.tree.engine.Event`."""

    WORK = 100
    HOP = 101
    LOG = 102


class Held(IntFlag):
    """Directions in which ends of groups are left to user space."""

    HELD_UP = 1
    HELD_DOWN = 2


def processors(listed: Path = Path("/sys/devices/system/cpu/possible")) -> int:
    """One more than the highest number that a processor of this machine can have, those that are off or missing included."""
    return int(re.split("[,-]", listed.read_text().strip())[-1]) + 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where everything lies for a number of slots."""

    capacity: int
    groups: int
    bank_rows: int
    banks: int
    bank_shift: int
    #: offsets in the map ``slots``, by array
    offsets: dict[str, int]
    slots_bytes: int

    @classmethod
    def of(cls, capacity: int) -> "Geometry":
        """For ``capacity`` slots."""
        groups = capacity // GROUP + MAX_SHARDS + 1
        banks = -(-capacity // (1 << BANK_SHIFT))
        # a map pads its values to 8 bytes, and rows must follow one another without a gap
        bank_rows = 1 << BANK_SHIFT if banks > 1 else capacity + capacity % 2
        offsets, at = {}, 0
        for names, size in ((_PER_SLOT, 4 * capacity), (_PER_GROUP, 4 * groups), (_BYTES, capacity)):
            for name in names:
                offsets[name] = at
                at += size
        return cls(capacity, groups, bank_rows, banks, BANK_SHIFT if banks > 1 else 31, offsets, at)

    def record(self, endpoint: int, ports: int) -> bytes:
        """``struct geometry`` for the program of a node at ``endpoint`` with ``ports`` interfaces."""
        values = np.zeros(1, GEOMETRY)
        for name in ("capacity", "bank_rows", "bank_shift", "groups"):
            values[name] = getattr(self, name)
        for name, at in self.offsets.items():
            values[name] = at
        _, port = address_of(endpoint)
        values["address"], values["port"], values["ports"] = endpoint >> 16, port, ports
        values["reorders"] = platform.machine() not in _IN_ORDER
        return values.tobytes()


class SharedMemory(SlotMemory):
    """Slot memory for ``capacity`` slots with the programs for ``modes`` loaded on it, for a node at ``endpoint``.

    ``endpoint`` with port 0 stands for the raw IPv4 framing. ``ports`` is the number of interfaces that the program will
    be attached to. ``image`` is another object than the committed one, ``names`` are programs in it, and
    ``stride`` is the size of its rows, all for measurements. Raises :class:`~inanet.xdp.libbpf.BpfError` and :class:`~inanet.xdp.libbpf.NoLibrary`.
    """

    def __init__(
        self,
        capacity: int,
        endpoint: int,
        *modes: Mode,
        ports: int = 1,
        image: bytes | None = None,
        names: tuple[str, ...] | None = None,
        stride: int = ROW_BYTES,
    ) -> None:
        geometry = Geometry.of(capacity)
        wanted = tuple(PROGRAMS[mode] for mode in modes) if names is None else names
        self.object = Object(OBJECT.read_bytes() if image is None else image)
        try:
            for program in self.object.programs():
                program.autoload(program.name in wanted)
            self.object.map("rows").resize(value_size=geometry.bank_rows * stride, entries=geometry.banks)
            self.object.map("slots").resize(value_size=geometry.slots_bytes)
            self.object.map("slot_locks").resize(entries=capacity)
            initial = self.object.map(".rodata").initial()
            record = geometry.record(endpoint, ports)
            initial[: len(record)] = record
            self.object.load()
            self.programs = {name: self.object.program(name) for name in wanted}
            self._mapped: dict[str, mmap.mmap] = {
                name: self.object.map(name).map_memory() for name in ("rows", "slots", ".bss")
            }
        except BaseException:
            self.object.close()
            raise
        self.tables: NDArray[Any] = np.frombuffer(self._mapped[".bss"], TABLES, 1)
        super().__init__(capacity, partial(self._place, geometry))

    def _place(self, geometry: Geometry, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        if name in TABLES.fields:  # type: ignore[operator]
            array: NDArray[Any] = self.tables[name][0]
        elif name == "rows":
            array = np.frombuffer(self._mapped["rows"], dtype, shape[0] * shape[1]).reshape(shape)
        else:
            array = np.frombuffer(self._mapped["slots"], dtype, shape[0], geometry.offsets[name])
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        return array

    def program(self, mode: Mode) -> Program:
        """The program for a mode, if it was asked for. Raises ``KeyError``."""
        return self.programs[PROGRAMS[mode]]

    def kernel_drops(self) -> NDArray[np.int64]:
        """Packets that the program has seen, by drop reason; int64, of :data:`DROPS`."""
        drops: NDArray[np.int64] = self.tables["figures"][0]["drops"].sum(axis=0).astype(np.int64)
        return drops

    def kernel_counts(self) -> NDArray[np.int64]:
        """The program's counters, indexed by ``enum count`` of ``layout.h``; int64, of :data:`COUNTS`."""
        counts: NDArray[np.int64] = self.tables["figures"][0]["counts"].sum(axis=0).astype(np.int64)
        return counts

    def close(self) -> None:
        """Let go of the program and its maps. The arrays stay valid as long as somebody holds one."""
        self.object.close()
