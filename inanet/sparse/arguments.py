"""Checks what a caller calls keys and values, before anything of it is sent.

NumPy would take much for numbers that is none of the kind: ``1.9`` for key 1, ``-1`` for key 2^64 - 1, ``"7"`` and ``True`` for 7 and
1, and 2^53 + 1 beside a float for 2^53. Whatever is no number of its type is refused by its element.
"""

from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inanet.proto.zebra.job import F32
from inanet.wire.batch import U64

_KEY = "an integer from 0 to 2^64 - 1"
_VALUE = "a real number"


def keys_of(keys: ArrayLike) -> U64:
    """uint64[n] of what a caller calls keys.

    Raises ``ValueError`` naming the first element that is no integer from 0 to 2^64 - 1, and for an array of other than one
    dimension.
    """
    given = _array("keys", keys)
    if given.ndim != 1:
        raise ValueError(f"keys have shape {given.shape}; give an array of one dimension")
    if given.size and given.dtype.kind not in "iu":
        _each("keys", given, _KEY, _is_key)
    elif given.dtype.kind == "i" and (given < 0).any():
        _refuse("keys", given, int(np.argmax(given < 0)), _KEY)
    return given.astype(np.uint64, copy=False)


def values_of(values: ArrayLike, keys: int, width: int) -> F32:
    """float32[keys, width] of what a caller calls values: of this shape, or flat where ``width`` is 1.

    Raises ``ValueError`` for another shape and naming the first element that is no real number. What float32 does not hold is
    infinite.
    """
    given = _array("values", values)
    flat = (keys,) if width == 1 else (keys, width)
    if given.shape not in ((keys, width), flat) and (given.size or keys):
        raise ValueError(f"values have shape {given.shape}; {keys} keys of {width} values need {flat}")
    if given.size and given.dtype.kind not in "iuf":
        _each("values", given, _VALUE, _is_value)
    with np.errstate(over="ignore"):
        return given.astype(np.float32).reshape(keys, width)


def _array(name: str, given: ArrayLike) -> NDArray[Any]:
    """The array as it is, or of objects where NumPy would make one type out of several."""
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        place = int(np.argmax(np.ma.getmaskarray(given)))
        raise ValueError(f"{name}: element {place} is masked")
    if isinstance(given, list | tuple):
        made = _of_objects(given)
        kinds = {type(one) for one in made.flat}
        if kinds == {float} or (kinds == {int} and all(0 <= one < 1 << 63 for one in made.flat)):
            return np.asarray(given)
        return made
    return np.asarray(given)


def _of_objects(given: list[Any] | tuple[Any, ...]) -> NDArray[Any]:
    try:
        return np.array(given, object)
    except ValueError:
        # rows of several lengths
        made = np.empty(len(given), object)
        made[:] = given
        return made


def _each(name: str, given: NDArray[Any], what: str, sound: Any) -> None:
    """Refuse the first element that is not ``sound``; all of an array whose type is another."""
    for place, one in enumerate(given.flat):
        if given.dtype.kind != "O" or not sound(one):
            _refuse(name, given, place, what)


def _is_key(one: Any) -> bool:
    return isinstance(one, int | np.integer) and not isinstance(one, bool) and 0 <= int(one) < 1 << 64


def _is_value(one: Any) -> bool:
    return isinstance(one, Real) and not isinstance(one, bool | np.bool_)


def _refuse(name: str, given: NDArray[Any], place: int, what: str) -> None:
    one = given.flat[place]
    one = one.item() if isinstance(one, np.generic) else one
    at = place if given.ndim == 1 else tuple(int(index) for index in np.unravel_index(place, given.shape))
    raise ValueError(f"{name}: element {at} is {one!r}, not {what}")
