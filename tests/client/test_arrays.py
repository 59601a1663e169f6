"""What may be reduced: which memory is looked into, under which format, and what refusals say."""

import array
from typing import Any

import numpy as np
import pytest

from inanet.client.arrays import SUPPORTED, as_array


@pytest.mark.parametrize(
    ("dtype", "form"),
    [(np.float32, "f32"), (np.float16, "f16"), (np.int32, "i32"), (np.int64, "i64"), (np.longlong, "i64")],
)
def test_numpy_arrays_are_looked_into_not_copied(dtype: Any, form: str) -> None:
    data = np.arange(6, dtype=dtype).reshape(2, 3)[:, ::2]
    view, found = as_array(data)
    assert found == form
    assert view.shape == data.shape
    assert np.shares_memory(view, data)


def test_buffers_are_looked_into() -> None:
    data = array.array("f", [1, 2, 3])
    view, form = as_array(data)
    view[1] = 7
    assert form == "f32"
    assert list(data) == [1, 7, 3]
    view, form = as_array(memoryview(array.array("q", [5])))
    assert (form, view.tolist()) == ("i64", [5])


class Exported:
    """An object that offers nothing but DLPack."""

    def __init__(self, data: Any, broken: bool = False) -> None:
        self._data = data
        self._broken = broken

    def __dlpack__(self, **options: Any) -> Any:
        if self._broken:
            raise BufferError("it is elsewhere")
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()


def test_dlpack_is_looked_into() -> None:
    data = np.zeros((2, 2), np.int32)
    view, form = as_array(Exported(data))
    view[1, 1] = 3
    assert form == "i32"
    assert data[1, 1] == 3


def test_dlpack_that_numpy_cannot_read_is_refused() -> None:
    with pytest.raises(TypeError, match="Exported through DLPack: it is elsewhere; pass a numpy array"):
        as_array(Exported(np.zeros(1), broken=True))


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ("float64", "reduce a float32 copy"),
        ("complex64", "view"),
        ("complex128", "real and imaginary"),
        ("bool", "int32 copy"),
        ("uint16", "bfloat16"),
        ("int8", "another dtype"),
        (">f4", "foreign byte order"),
        ("U3", "another dtype"),
    ],
)
def test_other_dtypes_are_refused_with_advice(dtype: str, advice: str) -> None:
    with pytest.raises(TypeError, match=advice) as caught:
        as_array(np.zeros(2, dtype))
    assert SUPPORTED in str(caught.value)


def test_read_only_memory_is_refused() -> None:
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    for data in (
        frozen,
        np.broadcast_to(np.float32(1), (4,)),
        memoryview(array.array("f", [1])).toreadonly(),
    ):
        with pytest.raises(ValueError, match="read-only"):
            as_array(data)


@pytest.mark.parametrize("data", [[1.0, 2.0], 3.5, "text", None])
def test_what_is_no_array_is_refused(data: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(data).__name__} is no array"):
        as_array(data)


def test_bfloat16_of_other_packages_is_recognised_by_name() -> None:
    types = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    data = np.array([1.5, -2.0], types.bfloat16)
    view, form = as_array(data)
    assert form == "bf16"
    assert view.tolist() == [0x3FC0, 0xC000]
    assert np.shares_memory(view, data)


@pytest.fixture(scope="module")
def torch() -> Any:
    """The module, where it is installed."""
    return pytest.importorskip("torch", reason="torch is not installed")


class TestTorch:
    """Tensors on the CPU."""

    def test_tensors_are_looked_into(self, torch: Any) -> None:
        for dtype, form in [
            (torch.float32, "f32"),
            (torch.float16, "f16"),
            (torch.int32, "i32"),
            (torch.int64, "i64"),
        ]:
            tensor = torch.zeros((3, 2), dtype=dtype)
            view, found = as_array(tensor)
            view[2, 1] = 4
            assert found == form
            assert tensor[2, 1] == 4

    def test_tensors_can_be_resized_afterwards(self, torch: Any) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.zeros(3, dtype=dtype)
            as_array(tensor)
            assert tensor.resize_(7).numel() == 7

    def test_the_memory_stays_as_long_as_the_array(self, torch: Any) -> None:
        view, _ = as_array(torch.full((1000,), 2.0))
        torch.zeros(1000)
        assert view.sum() == 2000.0
        view, form = as_array(torch.zeros(0, 3))
        assert (form, view.shape) == ("f32", (0, 3))

    def test_bfloat16_comes_as_bits(self, torch: Any) -> None:
        tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
        view, form = as_array(tensor)
        assert (form, view.dtype.name) == ("bf16", "uint16")
        view[0] = 0x4000
        assert tensor.tolist() == [2.0, -2.0]

    def test_parameters_and_transposed_tensors(self, torch: Any) -> None:
        weights = torch.nn.Parameter(torch.zeros(2, 3))
        view, _ = as_array(weights.t())
        view[2, 0] = 9
        assert weights[0, 2].item() == 9

    def test_others_are_refused(self, torch: Any) -> None:
        with pytest.raises(TypeError, match="cpu"):
            as_array(torch.zeros(2, device="meta"))
        with pytest.raises(TypeError, match="dense"):
            as_array(torch.zeros(2).to_sparse())
        with pytest.raises(TypeError, match="float64"):
            as_array(torch.zeros(2, dtype=torch.float64))
        with pytest.raises(TypeError, match="Float8"):
            as_array(torch.zeros(2, dtype=torch.float8_e5m2))
