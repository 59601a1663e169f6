"""Who gets which multicast group: views of parent and children agree, groups are never shared, and go with their job."""

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from inanet.config.daemons import MODELS, PsConfig
from inanet.config.file import ConfigError, validate
from inanet.coordinator.job_plan import JobPlan
from inanet.coordinator.multicast_groups import Groups
from inanet.coordinator.receive_buffers import Destination
from inanet.messages.control import Leave
from inanet.planning.topology import Topology
from inanet.proto.common.plan import NodePlan
from inanet.wire.endpoint import address_of, show
from tests.coordinator.nodes import JOB, Nodes, two_level

RANGE = IPv4Network("239.192.0.0/14")
TWO_TREES = Topology(
    roots=("ps", "ps2"),
    aggregators={"a0": "ps", "b0": "ps2"},
    workers={"w0": ("a0", "b0"), "w1": ("a0", "b0"), "w2": ("ps", "b0"), "w3": ("ps", "ps2")},
)


def views(plan: JobPlan, unable: set[str]) -> dict[str, NodePlan]:
    return {
        name: plan.view(name, lambda other: Destination(100, 10, other not in unable))
        for name in plan.nodes()
    }


def sent_and_heard(plans: dict[str, NodePlan]) -> dict[tuple[int, str], tuple[int, set[str], set[str]]]:
    """By tree and parent: its group, the children it counts on, and those that were told to join."""
    found = {}
    for name, plan in plans.items():
        for place in plan.placements:
            if not place.children:
                assert place.group == 0
                continue
            hearing = {
                child
                for child, its in plans.items()
                for p in its.placements
                if p.tree == place.tree and p.parent and p.parent.name == name and p.parent.group
            }
            heard = {
                p.parent.group
                for c in hearing
                for p in plans[c].placements
                if p.tree == place.tree and p.parent
            }
            assert heard in (set(), {place.group})
            found[place.tree, name] = (place.group, {c.name for c in place.children if c.joins}, hearing)
    return found


@pytest.mark.parametrize("unable", [set(), {"w1"}, {"w2", "ps2"}, {"a0"}, set(TWO_TREES.workers)])
@pytest.mark.parametrize("probe", [False, True])
def test_parents_and_children_agree(unable: set[str], probe: bool) -> None:
    groups = Groups(RANGE, 7401)
    plan = JobPlan(
        7, 99, 4, TWO_TREES.ancestors, group_of=lambda tree, name: groups.of(7, 99, tree, name), probe=probe
    )
    for absent in (set(), {"a0"}, set()):
        plan.advance(TWO_TREES.trees(TWO_TREES.workers, absent), quiet=True)
        plans = views(plan, unable)
        found = sent_and_heard(plans)
        for (_, parent), (group, counted, hearing) in found.items():
            assert counted == hearing
            assert hearing.isdisjoint(unable)
            # one listener alone is better served by unicast
            assert (group == 0) == (len(hearing) == 0)
            assert len(hearing) != 1
            assert parent not in unable or group == 0
        used = [group for group, _, _ in found.values() if group]
        assert len(set(used)) == len(used)
        assert {address_of(group)[1] for group in used} <= {7401}
        assert all(
            place.probe == (probe and place.group != 0) for p in plans.values() for place in p.placements
        )
    assert used or unable


def test_unicast_names_no_groups() -> None:
    plan = JobPlan(7, 99, 4, TWO_TREES.ancestors)
    plan.advance(TWO_TREES.trees(TWO_TREES.workers))
    assert {entry[0] for entry in sent_and_heard(views(plan, set())).values()} == {0}


def test_groups_are_in_range_kept_and_never_given_twice() -> None:
    groups = Groups(IPv4Network("239.1.2.0/29"), 5000)
    given = {(job, name): groups.of(job, job * 77, 0, name) for job in (1, 2) for name in "abcd"}
    assert len(set(given.values())) == 8
    assert {show(group).rpartition(".")[0] for group in given.values()} == {"239.1.2"}
    # none is left: unicast
    assert groups.of(3, 5, 0, "a") == 0
    assert groups.of(1, 77, 0, "c") == given[1, "c"]
    groups.withdraw(1)
    assert groups.of(3, 5, 0, "a") in {group for (job, _), group in given.items() if job == 1}
    assert groups.of(2, 154, 0, "d") == given[2, "d"]
    # a coordinator that starts again comes to the same
    assert Groups(RANGE, 7401).of(1, 7, 0, "a") == Groups(RANGE, 7401).of(1, 7, 0, "a")
    assert Groups(RANGE, 7401).of(1, 7, 0, "a") != Groups(RANGE, 7401).of(1, 8, 0, "a")


@pytest.mark.parametrize("downlink", ["multicast", "auto", "unicast"])
def test_a_job_through_the_coordinator(downlink: str) -> None:
    nodes = Nodes(two_level(4, 2), downlink=downlink)  # type: ignore[arg-type]
    nodes.join("ps", "a0", "a1", "w0", "w1", "w2", "w3", groups=True)
    before = sent_and_heard(nodes.plans)
    assert all((group != 0) == (downlink != "unicast") for group, _, _ in before.values())
    assert {place.probe for plan in nodes.plans.values() for place in plan.placements if place.children} == {
        downlink == "auto"
    }
    nodes.kill("a0")
    after = sent_and_heard(nodes.plans)
    assert after.keys() == {(0, "ps"), (0, "a1")}
    assert {key: after[key][0] for key in after} == {key: before[key][0] for key in after}
    if downlink != "unicast":
        assert after[0, "ps"][2] == {"a1", "w0", "w2"}
    given = nodes.coordinator._admission.groups._given
    assert {key[0] for key in given} == ({JOB} if downlink != "unicast" else set())
    for name in ("w0", "w1", "w2", "w3"):
        nodes.say(name, Leave())
    assert not given


def test_nodes_that_cannot_multicast_are_served_by_unicast() -> None:
    nodes = Nodes(two_level(3, 0), downlink="multicast")  # type: ignore[arg-type]
    nodes.join("ps", "w0", groups=True)
    nodes.join("w1")
    nodes.join("w2", groups=True)
    group, counted, hearing = sent_and_heard(nodes.plans)[0, "ps"]
    assert group != 0
    assert counted == hearing == {"w0", "w2"}


def ps(**sections: dict[str, object]) -> PsConfig:
    topology = {"workers": [{"name": "w0", "parent": "ps"}]}
    data = {"node": {"name": "ps"}, "topology": topology, **sections}
    config = validate(MODELS["ps"], data, Path("ps.toml"))
    assert isinstance(config, PsConfig)
    return config


def test_configuration() -> None:
    control = ps().control
    assert (control.downlink, control.group_range, control.group_port) == ("unicast", RANGE, 7401)
    control = ps(control={"downlink": "auto", "group_range": "239.1.0.0/16", "group_port": 9000}).control
    assert (control.downlink, str(control.group_range), control.group_port) == ("auto", "239.1.0.0/16", 9000)
    for transport in ("rawip", "tun"):
        node = {"name": "ps", "transport": transport}
        assert ps(node=node, control={"downlink": "auto"}).control.downlink == "auto"
        with pytest.raises(
            ConfigError, match=f"downlink is multicast and node.transport is {transport}, which"
        ):
            ps(node=node, control={"downlink": "multicast"})


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("downlink", "broadcast", "allowed: 'multicast', 'unicast' or 'auto'"),
        (
            "group_range",
            "10.0.0.0/8",
            r"allowed: a part of 239\.0\.0\.0/8, e\.g\. '239\.192\.0\.0/14'",
        ),
        ("group_range", "224.0.0.0/4", "is not a range of multicast groups for private use"),
        ("group_range", "239.192.0.1/14", "is not a range of multicast groups for private use"),
        ("group_range", 5, "is not a range of multicast groups for private use"),
        ("group_port", 0, "group_port: 0 is not allowed"),
        ("group_port", 65536, "group_port: 65536 is not allowed"),
    ],
)
def test_what_makes_no_sense_is_refused(key: str, value: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ps(control={key: value})
