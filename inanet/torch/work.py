"""What collectives of the process group return.

Torch's own ready-made Work returns from ``wait`` as if all were well when its future has failed, so these
are classes of their own, whose ``wait`` raises. C++ passes a timeout, Python may not; zero or less is none.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inanet.errors import InaError
from inanet.torch.completion import Completer, promise
from inanet.torch.ledger import Entry
from inanet.torch.transport import Reduction

#: torch's base class, under its name of today or of torch 2.6
Work: Any = getattr(dist, "Work", None) or dist.distributed_c10d.Work
#: how Gloo or another backend fails, for the sentence of an error of ours instead
Explain = Callable[[RuntimeError], Exception]
#: complete works that C++ may still wait for
_MOST_KEPT = 4096


def seconds_of(timeout: timedelta | None) -> float | None:
    """Seconds, or None for the values that mean "unset"."""
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


class Unwaited:
    """Works that Python has dropped and nobody has waited for.

    C++ may have them, and calls our ``wait`` only while the Python object lives; after that it would wait in torch's
    base class for ever (DDP's join with ``divide_by_initial_world_size=False``). They are kept until they are complete,
    and without their tensors for a while after.
    """

    def __init__(self) -> None:
        self._running: deque[GroupWork] = deque()
        self._complete: deque[GroupWork] = deque(maxlen=_MOST_KEPT)

    def keep(self, work: "GroupWork") -> None:
        """Called when the last reference goes."""
        self._running.append(work)

    def sweep(self) -> None:
        """Let complete works go of their tensors."""
        while self._running and self._running[0].is_completed():
            work = self._running.popleft()
            work.strip()
            self._complete.append(work)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._running.clear()
        self._complete.clear()


class GroupWork(Work):
    """A collective that is on its way. Subclasses wait, and say what became of it."""

    def __init__(self, unwaited: Unwaited) -> None:
        super().__init__()
        self._unwaited = unwaited
        #: somebody waited for it, or has the future
        self._watched = False

    def __del__(self) -> None:
        if not getattr(self, "_watched", True):
            self._unwaited.keep(self)

    def strip(self) -> None:
        """Forget the tensors of a complete work; what ``wait`` does stays the same."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Whether it is completed without an error."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()


class FabricWork(GroupWork):
    """Tensors that are being reduced through the fabric, in place."""

    def __init__(
        self,
        reductions: Sequence[Reduction],
        tensors: Sequence[torch.Tensor],
        completer: Completer,
        unwaited: Unwaited,
        entry: Entry,
    ) -> None:
        super().__init__(unwaited)
        self._reductions = list(reductions)
        self._tensors = list(tensors)
        self._completer = completer
        self._entry = entry
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the tensors hold the results; raises an :class:`~inanet.errors.InaError`."""
        self._watched = True
        with self._entry.waiting():
            self._finish(seconds_of(timeout))
        self._synchronize()
        return True

    def _finish(self, seconds: float | None = None) -> None:
        if self._error is not None and not self._reductions:
            raise self._error
        try:
            for reduction in self._reductions:
                reduction.finish(seconds)
        except BaseException as error:
            self._error = error
            raise

    def _synchronize(self) -> None:
        for reduction in self._reductions:
            reduction.synchronize()

    def is_completed(self) -> bool:
        """Whether the tensors hold the results, or ``wait`` would raise at once."""
        if not all(reduction.done() for reduction in self._reductions):
            return False
        # whoever asks may read the tensors next
        self.exception()
        return True

    def exception(self) -> BaseException | None:
        """The error, if it is completed with one."""
        if self._error is None and all(reduction.done() for reduction in self._reductions):
            try:
                self._finish(0.0)
            except InaError as error:
                return error
        return self._error

    def strip(self) -> None:
        self.exception()
        self._reductions.clear()
        self._tensors.clear()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the list of tensors."""
        self._watched = True
        devices = sorted({tensor.device for tensor in self._tensors if tensor.is_cuda}, key=str)

        def value() -> list[torch.Tensor]:
            self._synchronize()
            return self._tensors

        ready = self.is_completed()
        return promise(self._completer, self._finish, value, ready=ready, devices=devices or None)


class DelegatedWork(GroupWork):
    """Work of the private Gloo group. Its errors become those of the job if that is what they come from.

    ``after`` is what remains to be done with the result, once.
    """

    def __init__(
        self,
        inner: Any,
        explain: Explain,
        completer: Completer,
        unwaited: Unwaited,
        entry: Entry,
        after: Callable[[], None] | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        super().__init__(unwaited)
        self._devices = list(devices)
        self._inner = inner
        self._explain = explain
        self._completer = completer
        self._entry = entry
        self._after = after
        self._lock = threading.Lock()
        self._stripped = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torch's; raises Gloo's ``RuntimeError``, or the error that ended the job."""
        self._watched = True
        if self._stripped:
            if self._error is not None:
                raise self._error
            return True
        seconds = seconds_of(timeout)
        try:
            with self._entry.waiting():
                done = self._inner.wait() if seconds is None else self._inner.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise self._explain(error) from error
        self._finish()
        return bool(done)

    def _finish(self) -> None:
        with self._lock:
            after, self._after = self._after, None
            if after is not None:
                after()

    def is_completed(self) -> bool:
        """Whether the result is here, or ``wait`` would raise at once."""
        done = self._stripped or bool(self._inner.is_completed())
        if done and not self._stripped and self._inner.is_success():
            self._finish()
        return done

    def exception(self) -> Any:
        """The error, if it is completed with one."""
        return self._error if self._stripped else self._inner.exception()

    def strip(self) -> None:
        try:
            self._inner.wait()
            self._finish()
        except RuntimeError as error:
            self._error = error
        self._stripped, self._inner = True, None

    def result(self) -> Any:
        """The tensors."""
        return self._inner.result()

    def source_rank(self) -> int:
        """Who sent what was received from anybody."""
        return int(self._inner._source_rank())

    _source_rank = source_rank

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the result. Gloo has few threads: callbacks, which may wait for other collectives, run in ours."""
        self._watched = True
        inner: torch.futures.Future[Any] = self._inner.get_future()
        source: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices or None)

        def settle(_: Any) -> Any:
            try:
                value = inner.value()
            except RuntimeError as error:
                raise self._explain(error) from error
            self._finish()
            return value

        future = source.then(settle)

        def complete() -> None:
            source.set_result(None)

        if inner.done():
            complete()
        else:
            inner.add_done_callback(lambda _: self._completer.put(complete))
        return future
