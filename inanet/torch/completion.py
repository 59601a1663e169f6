"""Threads that do things in order, and futures that they complete."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

_LEAVE_SECONDS = 2.0


class SerialThread:
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
        """Run ``work``, which must not raise, after all that was put before. After :meth:`close` it runs in the calling
        thread, so that nobody waits for it in vain."""
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


class Completer:
    """Completes futures in the order of :meth:`put`.

    Callbacks of torch's futures run in the thread that completes them, and may wait for another future of the same
    completer. So the threads lead in turn (leader/followers): the leader waits for the next result, hands the lead
    on, and only then completes the future. There is always a thread free to lead, however many callbacks wait.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._lead = threading.Lock()
        self._threads: list[threading.Thread] = []
        #: threads that wait for the lead, or have it
        self._free = 0
        self._closed = False

    def put(self, complete: Callable[[], None], wait: Callable[[], None] = lambda: None) -> None:
        """Call ``wait``, then ``complete``; neither may raise. After :meth:`close` both run in the calling thread."""
        with self._lock:
            if not self._closed:
                self._ensure_leader()
                self._queue.put((wait, complete))
                return
        wait()
        complete()

    def _ensure_leader(self) -> None:
        if self._free == 0:
            self._free = 1
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def _run(self) -> None:
        while True:
            with self._lead:
                task = self._queue.get()
                if task is None:
                    # for the next one, too
                    self._queue.put(None)
                    return
                wait, complete = task
                wait()
                with self._lock:
                    self._free -= 1
                    self._ensure_leader()
            complete()
            with self._lock:
                if self._free > 1:
                    return
                self._free += 1

    def close(self) -> None:
        """Let the threads finish what they have; they must have nothing left to wait for."""
        with self._lock:
            self._closed = True
            threads = self._threads
        self._queue.put(None)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def promise(
    completer: Completer,
    wait: Callable[[], None],
    value: Callable[[], Any],
    *,
    ready: bool = False,
    devices: Sequence[torch.device] | None = None,
) -> "torch.futures.Future[Any]":
    """A future with ``value()`` once ``wait`` has returned, or with the error that either raised.

    ``ready``: ``wait`` would return at once; then the future is complete when this returns. Errors travel by being raised
    inside of ``then``: after ``set_exception`` torch's C++ code, DDP's among it, takes the exception for the value, which
    ends in a segmentation fault or in silence.
    """
    source: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    failure: list[BaseException] = []

    def settle(_: Any) -> Any:
        if failure:
            raise failure[0]
        return value()

    future = source.then(settle)

    def attempt() -> None:
        try:
            wait()
        except BaseException as error:
            failure.append(error)

    def complete() -> None:
        source.set_result(None)

    if ready:
        attempt()
        complete()
    else:
        completer.put(complete, attempt)
    return future
