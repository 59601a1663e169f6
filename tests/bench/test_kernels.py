"""The kernel benchmark measures kernels that do their work; nothing here looks at a clock."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from inanet.bench.cli import bench
from inanet.bench.kernels import Bench
from inanet.bench.measure import interleave, median


def test_subjects_alternate_and_warm_up() -> None:
    calls: list[str] = []
    seconds = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, warmups=1)
    assert calls == ["a", "b"] * 3
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(("values", "expected"), [([], 0.0), ([3.0], 3.0), ([9.0, 1.0, 2.0], 2.0)])
def test_median(values: list[float], expected: float) -> None:
    assert median(values) == expected


def test_aggregate_runs_every_check_and_sums_all_children() -> None:
    made = Bench(300, children=3)
    made.aggregate()
    assert not any(made.root.drops_by_reason().values())
    single = np.zeros((300, 263), np.int32)
    made.format.encode([made.values], 0, 300, made.exponents, single, 0)
    assert (made.root.memory.rows[:300, 6:262] == 3 * single[:, 6:262]).all()
    # a damaged packet is noticed, so the checks are on
    made.batches[0].arena[500] ^= 1
    with pytest.raises(RuntimeError, match="299 of 300"):
        made.aggregate()


def test_json_has_a_row_for_every_kernel() -> None:
    result = CliRunner().invoke(bench, ["kernels", "--size", "1", "-n", "1", "--json"])
    printed = json.loads(result.output)
    assert (printed["schema"], printed["ok"]) == (1, True)
    assert {row["kernel"] for row in printed["rows"]} == {
        "memcpy",
        "exponents",
        "quantise",
        "fold",
        "checksum",
        "aggregate",
        "dequantise",
    }
    assert all(row["ns_per_fragment"] > 0 and row["gbps"] > 0 for row in printed["rows"])
