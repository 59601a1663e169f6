"""What collectives of the process group return.

Torch's own ready-made Work returns from ``wait`` as if all were well when its future has failed, so this is a class of
its own, whose ``wait`` raises. C++ passes a timeout, Python may not; zero or less is none.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from inanet.torch.completion import Completer, promise
from inanet.torch.ledger import Entry
from inanet.torch.transport import Reduction

#: torch's base class, under its name of today or of torch 2.6
Work: Any = getattr(dist, "Work", None) or dist.distributed_c10d.Work
#: how Gloo or another backend fails, for the sentence of an error of ours instead
Explain = Callable[[RuntimeError], Exception]
#: complete works that C++ may still wait for
_MOST_KEPT = 4096
#: bytes of tensors that such a work keeps: DDP's join asks for one element
_MOST_KEPT_BYTES = 4096
_GONE = "nobody has waited for this collective, and its tensors were let go of"


def seconds_of(timeout: timedelta | None) -> float | None:
    """Seconds, or None for the values that mean "unset"."""
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


class Operation(Protocol):
    """A collective on its way, which may be waited for in any thread."""

    def wait(self, seconds: float | None) -> None:
        """Until the tensors hold the results; raises what went wrong."""

    def done(self) -> bool:
        """Whether :meth:`wait` would return, with the results in the tensors, or raise at once."""

    def error(self) -> BaseException | None:
        """What went wrong, if it is done."""

    def result(self) -> Any:
        """The tensors, or what else torch says the result is."""

    def source_rank(self) -> int:
        """Who sent what was received from anybody."""

    def future(self) -> "torch.futures.Future[Any]":
        """A future of the result."""

    def forget(self) -> None:
        """Let go of large tensors of an operation that is done; :meth:`wait` stays what it is."""


class Unwaited:
    """Works that Python has dropped and nobody has waited for. Threads may share it.

    C++ may have them, and calls our ``wait`` only while the Python object lives; after that it would wait in torch's
    base class for ever (DDP's join with ``divide_by_initial_world_size=False``). They are kept until they are complete,
    and without large tensors for a while after.
    """

    def __init__(self) -> None:
        #: whoever sweeps has it; works may be kept at any time, by the garbage collector within :meth:`sweep` as well
        self._lock = threading.Lock()
        self._running: deque[GroupWork] = deque()
        self._complete: deque[GroupWork] = deque(maxlen=_MOST_KEPT)

    def keep(self, work: "GroupWork") -> None:
        """Called when the last reference goes."""
        self._running.append(work)

    def sweep(self) -> None:
        """Let complete works go of their tensors, unless another thread does."""
        if not self._running or not self._lock.acquire(blocking=False):
            return
        try:
            # one that never completes, as what is received from nobody, holds up no other
            for _ in range(len(self._running)):
                work = self._running.popleft()
                if work.is_completed():
                    work.operation.forget()
                    self._complete.append(work)
                else:
                    self._running.append(work)
        finally:
            self._lock.release()

    def clear(self) -> None:
        self._running.clear()
        self._complete.clear()


class GroupWork(Work):
    """An operation of the group, as torch waits for it."""

    def __init__(self, operation: Operation, unwaited: Unwaited) -> None:
        super().__init__()
        self.operation = operation
        self._unwaited = unwaited
        #: somebody waited for it, or has the future
        self._watched = False

    def __del__(self) -> None:
        if not getattr(self, "_watched", True):
            self._unwaited.keep(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the tensors hold the results; raises an :class:`~inanet.errors.InaError`, or Gloo's ``RuntimeError``."""
        self._watched = True
        self.operation.wait(seconds_of(timeout))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the tensors hold the results, or ``wait`` would raise at once."""
        return self.operation.done()

    def is_success(self) -> bool:
        """Whether it is completed without an error."""
        return self.operation.done() and self.operation.error() is None

    def exception(self) -> BaseException | None:
        """The error, if it is completed with one."""
        return self.operation.error()

    def result(self) -> Any:
        return self.operation.result()

    def source_rank(self) -> int:
        """Who sent what was received from anybody."""
        return self.operation.source_rank()

    _source_rank = source_rank

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the result. Callbacks, which may wait for other collectives, run in threads of ours."""
        self._watched = True
        return self.operation.future()


class FabricReduction:
    """Tensors that are being reduced through the fabric, in place."""

    def __init__(
        self,
        reductions: Sequence[Reduction],
        tensors: Sequence[torch.Tensor],
        completer: Completer,
        entry: Entry,
    ) -> None:
        self._reductions = list(reductions)
        self._tensors: list[torch.Tensor] | None = list(tensors)
        self._completer = completer
        self._entry = entry
        #: what is left of the reductions once they are forgotten
        self._error: BaseException | None = None

    def wait(self, seconds: float | None) -> None:
        """Raises an :class:`~inanet.errors.InaError`."""
        with self._entry.waiting():
            self._finish(seconds)
        self._synchronize()

    def _finish(self, seconds: float | None = None) -> None:
        if self._error is not None:
            raise self._error
        for reduction in self._reductions:
            reduction.finish(seconds)

    def _synchronize(self) -> None:
        for reduction in self._reductions:
            reduction.synchronize()

    def done(self) -> bool:
        """Private memory has the result as well: whoever asks may read it next."""
        if not all(reduction.done() for reduction in self._reductions):
            return False
        self.error()
        return True

    def error(self) -> BaseException | None:
        """What went wrong, if it is done."""
        if not all(reduction.done() for reduction in self._reductions):
            return None
        try:
            self._finish()
        except Exception as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        if self._tensors is None:
            raise RuntimeError(_GONE)
        return self._tensors

    def source_rank(self) -> int:
        """An all-reduce has none."""
        raise RuntimeError("an all-reduce has no source rank")

    def future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """A future of the list of tensors."""
        devices = sorted({tensor.device for tensor in self._tensors or () if tensor.is_cuda}, key=str)

        def value() -> list[torch.Tensor]:
            self._synchronize()
            return self.result()

        return promise(self._completer, self._finish, value, ready=self.done(), devices=devices or None)

    def forget(self) -> None:
        """Keep the error, and small tensors."""
        self._error = self.error()
        self._reductions.clear()
        if self._tensors is not None and _large(self._tensors):
            self._tensors = None


class GlooOperation:
    """What the private Gloo group does. Its errors become those of the job if that is what they come from.

    ``after`` is what remains to be done with the result, once. ``outputs``: the caller's tensors where Gloo has others
    (None: what Gloo says the result is).
    """

    def __init__(
        self,
        work: Any,
        explain: Explain,
        completer: Completer,
        entry: Entry,
        tensors: Sequence[torch.Tensor],
        after: Callable[[], None] | None = None,
        outputs: list[torch.Tensor] | None = None,
    ) -> None:
        self._work = work
        self._explain = explain
        self._completer = completer
        self._entry = entry
        self._tensors = tensors
        self._after = after
        self._outputs = outputs
        self._lock = threading.Lock()
        self._finished = after is None
        self._kept: Any = None
        self._error: Exception | None = None

    def wait(self, seconds: float | None) -> None:
        """Raises Gloo's ``RuntimeError``, or the error that ended the job."""
        work = self._work
        if work is None:
            if self._error is not None:
                raise self._error
            return
        try:
            with self._entry.waiting():
                if seconds is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise self._explain(error) from error
        if not self._finished:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            after, self._after = self._after, None
            if after is not None:
                after()
            self._finished = True

    def done(self) -> bool:
        """Also what remained to be done is done then."""
        work = self._work
        if work is None:
            return True
        done = bool(work.is_completed())
        if done and not self._finished and work.is_success():
            self._finish()
        return done

    def error(self) -> Any:
        """What Gloo says."""
        work = self._work
        return self._error if work is None else work.exception()

    def result(self) -> Any:
        if self._outputs is not None:
            return self._outputs
        work = self._work
        if work is not None:
            return work.result()
        if self._kept is None:
            raise RuntimeError(_GONE)
        return self._kept

    def source_rank(self) -> int:
        """Who sent what was received from anybody."""
        if self._work is None:
            raise RuntimeError("nobody has waited for what was received")
        return int(self._work._source_rank())

    def future(self) -> "torch.futures.Future[Any]":
        """A future of the result. Gloo has few threads, and callbacks may wait for other collectives: they run in ours."""
        work = self._work
        devices = sorted({tensor.device for tensor in self._tensors if tensor.is_cuda}, key=str)
        source: torch.futures.Future[Any] = torch.futures.Future(devices=devices or None)
        inner: torch.futures.Future[Any] | None = None if work is None else work.get_future()

        def settle(_: Any) -> Any:
            if inner is None:
                self.wait(None)
                return self.result()
            try:
                value = inner.value()
            except RuntimeError as error:
                raise self._explain(error) from error
            self._finish()
            return value if self._outputs is None else self._outputs

        future = source.then(settle)

        def complete() -> None:
            source.set_result(None)

        if inner is None or inner.done():
            complete()
        else:
            inner.add_done_callback(lambda _: self._completer.put(complete))
        return future

    def forget(self) -> None:
        """Keep the error, and small results."""
        small = not _large(self._tensors)
        try:
            self.wait(None)
            if small and self._outputs is None:
                self._kept = self._work.get_future().value()
        except Exception as error:
            self._error = error
        if not small:
            self._outputs, self._tensors = None, ()
        self._work = None


def _large(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(sum(tensor.numel() * tensor.element_size() for tensor in tensors) > _MOST_KEPT_BYTES)
