"""The planner's prices against section 5's arithmetic, and what it advises, also where that is a ring."""

from pathlib import Path

import pytest

from inanet.config.daemons import Topology as Section
from inanet.planning.candidates import Fleet, candidates
from inanet.planning.costs import Costs, cache_file, load, save
from inanet.planning.network import Network, Port
from inanet.planning.plans import Plan, beside, star, tree_of
from inanet.planning.prices import FRAGMENT, SEGMENT, UNHIDDEN, choose, price
from inanet.planning.trees import Server

GBPS = 1e9
SIZE = 100 * 1024 * 1024
#: what a tensor takes at 1 Gbit/s, as fragments
TENSOR = SIZE * FRAGMENT * 33 / 32 * 8 / GBPS
#: next to no costs: the links alone
FREE = Costs(1, 1, 1, 1, 1e-9, 1e-9, 1e-9)


def fleet(
    workers: int = 4,
    servers: dict[str, float] | None = None,
    *,
    late: dict[str, float] | None = None,
    colocate: bool = False,
    cores: int | None = None,
    routed: bool = False,
) -> Fleet:
    """A star of workers with 1 Gbit/s and servers with their own rates."""
    servers = {"ps": 1.0} if servers is None else servers
    names = tuple(f"w{i}" for i in range(workers))
    ports = {name: Port("s", GBPS, GBPS) for name in names}
    ports |= {name: Port("s", rate * GBPS, rate * GBPS) for name, rate in servers.items()}
    able = tuple(Server(name, rate * GBPS, 64, 1 << 40) for name, rate in servers.items())
    return Fleet(Network(ports, {}, routed=routed), names, able, late or {}, (), cores, colocate)


def test_a_ring_moves_twice_n_minus_1_over_n() -> None:
    for n in (2, 4, 8):
        found = price(Plan("ring", "ring"), fleet(n), SIZE, FREE)
        assert found.seconds == pytest.approx(2 * (n - 1) / n * SIZE * SEGMENT * 8 / GBPS)
    assert price(Plan("ring", "ring"), fleet(1), SIZE, FREE).seconds == 0.0


def test_a_late_rank_holds_the_whole_ring() -> None:
    found = price(Plan("ring", "ring"), fleet(4, late={"w2": 2.0}), SIZE, FREE)
    assert found.seconds == pytest.approx(2.0 + 1.5 * SIZE * SEGMENT * 8 / GBPS, rel=0.01)
    assert "late" in found.bound


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_ps_takes_n_tensors_and_a_fast_one_takes_one(n: int) -> None:
    plan = Plan("ps", "ps", (star(0, "ps", [f"w{i}" for i in range(n)]),))
    slow = price(plan, fleet(n), SIZE, FREE)
    fast = price(plan, fleet(n, {"ps": float(n)}), SIZE, FREE)
    assert slow.links == pytest.approx(n * TENSOR)
    assert fast.links == pytest.approx(TENSOR)
    assert slow.bound == f"{n} tensors into ps at 1 Gbit/s"


def test_processors_count_where_links_do_not() -> None:
    plan = Plan("ps", "ps", (star(0, "ps", ["w0", "w1"]),))
    costs = Costs(2000, 1000, 500, 0, 0, 0, 0)
    fragments = SIZE / 1024
    alone = price(plan, fleet(2, {"ps": 1000.0}), SIZE, costs)
    # two contributions and two copies of the result take longer than a worker's own part
    assert alone.processors == pytest.approx(fragments * (2 * 1000 + 2 * 500) * 1e-9)
    shared = price(plan, fleet(2, {"ps": 1000.0}, cores=2), SIZE, costs)
    assert shared.processors == pytest.approx(fragments * (2 * 2000 + 3000) * 1e-9 / 2)
    # nodes that share cores keep each other's links waiting
    assert alone.seconds == pytest.approx(max(alone.links, alone.processors) + alone.latency)
    assert shared.seconds == pytest.approx(
        max(shared.links, shared.processors)
        + UNHIDDEN * min(shared.links, shared.processors)
        + shared.latency
    )
    tree = tree_of(0, "ps", {"w0": "agg", "w1": "agg", "agg": "ps"})
    deep = price(Plan("tree", "tree", (tree,)), fleet(2, {"ps": 1000.0, "agg": 1000.0}, cores=2), SIZE, costs)
    assert deep.seconds == pytest.approx(deep.links + deep.processors + deep.latency)
    many = price(plan, fleet(2, {"ps": 1000.0}), SIZE, Costs(20_000, 0, 0, 0, 0, 0, 0))
    assert many.bound.startswith("processors:")
    assert many.seconds > many.processors


def kinds(found: list[Plan]) -> set[str]:
    return {plan.kind for plan in found}


def test_candidates_cover_what_the_design_lists() -> None:
    everything = candidates(fleet(8, {f"p{i}": 1.0 for i in range(6)}, colocate=True))
    assert kinds(everything) == {"ring", "ps", "sharded", "colocated", "mixed", "tree", "sharded-tree"}
    names = [plan.name for plan in everything]
    assert len(set(names)) == len(names)
    assert {plan.downlink for plan in everything if plan.kind == "sharded"} == {"unicast", "multicast"}
    assert [len(plan.trees) for plan in everything if plan.kind == "sharded"][::2] == [2, 3, 4, 5, 6]
    assert kinds(candidates(fleet(4, {}))) == {"ring"}


def test_few_servers_get_as_many_children_as_it_takes() -> None:
    found = candidates(fleet(64, {f"p{i}": 10.0 for i in range(4)}))
    (tree,) = next(plan.trees for plan in found if plan.kind == "tree")
    # three under the fourth; two would leave more at the root than it can have
    assert [len(tree.children[name]) for name in tree.children] == [3, 22, 22, 20]


def test_multicast_is_no_candidate_where_it_does_not_get_through() -> None:
    found = candidates(fleet(4))
    assert [plan.downlink for plan in found if plan.kind == "ps"] == ["unicast", "multicast"]
    apart = fleet(4, routed=True)
    ports = dict(apart.network.ports) | {"w3": Port("t", GBPS, GBPS)}
    split = Fleet(
        Network(ports, {("s", "t"): GBPS}, routed=True), apart.workers, apart.servers, colocate=False
    )
    assert [plan.downlink for plan in candidates(split) if plan.kind == "ps"] == ["unicast"]


def test_racks_with_a_thin_uplink_get_a_server_each() -> None:
    ports = {f"w{i}": Port("ab"[i // 2], GBPS, GBPS) for i in range(4)}
    ports |= {"x": Port("a", 4 * GBPS, 4 * GBPS), "y": Port("b", 4 * GBPS, 4 * GBPS)}
    servers = tuple(Server(name, 4 * GBPS, 64, 1 << 40) for name in "xy")
    net = Network(ports, {("a", "b"): 0.25 * GBPS})
    choice = choose(Fleet(net, ("w0", "w1", "w2", "w3"), servers), SIZE, FREE)
    assert choice.chosen.plan.kind == "racks"
    assert choice.chosen.links == pytest.approx(4 * TENSOR)


def test_one_equal_server_is_no_reason_against_a_ring() -> None:
    choice = choose(fleet(4), SIZE, FREE)
    assert not choice.helps
    assert choice.chosen is choice.ring
    assert choice.reasons[0].startswith("use ring: no plan with aggregation")
    # links would do, processors do not: that is what is said
    slow = choose(fleet(4, {"ps": 4.0}), SIZE, Costs(worker_ns=9000.0, sum_ns=9000.0, result_ns=9000.0))
    assert not slow.helps
    assert "moves less through the busiest link, but takes" in slow.reasons[0]
    assert "of a ring; it is bound by processors: " in slow.reasons[0]


def test_a_gain_within_the_margin_is_not_worth_it() -> None:
    # as many bytes as a ring, and 1.6 % less where the server's rate makes it so
    ring = choose(fleet(4), SIZE, FREE).ring.seconds
    rate = 4 * TENSOR / (ring * 0.984)
    choice = choose(fleet(4, {"ps": rate}), SIZE, FREE)
    assert not choice.helps
    assert "gains 1.6%, less than 5%" in choice.reasons[0]


def test_a_fast_server_shards_and_lateness_are_worth_it() -> None:
    fast = choose(fleet(4, {"ps": 4.0}), SIZE, FREE)
    assert (fast.chosen.plan.kind, fast.chosen.links) == ("ps", pytest.approx(TENSOR))
    four = choose(fleet(4, {f"p{i}": 1.0 for i in range(4)}), SIZE, FREE)
    assert (four.chosen.plan.kind, four.chosen.links) == ("sharded", pytest.approx(TENSOR))
    late = choose(fleet(4, {"ps": 1.0, "s": 1.0}, late={"w3": 2.0}), SIZE, FREE)
    assert late.helps
    assert late.chosen.seconds < late.ring.seconds


def test_the_mode_is_named_with_its_price() -> None:
    fast = choose(fleet(4, {"ps": 4.0}), SIZE, FREE)
    assert fast.chosen.mode == "prologue"
    assert fast.reasons[-1].startswith("mode prologue: exact exponents take 3.1% more bytes; without them")
    # a slow server takes the others' data while the last worker is late, or has all of it then
    late = fleet(4, {"ps": 1.0, "s": 1.0}, late={"w3": 2.0})
    plan = Plan("ps", "ps", (star(0, "ps", [f"w{i}" for i in range(4)]),), "multicast")
    assert price(plan, late, SIZE, FREE).mode == "carried"
    assert price(plan, fleet(4, {"ps": 1.0}, late={"w3": 0.001}), SIZE, FREE).mode == "prologue"
    chosen = choose(late, SIZE, FREE)
    assert (chosen.chosen.mode, chosen.ring.mode) == ("carried", "")
    assert chosen.reasons[-1].startswith("mode carried: w3 has its tensor 2.000 s late, and with exact")


def test_ten_percent_of_communication_is_the_least() -> None:
    free = choose(fleet(4, {"ps": 4.0}), SIZE, FREE)
    assert choose(fleet(4, {"ps": 4.0}), SIZE, FREE, compute=8 * free.ring.seconds).helps
    stays = choose(fleet(4, {"ps": 4.0}), SIZE, FREE, compute=9.5 * free.ring.seconds)
    assert not stays.helps
    assert "less than 10%" in stays.reasons[0]


def test_a_choice_is_never_dearer_than_a_ring() -> None:
    for workers in (1, 2, 5, 8):
        for servers in ({}, {"a": 1.0}, {"a": 10.0, "b": 2.0, "c": 1.0}):
            choice = choose(fleet(workers, servers, colocate=True), SIZE, Costs())
            assert choice.chosen.seconds <= choice.ring.seconds
            assert [p.seconds for p in choice.prices] == sorted(p.seconds for p in choice.prices)
    with pytest.raises(ValueError, match="no workers"):
        choose(fleet(0), SIZE, FREE)


def test_every_candidate_is_a_fabric_that_daemons_accept() -> None:
    for plan in candidates(fleet(5, {f"p{i}": 1.0 for i in range(5)}, colocate=True)):
        if plan.kind == "ring":
            with pytest.raises(ValueError, match="needs no fabric"):
                plan.config()
            continue
        section = Section.model_validate(plan.config()["topology"])
        fabric = section.fabric(plan.trees[0].root)
        trees = fabric.trees(fabric.workers)
        assert [dict(tree.parents) for tree in trees] == [dict(tree.parents) for tree in plan.trees]
        assert {plan.host(node) for node in plan.servers} <= {
            *(f"w{i}" for i in range(5)),
            *(f"p{i}" for i in range(5)),
        }


def test_aggregators_beside_workers_have_names_of_their_own() -> None:
    (plan, *_) = [p for p in candidates(fleet(3, colocate=True)) if p.kind == "colocated"]
    assert plan.host(beside("w1")) == "w1"
    assert plan.servers == ("w0-agg", "w1-agg", "w2-agg")


def test_costs_are_kept_and_damage_falls_back_to_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "inanet" / "costs.json"
    assert load() == Costs()
    costs = Costs(worker_ns=1000.0, sum_ns=500.0, result_ns=100.0, measured=True)
    assert load(save(costs)) == costs
    # one core sums 8192 bits in 600 ns
    assert costs.core_bps == pytest.approx(13.65e9, rel=1e-3)
    for text in ("", "[]", "{}", '{"schema": 1}', '{"schema": 2, "worker_ns": 1}'):
        cache_file().write_text(text)
        assert load() == Costs()
