"""ina zebra hot."""

import json
from pathlib import Path

import numpy as np
import pytest

from inanet.cli.main import main


@pytest.fixture
def data(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    path = tmp_path / "clicks.svm"
    with path.open("w") as out:
        for _ in range(2000):
            keys = np.unique(rng.zipf(1.5, 10))
            out.write("1 " + " ".join(f"{key}:1" for key in keys.tolist()) + "\n")
    return str(path)


def test_hot_parameters_are_counted_and_written(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "hot.txt"
    assert main(["zebra", "hot", data, "-p", "0.5", "--sample", "0.08", "--json", "-o", str(keys)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    assert result["reached"]
    assert result["share"] >= 0.5
    assert result["bytes"] == 4 * result["k"]
    assert 0.5 < result["sample"]["precision"] < 1.0
    assert len(keys.read_text().split()) == result["sample"]["k"]


def test_a_share_that_does_not_fit_is_said_to_be_so(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zebra", "hot", data, "-p", "0.9", "--memory", "1 KiB"]) == 0
    out = capsys.readouterr().out
    assert "hot: 12 parameters" in out
    assert "NOT REACHED: 90% of the updates need" in out


@pytest.mark.parametrize(
    "options", [["-p", "1.5"], ["--sample", "0"], ["--memory", "much"]], ids=["p", "sample", "memory"]
)
def test_numbers_out_of_range_are_usage_errors(
    data: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["zebra", "hot", data, *options]) == 2
    assert "Error" in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zebra", "hot", "/nowhere/at/all"]) == 2
    assert "cannot read /nowhere/at/all" in capsys.readouterr().err
