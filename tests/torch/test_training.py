"""Training the digits through the fabric, beside Gloo."""

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

from inanet.bench.peers import ddp
from inanet.bench.torch import MLP_BYTES, loss_differences
from inanet.data.digits import load
from inanet.launch.process import python, python_environment
from inanet.torch import Options
from tests.torch.ranks import Rank, Ranks

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    # the ranks import this module, and must not import scikit-learn
    pytest.mark.skipif(
        importlib.util.find_spec("sklearn") is None,
        reason="scikit-learn is not installed: pip install 'inanet[demo]'",
    ),
]

STEPS = 33


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    subprocess.run(python("inanet.data.digits", str(path)), env=python_environment(), check=True)
    return path


def by_hook(rank: Rank, path: Path) -> list[dict[str, Any]]:
    with rank.group():
        return [ddp.train(way, "cnn", STEPS, load(path)) for way in ("gloo", "ina", "ina")]


def by_group(rank: Rank, path: Path) -> dict[str, Any]:
    with rank.group("ina", pg_options=Options(require_ina=True)):
        return ddp.train("gloo", "cnn", STEPS, load(path))


def test_losses_are_those_of_gloo_and_runs_are_bit_identical(ranks: Ranks, digits: Path) -> None:
    results = ranks.run(by_hook, digits)
    gloo, ina, again = results[0]
    # it learns, or the comparison would say nothing
    assert gloo["losses"][0] > 2.0
    assert gloo["losses"][-1] < 0.5
    assert max(loss_differences(ina["losses"], gloo["losses"])) < 2e-5
    assert abs(ina["accuracy"] - gloo["accuracy"]) <= 2 / 360
    assert gloo["accuracy"] > 0.9
    assert len({one["digest"] for each in results for one in each[1:]}) == 1
    assert ina["losses"] == again["losses"]
    # DDP sums and divides where the hook asks for the mean: other roundings, and again the same in all ranks
    through = ranks.run(by_group, digits)
    assert max(loss_differences(through[0]["losses"], gloo["losses"])) < 2e-5
    assert len({one["digest"] for one in through}) == 1


def test_the_benchmark_predicts_for_the_model_that_it_trains() -> None:
    assert sum(parameter.numel() * 4 for parameter in ddp.mlp().parameters()) == MLP_BYTES
