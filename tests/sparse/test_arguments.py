"""What a sparse job takes for keys and values, and what it refuses before anything changes."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from inanet.sparse.arguments import keys_of, values_of
from inanet.sparse.group import sparse_group

KEY = "not an integer from 0 to 2^64 - 1"
VALUE = "not a real number"

BAD_KEYS: list[tuple[Any, str]] = [
    ([1.9, 2.2], f"keys: element 0 is 1.9, {KEY}"),
    ([1, 2.5], f"keys: element 1 is 2.5, {KEY}"),
    ([7, 2.0**53 + 1], f"keys: element 1 is 9007199254740992.0, {KEY}"),
    ([3.0], f"keys: element 0 is 3.0, {KEY}"),
    (np.array([1.0, 2.0], np.float32), f"keys: element 0 is 1.0, {KEY}"),
    ([1, float("nan")], f"keys: element 1 is nan, {KEY}"),
    (["7", "8"], f"keys: element 0 is '7', {KEY}"),
    ([1, "8"], f"keys: element 1 is '8', {KEY}"),
    ("123", "keys have shape ()"),
    (np.array(["a"]), f"keys: element 0 is 'a', {KEY}"),
    ([b"7"], f"keys: element 0 is b'7', {KEY}"),
    ([True, False], f"keys: element 0 is True, {KEY}"),
    ([1, True], f"keys: element 1 is True, {KEY}"),
    (np.array([True]), f"keys: element 0 is True, {KEY}"),
    ([5, -1], f"keys: element 1 is -1, {KEY}"),
    (np.array([5, -1]), f"keys: element 1 is -1, {KEY}"),
    ([2**63, -1], f"keys: element 1 is -1, {KEY}"),
    ([2**64], f"keys: element 0 is 18446744073709551616, {KEY}"),
    ([0, 2**200], f"keys: element 1 is {2**200}, {KEY}"),
    ([None], f"keys: element 0 is None, {KEY}"),
    ([1, None], f"keys: element 1 is None, {KEY}"),
    (None, "keys have shape ()"),
    (5, "keys have shape ()"),
    ([[1, 2], [3, 4]], "keys have shape (2, 2)"),
    (np.zeros((2, 3), np.uint64), "keys have shape (2, 3)"),
    ([[1], [2, 3]], f"keys: element 0 is [1], {KEY}"),
    ([1j], f"keys: element 0 is 1j, {KEY}"),
    (np.array(["2024-01-01"], "datetime64[D]"), f"keys: element 0 is datetime.date(2024, 1, 1), {KEY}"),
    (np.ma.array([1, 2], mask=[False, True]), "keys: element 1 is masked"),
    ({1, 2}, "keys have shape ()"),
]

GOOD_KEYS: list[tuple[Any, list[int]]] = [
    ([], []),
    (np.zeros(0), []),
    ([0, 2**64 - 1], [0, 2**64 - 1]),
    ((2**63, 1), [2**63, 1]),
    (range(3), [0, 1, 2]),
    (np.array([1, 2], np.int8), [1, 2]),
    (np.array([7, 3, 5, 1], np.uint64)[::2], [7, 5]),
    ([np.uint64(2**64 - 1), np.int32(4)], [2**64 - 1, 4]),
    (np.array([2**64 - 1, 3], object), [2**64 - 1, 3]),
]

BAD_VALUES: list[tuple[Any, str]] = [
    (["1.0", "2.0"], f"values: element 0 is '1.0', {VALUE}"),
    ([1.0, None], f"values: element 1 is None, {VALUE}"),
    ([1.0, "x"], f"values: element 1 is 'x', {VALUE}"),
    ([True, False], f"values: element 0 is True, {VALUE}"),
    ([1.0, True], f"values: element 1 is True, {VALUE}"),
    (np.array([True, False]), f"values: element 0 is True, {VALUE}"),
    ([1j, 2], f"values: element 0 is 1j, {VALUE}"),
    (np.array([1j, 2]), f"values: element 0 is 1j, {VALUE}"),
    ([[1.0], ["x"]], f"values: element (1, 0) is 'x', {VALUE}"),
    ([[1.0], [2.0, 3.0]], f"values: element 0 is [1.0], {VALUE}"),
    ([1.0], "values have shape (1,); 2 keys of 1 values need (2,)"),
    ([1.0, 2.0, 3.0], "values have shape (3,); 2 keys of 1 values need (2,)"),
    (1.0, "values have shape (); 2 keys of 1 values need (2,)"),
    (None, "values have shape (); 2 keys of 1 values need (2,)"),
    ([[1.0, 2.0]], "values have shape (1, 2); 2 keys of 1 values need (2,)"),
    ([1.0, float("nan")], "the gradient of key 9 is not finite"),
    ([float("inf"), 1.0], "the gradient of key 4 is not finite"),
    ([1.0, -1e300], "the gradient of key 9 is not finite"),
    (np.ma.array([1.0, 2.0], mask=[True, False]), "values: element 0 is masked"),
]

GOOD_VALUES: list[tuple[Any, list[float]]] = [
    ([1, 2], [1.0, 2.0]),
    ([0.5, 2], [0.5, 2.0]),
    ([[1], [2]], [1.0, 2.0]),
    (np.array([1, 2], np.float16), [1.0, 2.0]),
    (np.array([1, 2], np.uint8), [1.0, 2.0]),
    ([Fraction(1, 2), 1], [0.5, 1.0]),
    ([np.float64(1), np.float32(2)], [1.0, 2.0]),
    (np.array([[1.0, 2.0]]).T, [1.0, 2.0]),
]


def test_what_is_no_key_is_refused_by_its_element_and_the_job_goes_on() -> None:
    with sparse_group(1, 1) as group:
        job = group.jobs[0]
        for keys, message in BAD_KEYS:
            calls = (
                lambda: job.push(keys, [1.0, 1.0]),  # noqa: B023
                lambda: job.pull(keys),  # noqa: B023
                lambda: job.push_pull([1], [1.0], keys),  # noqa: B023
                lambda: group.use_hot(keys),  # noqa: B023
            )
            for call in calls[: 2 if keys is None else None]:
                with pytest.raises(ValueError) as caught:  # noqa: PT011
                    call()
                assert message in str(caught.value)
        assert (group.workers[0].begun, group.hot.version) == (False, 0)
        assert job.push_pull([1], [1.0]).tolist() == [[1.0]]


@pytest.mark.parametrize(("keys", "wanted"), GOOD_KEYS)
def test_integers_of_any_kind_are_keys(keys: Any, wanted: list[int]) -> None:
    found = keys_of(keys)
    assert (found.tolist(), found.dtype) == (wanted, np.uint64)


def test_what_is_no_value_is_refused_by_its_element_and_the_job_goes_on() -> None:
    with sparse_group(2, 1) as group:
        for values, message in BAD_VALUES:
            for call in (
                lambda: group.jobs[0].push([4, 9], values),  # noqa: B023
                # nor has the rank before it pushed
                lambda: group.push_all([([4], [1.0]), ([4, 9], values)]),  # noqa: B023
            ):
                with pytest.raises(ValueError) as caught:  # noqa: PT011
                    call()
                assert message in str(caught.value)
        with pytest.raises(ValueError, match="key 5 comes more than once"):
            group.push_all([([4], [1.0]), ([5, 6, 5], np.ones(3))])
        assert not any(worker.begun for worker in group.workers)
        group.push_all([([4, 9], [1.0, 2.0]), ([9], [3.0])])
        assert group.jobs[1].pull([4, 9]).ravel().tolist() == [1.0, 5.0]


@pytest.mark.parametrize(("values", "wanted"), GOOD_VALUES)
def test_real_numbers_of_any_kind_are_values(values: Any, wanted: list[float]) -> None:
    found = values_of(values, 2, 1)
    assert (found.ravel().tolist(), found.dtype, found.shape) == (wanted, np.float32, (2, 1))


def test_values_of_several_have_a_row_for_each_key() -> None:
    assert values_of([[1, 2], [3, 4]], 2, 2).tolist() == [[1, 2], [3, 4]]
    for wrong in ([1, 2, 3, 4], [[1, 2]], np.ones((2, 2, 1)), np.ones((2, 3))):
        with pytest.raises(ValueError, match=r"2 keys of 2 values need \(2, 2\)"):
            values_of(wrong, 2, 2)
    assert values_of([], 0, 3).shape == (0, 3)
