"""What a training script may hand to a collective, as numpy arrays and the names of their number formats."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUPPORTED = "float32, float16, bfloat16, int32, int64"
_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}


def as_array(data: Any) -> tuple[NDArray[Any], str]:
    """A writable view of ``data`` and its format (``f32 f16 bf16 i32 i64``); bfloat16 as its uint16 bits.

    Takes numpy arrays, CPU tensors through DLPack, and anything with the buffer protocol; any shape and strides.
    Raises ``TypeError`` for other objects and other dtypes, ``ValueError`` for read-only memory.
    """
    array = _view(data)
    name = array.dtype.name
    if name == "uint16":
        name = "bfloat16" if _is_bfloat16(data) else name
    if name not in _NAMES or not array.dtype.isnative:
        advice = "; convert it to float32 first" if array.dtype.kind == "f" else ""
        raise TypeError(f"dtype {array.dtype} cannot be reduced; supported: {SUPPORTED}{advice}")
    if not array.flags.writeable:
        raise ValueError("the array is read-only, but a collective writes its result into it; pass a copy")
    if name == "bfloat16" and array.dtype.name != "uint16":
        array = array.view(np.uint16)
    return array, _NAMES[name]


def _is_bfloat16(data: Any) -> bool:
    return "bfloat16" in str(getattr(data, "dtype", ""))


def _view(data: Any) -> NDArray[Any]:
    if isinstance(data, np.ndarray):
        return data
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        if data.device.type != "cpu":
            raise TypeError(f"tensor on {data.device}: only CPU memory can be shared; use tensor.cpu()")
        plain = data.detach()
        view = plain.view(torch.int16).numpy() if plain.dtype is torch.bfloat16 else plain.numpy()
        return view.view(np.uint16) if plain.dtype is torch.bfloat16 else view
    if hasattr(data, "__dlpack__"):
        return np.from_dlpack(data)
    try:
        return np.asarray(memoryview(data))
    except TypeError:
        raise TypeError(
            f"{type(data).__name__} is neither an array, nor has DLPack or the buffer protocol"
        ) from None
