"""Who is hot: Principle 1, the stop rule, sampling, and when to redistribute."""

from itertools import combinations

import numpy as np
import pytest

from inanet.proto.zebra import hot
from inanet.proto.zebra.hot import OnlineIdentifier, Ranking, choose


def zipf(n: int, total: int = 10**6) -> Ranking:
    counts = (total / np.arange(1, n + 1)).astype(np.int64)
    return Ranking(np.arange(n, dtype=np.uint64), counts)


def test_hottest_first_and_equals_by_key() -> None:
    ranked = hot.of_updates([np.array([5, 9], np.uint64), np.array([9, 1], np.uint64)])
    assert ranked.keys.tolist() == [9, 1, 5]
    assert ranked.counts.tolist() == [2, 1, 1]
    assert ranked.share(1) == 0.5


def test_principle_1_takes_the_fewest_that_have_the_share() -> None:
    ranked = zipf(10_000)
    choice = choose(ranked, p=0.5, c=0.1, memory=1 << 20)
    assert choice.reached
    assert ranked.share(choice.k) >= 0.5 > ranked.share(choice.k - 1)
    assert choice.bytes == 4 * choice.k <= 0.1 * (1 << 20)


def test_principle_1_says_so_when_the_share_does_not_fit() -> None:
    choice = choose(zipf(10_000), p=0.9, c=0.05, memory=40_000)
    assert not choice.reached
    assert choice.k == choice.limit == 500
    assert "90% of the updates need" in choice.reason
    assert "hold 500" in choice.reason
    # a vector takes more of the switch
    assert choose(zipf(10_000), p=0.9, c=0.05, memory=40_000, width=8).k == 62


def test_the_stop_rule_ends_where_a_step_adds_too_little() -> None:
    ranked = zipf(100_000)
    k = hot.stop_rule(ranked)
    assert k % 1000 == 0
    assert ranked.share(k) - ranked.share(k - 1000) >= 0.01 > ranked.share(k + 1000) - ranked.share(k)
    assert choose(ranked).k == k
    assert hot.stop_rule(zipf(300)) == 300


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 1.5}, {"c": 0.0}, {"memory": 0}])
def test_shares_outside_their_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"share between|holds none"):
        choose(zipf(10), **options)  # type: ignore[arg-type]


def test_a_sample_is_of_the_rate_and_repeats_from_its_seed() -> None:
    one, other = (hot.sample(1000, 0.04, np.random.default_rng(3)) for _ in range(2))
    assert len(one) == 40
    assert (one == other).all()
    assert len(set(one.tolist())) == 40
    with pytest.raises(ValueError, match="sampling rate"):
        hot.sample(10, 0.0, np.random.default_rng(0))


def test_inversions_are_those_of_all_pairs() -> None:
    for n in (0, 1, 2, 3, 8, 33):
        order = np.random.default_rng(n).permutation(n).astype(np.int64)
        assert hot.inversions(order) == sum(a > b for a, b in combinations(order.tolist(), 2))


def test_tau_and_the_distance_of_lists() -> None:
    a = np.arange(10, dtype=np.uint64)
    assert hot.kendall_tau(a, a) == 1.0
    assert hot.kendall_tau(a, a[::-1].copy()) == -1.0
    assert hot.list_distance(a, a) == 0.0
    assert hot.list_distance(a, a[::-1].copy()) == 1.0
    b = np.array([0, 1, 20, 3], np.uint64)
    c = np.array([1, 0, 3, 2], np.uint64)
    # pairs of {0, 1, 2, 3, 20}: 0-1 turned; 20 before 3 against 3 before 20; 2 against 20; the others agree
    assert hot.list_distance(b, c) == pytest.approx(3 / 10)
    assert hot.precision(b, c) == 0.75


def test_online_identification_redistributes_only_for_a_reason() -> None:
    identifier = OnlineIdentifier(threshold=0.2, p=0.5)
    ranked = zipf(1000)
    current = ranked.top(choose(ranked, p=0.5).k).keys
    assert identifier.decide(current, ranked.keys, ranked.counts) is None
    assert identifier.distance == 0.0
    found = identifier.decide(current, ranked.keys[::-1].copy(), ranked.counts)
    assert found is not None
    assert found[0] == 999
    assert identifier.distance > 0.7


def test_earlier_counts_fade() -> None:
    one, other = np.arange(4, dtype=np.uint64), np.arange(2, 6, dtype=np.uint64)
    before, after = np.array([80, 60, 40, 20], np.int64), np.array([30, 30, 30, 30], np.int64)
    nothing = np.zeros(0, np.uint64)
    # at a half: key 2 has 40 / 2 + 30, key 0 has 80 / 2
    for fading, wanted in ((0.0, [2, 3, 4, 5]), (0.5, [2, 0, 3, 1, 4, 5]), (0.9, [0, 2, 1, 3, 4, 5])):
        identifier = OnlineIdentifier(0.0, fading=fading, step=1)
        assert identifier.decide(nothing, one, before) is not None
        found = identifier.decide(nothing, other, after)
        assert found is not None
        assert found.tolist() == wanted
    with pytest.raises(ValueError, match="threshold and fading"):
        OnlineIdentifier(fading=1.0)
