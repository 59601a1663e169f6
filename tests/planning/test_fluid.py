"""Times of plans on networks against arithmetic done by hand (section 5 of the design, XAgg's Fig. 1)."""

import math

import pytest

from inanet.planning.fluid import Stream, finish, streams
from inanet.planning.network import Network, Port
from inanet.planning.plans import Plan, star, tree_of

WORKERS = ["w0", "w1", "w2", "w3"]


def network(rates: dict[str, float], *, flooding: bool = False) -> Network:
    return Network({n: Port("s", 8 * rate, 8 * rate) for n, rate in rates.items()}, {}, flooding)


def time_of(plan: Plan, net: Network, size: float = 1.0, late: dict[str, float] | None = None) -> float:
    return finish(streams(plan, net, size, late or {}), net.limits())


def equal(n: int = 4, servers: int = 1) -> Network:
    return network({**{f"w{i}": 1.0 for i in range(n)}, **{f"p{i}": 1.0 for i in range(servers)}})


def test_a_ps_takes_n_tensors_through_its_link() -> None:
    for downlink in ("unicast", "multicast"):
        assert time_of(Plan("ps", "ps", (star(0, "p0", WORKERS),), downlink), equal()) == pytest.approx(4.0)


def test_a_faster_ps_takes_as_long_as_a_workers_link() -> None:
    fast = network({**dict.fromkeys(WORKERS, 1.0), "p0": 4.0})
    assert time_of(Plan("ps", "ps", (star(0, "p0", WORKERS),)), fast) == pytest.approx(1.0)


def test_shards_divide_the_load_of_the_servers() -> None:
    for count in (2, 4):
        trees = tuple(star(i, f"p{i}", WORKERS) for i in range(count))
        plan = Plan("sharded", "x", trees)
        assert time_of(plan, equal(servers=4)) == pytest.approx(4 / count)


def test_a_switch_that_floods_fills_the_ports_of_the_others() -> None:
    trees = tuple(star(i, f"p{i}", WORKERS) for i in range(4))
    flooded = network({**dict.fromkeys(WORKERS, 1.0), **{f"p{i}": 1.0 for i in range(4)}}, flooding=True)
    quiet = equal(servers=4)
    assert time_of(Plan("sharded", "x", trees, "multicast"), quiet) == pytest.approx(1.0)
    # a root gets its own shard four times and the results of three others: 7/4
    assert time_of(Plan("sharded", "x", trees, "multicast"), flooded) == pytest.approx(1.75)


def test_colocated_shards_move_as_many_bytes_as_a_ring() -> None:
    net = network(dict.fromkeys(WORKERS, 1.0))
    trees = tuple(star(i, f"{w}-agg", WORKERS) for i, w in enumerate(WORKERS))
    plan = Plan("colocated", "x", trees, hosts={f"{w}-agg": w for w in WORKERS})
    assert time_of(plan, net) == pytest.approx(2 * 3 / 4)


FIGURE_1 = {"w1": 1.0, "w2": 0.5, "w3": 1.0, "w4": 1.0, "s1": 1.0, "ps": 1.0}
LATE = {"w3": 2.0}


def test_figure_1_a_ps_takes_four_seconds() -> None:
    net = network(FIGURE_1)
    plan = Plan("ps", "ps", (star(0, "ps", ["w1", "w2", "w3", "w4"]),), "multicast")
    pushed = streams(plan, net, 1.0, LATE)[:4]
    assert finish(pushed, net.limits()) == pytest.approx(4.0)


def test_figure_1_the_tree_takes_three_seconds() -> None:
    net = network(FIGURE_1)
    parents = {"w1": "s1", "w2": "s1", "w3": "s1", "s1": "ps", "w4": "ps"}
    plan = Plan("configured", "xagg", (tree_of(0, "ps", parents),), "multicast")
    pushed = streams(plan, net, 1.0, LATE)[:5]
    assert finish(pushed, net.limits()) == pytest.approx(3.0)


def test_a_thin_uplink_is_crossed_once_with_an_aggregator_in_each_rack() -> None:
    ports = {
        "w0": Port("a", 8.0, 8.0),
        "w1": Port("a", 8.0, 8.0),
        "w2": Port("b", 8.0, 8.0),
        "w3": Port("b", 8.0, 8.0),
    }
    ports |= {name: Port("b" if name == "y" else "a", 80.0, 80.0) for name in ("ps", "x", "y")}
    net = Network(ports, {("a", "b"): 2.0})
    flat = Plan("ps", "ps", (star(0, "ps", WORKERS),))
    racks = Plan(
        "racks", "x", (tree_of(0, "ps", {"w0": "x", "w1": "x", "w2": "y", "w3": "y", "x": "ps", "y": "ps"}),)
    )
    assert time_of(flat, net) == pytest.approx(8.0)
    assert time_of(racks, net) == pytest.approx(4.0)
    assert net.path("w0", "w3") == (("up", "w0"), ("trunk", "a", "b"), ("down", "w3"))


def test_a_source_that_is_late_is_waited_for_and_then_caught_up_with() -> None:
    # 1 byte/s each; the sum's own link is faster than both
    flows = [
        Stream((("up", "a"),), 10.0),
        Stream((("up", "b"),), 10.0, ready=4.0),
        Stream((("up", "c"),), 10.0, follows=(0, 1)),
    ]
    limits = {("up", "a"): 8.0, ("up", "b"): 40.0, ("up", "c"): 16.0}
    # b sends from 4 to 6; a ends at 10, and what is made of both ends with it
    assert finish(flows, limits) == pytest.approx(10.0)
    assert finish(flows[:1], {}) == pytest.approx(0.0, abs=1e-6)
    assert math.isinf(Network({}, {("a", "b"): math.inf}).limits()["trunk", "a", "b"])


def test_equally_short_ways_share_flows() -> None:
    ports = {"h": Port("l0", 8.0, 8.0), "g": Port("l1", 8.0, 8.0)}
    net = Network(
        ports, dict.fromkeys([("l0", "s0"), ("l0", "s1"), ("l1", "s0"), ("l1", "s1")], 8.0), routed=True
    )
    ways = {net.path("h", "g", flow)[1] for flow in range(4)}
    assert ways == {("trunk", "l0", "s0"), ("trunk", "l0", "s1")}
    assert not net.reaches("h", ["g"])
    assert net.path("h", "h") == ()
