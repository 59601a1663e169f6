"""``ina bench scheduler``."""

import json

import pytest
from click.testing import CliRunner

from inanet.bench.cli import bench
from inanet.bench.scheduler import GROWTH, Size, run, sizes_for, table


def test_the_first_row_is_the_papers_instance_and_the_last_has_a_thousand_workers() -> None:
    assert GROWTH[0] == Size(8, 6, 40)
    assert GROWTH[-1].workers == 1000
    assert sizes_for((12, 700)) == (Size(8, 6, 12), Size(16, 8, 700))
    with pytest.raises(ValueError, match="2000 workers do not fit"):
        sizes_for((2000,))


def test_rows_have_bound_cost_and_overshoot() -> None:
    result = run((Size(4, 2, 9),), seed=2, exact=3)
    assert result["ok"]
    assert len(result["exact"]["ratios"]) == 3
    assert 1 - 1e-5 <= result["exact"]["median"] <= result["exact"]["worst"]
    assert result["exact"]["median"] <= 1.2
    assert [row["method"] for row in result["rows"]] == ["plain", "columns"]
    for row in result["rows"]:
        assert row["lp_bound"] <= row["lp_value"] * (1 + 1e-9)
        assert row["lp_bound"] <= row["cost"] <= row["without_aggregation"]
        assert row["ratio"] == row["cost"] / row["lp_bound"]
    assert {key: result[key] for key in ("cost", "lp_bound", "overshoot")} == {
        key: result["rows"][0][key] for key in ("cost", "lp_bound", "overshoot")
    }
    assert len([line for line in table(result) if not line.startswith("#")]) == 2


def test_the_command_prints_one_object() -> None:
    said = CliRunner().invoke(bench, ["scheduler", "--workers", "12", "-n", "1", "--json"])
    assert said.exit_code == 0, said.output
    result = json.loads(said.output)
    assert result["schema"] == 1
    assert result["seconds"] > 0
    assert result["rows"][0]["workers"] == 12
