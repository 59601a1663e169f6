"""XAgg's machines on simulated links, against the arithmetic of what a link can carry."""

import numpy as np
import pytest

from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.sim.fabric import SimulatedFabric
from inanet.sim.link import UDP_OVERHEAD, LinkSpec
from inanet.sim.network import Network
from inanet.testing.fabric import float_arrays
from inanet.wire.xagg import ROW_BYTES, VALUES

FRAGMENTS = 800
SPEC = TensorSpec("t", "f32", (FRAGMENTS * VALUES,), "sum", ExponentMode.FIXED, 1e6)
RATE = 1e9


def star(workers: int, **how: object) -> SimulatedFabric:
    names = [f"w{rank}" for rank in range(workers)]
    parents: dict[str, str | None] = {"ps": None, **dict.fromkeys(names, "ps")}
    settings = {"link": LinkSpec(rate=RATE, grain=8), "downlink": "multicast", **how}
    return SimulatedFabric(parents, {name: [n] for n, name in enumerate(names)}, **settings)  # type: ignore[arg-type]


def wire_seconds(copies: int) -> float:
    return copies * FRAGMENTS * (ROW_BYTES + UDP_OVERHEAD) * 8 / RATE


def check_bits(arrays: dict[int, np.ndarray], before: dict[int, np.ndarray]) -> None:
    expected = [before[rank].copy() for rank in sorted(before)]
    assert LocalTensor(SPEC, len(before)).reduce(expected) is None
    for array in arrays.values():
        np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))


@pytest.mark.parametrize("workers", [2, 4])
def test_a_round_takes_what_the_roots_link_needs_for_k_gradients(workers: int) -> None:
    fabric, arrays = star(workers), float_arrays(FRAGMENTS * VALUES, workers)
    before = {rank: array.copy() for rank, array in arrays.items()}
    # in the first round windows open
    assert 1.0 < fabric.all_reduce(SPEC, arrays) / wire_seconds(workers) < 1.15
    check_bits(arrays, before)
    arrays = {rank: array.copy() for rank, array in before.items()}
    assert 1.0 < fabric.all_reduce(SPEC, arrays) / wire_seconds(workers) < 1.05
    check_bits(arrays, before)
    up = fabric.network.counters()["switch-ps"]
    assert up["packets"] >= 2 * workers * FRAGMENTS
    assert up.get("dropped", 0) == up.get("lost", 0) == 0


def test_an_aggregator_with_a_link_k_times_as_fast_hides_all_but_one_gradient() -> None:
    fast = LinkSpec(rate=4 * RATE, grain=8)
    fabric, arrays = star(4, links={"ps": fast}), float_arrays(FRAGMENTS * VALUES, 4)
    fabric.all_reduce(SPEC, {rank: array.copy() for rank, array in arrays.items()})
    assert 1.0 < fabric.all_reduce(SPEC, arrays) / wire_seconds(1) < 1.12


def test_unicast_results_leave_the_root_once_for_every_worker() -> None:
    for downlink, copies in (("unicast", 2), ("multicast", 1)):
        fabric = star(2, downlink=downlink)
        fabric.all_reduce(SPEC, float_arrays(FRAGMENTS * VALUES, 2))
        sent = fabric.network.counters()["ps-switch"]["bytes"]
        assert sent == pytest.approx(copies * FRAGMENTS * (ROW_BYTES + UDP_OVERHEAD), rel=0.03)


def test_the_same_seed_gives_the_same_run_and_losses_give_the_same_bits() -> None:
    def run(seed: int) -> tuple[float, dict[str, dict[str, int]], list[object]]:
        lossy = LinkSpec(rate=RATE, grain=8, loss=0.01)
        fabric, arrays = star(3, link=lossy, seed=seed), float_arrays(FRAGMENTS * VALUES, 3)
        before = {rank: array.copy() for rank, array in arrays.items()}
        seconds = fabric.all_reduce(SPEC, arrays)
        check_bits(arrays, before)
        return seconds, fabric.network.counters(), list(fabric.network.log)

    first = run(1)
    assert first == run(1)
    assert first[0] != run(2)[0]
    assert first[0] > wire_seconds(3)
    assert sum(its.get("lost", 0) for its in first[1].values()) > 50


def test_a_short_queue_overflows_and_the_round_is_whole_all_the_same() -> None:
    shallow = LinkSpec(rate=RATE, grain=8, queue=64 << 10, ecn=16 << 10)
    fabric, arrays = star(4, down=shallow), float_arrays(FRAGMENTS * VALUES, 4)
    before = {rank: array.copy() for rank, array in arrays.items()}
    fabric.all_reduce(SPEC, arrays)
    check_bits(arrays, before)
    port = fabric.network.counters()["switch-ps"]
    assert port["dropped"] > 0
    assert port["marked"] > 0
    assert port["peak_bytes"] <= 64 << 10
    figures = fabric.plans.figures()
    assert sum(figures[f"w{rank}"].get("retransmissions", 0) for rank in range(4)) > 0


def test_two_racks_with_an_aggregator_each_cross_the_trunk_once() -> None:
    network = Network(seed=3)
    for name in ("left", "right"):
        network.add_switch(name)
    network.connect("left", "right", LinkSpec(rate=RATE, grain=8))
    parents = {"ps": None, "agg": "ps", "w0": "agg", "w1": "agg", "w2": "ps"}
    fabric = SimulatedFabric(
        parents,
        {"w0": [0], "w1": [1], "w2": [2]},
        link=LinkSpec(rate=RATE, grain=8),
        network=network,
        downlink="multicast",
        switch={"ps": "left", "w2": "left", "agg": "right", "w0": "right", "w1": "right"},
    )
    arrays = float_arrays(FRAGMENTS * VALUES, 3)
    before = {rank: array.copy() for rank, array in arrays.items()}
    seconds = fabric.all_reduce(SPEC, arrays)
    check_bits(arrays, before)
    # the aggregator's link brings two contributions and the results
    assert 1.0 < seconds / wire_seconds(3) < 1.1
    crossed = network.counters()["right-left"]["bytes"]
    assert crossed == pytest.approx(FRAGMENTS * (ROW_BYTES + UDP_OVERHEAD), rel=0.03)
