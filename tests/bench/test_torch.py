"""``ina bench torch``: what its figures are made of. The training itself is in tests/torch."""

from typing import ClassVar

import pytest

from inanet.bench import torch as bench
from inanet.bench.peers.rank import Team
from inanet.lab.namespaces import Unprivileged
from inanet.service.exits import Exit, Failure


class Scripted(Team):
    """Answers with seconds per step that depend on the way, a slower rank among them."""

    def ask(self, question, deadline, what):  # type: ignore[no-untyped-def]
        seconds = {"alone": 1.0, "gloo": 3.0, "ina": 2.0}[question["way"]]
        return [{"seconds": seconds / 2}, {"seconds": seconds}]


def test_communication_is_what_a_step_takes_beyond_computing() -> None:
    rows = bench._time(Scripted("scripted", []), "local", 3, 5)
    found = {(row["model"], row["system"]): row for row in rows}
    assert found["mlp", "ina"]["step_seconds"] == 2.0
    assert found["mlp", "ina"]["communication_seconds"] == 1.0
    assert found["mlp", "gloo"]["communication_share"] == pytest.approx(2 / 3)
    assert found["cnn", "alone"]["communication_seconds"] == 0.0
    assert len(found["mlp", "ina"]["samples"]) == 3
    rows += bench._metrics(Scripted("scripted", []), "local", 3, 5)
    assert bench._ratio(rows, "local", "metrics", "step_seconds") == pytest.approx(2 / 3)
    assert bench._ratio(rows, "local", "mlp", "communication_seconds") == 0.5
    assert bench._ratio(rows, "lab", "mlp", "step_seconds") is None
    result = {"cores": 2, "load": 0.5, "rows": rows, "skipped": ["lab: why"], "ratio_to_gloo_local": 0.5}
    result |= {"ratio_to_gloo_lab": None, "predicted_ratio_lab": bench._predicted(rows)}
    result |= {"metrics_ratio_to_gloo_local": 1.5, "metrics_ratio_to_gloo_lab": None}
    lines = list(bench.table(result | {"marks": bench._marks(result)}))
    assert "# mlp, communication, 4 ranks on one host: time over Gloo's 0.5, at most 0.5: met" in lines
    assert "# communication of mlp, to Gloo's, local: 0.5" in lines
    assert "# metrics, 4 ranks on one host: time over Gloo's 1.5, at most 1: missed" in lines
    assert lines[-1] == "# skipped lab: why"
    assert sum(not line.startswith("#") for line in lines) == len(rows)


def test_on_shaped_links_steps_are_held_against_what_the_plan_predicts() -> None:
    rows = bench._time(Scripted("scripted", []), "lab", 1, 1)
    # 17.4 MB at 200 Mbit/s, once in fragments, or one and a half times in segments
    fabric, ring = 17_399_848 * 8 / 200e6 * 1094 / 1024, 17_399_848 * 8 / 200e6 * 1.5 * 1514 / 1448
    predicted = bench._predicted(rows)
    assert predicted == pytest.approx((1 + fabric) / (1 + ring), rel=1e-3)
    result = {"ratio_to_gloo_local": None, "predicted_ratio_lab": predicted}
    result |= {"metrics_ratio_to_gloo_local": None, "metrics_ratio_to_gloo_lab": None}
    verdicts = [
        bench._marks(result | {"ratio_to_gloo_lab": ratio * predicted})[1]["met"] for ratio in (1.09, 1.11)
    ]
    assert verdicts == [True, False]
    assert bench._marks(result | {"ratio_to_gloo_lab": None})[1]["met"] is None


class Trained(Team):
    """Answers with losses that depend on the way."""

    losses: ClassVar = {"ina": [1.0, 2.02, 3.0], "gloo": [1.0, 2.0, 3.0], "double": [1.0, 2.002, 3.0]}

    def ask(self, question, deadline, what):  # type: ignore[no-untyped-def]
        return [{"losses": self.losses[question["way"]], "digest": question["way"], "accuracy": 0.9}]


def test_losses_are_held_against_what_rounding_alone_does_to_them() -> None:
    found = bench._train(Trained("trained", []))
    assert found["loss_diff_max"] == pytest.approx(0.01)
    assert found["loss_diff_step"] == 1
    assert found["loss_diff_double"] == pytest.approx(0.001, rel=1e-2)
    assert found["loss_diff_ratio"] == pytest.approx(10.0, rel=1e-2)
    with pytest.raises(ValueError, match="zip"):
        bench.loss_differences([1.0], [1.0, 2.0])


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        Failure, match=r"torch is not installed: .* -m pip install 'inanet\[torch\]'"
    ) as refused:
        bench.run((), 1, 1, lambda _: None)
    assert refused.value.code is Exit.MISSING


def test_a_lab_that_cannot_be_had_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def unprivileged() -> None:
        raise Unprivileged("run it as root")

    monkeypatch.setattr(bench, "require_privileges", unprivileged)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(Failure, match="run it as root") as refused:
        bench.run(("lab",), 1, 1, lambda _: None)
    assert refused.value.code is Exit.PERMISSION
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyroute2" else object())
    with pytest.raises(Failure, match=r"pip install 'inanet\[net\]'") as refused:
        bench.run(("lab",), 1, 1, lambda _: None)
    assert refused.value.code is Exit.MISSING
