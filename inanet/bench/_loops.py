"""Loops that only benchmarks need."""

from typing import Any

from inanet.kernels.fold import fold_add
from inanet.kernels.jit import njit
from inanet.kernels.layout import ROW_WORDS


@njit("void(int32[:, ::1], int32[::1], int64)", cache=True, nogil=True, _nrt=False)
def fold_rows(rows: Any, arena: Any, count: int) -> None:
    """Add the packet at row ``i`` of ``arena`` to slot ``i``."""
    for i in range(count):
        fold_add(rows, i, arena, i * ROW_WORDS)
