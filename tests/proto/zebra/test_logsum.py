"""The log-table sum: how far off it is, and what is exact about it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.proto.zebra.logsum import TABLE_BYTES, TABLES, sum_rows


def table_sum(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    out = np.zeros(rows.shape[1], np.uint32)
    sum_rows(TABLES, np.ascontiguousarray(rows).view(np.uint32), out)
    return out.view(np.float32).astype(np.float64)


@pytest.mark.parametrize("workers", [1, 2, 8, 32])
def test_sums_of_one_sign_are_within_half_a_thousandth(workers: int) -> None:
    rows = np.abs(np.random.default_rng(workers).standard_normal((workers, 4000))).astype(np.float32)
    exact = rows.astype(np.float64).sum(axis=0)
    assert np.abs(table_sum(rows) / exact - 1).max() < 5e-4


@pytest.mark.parametrize("workers", [2, 8, 32])
def test_sums_of_both_signs_are_within_a_thousandth_of_the_magnitudes(workers: int) -> None:
    rows = np.random.default_rng(workers).standard_normal((workers, 4000)).astype(np.float32)
    error = np.abs(table_sum(rows) - rows.astype(np.float64).sum(axis=0))
    assert (error / np.abs(rows).astype(np.float64).sum(axis=0)).max() < 1e-3


def test_zeros_cancellation_and_the_ends_of_the_range() -> None:
    rows = np.array([[0.0, 1.5, 1.5, 3e38, 1e-38, -2.0], [0.0, 0.0, -1.5, 3e38, 1e-45, 1e-9]], np.float32)
    found = table_sum(rows)
    assert found[0] == 0.0
    assert found[1] == pytest.approx(1.5, rel=1e-4)
    assert found[2] == 0.0
    assert found[3] == np.inf
    assert found[4] == pytest.approx(1e-38, rel=1e-4)
    assert found[5] == pytest.approx(-2.0, rel=1e-4)


def test_the_tables_fit_into_a_switch() -> None:
    assert TABLE_BYTES < 600_000
