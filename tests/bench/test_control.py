"""Delays of the control plane: every quantity is measured for every role; what is made of samples."""

import pytest

from inanet.bench.control import PAPER, measure, rows, table


@pytest.mark.parametrize("delay", [0.0, 0.001])
async def test_every_role_is_measured(delay: float) -> None:
    found = await measure(delay, 2, 1 << 20)
    beside = ("update", "worker, from another's word")
    assert set(found) == {beside, *(key for key in PAPER if key[1] != "mean")}
    assert {key: len(samples) for key, samples in found.items() if key[0] != "deployment"} == dict.fromkeys(
        [key for key in found if key[0] != "deployment"], 2
    )
    # a way there and back, or one way: no link is faster than it is
    for (what, role), samples in found.items():
        ways = {"worker": 2.0, beside[1]: 2.0, "server": 0.5, "ps": 0.0}[role]
        if what == "deployment" or (what, role) == ("update", "worker"):
            # to the aggregator, back, and to the worker; or one way, from the root
            ways = 2.0 if what == "deployment" else 1.0
        assert min(samples) >= ways * delay


def test_rows_hold_the_papers_numbers_beside_ours() -> None:
    found = {
        ("update", "worker"): [0.001, 0.003, 0.001],
        ("update", "server"): [0.002, 0.002, 0.002],
        ("update", "worker, from another's word"): [0.009, 0.009, 0.009],
        ("deployment", "server"): [0.5],
    }
    made = {(row["quantity"], row["role"]): row for row in rows("here", found)}
    assert made["update", "worker"]["ms"] == pytest.approx(1.0)
    assert made["update", "worker"]["holds"]
    assert made["update", "server"]["paper_ms"] == 1.0
    assert not made["update", "server"]["holds"]
    # the mean over all requests, as the paper has it: 11/6
    assert made["update", "mean"]["ms"] == pytest.approx(11 / 6)
    assert made["update", "worker"]["worst_ms"] == pytest.approx(3.0)
    assert not made["deployment", "server"]["holds"]
    assert made["update", "worker, from another's word"]["holds"] is None
    text = "\n".join(table({"rows": list(made.values())}))
    assert text.count("slower than the paper's") == 3
