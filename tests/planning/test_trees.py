"""XAgg's trees with the paper's numbers: Eq. (2), the screening, Fig. 12, and what holds for every tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.planning.trees import (
    FAN_INS,
    KTree,
    Performance,
    Server,
    TreeError,
    build,
    by_performance,
    candidates,
    choose_k,
    communication_share,
    fan_in,
    height,
    needed,
    worthwhile,
)

GB = 10**9
GBPS = 1e9


def server(name: str, gbps: float = 100, cores: int = 44, memory: int = 128 * GB, used: int = 0) -> Server:
    return Server(name, gbps * GBPS, cores, memory, used)


@pytest.mark.parametrize(
    ("k", "workers", "h"),
    [(2, 2, 2), (2, 3, 3), (2, 4, 3), (2, 5, 4), (3, 7, 3), (3, 9, 3), (3, 10, 4), (5, 5, 2), (5, 125, 4)],
)
def test_equation_2(k: int, workers: int, h: int) -> None:
    assert height(k, workers) == h
    assert k ** (h - 2) < workers <= k ** (h - 1)


@given(st.integers(2, 9), st.integers(2, 5000))
def test_equation_2_has_one_solution(k: int, workers: int) -> None:
    h = height(k, workers)
    assert h >= 2
    assert k ** (h - 2) < workers <= k ** (h - 1)


@pytest.mark.parametrize(("k", "workers"), [(1, 4), (2, 1), (0, 0)])
def test_equation_2_needs_two_of_each(k: int, workers: int) -> None:
    with pytest.raises(ValueError, match="needs 2 or more"):
        height(k, workers)


def test_workers_stand_by_the_sum_of_both_times() -> None:
    measured = [Performance("slow", 3.0, 0.5), Performance("b", 1.0, 1.0), Performance("a", 0.5, 1.5)]
    assert by_performance(measured) == ("a", "b", "slow")
    assert communication_share(measured) == pytest.approx(3.0 / 7.5)


def test_the_ten_percent_rule() -> None:
    # section VI: BERT-BiLSTM-CRF spends 25 % on communication, DeepLight 79 %
    for share, helps in ((0.25, True), (0.79, True), (0.1, True), (0.099, False)):
        assert worthwhile(share) is helps
        measured = [Performance("w", 1 - share, share)]
        assert communication_share(measured) == pytest.approx(share)
    assert not worthwhile(communication_share([]))


def test_memory_is_filled_to_80_percent_at_most() -> None:
    full = server("full", used=102 * GB)
    assert candidates([full], 400 * 10**6) == (full,)
    assert candidates([full], 401 * 10**6) == ()


def test_cores_must_keep_up_with_the_bandwidth() -> None:
    # 100 Gbit/s need ten cores at 10 Gbit/s each (section VI-B)
    assert candidates([server("ten", cores=10)], GB)
    assert not candidates([server("nine", cores=9)], GB)
    assert candidates([server("nine", cores=9)], GB, core_bps=13.03 * GBPS)
    assert not candidates([server("none", gbps=0)], GB)


def test_candidates_stand_by_bandwidth_then_cores_then_memory() -> None:
    fast, many, roomy, plain = (
        server("fast", gbps=200),
        server("many", cores=45),
        server("roomy", memory=256 * GB),
        server("plain"),
    )
    assert [s.name for s in candidates([plain, roomy, fast, many], GB)] == ["fast", "many", "roomy", "plain"]


def test_fan_in_follows_the_bandwidth() -> None:
    b = 100 / 4
    assert [fan_in(gbps, b) for gbps in (100, 90, 87.5, 87, 40, 13, 12.5, 5)] == [4, 4, 3, 3, 2, 1, 0, 0]


def test_figure_12() -> None:
    order = by_performance(
        [Performance(f"w{i}", 1.0, 1.0) for i in (1, 2, 3)]
        + [Performance(f"w{i}", 1.0, 0.4) for i in (4, 5, 6, 7)]
    )
    assert order == ("w4", "w5", "w6", "w7", "w1", "w2", "w3")
    tree = build("ps", order, candidates([server("s2"), server("s1")], 97 * 10**6), 3)
    # seven workers with k = 3: two servers with three each, and the last worker at the PS
    assert height(3, 7) == 3
    assert tree.servers == ("s1", "s2")
    assert [len(tree.children(name)) for name in ("s1", "s2", "ps")] == [3, 3, 3]
    assert tree.parents["w3"] == "ps"


def test_a_server_with_one_child_is_removed() -> None:
    three = candidates([server("s1"), server("s2"), server("s3")], GB)
    tree = build("ps", [f"w{i}" for i in range(7)], three, 3)
    assert tree.servers == ("s1", "s2")
    assert tree.parents["w6"] == "ps"
    assert needed(3, 7) == 2


def test_the_best_servers_take_the_places_that_are_left() -> None:
    # 2 + 2 + 1 workers in the first layer: s3 is removed, and s4 of the second layer gives its place to s3
    four = candidates([server(f"s{i}", gbps=100 - i) for i in (1, 2, 3, 4)], GB)
    tree = build("ps", [f"w{i}" for i in range(5)], four, 2)
    assert tree.servers == ("s1", "s2", "s3")
    assert tree.parents["s1"] == tree.parents["s2"] == "s3"
    assert tree.parents["s3"] == tree.parents["w4"] == "ps"


def test_weaker_servers_get_fewer_children() -> None:
    tree = build("ps", [f"w{i}" for i in range(8)], candidates([server("a", 100), server("b", 50)], GB), 4)
    assert [len(tree.children(name)) for name in ("a", "b", "ps")] == [4, 2, 4]


def test_no_server_and_few_workers_go_to_the_root() -> None:
    assert set(build("ps", ["w0", "w1", "w2"], (), 2).parents.values()) == {"ps"}
    assert set(build("ps", ["w0", "w1"], candidates([server("s")], GB), 2).parents.values()) == {"ps"}
    assert build("ps", ["w0"], (), 2) == KTree("ps", {"w0": "ps"}, ())


def test_k_follows_the_number_of_servers() -> None:
    # 8 workers: k = 2 needs 4 + 2 servers, k = 3 needs 3, k = 4 two, k = 5 two
    assert [needed(k, 8) for k in FAN_INS] == [6, 3, 2, 2]
    assert [choose_k(8, servers) for servers in (6, 5, 3, 2, 1, 0)] == [2, 3, 3, 4, 5, 5]


def test_a_root_has_32_children_at_most() -> None:
    with pytest.raises(TreeError, match="'ps' would have 33 children"):
        build("ps", [f"w{i}" for i in range(33)], (), 5)


@given(st.integers(2, 60), st.integers(2, 5), st.lists(st.integers(10, 400), max_size=40))
def test_every_tree_is_sound(workers: int, k: int, rates: list[int]) -> None:
    names = [f"w{i}" for i in range(workers)]
    able = candidates([server(f"s{i}", gbps) for i, gbps in enumerate(rates)], GB)
    try:
        tree = build("ps", names, able, k)
    except TreeError:
        return
    assert tree.servers == tuple(s.name for s in able[: len(tree.servers)])
    assert set(tree.parents) == {*names, *tree.servers}
    for name in tree.servers:
        assert 2 <= len(tree.children(name)) <= k
    for name in tree.parents:
        path = [name]
        while path[-1] != "ps":
            path.append(tree.parents[path[-1]])
        assert len(path) <= height(k, workers)
