"""What collectives of the process group return.

Torch's own ready-made Work returns from ``wait`` as if all were well when its future has failed, so these
are classes of their own, whose ``wait`` raises. C++ passes a timeout, Python may not; zero or less is none.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inanet.errors import InaError
from inanet.torch.lane import Lane, promise
from inanet.torch.transport import Reduction

#: torch's base class, under its name of today or of torch 2.6
Work: Any = getattr(dist, "Work", None) or dist.distributed_c10d.Work
#: how Gloo or another backend fails, for the sentence of an error of ours instead
Explain = Callable[[RuntimeError], Exception]


def seconds_of(timeout: timedelta | None) -> float | None:
    """Seconds, or None for the values that mean "unset"."""
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


class FabricWork(Work):  # type: ignore[misc]
    """Tensors that are being reduced through the fabric, in place."""

    def __init__(self, reductions: Sequence[Reduction], tensors: Sequence[torch.Tensor], lane: Lane) -> None:
        super().__init__()
        self._reductions = list(reductions)
        self._tensors = list(tensors)
        self._lane = lane
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the tensors hold the results; raises an :class:`~inanet.errors.InaError`."""
        self._finish(seconds_of(timeout))
        for reduction in self._reductions:
            reduction.synchronize()
        return True

    def _finish(self, seconds: float | None = None) -> None:
        try:
            for reduction in self._reductions:
                reduction.finish(seconds)
        except BaseException as error:
            self._error = error
            raise

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return all(reduction.done() for reduction in self._reductions)

    def is_success(self) -> bool:
        """Whether it is completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error, if it is completed with one."""
        if self._error is None and self.is_completed():
            try:
                self._finish(0.0)
            except InaError as error:
                return error
        return self._error

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the list of tensors, completed by a thread of its own."""
        devices = sorted({tensor.device for tensor in self._tensors if tensor.is_cuda}, key=str)

        def value() -> list[torch.Tensor]:
            for reduction in self._reductions:
                reduction.synchronize()
            return self._tensors

        return promise(self._lane, self._finish, value, devices or None)


class DelegatedWork(Work):  # type: ignore[misc]
    """Work of the private Gloo group. Its errors become those of the job if that is what they come from.

    ``after`` is what remains to be done with the result, once.
    """

    def __init__(self, inner: Any, explain: Explain, after: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._inner = inner
        self._explain = explain
        self._after = after

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torch's; raises Gloo's ``RuntimeError``, or the error that ended the job."""
        seconds = seconds_of(timeout)
        try:
            done = self._inner.wait() if seconds is None else self._inner.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise self._explain(error) from error
        self._finish()
        return bool(done)

    def _finish(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            after()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether it is completed without an error."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """The error, if it is completed with one."""
        return self._inner.exception()

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def result(self) -> Any:
        """The tensors."""
        return self._inner.result()

    def source_rank(self) -> int:
        """Who sent what was received from anybody."""
        return int(self._inner._source_rank())

    _source_rank = source_rank

    def get_future(self) -> "torch.futures.Future[Any]":
        """The inner future, behind what remains to be done."""
        future = self._inner.get_future()
        if self._after is None:
            return future  # type: ignore[no-any-return]

        def settle(done: Any) -> Any:
            value = done.value()
            self._finish()
            return value

        return future.then(settle)  # type: ignore[no-any-return]
