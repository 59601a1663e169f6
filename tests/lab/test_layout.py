"""Operations as data."""

from collections.abc import Callable

import pytest

from inanet.lab import library
from inanet.lab.layout import (
    BRIDGE,
    Bridge,
    Interface,
    Namespace,
    Operation,
    Route,
    Router,
    Shaper,
    Veth,
    addresses,
    namespace,
    operations,
)
from inanet.lab.model import Topology


def test_a_star(pair: Topology) -> None:
    plan = operations(pair, "x")
    assert [op for op in plan if isinstance(op, Namespace)] == [
        Namespace(f"ina.x.{node}") for node in ("s0", "ps", "w0", "w1")
    ]
    assert [op for op in plan if getattr(op, "name", None) == "ps"] == [
        Veth("ina.x.s0", "ps", "ina.x.ps", "eth0"),
        Interface("ina.x.s0", "ps", 1500, master=BRIDGE),
        Shaper("ina.x.s0", "ps", 800_000_000, 150_000, 0.01),
    ]
    assert [op for op in plan if op.namespace == "ina.x.w1"][1:] == [
        Interface("ina.x.w1", "eth0", 1500, address="10.201.0.3/24"),
        Shaper("ina.x.w1", "eth0", 400_000_000, 150_000, 0.02),
        Route("ina.x.w1", "224.0.0.0/4"),
    ]
    assert Bridge("ina.x.s0", BRIDGE, snooping=True, querier=True) in plan
    assert addresses(pair) == {"ps": "10.201.0.1", "w0": "10.201.0.2", "w1": "10.201.0.3"}


def test_each_direction_of_a_link_has_a_shaper_of_its_own() -> None:
    plan = [op for op in operations(library.topology("xagg-fig1-push"), "x") if isinstance(op, Shaper)]
    rates = {(op.namespace, op.name): op.rate for op in plan}
    assert (rates["ina.x.w2", "eth0"], rates["ina.x.sw", "w2"]) == (250_000_000, None)
    assert (rates["ina.x.ps", "eth0"], rates["ina.x.sw", "ps"]) == (None, 500_000_000)


def test_a_routed_fabric_spreads_flows_over_equal_paths() -> None:
    topology = library.topology("leaf-spine")
    plan = operations(topology, "x")
    leaf, spine = namespace("x", "leaf0"), namespace("x", "spine0")
    routes = [op for op in plan if isinstance(op, Route)]
    assert [op for op in routes if op.namespace == leaf] == [
        Route(leaf, "10.201.1.0/24", ("10.202.0.2", "10.202.0.6"))
    ]
    assert [op for op in routes if op.namespace == spine] == [
        Route(spine, "10.201.0.0/24", ("10.202.0.1",)),
        Route(spine, "10.201.1.0/24", ("10.202.0.9",)),
    ]
    assert Router(leaf) in plan
    places = addresses(topology)
    assert (places["ps"], places["agg1"]) == ("10.201.0.1", "10.201.1.1")
    assert Route(namespace("x", "agg1"), "0.0.0.0/0", ("10.201.1.254",)) in routes


@pytest.mark.parametrize("known", library.known())
def test_everything_stands_after_what_it_needs(known: str) -> None:
    plan = operations(library.topology(known), "x")
    spaces: set[str] = set()
    interfaces: set[tuple[str, str]] = set()
    for operation in plan:
        _require(operation, spaces, interfaces)
    ends = [(op.namespace, op.name) for op in plan if isinstance(op, Veth)]
    ends += [(op.peer_namespace, op.peer_name) for op in plan if isinstance(op, Veth)]
    shaped = [(op.namespace, op.name) for op in plan if isinstance(op, Shaper)]
    # both ends of every cable are shaped, each once
    assert sorted(ends) == sorted(shaped)
    assert len(set(ends)) == len(ends)


def _require(operation: Operation, spaces: set[str], interfaces: set[tuple[str, str]]) -> None:
    here = operation.namespace
    if isinstance(operation, Namespace):
        spaces.add(here)
        return
    assert here in spaces
    if isinstance(operation, Bridge):
        interfaces.add((here, operation.name))
    elif isinstance(operation, Veth):
        assert operation.peer_namespace in spaces
        new = {(here, operation.name), (operation.peer_namespace, operation.peer_name)}
        assert not new & interfaces
        interfaces |= new
    elif isinstance(operation, Interface | Shaper):
        assert (here, operation.name) in interfaces
        if isinstance(operation, Interface) and operation.master is not None:
            assert (here, operation.master) in interfaces


@pytest.mark.parametrize("known", library.known())
def test_names_fit_and_addresses_differ(known: str) -> None:
    topology = library.topology(known)
    for operation in operations(topology, "x"):
        # the kernel takes 15 characters for an interface
        assert len(getattr(operation, "name", "")) <= 15
        assert operation.namespace.startswith("ina.x.")
    places = list(addresses(topology).values())
    assert len(set(places)) == len(places)


def test_a_link_without_a_rate_is_not_shaped(parse: Callable[[str], Topology]) -> None:
    topology = parse(
        'name = "t"\nsummary = "s"\n[[switch]]\nname = "s0"\n[[host]]\nname = "w"\nswitch = "s0"\n'
    )
    assert {op.rate for op in operations(topology, "x") if isinstance(op, Shaper)} == {None}
