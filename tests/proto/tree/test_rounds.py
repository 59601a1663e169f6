"""Whole rounds in virtual time: trees, formats, modes."""

import numpy as np
import pytest

from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.testing.fabric import VirtualFabric, float_arrays

STAR = {"ps": None, "w0": "ps", "w1": "ps", "w2": "ps", "w3": "ps"}
TREE = {"ps": None, "a0": "ps", "a1": "ps", "w0": "a0", "w1": "a0", "w2": "a1", "w3": "a1"}
DEEP = {"ps": None, "a0": "ps", "a1": "a0", "w0": "a1", "w1": "a1", "w2": "a0", "w3": "ps"}
ONE_EACH = {f"w{i}": [i] for i in range(4)}


def spec_of(
    count: int, op: str = "sum", mode: ExponentMode = ExponentMode.CARRIED, dtype: str = "f32"
) -> TensorSpec:
    return TensorSpec("t", dtype, (count,), op, mode, 1e8 if mode is ExponentMode.FIXED else 0.0)


@pytest.mark.parametrize("parents", [STAR, TREE, DEEP], ids=["star", "tree", "deep"])
@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.CARRIED, ExponentMode.FIXED])
def test_three_rounds_sum_within_the_bound(parents, mode):
    fabric = VirtualFabric(parents, ONE_EACH)
    count = 256 * 1500 + 3
    for round_ in range(3):
        arrays = float_arrays(count, 4, seed=round_)
        exact = sum(array.astype(np.float64) for array in arrays.values())
        fabric.all_reduce(spec_of(count, mode=mode), arrays)
        for rank in range(1, 4):
            assert arrays[rank].tobytes() == arrays[0].tobytes()
        np.testing.assert_allclose(arrays[0], exact, rtol=0, atol=2e-6)
