"""Zebra's demo on a few made-up samples: through daemons, impaired, repeated in one process, compared."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from inanet.data.clicks import BadData
from inanet.demo.cli import demo
from inanet.demo.sparse_demo import Options, line, run, table
from inanet.training.sparse import Step

from .test_sparse_training import made_up

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_hot_parameters_found_on_the_way_and_lost_packets_change_no_bit() -> None:
    steps: list[Step] = []
    options = Options(workers=2, steps=12, impair=0.02, model="ncf", hot="online")
    result = run(options, steps.append, samples=made_up(800))
    json.dumps(result, allow_nan=False)
    assert result["ok"], result
    assert result["identical_without_impairments"]
    assert result["repeated"] > 0
    assert result["drops"]["duplicate"] > 0 < result["drops"]["injected"]
    assert [step.number for step in steps] == list(range(12))
    # what the first step has counted decides what is hot in the third
    assert [step.changed for step in steps[:3]] == [False, False, True]
    assert steps[1].hot == 0 < steps[2].hot
    assert result["changes_of_the_hot_set"] == sum(step.changed for step in steps)
    assert sum(step.hot for step in steps) == result["hot_pairs"]
    assert 0.0 < result["in_network_share"] < 1.0
    assert result["hot_parameters"] > 0 < result["hot_sums"]
    assert line(steps[0]).startswith("step    1  loss 0.68")
    assert line(steps[2]).endswith("other parameters are hot from now on")
    assert "bit for bit" in table(result)[-1]
    assert "too short" not in "".join(table(result))
    assert "the run was too short to find hot parameters" in table({**result, "hot_parameters": 0})[3]


def test_a_file_with_hardly_any_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.svm"
    path.write_text("1 3:1\n0 4:1\n")
    with pytest.raises(BadData, match=r"a.svm has 2 samples; training needs 64 at least"):
        run(Options(data=str(path)), lambda step: None)


def test_the_command_line_takes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{place % 2},{place % 5},{place % 2}" for place in range(200)]
    path.write_text("\n".join(["click,site,ad", *rows, ""]))
    sparse = ["--system", "zebra", "--workers", "1", "--steps", "20", "--model", "lr", "--json"]
    ran = CliRunner().invoke(demo, [*sparse, "--data", str(path)])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert (result["model"], result["data"], result["hot"]) == ("lr", str(path), "sampled")
    assert result["in_network_share"] > 0
    # the advertisement decides
    assert result["auc"] == 1.0
    failed = CliRunner().invoke(demo, [*sparse, "--data", str(tmp_path / "missing")])
    assert failed.exit_code == 2
    assert "cannot read" in json.loads(failed.stdout)["error"]
    refused = CliRunner().invoke(demo, ["--model", "lr"])
    assert refused.exit_code == 2
    assert "--model is for --system zebra" in refused.stderr


def test_steps_beyond_the_data_go_through_it_again_and_an_interrupt_ends_it() -> None:
    taken: list[int] = []

    def enough() -> None:
        if len(taken) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Options(workers=1, steps=50, model="lr"), lambda s: taken.append(s.number), enough, made_up(200))
    assert taken == np.arange(3).tolist()
