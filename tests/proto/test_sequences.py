"""Sequences of tensors: every sum within its bound *relative to its own block*, whatever was summed before it.

Magnitudes from 2^-120 to 2^120, tensors that share a name and tensors that do not, ranks that differ, all modes, and the
systems as far as they run in virtual time, against exact sums in fractions.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inanet.kernels.layout import PROLOGUE_BLOCK
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.quantised import FACTOR_BITS, SLACK
from inanet.testing.fabric import VirtualFabric
from inanet.testing.netreduce import RingFabric
from inanet.wire.xagg import Kind
from tests.proto.common.arrays import exact_sums, from_floats, to_floats
from tests.proto.netreduce.test_rings import members
from tests.proto.slots.jobs import Job
from tests.proto.slots.test_atp import single
from tests.proto.slots.test_switchml import switchml
from tests.proto.tree.rig import Recorder
from tests.proto.tree.test_rounds import ONE_EACH, STAR, TREE

RANKS = 4
PRECISION = {"f32": (24, -149), "f16": (11, -24), "bf16": (8, -133)}
Arrays = list[np.ndarray]
#: reduces one tensor after the other, in place
System = Callable[[TensorSpec, Arrays], None]


def tree(parents: dict[str, str | None]) -> System:
    fabric = VirtualFabric(parents, ONE_EACH)

    def reduce(spec: TensorSpec, arrays: Arrays) -> None:
        fabric.all_reduce(spec, dict(enumerate(arrays)))

    return reduce


def shared_memory() -> System:
    tensors: dict[TensorSpec, LocalTensor] = {}

    def reduce(spec: TensorSpec, arrays: Arrays) -> None:
        tensor = tensors.setdefault(spec, LocalTensor(spec, RANKS))
        assert tensor.reduce([array.reshape(-1) for array in arrays]) is None

    return reduce


def switched(job: Job) -> System:
    tensors: dict[TensorSpec, int] = {}

    def reduce(spec: TensorSpec, arrays: Arrays) -> None:
        if spec not in tensors:
            tensors[spec] = len(tensors)
            job.add(tensors[spec], spec)
        job.begin(tensors[spec], arrays)
        job.star.run(job.done)
        for array, result in zip(arrays, job._begun[-1][1], strict=True):
            array[:] = result

    return reduce


def ring() -> System:
    fabric = RingFabric(RANKS)
    workers = fabric.add_ring(members(RANKS))
    tensors: dict[TensorSpec, int] = {}
    rounds = iter(range(1, 1000))

    def reduce(spec: TensorSpec, arrays: Arrays) -> None:
        round_ = next(rounds)
        if spec not in tensors:
            tensors[spec] = len(tensors)
            for worker in workers:
                worker.add_tensor(tensors[spec], spec)
        for worker, array in zip(workers, arrays, strict=True):
            worker.begin(tensors[spec], round_, [array], fabric.clock.now)
        fabric.run(lambda: fabric.done(workers, round_))

    return reduce


SYSTEMS: dict[str, Callable[[], System]] = {
    "star": lambda: tree(STAR),
    "tree": lambda: tree(TREE),
    "shared memory": shared_memory,
    "switchml": lambda: switched(switchml(RANKS, 16)),
    "atp": lambda: switched(single(RANKS, 16, 64)),
    "netreduce": ring,
}


def half_ulp(dtype: str, value: Fraction) -> Fraction:
    """Half a unit in the last place of the binade of ``value``."""
    digits, smallest = PRECISION[dtype]
    exponent = ceil(log2(abs(value))) if value else smallest
    return Fraction(2) ** (max(exponent - digits + 1, smallest) - 1)


def check(spec: TensorSpec, before: Arrays, after: Arrays) -> None:
    """All ranks have the same bits, each within the bound of its mode and of its own block's largest contribution."""
    for array in after[1:]:
        assert array.tobytes() == after[0].tobytes()
    values = np.stack([to_floats(spec.dtype, array) for array in before])
    sums, got = exact_sums(spec.dtype, before), to_floats(spec.dtype, after[0]).tolist()
    ranks = len(before)
    bits = {
        ExponentMode.PROLOGUE: 0,
        ExponentMode.CARRIED: SLACK,
        ExponentMode.FIXED: 31 - FACTOR_BITS - ceil(log2(ranks)),
    }[spec.mode]
    width = PROLOGUE_BLOCK if spec.mode is ExponentMode.PROLOGUE else 256
    for start in range(0, spec.elements, width):
        peak = np.abs(values[:, start : start + width]).max()
        e = max(int(np.frexp(peak)[1]), -125)
        bound = ranks * Fraction(2) ** (ceil(log2(ranks)) - 32 + e + bits) if peak else Fraction(0)
        for exact, value in zip(sums[start : start + width], got[start : start + width], strict=True):
            assert np.isfinite(value)
            assert abs(Fraction(value) - exact) <= bound + half_ulp(spec.dtype, Fraction(value))


def filled(dtype: str, count: int, magnitudes: Sequence[int], seed: int) -> Arrays:
    """One array a rank, of normally distributed values times 2^magnitude, with zeros among them."""
    rng = np.random.default_rng(seed)
    arrays = []
    for magnitude in magnitudes:
        values = rng.standard_normal(count) * (rng.random(count) < 0.9) * 2.0**magnitude
        arrays.append(from_floats(dtype, values))
    return arrays


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[TensorSpec, Arrays]]:
    """Two to six rounds of few tensors, so that they meet again."""
    mode = draw(st.sampled_from([ExponentMode.CARRIED, ExponentMode.PROLOGUE, ExponentMode.FIXED]))
    out = []
    for number in range(draw(st.integers(2, 6))):
        dtype = draw(st.sampled_from(["f32", "f32", "bf16", "f16"]))
        count = draw(st.sampled_from([1, 5, 257, 600]))
        low, high = (-14, 12) if dtype == "f16" else (-120, 120)
        base = draw(st.integers(low, high))
        magnitudes = draw(
            st.one_of(
                st.just([base] * RANKS),
                st.lists(st.integers(low, high), min_size=RANKS, max_size=RANKS),
                st.lists(st.integers(max(low, base - 12), base), min_size=RANKS, max_size=RANKS),
            )
        )
        factor = 1e8 if mode is ExponentMode.FIXED else 0.0
        spec = TensorSpec(draw(st.sampled_from(["loss", "weight"])), dtype, (count,), "sum", mode, factor)
        out.append((spec, filled(dtype, count, magnitudes, number)))
    return out


@pytest.mark.parametrize("system", SYSTEMS)
@given(sequence=rounds())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_sum_of_a_sequence_is_within_its_own_bound(
    system: str, sequence: list[tuple[TensorSpec, Arrays]]
) -> None:
    reduce = SYSTEMS[system]()
    for spec, arrays in sequence:
        before = [array.copy() for array in arrays]
        reduce(spec, arrays)
        check(spec, before, arrays)


def constant(*values: float, count: int = 1) -> list[np.ndarray]:
    return [np.full(count, value, np.float32) for value in values]


#: what was lost, or took a storm of packets
CONCRETE: dict[str, list[np.ndarray]] = {
    "a count and a loss": constant(4e9, 2.3, 4e9, 2.3),
    "1e7 and 0.0123": constant(1e7, 0.0123, 1e7, 0.0123),
    "1e5 and 1e-4": constant(1e5, 1e-4, 1e5, 1e-4),
    "1e6 and 1e-3": constant(1e6, 1e-3, 1e6, 1e-3),
    "1e10, then ones": constant(1e10, 1.0, count=1000),
    "a spike of 1e12 in a step": constant(1e-3, 1e9, 1e-3, 1e-3, count=1000),
    "zeros between": constant(1.0, 0.0, 1e-30, count=300),
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("mode", [ExponentMode.CARRIED, ExponentMode.PROLOGUE, ExponentMode.FIXED])
@pytest.mark.parametrize("sequence", CONCRETE)
def test_no_sum_is_lost_behind_a_larger_one(system: str, mode: ExponentMode, sequence: str) -> None:
    reduce = SYSTEMS[system]()
    for array in CONCRETE[sequence]:
        factor = 1e8 if mode is ExponentMode.FIXED else 0.0
        spec = TensorSpec("t", "f32", array.shape, "sum", mode, factor)
        arrays = [array.copy() for _ in range(RANKS)]
        reduce(spec, arrays)
        check(spec, [array] * RANKS, arrays)
        assert arrays[0][0] or not array[0]


@pytest.mark.parametrize(("low", "high"), [(1.0, 1e4), (1e4, 1.0)], ids=["too large", "too small"])
def test_a_round_of_misfits_costs_one_more_pass_and_no_storm(low: float, high: float) -> None:
    """3,000 blocks that all misfit through windows: every block leaves twice, and few packets beside."""
    recorders = {}

    def wrap(device, name, clock):
        recorders[name] = Recorder(device)
        return recorders[name]

    fabric = VirtualFabric(STAR, ONE_EACH, wrap=wrap, window=256)
    spec = TensorSpec("t", "f32", (256 * 3000,), "sum", ExponentMode.CARRIED)
    rng = np.random.default_rng(0)
    took = []
    for scale in (low, low, high):
        arrays = [(rng.standard_normal(spec.elements) * scale).astype(np.float32) for _ in range(RANKS)]
        before = [array.copy() for array in arrays]
        fabric.all_reduce(spec, dict(enumerate(arrays)))
        fabric.settle()
        for array in arrays:
            assert array.tobytes() == arrays[0].tobytes()
        exact = np.sum([array.astype(np.float64) for array in before], axis=0)
        np.testing.assert_allclose(arrays[0], exact, atol=scale * 1e-4)
        took.append(
            {
                "rows": sum(p[1] & 15 in (Kind.DATA, Kind.EXPONENT) for p, _ in recorders["ps"].drain()),
                "down": [p[1] & 15 for p, _ in recorders["w0"].drain()],
            }
        )
    plain, misfit = took[1], took[2]
    assert plain["rows"] == RANKS * 3000
    assert misfit["rows"] <= 2.02 * plain["rows"]
    assert misfit["down"].count(Kind.RESULT) <= 1.02 * plain["down"].count(Kind.RESULT)
    assert misfit["down"].count(Kind.RESTART) <= 3000 // 8
    assert len(misfit["down"]) <= 1.2 * len(plain["down"])
