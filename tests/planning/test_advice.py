"""The pattern that the planner recommends: by NetReduce's equations, on the planner's network."""

import math

import pytest

from inanet.planning.advice import advise
from inanet.planning.candidates import Fleet
from inanet.planning.costs import Costs
from inanet.planning.network import Network, Port
from inanet.planning.patterns import Cluster, flat_ring, parallel_netreduce, surely_best

COSTS = Costs(step_s=1e-6)


def fleet(hosts: int, *rates: float) -> Fleet:
    ports = {f"w{k}": Port("s", rates[k % len(rates)], rates[0]) for k in range(hosts)}
    return Fleet(Network(ports, {}), tuple(ports), ())


def test_the_papers_testbed_gets_parallel_netreduce_for_every_size() -> None:
    for size in (1e3, 236e6):
        advice = advise(fleet(4, 100e9), size, COSTS, each=8, inside=150e9)
        assert advice is not None
        assert advice.cluster == Cluster(32, 8, 150e9, 12.5e9, 1e-6)
        assert (advice.pattern, advice.surely) == ("parallel-netreduce", True)
    assert advice.plain == "parallel-ring"
    assert advice.seconds["parallel-netreduce"] == parallel_netreduce(advice.cluster, 236e6)
    assert "holds for every size: 12.0 times the link's rate within a host, 2.13 suffice" in advice.lines()[1]


def test_slow_hosts_inside_get_a_flat_ring_for_large_tensors() -> None:
    # PCIe under a link of 100 Gbit/s, steps that take nothing: equation (5)
    large = advise(fleet(4, 100e9), 1e9, Costs(step_s=1e-9), each=8, inside=15.75e9)
    assert large is not None
    assert (large.pattern, large.surely) == ("flat-ring", False)
    assert "1.3 times the link's rate within a host, where 2.13 would do" in large.lines()[1]
    small = advise(fleet(4, 100e9), 1e3, Costs(step_s=1e-6), each=8, inside=15.75e9)
    assert small is not None
    assert small.pattern == "parallel-netreduce"


def test_the_slowest_link_counts_and_few_hosts_are_said() -> None:
    advice = advise(fleet(3, 100e9, 10e9), 1e6, COSTS, each=2, inside=100e9)
    assert advice is not None
    assert advice.cluster.between == 10e9 / 8
    assert not surely_best(advice.cluster)
    assert "more than 3 hosts, not 3" in advice.lines()[1]


def test_tencent_needs_a_power_of_two_and_one_rank_a_host_no_second_line() -> None:
    six = advise(fleet(4, 10e9), 1e6, COSTS, each=6)
    assert six is not None
    assert "tencent" not in six.seconds
    one = advise(fleet(4, 10e9), 1e6, COSTS)
    assert one is not None
    (line,) = one.lines()
    assert line.startswith("pattern for 1 rank a host: parallel-netreduce")
    assert one.seconds["flat-ring"] == pytest.approx(flat_ring(one.cluster, 1e6))


def test_there_is_no_pattern_for_one_host_or_without_rates() -> None:
    assert advise(fleet(1, 10e9), 1e6, COSTS, each=8) is None
    assert advise(fleet(4, math.inf), 1e6, COSTS) is None
