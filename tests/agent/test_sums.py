"""Jobs of one host: rounds in order, large ones in threads, errors with rank and element."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import fields

import numpy as np
import pytest
from numpy.typing import NDArray

import inanet
from inanet.agent.sums import INLINE_BYTES, MOST_TENSORS, LocalSums, Threads
from inanet.coordinator.settings import Settings
from inanet.proto.common.local import LocalRound, LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec

SMALL, LARGE = 100, INLINE_BYTES
PATIENCE = 30.0


@pytest.fixture
async def sums() -> AsyncIterator[LocalSums]:
    """A job of ranks 0 and 1."""
    threads = Threads()
    made = LocalSums((0, 1), threads)
    yield made
    await made.close()
    threads.close()


def spec_of(elements: int, dtype: str = "f32", name: str = "t") -> TensorSpec:
    mode = ExponentMode.CARRIED if dtype == "f32" else ExponentMode.NONE
    return TensorSpec(name, dtype, (elements,), "sum", mode)


def pair(elements: int, seed: int = 0) -> list[NDArray[np.float32]]:
    return [np.random.default_rng((seed, k)).standard_normal(elements).astype(np.float32) for k in range(2)]


async def test_small_rounds_are_done_at_once_and_large_ones_in_threads(
    sums: LocalSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = []
    work = LocalRound.work

    def noted(round_: LocalRound, part: object) -> None:
        where.append(threading.current_thread())
        work(round_, part)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalRound, "work", noted)
    assert sums.submit(1, spec_of(SMALL), pair(SMALL)).done()
    assert where == [threading.main_thread()]
    where.clear()
    arrays, alike = pair(LARGE), pair(LARGE)
    future = sums.submit(2, spec_of(LARGE), arrays)
    assert not future.done()
    await future
    assert len(where) > 1
    assert threading.main_thread() not in where
    assert LocalTensor(spec_of(LARGE), 2).reduce(alike) is None
    assert [array.tobytes() for array in arrays] == [array.tobytes() for array in alike]


async def test_rounds_follow_each_other(sums: LocalSums) -> None:
    """Small ones do not overtake large ones: they may be of the same tensor, or on the same arrays."""
    arrays = [np.ones(LARGE, np.int32) for _ in range(2)]
    parts = [array[:SMALL] for array in arrays]
    order: list[int] = []
    futures = []
    for number, (elements, views) in enumerate([(LARGE, arrays), (SMALL, parts), (LARGE, arrays)], 1):
        future = sums.submit(number, spec_of(elements, "i32"), views)
        future.add_done_callback(lambda _, number=number: order.append(number))
        futures.append(future)
    await asyncio.gather(*futures)
    assert order == [1, 2, 3]
    assert (arrays[0][:SMALL] == 8).all()
    assert (arrays[1][SMALL:] == 4).all()
    # and after all that it is idle again
    assert sums.submit(4, spec_of(SMALL, "i32"), parts).done()


@pytest.mark.parametrize("elements", [SMALL, LARGE])
async def test_refusals_are_typed_and_the_next_round_is_fine(sums: LocalSums, elements: int) -> None:
    arrays = pair(elements)
    arrays[1][77] = np.nan
    with pytest.raises(inanet.NonFiniteError, match="rank 1 has nan at element 77 of tensor 't'") as caught:
        await sums.submit(1, spec_of(elements), arrays)
    assert (caught.value.ranks, caught.value.tensor, caught.value.index) == ((1,), "t", 77)
    numbers = [np.full(elements, 2**30, np.int32) for _ in range(2)]
    with pytest.raises(inanet.OverflowRefused, match="sum of element 0 does not fit"):
        await sums.submit(2, spec_of(elements, "i32"), numbers)
    assert await sums.submit(3, spec_of(elements), pair(elements)) is None


async def test_what_no_format_can_do_is_refused_at_once(sums: LocalSums) -> None:
    wrong = TensorSpec("t", "i32", (4,), "mean", ExponentMode.NONE)
    with pytest.raises(inanet.FabricError, match="mean of i32 is not supported") as caught:
        sums.submit(9, wrong, [])
    assert caught.value.round == 9


async def test_an_error_in_a_thread_ends_its_round_only(
    sums: LocalSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = LocalRound.work

    def failing(round_: LocalRound, part: object) -> None:
        if part is round_.parts[-1] and part is not round_.parts[0]:
            raise ZeroDivisionError
        work(round_, part)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalRound, "work", failing)
    first = sums.submit(1, spec_of(LARGE), pair(LARGE))
    second = sums.submit(2, spec_of(SMALL), pair(SMALL))
    with pytest.raises(ZeroDivisionError):
        await first
    assert await second is None


async def test_closing_waits_for_threads_and_gives_up_what_they_have_not_begun(
    sums: LocalSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    ended: list[object] = []
    all_busy, may_end = threading.Semaphore(0), threading.Event()

    def held(round_: LocalRound, part: object) -> None:
        begun.append(part)
        all_busy.release()
        assert may_end.wait(PATIENCE)
        ended.append(part)

    monkeypatch.setattr(LocalRound, "work", held)
    busy = sums._threads.count = min(sums._threads.count, 2)
    rounds = [sums.submit(number, spec_of(LARGE), pair(LARGE)) for number in (1, 2)]
    for _ in range(busy):
        assert await asyncio.to_thread(all_busy.acquire, timeout=PATIENCE)
    closing = asyncio.create_task(sums.close())
    # it has looked at all there is, and waits
    await asyncio.sleep(0)
    assert rounds[1].cancelled()
    assert not closing.done()
    may_end.set()
    await closing
    assert rounds[0].cancelled()
    # of 4 parts or more
    assert len(begun) == len(ended) == busy


async def test_as_many_tensors_are_remembered_as_over_the_network(sums: LocalSums) -> None:
    assert {field.name: field.default for field in fields(Settings)}["most_tensors"] == MOST_TENSORS
    for number in range(MOST_TENSORS + 5):
        sums.submit(number, spec_of(4, "i32", f"t{number}"), [np.ones(4, np.int32)] * 2)
        sums.submit(number, spec_of(4, "i32", "often"), [np.ones(4, np.int32)] * 2)
    assert len(sums._tensors) == MOST_TENSORS
    assert spec_of(4, "i32", "often") in sums._tensors
    assert spec_of(4, "i32", "t0") not in sums._tensors
