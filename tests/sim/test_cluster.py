"""Racks under core switches: what two levels of aggregation save, shared servers, and the ring beside them."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.slots import window
from inanet.proto.slots.worker import Worker
from inanet.sim.cluster import INTEGER, RING, Cluster, Layout, Placed, scaled
from inanet.sim.hostring import RingWorker

TIMING = replace(window.TIMING, retransmit=500e-6, silent=60.0)
SIZE = 248 * 300


def layout(tick: float | None = 4e-6, **changed: float) -> Layout:
    return Layout(racks=3, cores=2, servers=4, nic=20e9, uplink=20e9, tick=tick, **changed)  # type: ignore[arg-type]


def cluster(system: str, *jobs: Placed, slots: int = 256, where: Layout | None = None) -> Cluster:
    window = 27 if system == RING else 130
    return Cluster(
        where or layout(), system, jobs, slots=slots, window=window, timing=TIMING, pull_after=200e-6
    )


@pytest.mark.parametrize("system", ["switchml", "atp", "a2tp", "esa"])
@pytest.mark.parametrize("tick", [None, 4e-6])
def test_sums_over_racks_are_those_of_all_workers(system: str, tick: float | None) -> None:
    # two in the first rack, three in the second, one alone in the third; the PS in the second
    job = Placed(1, (0, 1, 4, 5, 7, 9), 6, SIZE, start=1.0)
    made = cluster(system, job, where=layout(tick))
    rng = np.random.default_rng(3)
    arrays = [rng.integers(-1000, 1000, SIZE // INTEGER, dtype=np.int32) for _ in job.workers]
    expected = sum(arrays)
    for index, array in enumerate(arrays):
        machine = made.machines[f"j1w{index}"]
        assert isinstance(machine, Worker)
        machine.add_tensor(1, TensorSpec("u", "i32", (len(array),), "sum", ExponentMode.NONE))
        machine.begin(1, 1, [array], 0.0)

    def done() -> bool:
        return sum(isinstance(event, RoundDone) for _, event in made.network.log) == 6

    made.network.run(done, deadline=0.9)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    fragments = made.programs[0].stats()["completed"]
    counters = made.network.counters()
    # the first rack's two workers, and the root's answers, cross to the core once
    up = sum(counters[f"rack0-core{core}"].get("packets", 0) for core in (0, 1))
    down = sum(counters[f"core{core}-rack0"].get("packets", 0) for core in (0, 1))
    assert up == pytest.approx(fragments, rel=0.1)
    assert down == pytest.approx(fragments, rel=0.1)
    assert all(switch.unroutable == 0 for switch in made.network.switches.values())


def test_rounds_of_all_systems_take_what_their_links_need() -> None:
    job = Placed(1, (0, 4, 8), 5, SIZE)
    # one gradient on the worker's link; the ring's two thirds twice
    bare = dict.fromkeys(("switchml", "atp", "a2tp"), SIZE / 248 * 332 * 8 / 20000000000.0)
    bare[RING] = 4 / 3 * SIZE / 1472 * 1538 * 8 / 20e9
    for system, least in bare.items():
        made = cluster(system, job)
        made.run(2, deadline=0.1)
        assert 0.9 * least < made.iteration(1) < least + 140e-6, system


def test_a_server_with_two_workers_sends_for_both() -> None:
    alone = cluster(RING, Placed(1, (0, 4), 8, 4 * SIZE))
    shared = cluster(RING, Placed(1, (0, 4), 8, 4 * SIZE), Placed(2, (0, 5), 9, 4 * SIZE))
    for made in (alone, shared):
        made.run(2, deadline=0.1)
    assert shared.iteration(1) > 1.25 * alone.iteration(1)
    assert shared.machines["j1w0"] is not shared.machines["j2w0"]
    assert shared.network.hosts["j1w0"].links["rack0"] is shared.network.hosts["j2w0"].links["rack0"]


def test_shares_are_equal_among_the_jobs_of_a_switch_and_rounded_up() -> None:
    jobs = [Placed(number, (0, 1), 8, SIZE) for number in (1, 2, 3)]
    made = cluster("switchml", *jobs, slots=10)
    assert [int(made.programs[0].tenants.bindings.share[job]) for job in (1, 2, 3)] == [4, 4, 4]
    made = cluster("atp", *jobs, slots=10)
    # their rack's, and that of their PS
    assert [int(made.programs[rack].tenants.bindings.share[1]) for rack in (0, 1, 2)] == [10, 0, 10]


def test_computing_comes_before_every_round_and_runs_repeat() -> None:
    def run() -> tuple[float, dict[str, dict[str, int]]]:
        made = cluster(
            "a2tp", Placed(1, (0, 4, 5), 9, SIZE, 3e-4, 1e-4), Placed(2, (0, 8), 9, SIZE), slots=64
        )
        made.run(2, deadline=0.1)
        return made.iteration(1), made.network.counters()

    first = run()
    assert first == run()
    assert 3e-4 < first[0] < 9e-4


@pytest.mark.parametrize("queue", [1 << 20, 20_000])
def test_a_ring_goes_back_to_what_a_queue_has_dropped(queue: int) -> None:
    narrow = Layout(racks=2, cores=1, servers=2, nic=20e9, uplink=5e9, tick=None, queue=queue, ecn=1 << 30)
    made = cluster(RING, Placed(1, (0, 2), 1, 4 * SIZE), where=narrow)
    made.run(1, deadline=0.2)
    machines = [made.machines[name] for name in ("j1w0", "j1w1")]
    resent = sum(machine.resent for machine in machines if isinstance(machine, RingWorker))
    assert (resent > 0) is (queue < 1 << 20)


def test_scaling_divides_rates_and_queues() -> None:
    small = scaled(layout(process=10e9), 5)
    assert (small.nic, small.uplink, small.process, small.queue, small.ecn) == (4e9, 4e9, 2e9, 209715, 16000)
    assert small.delay == layout().delay
    assert small.sending(1, 66, 1).rate == 2e9
    assert small.sending(3, 66, 1).rate == 4e9


def test_rings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two workers"):
        RingWorker(1, 1, 2, 3, size=10, payload=100, window=1, largest=1)
