"""Whole fabrics whose aggregators have their slots in the kernel: the same bits, whatever is lost and whoever dies."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from inanet.proto.common.plan import ExponentMode
from inanet.proto.tree.control import Control
from inanet.proto.tree.groups import Groups
from inanet.proto.tree.links import Links
from inanet.proto.tree.rounds import Rounds
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.xdp.memory import Mode, SharedMemory
from inanet.xdp.slots import KernelSlots
from tests.proto.tree.test_impairment import ALL_FIVE, impaired
from tests.proto.tree.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of
from tests.xdp.virtual import KernelDevice, KernelFabric

pytestmark = pytest.mark.privileged("loads BPF programs")

COUNT = 256 * 200 + 77
Load = Callable[[int, int, Mode], SharedMemory]


@pytest.fixture
def load(root_needed: None) -> Iterator[Load]:
    """Memory of an aggregator at an endpoint, freed after the test."""
    with ExitStack() as stack:

        def make(capacity: int, endpoint: int, mode: Mode) -> SharedMemory:
            memory = SharedMemory(capacity, endpoint, mode)
            stack.callback(memory.close)
            return memory

        yield make


def rounds(fabric: VirtualFabric, mode: ExponentMode, count: int = 3) -> list[bytes]:
    """Results, equal on all workers; one rank outgrows its exponents in the last round."""
    results = []
    for round_ in range(count):
        arrays = float_arrays(COUNT, 4, seed=round_)
        if round_ == count - 1:
            arrays[2] *= 1000
        fabric.all_reduce(spec_of(COUNT, mode=mode), arrays)
        assert len({array.tobytes() for array in arrays.values()}) == 1
        results.append(arrays[0].tobytes())
    return results


def forwarded(fabric: VirtualFabric) -> int:
    """Packets that programs have sent."""
    return sum(device.forwarded for device in fabric.devices.values() if isinstance(device, KernelDevice))


@pytest.mark.parametrize(
    ("parents", "mode", "shares"),
    [
        (TREE, ExponentMode.CARRIED, {}),
        (TREE, ExponentMode.CARRIED, ALL_FIVE),
        (DEEP, ExponentMode.FIXED, ALL_FIVE),
    ],
    ids=["clean tree", "impaired tree", "impaired deep"],
)
def test_bits_do_not_depend_on_the_kernel(
    load: Load, parents: dict[str, str | None], mode: ExponentMode, shares: dict[str, object]
) -> None:
    fabric = KernelFabric(load, "native", parents, ONE_EACH, wrap=impaired(7, **shares))
    assert rounds(fabric, mode) == rounds(VirtualFabric(STAR, ONE_EACH), mode)
    fabric.settle()
    for name, node in fabric.nodes.items():
        if name.startswith("a"):
            stats = node.stats()
            # the kernel does the folding: user space opens rounds and does what is rare
            assert stats["xdp_contributions_in"] > 0.5 * stats["contributions_in"]
            assert stats["xdp_forwarded"] > 0.5 * stats["fragments_completed"]
    assert forwarded(fabric) > 100


def test_most_is_forwarded_by_the_kernel_whatever_has_to_be_repaired(load: Load) -> None:
    """Small windows and losses: user space has to send part of it, and the kernel gets the rest back at once."""
    spec = spec_of(256 * 900, mode=ExponentMode.CARRIED)
    fabric = KernelFabric(load, "native", TREE, ONE_EACH, window=128, wrap=impaired(3, **ALL_FIVE))
    for round_ in range(2):
        fabric.all_reduce(spec, float_arrays(256 * 900, 4, seed=round_))
    fabric.settle()
    for name in ("a0", "a1"):
        stats = fabric.nodes[name].stats()
        assert stats["fragments_completed"] > 1800
        assert stats["xdp_forwarded"] > 0.75 * stats["fragments_completed"]
        assert stats["xdp_contributions_in"] > 0.95 * stats["contributions_in"]


def test_results_go_to_a_group_without_user_space(load: Load) -> None:
    fabric = KernelFabric(load, "native", TREE, ONE_EACH, downlink="multicast", wrap=impaired(7, **ALL_FIVE))
    assert rounds(fabric, ExponentMode.CARRIED) == rounds(VirtualFabric(STAR, ONE_EACH), ExponentMode.CARRIED)
    fabric.settle()
    for name in ("a0", "a1"):
        stats = fabric.nodes[name].stats()
        assert stats["results_multicast"] >= stats["xdp_broadcast"] > 0.75 * stats["results_in"]
        # a child that lacks one gets what is its own
        assert stats["repairs_unicast"] > 0
    # and so does one that sends something again, which is rare
    assert sum(fabric.nodes[name].stats()["xdp_answered"] for name in ("a0", "a1")) > 0


def test_the_gate_is_closed_for_the_engine_and_not_for_what_follows(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is closed, all that comes is user space's: nothing that takes long, or comes often, may close it."""
    seen: dict[str, list[bool]] = {}

    def watch(where: type, name: str) -> None:
        plain = getattr(where, name)

        def watched(self: Any, *arguments: object, **options: object) -> object:
            slots = self._slots if hasattr(self, "_slots") else self._node.slots
            if isinstance(slots, KernelSlots):
                seen.setdefault(name, []).append(bool(slots.shared.tables["closed"][0]))
            return plain(self, *arguments, **options)

        monkeypatch.setattr(where, name, watched)

    parts = {
        "again": Groups,
        "return_credit": Links,
        "sink": Rounds,
        "_on_sent": Control,
        "_on_done": Control,
    }
    for name, part in parts.items():
        watch(part, name)
    fabric = KernelFabric(load, "native", TREE, ONE_EACH, wrap=impaired(5, **ALL_FIVE))
    rounds(fabric, ExponentMode.CARRIED, 2)
    fabric.settle()
    assert set(seen) == set(parts)
    assert {name: sum(closed) for name, closed in seen.items() if any(closed)} == {}
    for node in fabric.nodes.values():
        if isinstance(node.slots, KernelSlots):
            assert node.slots.shared.tables["closed"][0] == 0


def test_an_aggregator_dies_in_the_middle_of_a_round(load: Load) -> None:
    fabric = KernelFabric(load, "native", TREE, ONE_EACH, window=96)
    spec = spec_of(COUNT)
    arrays = float_arrays(COUNT, 4, seed=0)
    fabric.all_reduce(spec, arrays)
    results = [arrays[0].tobytes()]
    fabric.settle()
    first = fabric.nodes["a0"].stats()["fragments_completed"]
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec, arrays)
    fabric.run(lambda: fabric.nodes["a0"].stats()["fragments_completed"] >= first + 100)
    fabric.lose_aggregator("a0")
    fabric.run(lambda: fabric.done(number))
    results.append(arrays[0].tobytes())
    assert len({array.tobytes() for array in arrays.values()}) == 1
    plain = VirtualFabric(STAR, ONE_EACH)
    for round_, result in enumerate(results):
        arrays = float_arrays(COUNT, 4, seed=round_)
        plain.all_reduce(spec, arrays)
        assert arrays[0].tobytes() == result


def test_orphans_of_an_aggregator_move_to_one_in_the_kernel(load: Load) -> None:
    chain = {"ps": None, "a0": "ps", "a1": "a0", "w0": "a1", "w1": "a1", "w2": "a0", "w3": "ps"}
    fabric = KernelFabric(load, "native", chain, ONE_EACH, window=96)
    spec = spec_of(COUNT)
    arrays = float_arrays(COUNT, 4, seed=0)
    fabric.all_reduce(spec, arrays)
    fabric.settle()
    first = fabric.nodes["a1"].stats()["fragments_completed"]
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec, arrays)
    fabric.run(lambda: fabric.nodes["a1"].stats()["fragments_completed"] >= first + 100)
    fabric.lose_aggregator("a1")
    fabric.run(lambda: fabric.done(number))
    plain = VirtualFabric(STAR, ONE_EACH)
    for round_ in range(2):
        reference = float_arrays(COUNT, 4, seed=round_)
        plain.all_reduce(spec, reference)
    assert {array.tobytes() for array in arrays.values()} == {reference[0].tobytes()}


def test_a_restarted_root_adopts_what_is_there(load: Load) -> None:
    fabric = KernelFabric(load, "native", TREE, ONE_EACH, window=96)
    spec = spec_of(COUNT)
    arrays = float_arrays(COUNT, 4, seed=0)
    fabric.all_reduce(spec, arrays)
    fabric.settle()
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec, arrays)
    first = fabric.nodes["a0"].stats()["results_in"]
    fabric.run(lambda: fabric.nodes["a0"].stats()["results_in"] >= first + 100)
    fabric.restart_root("ps")
    fabric.run(lambda: fabric.done(number))
    plain = VirtualFabric(STAR, ONE_EACH)
    for round_ in range(2):
        reference = float_arrays(COUNT, 4, seed=round_)
        plain.all_reduce(spec, reference)
    assert {array.tobytes() for array in arrays.values()} == {reference[0].tobytes()}
