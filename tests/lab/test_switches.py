"""ina-switch in labs: networks without bridges, and what each switch is told of a ring."""

import tomllib
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network

import pytest

from inanet.client.ringhost import ring_of
from inanet.config.file import ConfigError
from inanet.lab import library
from inanet.lab.layout import (
    Bridge,
    Interface,
    Route,
    addresses,
    alias,
    operations,
    ports,
    switch_addresses,
)
from inanet.lab.model import Topology
from inanet.lab.network import network
from inanet.lab.switches import NoSpine, configurations, ring_entry
from inanet.proto.netreduce.ring import Sizes
from tests.lab.conftest import PAIR


def entry_of(topology: Topology, addresses: list[str]) -> dict[str, object]:
    hosts = [host.name for host in topology.workers()]
    return ring_entry(topology, 1, hosts, ring_of(addresses), Sizes()).model_dump(mode="json")


def test_the_ports_of_an_ina_switch_belong_to_no_bridge(pair: Topology) -> None:
    spliced = pair.with_switches("ina")
    plan = operations(spliced, "x")
    assert not [one for one in plan if isinstance(one, Bridge)]
    assert {one.master for one in plan if isinstance(one, Interface)} == {None}
    assert ports(spliced, "s0") == ["ps", "w0", "w1"]
    assert (switch_addresses(spliced), switch_addresses(pair)) == ({"s0": "10.201.0.200"}, {})
    # the same cables, addresses and shapers
    kinds = (Bridge, Interface)
    assert [one for one in plan if not isinstance(one, kinds)] == [
        one for one in operations(pair, "x") if not isinstance(one, kinds)
    ]
    # groups go everywhere, and the planner reckons with it
    assert network(spliced).flooding
    assert spliced.with_switches("bridge") == pair


def test_further_placesof_hosts_are_nobody_elses() -> None:
    assert [alias("10.201.0.64", number) for number in (1, 2)] == ["10.201.0.128", "10.201.0.192"]
    with pytest.raises(ValueError, match="no 3"):
        alias("10.201.0.1", 3)


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        ('name = "s0"', 'name = "s0"\nkind = "ina"\nsnooping = false', "neither snooping nor querier"),
        ('summary = "for tests"', 'summary = ""\nfabric = "routed"', "switch 's0' is ina-switch"),
    ],
)
def test_what_an_ina_switch_cannot_be_is_refused(
    parse: Callable[[str], Topology], was: str, becomes: str, says: str
) -> None:
    text = PAIR.replace("[[switch]]\n", '[[switch]]\nkind = "ina"\n') if "fabric" in becomes else PAIR
    with pytest.raises(ConfigError, match=says):
        parse(text.replace(was, becomes, 1))


def test_every_switch_of_several_racks_has_the_same_ring_and_an_address_of_its_own() -> None:
    topology = library.topology("ring-racks")
    addresses = [f"10.201.0.{65 + rank}" for rank in range(4)]
    entry = entry_of(topology, addresses)
    assert entry["spine"] == "10.201.0.200"
    assert entry["racks"] == [
        {"switch": "10.201.0.201", "hosts": addresses[:2]},
        {"switch": "10.201.0.202", "hosts": addresses[2:]},
    ]
    hosts = [host.name for host in topology.workers()]
    rings = [ring_entry(topology, 1, hosts, ring_of(addresses), Sizes())]
    written = {name: tomllib.loads(text)["switch"] for name, text in configurations(topology, rings).items()}
    assert {name: one["address"] for name, one in written.items()} == {
        "spine": "10.201.0.200",
        "leaf0": "10.201.0.201",
        "leaf1": "10.201.0.202",
    }
    assert [port["name"] for port in written["leaf1"]["ports"]] == ["wb0", "wb1", "spine"]
    assert written["spine"]["rings"] == written["leaf0"]["rings"] == written["leaf1"]["rings"]


def test_one_switch_is_all_there_is_to_a_ring_on_it() -> None:
    entry = entry_of(library.topology("ring4"), [f"10.201.0.{65 + rank}" for rank in range(4)])
    assert (entry["spine"], entry["racks"]) == (None, [])


def test_a_route_leads_rings_through_a_server_beside_the_switch(parse: Callable[[str], Topology]) -> None:
    topology = library.topology("ring-detour")
    plan = operations(topology, "x")
    for host in ("w0", "w1", "w2"):
        assert Route(f"ina.x.{host}", "10.201.0.64/26", ("10.201.0.201",)) in plan
    # where rings have their addresses, and nobody else
    ring = IPv4Network("10.201.0.64/26")
    places = addresses(topology)
    assert all(IPv4Address(alias(one, 1)) in ring for one in places.values())
    assert not any(IPv4Address(one) in ring for one in places.values())
    assert Bridge("ina.x.s0", "sw-bridge", True, True) in plan
    entry = entry_of(topology, [alias(one, 1) for one in places.values()])
    assert (entry["spine"], len(entry["connections"])) == (None, 3)  # type: ignore[arg-type]
    # in a lab of bridges they are neighbours again
    assert not [
        one
        for one in operations(topology.with_switches("bridge"), "x")
        if one in plan and "64/26" in str(one)
    ]
    with pytest.raises(ConfigError, match="detour is 's0'; allowed: a switch of kind 'ina'"):
        parse(PAIR.replace('name = "pair"', 'name = "pair"\ndetour = "s0"'))


def test_racks_without_a_switch_above_them_are_refused() -> None:
    topology = library.topology("two-rack").with_switches("ina")
    with pytest.raises(NoSpine, match="on tor0, tor1, and there is no other switch with a trunk to each"):
        entry_of(topology, [f"10.201.0.{65 + rank}" for rank in range(8)])
