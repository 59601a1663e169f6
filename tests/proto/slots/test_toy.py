"""A new system is a package and a record in the table of systems: nothing else has to know of it."""

import numpy as np
import pytest

from inanet.messages.control import Hello
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.slots.systems import SYSTEMS, System
from inanet.testing.switched import Impairment
from tests.coordinator.rack import Rack

TOY = System(
    job="tests.proto.slots.toy.job:ToyJob",
    program="tests.proto.slots.toy.program:ToyProgram",
    worker="tests.proto.slots.toy.worker:join",
    ports=range(7499, 7500),
)
FLOATS = TensorSpec("f", "f32", (1000,), "mean", ExponentMode.CARRIED)


def test_a_system_in_the_table_reduces_tensors_from_the_first_hello_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SYSTEMS, "toy", TOY)  # type: ignore[arg-type]
    rack = Rack("toy", impairment=Impairment(seed=3, drop=0.03, duplicate=0.03, late=0.03)).start().joined()
    reference, rng = LocalTensor(FLOATS, 6), np.random.default_rng(7)
    for _ in range(2):
        arrays = [rng.standard_normal(FLOATS.shape).astype(np.float32) for _ in range(6)]
        expected = [array.copy() for array in arrays]
        assert reference.reduce(expected) is None
        number = rack.begin(FLOATS, arrays)
        rack.run(lambda number=number: rack.ended(number))  # type: ignore[misc]
        assert rack.errors(number) == {""}
        for array in arrays:
            np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))
    assert rack.program.stats()["packets"] > 0


def test_without_its_record_the_system_is_unknown() -> None:
    hello = {"name": "w0", "role": "worker", "token": "t", "endpoint": 1, "rx_window": 1, "system": "toy"}
    with pytest.raises(ValueError, match="system 'toy' is not one of"):
        Hello(**hello)  # type: ignore[arg-type]
