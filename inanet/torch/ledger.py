"""What went where, and why: :func:`explain`, and ``INA_EXPLAIN=1``, which prints it when the process ends."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterable

import torch

#: environment: "1" prints the table of rank 0 to standard error at the end of the process
EXPLAIN_VARIABLE = "INA_EXPLAIN"
_COLUMNS = ("who", "operation", "dtype", "way", "calls", "tensors", "bytes", "waited", "why")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Entry:
    """One line: an operation of one dtype that went one way for one reason. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = self.tensors = self.bytes = 0
        #: seconds that callers were held up
        self.waited = 0.0

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """One call with these tensors."""
        number = size = 0
        for tensor in tensors:
            number += 1
            size += tensor.numel() * tensor.element_size()
        with self._lock:
            self.calls += 1
            self.tensors += number
            self.bytes += size

    def waiting(self) -> "_Waiting":
        """The caller is held up while the block lasts."""
        return _Waiting(self)

    def wait(self, seconds: float) -> None:
        """The caller was held up."""
        with self._lock:
            self.waited += seconds


class _Waiting:
    """A block whose time counts. Small collectives are called often: this costs less than a generator."""

    __slots__ = ("_began", "_entry")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._entry.wait(time.perf_counter() - self._began)


class Ledger:
    """The lines of one process group or hook of this process, kept until the process ends."""

    def __init__(self, who: str, rank: int) -> None:
        self._who = who
        self.rank = rank
        self._entries: dict[tuple[str, str, str, str], Entry] = {}
        _ledgers.append(self)

    def entry(self, operation: str, dtype: str, way: str, why: str) -> Entry:
        """The line of an operation; ``way`` is the fabric, shared memory, or a backend's name."""
        key = (operation, dtype, way, why)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries.setdefault(key, Entry())
        return entry

    def rows(self) -> list[tuple[str, ...]]:
        """The lines, in the order in which they came up."""
        return [
            (
                self._who,
                operation,
                dtype.removeprefix("torch."),
                way,
                str(entry.calls),
                str(entry.tensors),
                _bytes(entry.bytes),
                f"{entry.waited:.3f} s",
                why,
            )
            for (operation, dtype, way, why), entry in list(self._entries.items())
        ]


_ledgers: list[Ledger] = []


def explain() -> str:
    """A table of every collective that this process has called through inanet: how many calls, tensors and bytes went
    through the fabric, through shared memory of this host or by another backend, why, and how long callers were held up.
    """
    rows = [_COLUMNS, *(row for ledger in _ledgers for row in ledger.rows())]
    if len(rows) == 1:
        return "no collective was called through inanet"
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    lines = ("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)
    return "\n".join(lines)


def _bytes(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.4g} {_UNITS[unit]}"


def _print() -> None:
    if os.environ.get(EXPLAIN_VARIABLE, "0") not in ("", "0") and any(one.rank == 0 for one in _ledgers):
        print(explain(), file=sys.stderr, flush=True)


atexit.register(_print)
