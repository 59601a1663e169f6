"""Costs of nodes from runs: the arithmetic."""

import pytest

from inanet.bench.calibration import derive
from inanet.bench.peers.rank import Sample
from inanet.bench.runs import Run
from inanet.planning.costs import Costs


def runs(seconds: float, cpu: float, served: float) -> list[Run]:
    return [Run(Sample(seconds * wobble, cpu, served), None) for wobble in (3.0, 1.0, 5.0)]


def test_costs_come_from_processor_time_per_fragment() -> None:
    # two ranks of 1000 fragments: 2000 contributions; 3 ms at the server, 4 ms at the workers
    costs = derive(
        {"xagg-udp": runs(0.8e-3, 0.0, 0.0), "gloo": runs(2e-3, 0.0, 0.0)},
        {"xagg-udp": runs(0.1, 7e-3, 3e-3), "gloo": runs(0.1, 4e-3, 0.0)},
        2,
        1000 * 1024,
        500.0,
    )
    assert costs.worker_ns == pytest.approx(2000.0)
    # 1500 ns for each contribution: 500 adding, and half of the rest for each direction
    assert costs.sum_ns == pytest.approx(1000.0)
    assert costs.result_ns == pytest.approx(500.0)
    assert costs.ring_ns == pytest.approx(2000.0)
    assert (costs.round_s, costs.hop_s, costs.step_s) == pytest.approx((0.8e-3, 0.4e-3, 1e-3))
    assert costs.measured


def test_without_a_ring_its_defaults_stay() -> None:
    small, big = {"xagg-udp": runs(1e-3, 0.0, 0.0)}, {"xagg-udp": runs(0.1, 7e-3, 1e-3)}
    costs = derive(small, big, 2, 1000 * 1024, 600.0)
    assert (costs.ring_ns, costs.step_s) == (Costs().ring_ns, Costs().step_s)
    # a kernel that was slower alone than the whole server was is believed as far as the server
    assert costs.sum_ns == pytest.approx(501.0)
    assert costs.result_ns > 0
