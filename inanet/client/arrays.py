"""What a training script may hand to a collective, as numpy arrays and the names of their number formats."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUPPORTED = "float32, float16, bfloat16, int32, int64"
# by dtype: asking a dtype for its name costs more than all the rest. Foreign byte orders are other dtypes.
_FORMATS = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
}
_ADVICE = {
    "float64": "reduce a float32 copy: sums travel as 32-bit integers and would lose half of its precision",
    "complex64": "reduce array.view(numpy.float32), whose sum and mean are the same numbers",
    "complex128": "reduce the real and imaginary parts as float32",
    "bool": "reduce an int32 copy, with max for any and min for all",
    "uint16": "if it holds the bits of bfloat16, reduce array.view(ml_dtypes.bfloat16)",
}


def as_array(data: Any) -> tuple[NDArray[Any], str]:
    """A writable view of ``data`` and its format (``f32 f16 bf16 i32 i64``); bfloat16 as its uint16 bits.

    Takes numpy arrays, CPU tensors of torch or any other library with DLPack, and anything with the buffer
    protocol; any shape and strides. torch is used if the program has imported it, and never imported here.
    Raises ``TypeError`` for other objects and dtypes, saying what to do, and ``ValueError`` for read-only
    memory.
    """
    array, brain = _view(data)
    form = "bf16" if brain else _FORMATS.get(array.dtype)
    if form is None:
        raise TypeError(_unsupported(array.dtype))
    if not array.flags.writeable:
        raise ValueError("the array is read-only, but a collective writes its result into it; pass a copy")
    return array.view(np.uint16) if brain else array, form


def _unsupported(dtype: np.dtype[Any]) -> str:
    order = "" if dtype.isnative else " in foreign byte order"
    advice = _ADVICE.get(dtype.name, "reduce a copy of another dtype")
    return f"dtype {dtype.name}{order} cannot be reduced: {advice}. Supported: {SUPPORTED}"


def _view(data: Any) -> tuple[NDArray[Any], bool]:
    """An array on the same memory, and whether it holds bfloat16."""
    if isinstance(data, np.ndarray):
        known = data.dtype in _FORMATS
        # numpy itself has no bfloat16; packages that add it name their dtype so
        return np.asarray(data), not known and data.dtype.name == "bfloat16" and data.dtype.isnative
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _view_tensor(torch, data)
    if hasattr(data, "__dlpack__"):
        try:
            view = np.from_dlpack(data)
        except (BufferError, RuntimeError, ValueError) as error:
            kind = type(data).__name__
            raise TypeError(
                f"numpy cannot look into this {kind} through DLPack: {error}; pass a numpy array"
            ) from None
        return view, False
    try:
        return np.asarray(memoryview(data)), False
    except TypeError:
        kind = type(data).__name__
        raise TypeError(f"{kind} is no array and has neither DLPack nor the buffer protocol") from None


class _TensorMemory:
    """A dense tensor as numpy looks into it. ``tensor.numpy()`` would do, but torch resizes no tensor after that."""

    def __init__(self, tensor: Any, typestr: str) -> None:
        self._tensor = tensor
        self.__array_interface__ = interface = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
        }
        if not tensor.is_contiguous():
            size = tensor.element_size()
            interface["strides"] = tuple(stride * size for stride in tensor.stride())


#: by name of torch's dtype; bfloat16 as its bits
_TENSOR_TYPES = {
    "float32": np.dtype(np.float32).str,
    "float16": np.dtype(np.float16).str,
    "bfloat16": np.dtype(np.uint16).str,
    "int32": np.dtype(np.int32).str,
    "int64": np.dtype(np.int64).str,
}
#: the same by torch's dtype, once a tensor has come
_typestr_of: dict[Any, str] = {}


def _view_tensor(torch: Any, tensor: Any) -> tuple[NDArray[Any], bool]:
    if tensor.device.type != "cpu":
        raise TypeError(
            f"the tensor is on {tensor.device}, and only CPU memory can be shared; pass tensor.cpu()"
        )
    if not _typestr_of:
        _typestr_of.update((getattr(torch, name), typestr) for name, typestr in _TENSOR_TYPES.items())
    plain = tensor.detach()
    typestr = _typestr_of.get(plain.dtype)
    brain = plain.dtype is torch.bfloat16
    if typestr is not None and plain.layout is torch.strided and plain.numel() and not plain.is_neg():
        return np.asarray(_TensorMemory(plain, typestr)), brain
    try:
        return plain.view(torch.int16).numpy() if brain else plain.numpy(), brain
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"this tensor cannot be reduced: {error}. Supported: dense, {SUPPORTED}") from None
