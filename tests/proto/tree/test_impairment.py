"""Loss, duplication, reordering and corruption of 5 % each on every hop leave every bit as it is without them."""

import functools
import zlib

import numpy as np
import pytest

from inanet.phy.fault import FaultInjector
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.testing.fabric import VirtualFabric, float_arrays
from tests.proto.tree.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of

COUNT = 256 * 1100 + 77


def impaired(seed, **shares):
    """Fault injectors on every device, each with a seed of its own."""

    def wrap(device, name, clock):
        return FaultInjector(device, seed * 1000 + zlib.crc32(name.encode()) % 997, clock, **shares)

    return wrap


ALL_FIVE = {
    "drop": 0.05,
    "duplicate": 0.05,
    "reorder": 0.05,
    "corrupt": 0.05,
    "delay": (0.0, 0.003),
    "delayed": 0.05,
}


def run_rounds(fabric: VirtualFabric, spec: TensorSpec) -> list[bytes]:
    """Results of a few rounds, equal on all workers."""
    results = []
    # the one in between matters only where a round's exponents come from the one before it
    rounds = 3 if spec.mode is ExponentMode.CARRIED else 2
    for round_ in range(rounds):
        arrays = float_arrays(COUNT, 4, seed=round_)
        # one rank grows a thousandfold in the last round: carried exponents do not fit any more
        arrays[2] *= np.float32(1000.0 if round_ == rounds - 1 else 1.0)
        fabric.all_reduce(spec, arrays)
        assert len({array.tobytes() for array in arrays.values()}) == 1
        results.append(arrays[0].tobytes())
    return results


@functools.cache
def lossless(spec: TensorSpec) -> list[bytes]:
    """The same rounds on a star that loses nothing."""
    return run_rounds(VirtualFabric(STAR, ONE_EACH), spec)


@pytest.mark.parametrize("parents", [STAR, TREE, DEEP], ids=["star", "tree", "deep"])
@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.CARRIED, ExponentMode.FIXED])
def test_bits_do_not_depend_on_impairment_or_topology(parents, mode):
    spec = spec_of(COUNT, mode=mode)
    fabric = VirtualFabric(parents, ONE_EACH, wrap=impaired(7, **ALL_FIVE))
    assert run_rounds(fabric, spec) == lossless(spec)
    figures = fabric.figures()
    assert sum(node.get("retransmissions", 0) for node in figures.values()) > 50
    assert sum(node.get("drop_bad_checksum", 0) for node in figures.values()) > 20
    assert sum(node.get("drop_bad_tag", 0) for node in figures.values()) > 0
    assert sum(node.get("drop_duplicate", 0) for node in figures.values()) > 20
    assert sum(node.get("corrupt_slots", 0) for node in figures.values()) == 0


@pytest.mark.parametrize("seed", range(6))
def test_small_tensors_survive_heavy_loss(seed):
    """A tensor of one packet has no group to notice its loss: only SENT and DONE save it."""
    spec = spec_of(5)
    fabric = VirtualFabric(TREE, ONE_EACH, wrap=impaired(seed, drop=0.3, duplicate=0.2, corrupt=0.1))
    for round_ in range(20):
        arrays = float_arrays(5, 4, seed=round_)
        exact = sum(array.astype(np.float64) for array in arrays.values())
        fabric.all_reduce(spec, arrays)
        np.testing.assert_allclose(arrays[3], exact, atol=1e-6)
