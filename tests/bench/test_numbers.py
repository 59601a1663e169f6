"""``ina bench numbers``: how trainings are judged. The trainings themselves need torch and a fabric."""

import pytest

from inanet.bench import numbers as bench

GLOO = {"losses": [2.0, 1.0, 0.5], "digest": "g", "accuracy": 0.9}


def training(losses: list[float], digest: str = "d", *, same: bool = True) -> dict[str, object]:
    return {"losses": losses, "digest": digest, "accuracy": 0.9, "bytes": 7, "same": same}


@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (4.0, True), (6.0, False)])
def test_differences_are_reported_in_those_of_rounding_alone(factor: float, met: bool) -> None:
    rounding = [1e-6, 2e-6, 1e-6]
    ours = training([loss * (1 + factor * d) for loss, d in zip(GLOO["losses"], rounding, strict=True)])
    row = bench.judge("xagg", "cnn", "prologue", ours, ours, GLOO, rounding)
    assert row["ratio_max"] == pytest.approx(factor, rel=1e-3)
    assert row["ratio_median"] == pytest.approx(factor, rel=1e-3)
    assert row["met"] is met
    assert row["bit_identical"]


def test_only_the_default_mode_has_marks() -> None:
    ours = training([4.0, 1.0, 0.5])
    assert bench.judge("xagg", "cnn", "fixed", ours, ours, GLOO, [1e-6] * 3)["met"] is None
    assert bench.judge("xagg", "cnn", bench.DEFAULT, ours, ours, GLOO, [1e-6] * 3)["met"] is False


def test_losses_that_hardly_differ_are_not_divided_by_nothing() -> None:
    ours = training(list(GLOO["losses"]))
    row = bench.judge("xagg", "cnn", bench.DEFAULT, ours, ours, GLOO, [0.0] * 3)
    assert row["ratio_max"] == row["ratio_median"] == 0.0


@pytest.mark.parametrize("other", [training([2.0, 1.0, 0.5], "e"), training([2.0, 1.0, 0.6])])
def test_two_runs_must_have_the_same_bits(other: dict[str, object]) -> None:
    ours = training([2.0, 1.0, 0.5])
    assert not bench.judge("xagg", "cnn", bench.DEFAULT, ours, other, GLOO, [1e-6] * 3)["bit_identical"]
    torn = training([2.0, 1.0, 0.5], same=False)
    assert not bench.judge("xagg", "cnn", bench.DEFAULT, torn, torn, GLOO, [1e-6] * 3)["bit_identical"]


def test_rows_have_a_line_each() -> None:
    ours = training([2.0, 1.0, 0.5])
    row = bench.judge("xagg", "cnn", bench.DEFAULT, ours, ours, GLOO, [1e-6] * 3)
    lines = list(bench.table({"cores": 2, "rows": [row, row]}))
    assert sum(not line.startswith("#") for line in lines) == 2


def test_bytes_are_those_since_the_last_training_and_of_each_host_once() -> None:
    meter = bench._Meter(2)
    assert meter.passed([{"sent": 5}, {"sent": 7}, {"sent": 5}, {"sent": 7}]) == 12
    assert meter.passed([{"sent": 15}, {"sent": 8}, {"sent": 15}, {"sent": 8}]) == 11
