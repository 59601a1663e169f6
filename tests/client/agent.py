"""An agent without a network, in a thread of the test: the real server, a backend that sums with numpy."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

import inanet
from inanet.agent.server import LocalServer
from inanet.agent.session import Session
from inanet.errors import InaError
from inanet.proto.common.plan import TensorSpec

T = TypeVar("T")
#: seconds after which a test gives up; nothing takes that long
PATIENCE = 30.0


def widen(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values of an array as numpy can add them: bfloat16 (as uint16) and float16 become float32."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "f16" else array


def narrow(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The inverse of :func:`widen`, for values that need no rounding."""
    if dtype == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values


class LoopbackBackend:
    """Sums the arrays of the local ranks. What it was told is kept; what it does next can be set."""

    def __init__(self) -> None:
        self.joined: list[tuple[str, tuple[int, ...], int]] = []
        self.rounds: list[tuple[str, int, TensorSpec]] = []
        self.arrays: list[NDArray[Any]] = []
        self.mismatches: list[tuple[str, int, int, str]] = []
        #: (job, reason) of every leave, in order
        self.left: queue.Queue[tuple[str, str]] = queue.Queue()
        #: while set, joining waits for :meth:`admit`, which also says why it fails
        self.closed = False
        self.progress: Callable[[str], None] = lambda _: None
        self._admitted: asyncio.Future[None] | None = None
        #: while set, rounds wait for :meth:`finish`
        self.held = False
        self.futures: dict[int, asyncio.Future[None]] = {}
        #: while cleared, arrays of a job that is over are as if they were written to
        self.quiet = asyncio.Event()
        self.quiet.set()
        #: raised by submit, and the error that futures get
        self.crash: Exception | None = None
        self.refusal: Exception | None = None

    async def join(
        self, job: str, ranks: tuple[int, ...], world: int, system: str, progress: Callable[[str], None]
    ) -> None:
        self.system = system
        self.joined.append((job, ranks, world))
        self.progress = progress
        if self.closed:
            self._admitted = asyncio.get_running_loop().create_future()
            await self._admitted

    def admit(self, error: Exception | None = None) -> None:
        assert self._admitted is not None
        if error is None:
            self._admitted.set_result(None)
        else:
            self._admitted.set_exception(error)

    def submit(
        self, job: str, round_: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]]
    ) -> "asyncio.Future[None]":
        if self.crash is not None:
            raise self.crash
        self.rounds.append((job, round_, spec))
        self.arrays = list(arrays)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.futures[round_] = future
        if self.refusal is not None:
            future.set_exception(self.refusal)
        elif not self.held:
            self.finish(round_, spec, arrays)
        return future

    def finish(self, round_: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]]) -> None:
        if len(arrays) > 1 and spec.elements:
            values = np.stack([widen(array, spec.dtype) for array in arrays])
            total = {"sum": values.sum(0, values.dtype), "max": values.max(0), "min": values.min(0)}.get(
                spec.op
            )
            result = values.mean(0) if total is None else total
            for array in arrays:
                array[:] = narrow(result, spec.dtype)
        self.futures[round_].set_result(None)

    def mismatch(self, job: str, round_: int, spec: TensorSpec, rank: int, text: str) -> None:
        self.mismatches.append((job, round_, rank, text))

    def awaited(self, job: str) -> str:
        return f"the other hosts of {job}"

    async def quieten(self, job: str, reason: str) -> None:
        await self.quiet.wait()

    async def leave(self, job: str, reason: str) -> None:
        self.left.put((job, reason))

    def stats(self) -> dict[str, int]:
        return {"rounds": len(self.rounds)}


class Agent:
    """A :class:`LocalServer` on an event loop in a thread. Errors that reach the loop fail the test."""

    def __init__(
        self, path: Path, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None, **options: Any
    ) -> None:
        self.path = path
        self.backend = LoopbackBackend()
        self._factory = loop_factory
        self._options = options
        self._ready = threading.Event()
        self._errors: list[object] = []
        self._thread = threading.Thread(target=self._run, name="agent")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._factory) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _, context: self._errors.append(context))
        self._stop = asyncio.Event()
        # its rounds are what tests look at: small tensors come to it as well, unless a test says otherwise
        self.server = LocalServer(self.path, self.backend, **{"shares": False, **self._options})
        await self.server.start()
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            await self.server.close()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert not self._errors, self._errors

    def stop(self) -> None:
        """Stop it in good order. Stopping twice is fine."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive()

    def do(self, action: Callable[[], T]) -> T:
        """Call something in the loop's thread and return what it returns."""

        async def called() -> T:
            return action()

        return self.wait(called())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the agent's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def each(self, action: Callable[[Session], object]) -> None:
        """Call something with every session, in the loop's thread."""
        self.do(lambda: [action(session) for session in self.server._sessions])

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition on the agent holds; it is looked at once per turn of the loop."""
        holds = threading.Event()

        def look() -> None:
            if condition():
                holds.set()
            elif not given_up.is_set():
                self._loop.call_soon(look)

        given_up = threading.Event()
        self._loop.call_soon_threadsafe(look)
        try:
            assert holds.wait(PATIENCE)
        finally:
            given_up.set()

    def connect(self, job: str = "train", rank: int = 0, world: int = 1, **options: Any) -> inanet.Job:
        """A job of one process; ``local_world`` defaults to ``world``."""
        options = {"local_world": world, "timeout": PATIENCE} | options
        return inanet.connect(job, rank=rank, world=world, socket=self.path, **options)

    def connect_all(self, world: int, job: str = "train", **options: Any) -> list[inanet.Job]:
        """One job object for each of ``world`` local ranks."""
        return run_all(lambda rank: self.connect(job, rank, world, **options), world)


def run_all(work: Callable[[int], T], count: int) -> list[T]:
    """Call ``work(0)`` ... ``work(count - 1)`` at the same time, each in a thread; raises the first error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def error_from(work: Callable[[], object]) -> InaError:
    """The error that a call ends with."""
    try:
        work()
    except InaError as error:
        return error
    raise AssertionError("no error")
