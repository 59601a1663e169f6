"""``plan`` in the PS's configuration: the trees as they stand, or what the planner makes of the same nodes."""

from typing import Any

import pytest

from inanet.config.daemons import PsConfig, Topology
from inanet.config.file import SeveralErrors

NODES: dict[str, Any] = {
    "aggregators": [{"name": "a0", "parent": "ps"}, {"name": "a1", "parent": "ps"}],
    "workers": [{"name": f"w{i}", "parent": f"a{i // 2}"} for i in range(4)],
}


@pytest.fixture(autouse=True)
def defaults(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement of the machine that the test runs on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def section(**keys: Any) -> Topology:
    return Topology.model_validate(NODES | keys)


def test_trees_stay_as_they_are_unless_asked() -> None:
    fabric = section().fabric("ps")
    assert fabric.aggregators == {"a0": "ps", "a1": "ps"}
    assert fabric.workers["w2"] == ("a1",)


def test_a_flat_plan_leaves_the_aggregators_out() -> None:
    fabric = section(plan="ps").fabric("ps")
    assert (fabric.roots, fabric.aggregators) == (("ps",), {})
    assert set(fabric.workers.values()) == {("ps",)}


def test_shards_make_roots_of_aggregators_and_the_ps_stays_first() -> None:
    fabric = section(plan="sharded", rate="1 Gbit/s", rates={"a0": "2 Gbit/s"}).fabric("ps")
    # a0 is faster, but the PS coordinates, so its name comes first
    assert fabric.roots == ("ps", "a0", "a1")
    assert set(fabric.workers.values()) == {("ps", "a0", "a1")}


def test_a_tree_is_xaggs_over_the_same_nodes() -> None:
    fabric = section(plan="tree").fabric("ps")
    assert set(fabric.aggregators) == {"a0", "a1"}
    assert fabric.roots == ("ps",)


def test_auto_takes_the_cheapest_by_the_rates() -> None:
    equal = section(plan="auto", rate="1 Gbit/s").selection("ps")
    assert equal.plan.kind == "sharded"
    assert "a ring without a fabric" not in equal.reason
    fast = section(plan="auto", rate="1 Gbit/s", rates={"ps": "4 Gbit/s", "a0": "100 Mbit/s"}).selection("ps")
    assert fast.plan.kind in ("ps", "configured")
    slow = section(plan="auto", rate="1 Gbit/s", rates={"ps": "100 Mbit/s"}).selection("ps")
    assert "a ring without a fabric would take" in slow.reason


def test_what_is_not_possible_is_said() -> None:
    alone: dict[str, Any] = {"workers": [{"name": "w0", "parent": "ps"}], "plan": "sharded"}
    lonely = Topology.model_validate(alone)
    with pytest.raises(SeveralErrors, match="plan = 'sharded' is not possible with 1 workers and 1 servers"):
        lonely.fabric("ps")
    with pytest.raises(SeveralErrors, match="there is no node 'a9'"):
        section(plan="auto", rates={"a9": "1 Gbit/s"}).fabric("ps")
    with pytest.raises(ValueError, match="not possible"):
        PsConfig.model_validate({"node": {"name": "ps"}, "topology": alone})
