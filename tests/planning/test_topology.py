"""Trees from configuration: everything wrong is said at once; a job gets the part of the fabric it needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from inanet.planning.topology import Topology, TopologyError, split

CHAIN = Topology(
    roots="ps",  # type: ignore[arg-type]
    aggregators={"top": "ps", "left": "top", "right": "top"},
    workers={"w0": ("left",), "w1": ("left",), "w2": ("right",), "w3": ("ps",)},
)


def test_a_tree_has_only_who_takes_part() -> None:
    (tree,) = CHAIN.trees(["w1", "w0", "w3"])
    assert tree.parents == {"w0": "left", "w1": "left", "left": "top", "top": "ps", "w3": "ps"}
    assert tree.children == {"left": ("w0", "w1"), "top": ("left",), "ps": ("top", "w3")}
    assert tree.nodes == ("ps", "top", "w3", "left", "w0", "w1")
    assert CHAIN.needed(["w0", "w3"]) == ("left", "ps", "top")


@pytest.mark.parametrize(
    ("absent", "parents"),
    [
        ({"left"}, {"w0": "top", "w2": "right", "right": "top", "top": "ps"}),
        ({"top"}, {"w0": "left", "left": "ps", "w2": "right", "right": "ps"}),
        ({"left", "top"}, {"w0": "ps", "w2": "right", "right": "ps"}),
        ({"left", "top", "right"}, {"w0": "ps", "w2": "ps"}),
    ],
)
def test_children_of_absent_nodes_move_to_the_next_one_up(absent: set[str], parents: dict[str, str]) -> None:
    (tree,) = CHAIN.trees(["w0", "w2"], absent)
    assert tree.parents == parents


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        Topology(
            roots=("ps", "ps2"),
            aggregators={"a": "b", "b": "c", "c": "b", "d": "w0", "e": "nobody", "ps": "ps2"},
            workers={"w0": ("a",), "w1": ("nowhere",), "w2": ("w0",)},
        )
    text = str(caught.value)
    for sentence in (
        "'ps' is a root and a aggregator",
        "aggregators b -> c -> b form a circle",
        "aggregator 'd' has parent 'w0', which is a worker",
        "aggregator 'e' has parent 'nobody', which does not exist",
        "worker 'w1' has parent 'nowhere', which does not exist",
        "worker 'w2' has parent 'w0', which is a worker",
    ):
        assert sentence in text


def test_a_worker_needs_one_parent_in_every_tree() -> None:
    with pytest.raises(ValidationError) as caught:
        Topology(
            roots=("p", "q"),
            aggregators={"a": "p"},
            workers={"w0": ("p",), "w1": ("p", "a", "q"), "w2": ("q", "a")},
        )
    assert "worker 'w0' has no parent in the tree of 'q'" in str(caught.value)
    assert "worker 'w1' has 2 parents in the tree of 'p'" in str(caught.value)
    assert "worker 'w2'" not in str(caught.value)


def test_two_trees_share_workers_but_not_aggregators() -> None:
    topology = Topology(
        roots=("p", "q"), aggregators={"a": "p"}, workers={"w0": ("q", "a"), "w1": ("p", "q")}
    )
    first, second = topology.trees(["w0", "w1"])
    assert (first.tree, first.root, first.parents) == (0, "p", {"w0": "a", "a": "p", "w1": "p"})
    assert (second.tree, second.root, second.parents) == (1, "q", {"w0": "q", "w1": "q"})
    assert topology.ancestors(0, "w0") == ("a", "p")


def test_the_33rd_child_is_refused_by_name() -> None:
    topology = Topology(
        roots=("ps",), aggregators={"a": "ps"}, workers={f"w{index:02d}": ("a",) for index in range(33)}
    )
    names = sorted(topology.workers)
    assert len(topology.trees(names[:32])[0].children["a"]) == 32
    with pytest.raises(TopologyError, match=r"'a' would have 33 children, at most 32 .* 'w32'"):
        topology.trees(names)


def test_moving_children_up_may_be_too_much_as_well() -> None:
    topology = Topology(
        roots=("ps",),
        aggregators={"a": "ps", "b": "ps"},
        workers={f"w{index:02d}": ("ab"[index % 2],) for index in range(40)},
    )
    with pytest.raises(TopologyError, match="'ps' would have 40 children"):
        topology.trees(topology.workers, {"a", "b"})


def test_unknown_workers_are_named() -> None:
    with pytest.raises(TopologyError, match="worker 'w9' is not in the topology"):
        CHAIN.trees(["w0", "w9"])


@given(st.integers(0, 1 << 33), st.integers(1, 40))
def test_shares_are_contiguous_and_even(count: int, trees: int) -> None:
    shares = split(count, trees)
    at = 0
    for first, size in shares:
        assert first == at
        at += size
    assert at == count
    assert max(size for _, size in shares) - min(size for _, size in shares) <= 1
