"""Which element is named when a host refuses: its own input, never a result that has overwritten another one."""

import numpy as np
import pytest

from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import ExponentMode, Part, Shard, TensorLayout, TensorSpec
from inanet.proto.tree.collective import Collective, TensorState
from inanet.proto.tree.slots import ROW


@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.FIXED])
def test_a_result_that_became_infinite_is_not_blamed(mode):
    factor = 1e8 if mode is ExponentMode.FIXED else 0.0
    spec = TensorSpec("t", "f32", (256 * 1025,), "sum", mode, factor)
    form = make_format(spec, 2)
    shards = [Shard(0, 0, 0, Part.DATA, form.fold, 0, form.fragments)]
    if mode is ExponentMode.PROLOGUE:
        shards.append(Shard(1, 0, 0, Part.EXPONENTS, form.fold, 0, form.exponent_fragments))
    arrays = [np.ones(spec.elements, np.float32) for _ in range(2)]
    arrays[1][256 * 1024 + 7] = np.nan
    collective = Collective(TensorState(TensorLayout(0, spec, tuple(shards)), form), 1, arrays)
    collective.decide()
    rows = np.zeros((1025, ROW), np.int32)
    # results of the first fragments have come, and a sum exceeded what float32 holds
    arrays[0][:256] = arrays[1][:256] = np.inf
    if mode is ExponentMode.PROLOGUE:
        collective.encode(shards[1], np.array([1024 // form.share]), rows, 0)
    else:
        collective.encode(shards[0], np.arange(1000, 1025), rows, 0)
    assert collective.refused
    assert collective.where_refused() == (1, 256 * 1024 + 7)
