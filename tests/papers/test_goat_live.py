"""GOAT's testbed with real daemons: the network that it runs in, and what is made of the numbers."""

import pytest

from inanet.coordinator.goat.fabric import ways
from inanet.papers.goat_live import PLUGS, Run, judge, links, planned, topology


def test_every_bridge_has_a_switch_beside_it_and_everybody_a_way_to_the_ps() -> None:
    its = topology()
    hosts = {host.name: host for host in its.hosts()}
    assert {name: hosts[name].switch for name in PLUGS} == PLUGS
    parents = ways([(one, other) for one, other in links(its)], "ps", set(PLUGS))
    assert {name: parents[name] for name in PLUGS} == {"x1": "ps", "x2": "x1", "x3": "x1"}
    assert [parents[f"w{index}"] for index in range(8)] == ["x2"] * 4 + ["x3"] * 4
    # a worker and its ina-switch are on one bridge: only trunks lie between the switches
    assert all(hosts[f"w{index}"].switch == PLUGS[parents[f"w{index}"]] for index in range(8))
    assert hosts["x1"].link.rate > 8 * its.link.rate


def run(added: float, sums: dict[str, int]) -> Run:
    return Run(added, 2 * added, 0.1, sums, 0.01)


def test_claims_are_judged_by_what_the_ps_added_and_say_why_they_do_not_hold() -> None:
    three = {"x1": 5, "x2": 6, "x3": 7}
    others = {"ESA": run(1e5, {"x1": 9}), "ATP": run(1e5, {"x1": 9}), "Geryon": run(8e5, {})}
    schedule = planned()
    good = judge({"GOAT": run(1e5 * schedule.copies, three), **others})
    assert [claim.ours for claim in good.claims] == [pytest.approx(schedule.reduction)] * 2 + [3]
    assert [claim.holds for claim in good.claims] == [False, True, True]
    assert "GINA minimises" in good.claims[0].reason
    least = judge({"GOAT": run(1e5, three), **others})
    assert [claim.holds for claim in least.claims] == [True, False, True]
    assert not least.claims[0].reason
    bad = judge({"GOAT": run(3e5, {**three, "x2": 0}), **others})
    assert not any(claim.holds for claim in bad.claims)
    assert len(good.tables[0].rows) == 4


def test_the_schedule_trades_the_ps_load_for_links() -> None:
    schedule = planned()
    # two sums of what both racks sum, everybody's of what nobody does, one of the rest
    rest = schedule.parts - schedule.doubled - schedule.direct
    assert schedule.copies * schedule.parts == 2 * schedule.doubled + 8 * schedule.direct + rest
    assert 1 < schedule.copies < 2
    # memory would allow one switch for each, at a higher cost
    assert schedule.cost < schedule.single
