import pytest

from inanet.planning.patterns import (
    Cluster,
    flat_minus_parallel,
    flat_ring,
    least_ratio,
    parallel_netreduce,
    recommend,
    ring,
    surely_best,
    tencent,
    tencent_minus_parallel,
    times,
)

GRID = [
    Cluster(ranks, each, inside * 1e9, 12.5e9, hop)
    for ranks in (16, 32, 1024)
    for each in (1, 2, 8)
    for inside in (12.5, 15.75, 100.0)
    for hop in (0.0, 1e-6, 1e-4)
]


@pytest.mark.parametrize("size", [1e3, 1e8])
def test_differences_are_equations_4_and_5(size):
    for cluster in GRID:
        fast = parallel_netreduce(cluster, size)
        assert tencent_minus_parallel(cluster, size) == pytest.approx(tencent(cluster, size) - fast, abs=1e-9)
        assert flat_minus_parallel(cluster, size) == pytest.approx(flat_ring(cluster, size) - fast, abs=1e-9)


def test_one_rank_a_machine_is_the_single_gpu_case():
    cluster = Cluster(4, 1, 1e9, 1e9, 1e-6)
    assert parallel_netreduce(cluster, 1e6) == pytest.approx(1e-6 + 1e-3)
    assert flat_ring(cluster, 1e6) == pytest.approx(6e-6 + 1.5e-3)
    assert tencent(cluster, 1e6) == pytest.approx(ring(4, 1e6, 1e9, 1e-6))


def test_the_papers_testbed_meets_the_sufficient_conditions():
    testbed = Cluster(32, 8, 150e9, 12.5e9, 1e-6)
    assert least_ratio(testbed) == pytest.approx(2.13, abs=0.01)
    assert surely_best(testbed)
    for size in (1e3, 98e6, 236e6, 528e6):
        assert recommend(testbed, size)[0] == "parallel-netreduce"


def test_sufficient_conditions_suffice():
    for cluster in GRID:
        if surely_best(cluster):
            for size in (1e2, 1e6, 1e9):
                its = times(cluster, size)
                assert its["parallel-netreduce"] <= min(its["flat-ring"], its["tencent"])


def test_without_a_switch_netreduce_is_not_recommended():
    name, its = recommend(Cluster(32, 8, 150e9, 12.5e9, 1e-6), 236e6, switch=False)
    assert name == "parallel-ring"
    assert "parallel-netreduce" not in its


@pytest.mark.parametrize(("ranks", "each"), [(3, 2), (2, 4), (4, 0)])
def test_ranks_fill_machines(ranks, each):
    with pytest.raises(ValueError, match="do not fill machines"):
        Cluster(ranks, each, 1e9, 1e9, 0.0)
