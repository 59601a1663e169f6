"""Daemons of a lab as a plan has them, and a topology as the planner sees it."""

import math
import tomllib
from pathlib import Path

import pytest

from inanet.lab.credentials import prepare
from inanet.lab.fabric import Place, configurations, daemons
from inanet.lab.library import topology
from inanet.lab.network import configured, fleet, network, shorthand
from inanet.planning.candidates import candidates
from inanet.planning.plans import Plan


def colocated(name: str) -> Plan:
    found = candidates(fleet(topology(name), 1 << 20))
    return next(plan for plan in found if plan.kind == "colocated")


def test_a_topologys_roles_are_its_daemons_unless_there_is_a_plan() -> None:
    two = topology("star4-two-aggregators")
    assert daemons(two)["ps0"] == Place("ps", "ps0")
    assert daemons(two)["ps1"] == Place("agg", "ps1")
    planned = daemons(two, colocated("star4-two-aggregators"))
    assert planned["w0-agg"] == Place("ps", "w0")
    assert planned["w3-agg"] == Place("agg", "w3")
    assert planned["w3"] == Place("worker", "w3")
    assert "ps0" not in planned


def test_aggregators_beside_workers_are_configured_on_their_hosts(tmp_path: Path) -> None:
    plan = colocated("star2")
    prepare(tmp_path, {name: place.role for name, place in daemons(topology("star2"), plan).items()})
    texts = configurations(topology("star2"), tmp_path, plan=plan, negotiate=True)
    files = {name: tomllib.loads(text) for name, text in texts.items()}
    assert set(files) == {"w0", "w1", "w0-agg", "w1-agg"}
    coordinator = files["w0-agg"]
    host = files["w0"]["node"]["listen"].partition(":")[0]
    assert coordinator["node"]["listen"].partition(":")[0] == host
    assert coordinator["control"]["listen"] == files["w1"]["control"]["coordinator"] == f"{host}:7400"
    assert coordinator["control"]["downlink"] == plan.downlink
    for name in files:
        assert (files[name]["node"]["rate_negotiation"], files[name]["node"]["rate"]) == (True, "1 Gbit/s")
    assert coordinator["topology"]["roots"] == ["w0-agg", "w1-agg"]


def test_a_topology_file_becomes_links_and_servers() -> None:
    racks = topology("two-rack")
    net = network(racks)
    assert net.limits()["trunk", "tor0", "tor1"] == 500e6
    assert net.path("wa0", "wb0") == (("up", "wa0"), ("trunk", "tor0", "tor1"), ("down", "wb0"))
    hosts = fleet(racks, 1 << 20)
    assert [server.name for server in hosts.servers] == ["ps", "agg0", "agg1"]
    assert hosts.servers[1].bandwidth == 2e9
    (tree,) = configured(racks)
    assert tree.parents["wa0"] == "agg0"
    late = fleet(topology("xagg-fig1"), 1 << 20).late
    # two transmission times of an unhindered worker, 1 Gbit/s
    assert late["w3"] == pytest.approx(2 * 1024 * 1094 * 8 / 1e9)
    assert late["w1"] == 0.0


def test_a_shorthand_is_a_star() -> None:
    found = shorthand("2x1Gbit/s+1x10 Gbit/s")
    assert found is not None
    assert found.workers == ("w0", "w1")
    assert found.network.limits()["down", "s0"] == 10e9
    assert all(math.isfinite(rate) for rate in found.network.limits().values())
    assert shorthand("star4") is None
    assert shorthand("8x1Gbit.toml") is None
