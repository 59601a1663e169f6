"""The collectives of a job whose ranks are all on this host: sums in shared memory, no packet is sent.

Small rounds are done at once, on the event loop: that is faster than handing them to a thread. Larger ones are cut
into parts that the threads of a pool work on (kernels release the interpreter's lock), so that the loop stays free
for other jobs. Rounds of one job follow each other; bits depend neither on the cut nor on the threads (number format).
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray

from inanet.errors import FabricError, refusal_error
from inanet.proto.common.events import Participation
from inanet.proto.common.local import LocalTensor, Refusal
from inanet.proto.common.plan import TensorSpec

T = TypeVar("T")
#: bytes of all ranks' arrays together up to which a round is done at once: less than a millisecond
INLINE_BYTES = 1 << 20
#: parts per thread: one that the system holds up leaves its share to the others
PARTS_PER_THREAD = 4
#: tensors whose exponents are remembered: as many as a coordinator has slots made for, so that bits are the same
MOST_TENSORS = 1024


class Threads:
    """A pool with one thread for each core that this process may use, started when they are first needed."""

    def __init__(self) -> None:
        self.count = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.count, "sums")

    def run(self, work: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        """Call something in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        """End the threads; what they still do is waited for."""
        self._pool.shutdown(cancel_futures=True)


@dataclass(slots=True)
class _Queued:
    """A round that waits for those before it."""

    number: int
    tensor: LocalTensor
    arrays: Sequence[NDArray[Any]]
    future: "asyncio.Future[Participation | None]"

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


class LocalSums:
    """``ranks`` are the job's, all of them. ``threads`` may serve several jobs."""

    def __init__(self, ranks: tuple[int, ...], threads: Threads) -> None:
        self._ranks = ranks
        self._threads = threads
        #: the least recently used first
        self._tensors: dict[TensorSpec, LocalTensor] = {}
        self._queue: deque[_Queued] = deque()
        self._closing = False
        self._working: asyncio.Task[None] | None = None

    def submit(
        self, number: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]]
    ) -> "asyncio.Future[Participation | None]":
        """One round; see :meth:`inanet.agent.group.Backend.submit`.

        Raises :class:`~inanet.errors.FabricError` for what no number format can do.
        """
        loop = asyncio.get_running_loop()
        queued = _Queued(number, self._tensor(number, spec), arrays, loop.create_future())
        if self._working is None and queued.size <= INLINE_BYTES:
            self._settle(queued, queued.tensor.reduce(arrays))
            return queued.future
        self._queue.append(queued)
        if self._working is None:
            self._working = loop.create_task(self._work())
        return queued.future

    def _tensor(self, number: int, spec: TensorSpec) -> LocalTensor:
        tensor = self._tensors.pop(spec, None)
        if tensor is None:
            try:
                tensor = LocalTensor(spec, len(self._ranks))
            except ValueError as error:
                raise FabricError(str(error), round=number) from None
            if len(self._tensors) >= MOST_TENSORS:
                del self._tensors[next(iter(self._tensors))]
        self._tensors[spec] = tensor
        return tensor

    async def _work(self) -> None:
        try:
            while self._queue:
                queued = self._queue.popleft()
                try:
                    self._settle(queued, await self._reduce(queued))
                except Exception as error:
                    if not queued.future.done():
                        queued.future.set_exception(error)
        finally:
            self._working = None

    async def _reduce(self, queued: _Queued) -> Refusal | None:
        if queued.size <= INLINE_BYTES:
            return queued.tensor.reduce(queued.arrays)
        parts = min(queued.size // INLINE_BYTES + 1, PARTS_PER_THREAD * self._threads.count)
        round_ = queued.tensor.begin(queued.arrays, parts)
        # taken by whichever thread is free, so that threads are woken once a round and not once a part
        rest = iter(round_.parts)

        def work() -> None:
            for part in rest:
                if self._closing:
                    return
                round_.work(part)

        works = [self._threads.run(work) for _ in range(min(self._threads.count, len(round_.parts)))]
        # all of them, also if one fails: nobody may write into arrays that were given back
        for result in await asyncio.gather(*works, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if self._closing:
            queued.future.cancel()
            return None
        if any(part.refused >= 0 for part in round_.parts):
            # it looks for the culprit in all that is left
            return await self._threads.run(round_.finish)
        return round_.finish()

    def _settle(self, queued: _Queued, refusal: Refusal | None) -> None:
        if queued.future.done():
            return
        if refusal is None:
            queued.future.set_result(None)
        else:
            queued.future.set_exception(refusal_error(refusal, self._ranks, queued.number))

    async def close(self) -> None:
        """Give up what waits, and what is under way with the parts that threads are at; returns when nothing writes into the
        arrays any more.
        """
        self._closing = True
        for queued in self._queue:
            queued.future.cancel()
        self._queue.clear()
        if self._working is not None:
            await asyncio.wait({self._working})
