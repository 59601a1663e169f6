"""Jobs on switches from the first Hello on: same bits as everywhere, same errors at all hosts, nothing left behind."""

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.coordinator.managed_fabric import ManagedFabric, Policy
from inanet.coordinator.registry import Registry
from inanet.member.member import Failed
from inanet.messages.control import PROTOCOL
from inanet.messages.registration import Register
from inanet.planning.costs import Costs
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.testing.switched import Impairment
from tests.coordinator.rack import WINDOW, Rack

NOISE = Impairment(seed=5, drop=0.03, duplicate=0.03, late=0.03)
FLOATS = TensorSpec("f", "f32", (3000,), "mean", ExponentMode.CARRIED)
INTEGERS = TensorSpec("i", "i32", (700,), "sum", ExponentMode.NONE)
MAXIMUM = TensorSpec("m", "f32", (10,), "max", ExponentMode.NONE)


def arrays_of(spec: TensorSpec, ranks: int, seed: int) -> list[NDArray[np.generic]]:
    generator = np.random.default_rng(seed)
    if spec.dtype == "i32":
        return [generator.integers(-99, 99, spec.shape, np.int32) for _ in range(ranks)]
    scale = 2.0 ** generator.integers(-9, 9, spec.shape)
    return [(generator.standard_normal(spec.shape) * scale).astype(np.float32) for _ in range(ranks)]


def slots_held(rack: Rack) -> int:
    return int(np.count_nonzero(rack.program.file.registers.owner >= 0))


@pytest.mark.parametrize("system", ["switchml", "atp", "esa", "a2tp"])
def test_rounds_have_the_bits_of_a_single_host_whatever_the_network_does(system: str) -> None:
    rack = Rack(system, impairment=NOISE).start().joined()
    reference = {spec: LocalTensor(spec, 6) for spec in (FLOATS, INTEGERS)}
    rounds = []
    # all of them at once: layouts of the second tensor come while the first is on its way
    for seed, spec in enumerate((FLOATS, INTEGERS, FLOATS)):
        mine = arrays_of(spec, 6, seed)
        expected = [array.copy() for array in mine]
        assert reference[spec].reduce(expected) is None
        rounds.append((rack.begin(spec, mine), mine, expected))
    for number, mine, expected in rounds:
        rack.run(lambda number=number: rack.ended(number))  # type: ignore[misc]
        assert rack.errors(number) == {""}
        for array in mine:
            np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))
    for member in [rack.members[name] for name in rack.names]:
        member.leave("done")
    rack.run(lambda: not rack.coordinator.jobs)
    rack.step()
    assert slots_held(rack) == 0
    assert not rack.program.tenants.by_job


def test_what_switches_cannot_do_is_refused_and_the_job_goes_on() -> None:
    rack = Rack("switchml").start().joined()
    number = rack.begin(MAXIMUM, arrays_of(MAXIMUM, 6, 1))
    following = rack.begin(INTEGERS, mine := arrays_of(INTEGERS, 6, 2))
    expected = sum(array.astype(np.int64) for array in mine)
    rack.run(lambda: rack.ended(number) and rack.ended(following))
    assert rack.errors(number) == {"unsupported"}
    error = rack.results["w0", number]
    assert error is not None
    assert "system xagg" in error.message
    assert rack.errors(following) == {""}
    np.testing.assert_array_equal(mine[5], expected)


def test_a_refused_round_is_refused_everywhere_and_leaves_arrays_alone_after_that() -> None:
    rack = Rack("atp").start().joined()
    mine = arrays_of(FLOATS, 6, 3)
    mine[3][1234] = np.nan
    number = rack.begin(FLOATS, mine)
    rack.run(lambda: rack.ended(number))
    found = {rack.results[name, number] for name in rack.names}
    assert len(found) == 1
    (error,) = found
    assert error is not None
    assert (error.cause, error.rank, error.index) == ("nonfinite", 3, 1234)
    # the same memory at once again, with other values
    for array, fresh in zip(mine, arrays_of(FLOATS, 6, 4), strict=True):
        array[:] = fresh
    expected = [array.copy() for array in mine]
    assert LocalTensor(FLOATS, 6).reduce(expected) is None
    number = rack.begin(FLOATS, mine)
    rack.run(lambda: rack.ended(number))
    assert rack.errors(number) == {""}
    np.testing.assert_array_equal(mine[0].view(np.uint32), expected[0].view(np.uint32))


def test_hosts_that_disagree_get_the_same_error_and_the_job_is_over() -> None:
    rack = Rack("esa").start().joined()
    other = TensorSpec("f", "f32", (3001,), "mean", ExponentMode.CARRIED)
    number = rack.begin(FLOATS, arrays_of(FLOATS, 6, 1), only=["w0", "w1"])
    rack.begin_at("w2", number, other, arrays_of(other, 2, 1))
    rack.run(lambda: rack.ended(number))
    assert rack.errors(number) == {"mismatch"}
    rack.run(lambda: not rack.coordinator.jobs)
    rack.step()
    failures = {rack.members[name].failed for name in rack.names}
    assert len(failures) == 1
    assert next(iter(failures)).cause == "mismatch"  # type: ignore[union-attr]
    assert slots_held(rack) == 0


@pytest.mark.parametrize("system", ["switchml", "a2tp"])
def test_a_lost_worker_ends_the_job_for_the_others_and_its_slots_are_free(system: str) -> None:
    rack = Rack(system).start().joined()
    first = next(iter(rack.program.tenants.by_job))
    number = rack.begin(FLOATS, arrays_of(FLOATS, 6, 1), only=["w0", "w1"])
    rack.star.settle(0.002)
    rack.kill("w2")
    rack.run(lambda: rack.ended(number, ["w0", "w1"]))
    assert rack.errors(number, ["w0", "w1"]) == {"worker_lost"}
    rack.run(lambda: not rack.coordinator.jobs)
    rack.step()
    assert slots_held(rack) == 0
    assert not rack.program.tenants.by_job
    # the same job anew, under another number: what is late of the old one is foreign
    for name in ("w0", "w1"):
        rack.kill(name)
    for name in rack.names:
        rack.start_host(name)
    rack.joined()
    (second,) = rack.program.tenants.by_job
    assert second == first + 1


def test_a_lost_switch_is_the_same_error_for_all() -> None:
    rack = Rack("atp").start().joined()
    number = rack.begin(FLOATS, arrays_of(FLOATS, 6, 1), only=["w0", "w1"])
    rack.run(lambda: bool(rack.coordinator.jobs))
    rack.kill("s0")
    rack.run(lambda: all(rack.members[name].failed is not None for name in rack.names))
    failures = [rack.members[name].failed for name in rack.names]
    assert {failure.cause for failure in failures if failure} == {"aggregator_lost"}
    assert len({failure.message for failure in failures if failure}) == 1
    assert "switch 's0' was lost" in failures[0].message  # type: ignore[union-attr]
    assert number == 1


def test_a_lost_coordinator_ends_jobs_on_switches_and_the_switch_forgets_them() -> None:
    rack = Rack("switchml").start().joined()
    assert not rack.members["w0"].disconnected()
    assert rack.members["s0"].disconnected()
    assert not rack.program.tenants.by_job
    rack.members["w0"].abandon(Failed("coordinator_lost", "gone"))
    assert rack.hosts["w0"].jobs == 0


def test_a_job_waits_for_its_switch_by_name() -> None:
    rack = Rack("switchml").start(switch=False)
    rack.run(lambda: rack.members["w0"].failed is not None)
    failed = rack.members["w0"].failed
    assert failed is not None
    assert failed.cause == "timeout"
    assert "a switch that runs switchml (s0)" in failed.message


def test_a_switch_that_comes_late_is_in_time() -> None:
    rack = Rack("esa").start(switch=False)
    rack.run(lambda: rack.members["w2"].welcomed)
    assert not rack.members["w0"].joined
    rack.start_switch()
    rack.joined()


def test_unknown_switches_and_different_systems_are_refused() -> None:
    rack = Rack("switchml")
    rack.start_ps()
    rack.start_switch("s7")
    rack.run(lambda: rack.members["s7"].rejected is not None)
    assert "switch 's7' is not in the topology; it has s0" in rack.members["s7"].rejected.reason  # type: ignore[union-attr]
    rack.start_host("w0")
    rack.start_host("w1", system="xagg")
    rack.run(lambda: rack.members["w1"].rejected is not None)
    assert "system xagg on host 'w1' but switchml on 'w0'" in rack.members["w1"].rejected.reason  # type: ignore[union-attr]


def test_a_share_is_the_window_and_shared_slots_are_all() -> None:
    own, shared = (Rack(system).start().joined() for system in ("switchml", "atp"))
    for rack in (own, shared):
        (tenant,) = rack.program.tenants.by_job.values()
        assert len(tenant.members) == 3
        assert tenant.slots == (WINDOW if rack is own else None)


def test_a_manager_takes_whatever_switch_comes() -> None:
    registry = Registry()
    registry.enter(Register(protocol=PROTOCOL, name="taken", role="worker", token=""), 0.0)
    rack = Rack("switchml", fabric=ManagedFabric(registry, Policy(), Costs())).start(switch=False)
    rack.step()
    (seen,) = rack.coordinator.overview(rack.star.now).jobs
    assert seen.missing == ("a switch that runs switchml (none is connected)",)
    # a name that is registered for something else is no switch's
    rack.start_switch("taken")
    rack.run(lambda: rack.members["taken"].rejected is not None)
    assert "'taken' has registered as worker" in rack.members["taken"].rejected.reason
    rack.start_switch("s7")
    rack.joined()
    number = rack.begin(INTEGERS, mine := arrays_of(INTEGERS, 6, 2))
    expected = sum(array.astype(np.int64) for array in mine)
    rack.run(lambda: rack.ended(number))
    assert rack.errors(number) == {""}
    np.testing.assert_array_equal(mine[5], expected)
    (seen,) = rack.coordinator.overview(rack.star.now).jobs
    assert (seen.state, seen.trees[0]["w0"]) == ("running", "s7")
