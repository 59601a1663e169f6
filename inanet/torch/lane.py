"""Threads that do things in order, and futures that they complete."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

_LEAVE_SECONDS = 2.0


class Lane:
    """One thread that runs what it is given, in that order. It starts with the first piece of work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def used(self) -> bool:
        """Whether it ever got any work."""
        return self._thread is not None

    def put(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise, after all that was put before. Once the lane is closed it runs
        here and now, so that nobody waits for it in vain."""
        with self._lock:
            if not self._closed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._queue.put(work)
                return
        work()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def close(self) -> None:
        """Let the thread finish what it has; it must have nothing left to wait for."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(_LEAVE_SECONDS)


def promise(
    lane: Lane, wait: Callable[[], None], value: Callable[[], Any], devices: list[Any] | None = None
) -> "torch.futures.Future[Any]":
    """A future with ``value()`` once ``wait`` has returned on the lane, or with the error that either raised.

    Errors travel by being raised inside of ``then``. With ``set_exception`` torch's C++ code, DDP's among it,
    takes the exception for the value, which ends in a segmentation fault or in silence.
    """
    source: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    failure: list[BaseException] = []

    def settle(_: Any) -> Any:
        if failure:
            raise failure[0]
        return value()

    future = source.then(settle)

    def run() -> None:
        try:
            wait()
        except BaseException as error:
            failure.append(error)
        source.set_result(None)

    lane.put(run)
    return future
