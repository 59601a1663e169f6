"""XAgg's Fig. 1, by arithmetic and with the machines themselves."""

import pytest

from inanet.papers.xagg_example import Flow, arithmetic, run, shared


def test_a_port_is_shared_fairly_and_what_some_cannot_use_goes_to_others() -> None:
    assert shared({"a": Flow(0, 10, 10), "b": Flow(0, 10, 10)}, 10) == {"a": 2.0, "b": 2.0}
    # the slow one takes 2, the other 8; alone it takes what it can
    assert shared({"slow": Flow(0, 10, 2), "fast": Flow(0, 8, 10)}, 10) == {"fast": 1.0, "slow": 5.0}
    # the paper's Fig. 1(a): thirds, then quarters, then the late one alone
    flows = {name: Flow(0.0, 10, 10) for name in ("w1", "w2", "w4")} | {"w3": Flow(2.0, 10, 10)}
    ends = shared(flows, 10)
    assert ends["w1"] == pytest.approx(10 / 3)
    assert ends["w3"] == pytest.approx(4.0)


def test_the_arithmetic_is_the_papers() -> None:
    assert arithmetic() == pytest.approx({"PS": 4.0, "programmable switch": 4.0, "XAgg": 3.0})


def test_the_machines_take_as_long_as_the_arithmetic_says() -> None:
    outcome = run()
    assert len(outcome.claims) == 6
    assert all(claim.holds for claim in outcome.claims), [claim.as_dict() for claim in outcome.claims]
