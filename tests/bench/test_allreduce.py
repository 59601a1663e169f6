"""The all-reduce benchmark: its arithmetic, its table, and one small run through real daemons."""

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from inanet.bench.allreduce import Options, exact, source, summary, table, tolerance
from inanet.bench.cli import bench


def test_sizes_are_a_geometric_series() -> None:
    assert list(Options(begin=1024, end=70000, factor=4).sizes()) == [1024, 4096, 16384, 65536]


def rank_result(**changes: Any) -> dict[str, Any]:
    return {
        "seconds": [0.2, 0.1],
        "wrong": 0,
        "max_error": 0.0,
        "rows_sent": 4,
        "retransmissions": 1,
        "drops": 2,
        "load": 0.0,
    } | changes


def test_time_is_the_slowest_ranks_and_errors_add_up() -> None:
    options = Options(begin=4096, end=4096, workers=2)
    result = summary(options, [[rank_result()], [rank_result(seconds=[0.1, 0.3], wrong=3, max_error=0.5)]])
    row = result["rows"][0]
    assert not result["ok"]
    assert row["seconds"] == pytest.approx(0.25)  # median of max(0.2, 0.1) and max(0.1, 0.3)
    assert row["algbw_bps"] == pytest.approx(4096 * 8 / 0.25)
    assert row["busbw_bps"] == pytest.approx(row["algbw_bps"])  # 2(n-1)/n = 1 for two
    assert (row["wrong"], row["max_error"], row["retransmissions"], row["drops"]) == (3, 0.5, 2, 4)
    assert row["wire_bytes_per_worker"] == 4 * 1094
    lines = list(table(result))
    assert all(line.startswith("#") for line in lines if not line.lstrip()[0].isdigit())
    assert lines[-1] == "# Out of bounds values : 3 FAILED"


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_exact_results_and_tolerances(op: str) -> None:
    values = [source("float32", 100, rank) for rank in range(3)]
    assert exact(op, values) == pytest.approx(getattr(np, op)(np.stack(values).astype(np.float64), axis=0))
    allowed = tolerance(Options(op=op, workers=3), values)
    assert (allowed == 0) == (op in ("max", "min"))
    assert allowed < 1e-5


@pytest.mark.processes
@pytest.mark.parametrize("where", [[], ["--one-host"]], ids=["hosts", "one-host"])
def test_a_small_run_through_daemons_is_correct(where: list[str]) -> None:
    arguments = [
        "allreduce",
        "-b",
        "4KiB",
        "-e",
        "64KiB",
        "-n",
        "2",
        "-w",
        "1",
        "--workers",
        "2",
        "--json",
        *where,
    ]
    result = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    printed = json.loads(result.output)
    assert printed["ok"]
    assert [row["bytes"] for row in printed["rows"]] == [4096, 16384, 65536]
    assert all(row["wrong"] == 0 and row["seconds"] > 0 for row in printed["rows"])
    assert (printed["rows"][-1]["wire_bytes_per_worker"] > 65536) == (not where)
