"""When buckets were ready, sent and back, as a Chrome trace (chrome://tracing, Perfetto).

One file per rank, a complete JSON object trace: ``ina trace DIRECTORY`` puts them beside each other. Times
are microseconds since the epoch, so that ranks line up as well as their hosts' clocks do.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

#: events kept; a long run's trace has its first steps
MOST_EVENTS = 200_000
_BACKWARD = 0


def now() -> int:
    """Nanoseconds since the epoch, never going back within a process."""
    return _EPOCH + time.perf_counter_ns()


_EPOCH = time.time_ns() - time.perf_counter_ns()


class Recorder:
    """Collects events of one rank; threads may share it. Written by :meth:`close`."""

    def __init__(self, directory: str | os.PathLike[str], rank: int, name: str) -> None:
        self._path = Path(directory) / f"{name}-rank{rank}.json"
        self._rank = rank
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = [
            self._event("M", "process_name", 0, args={"name": f"rank {rank}"}),
            self._event("M", "thread_name", 0, args={"name": "backward"}),
        ]
        self._number = 0
        self._closed = False

    def backward(self, start: int, end: int, step: int) -> None:
        """The part of a backward pass from the first ready bucket to its end, nanoseconds from :func:`now`."""
        self._add(
            self._event("X", "backward", start, dur=(end - start) / 1e3, cat="backward", args={"step": step})
        )

    def bucket(self, index: int, nbytes: int, step: int, ready: int, sent: int, result: int) -> None:
        """One bucket's way, nanoseconds: ready, handed to the agent, and its result back in this process."""
        with self._lock:
            self._number += 1
            number = self._number
        what = {"step": step, "bucket": index, "bytes": nbytes, "sent": sent / 1e3}
        begin = self._event("b", f"bucket {index}", ready, cat="bucket", id=number, args=what)
        self._add(begin)
        self._add(self._event("n", "sent", sent, cat="bucket", id=number))
        self._add(self._event("e", f"bucket {index}", result, cat="bucket", id=number))

    def _event(self, phase: str, name: str, time_ns: int, **more: Any) -> dict[str, Any]:
        event = {"ph": phase, "name": name, "pid": self._rank, "tid": _BACKWARD, "ts": time_ns / 1e3}
        return event | more

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            if len(self._events) < MOST_EVENTS:
                self._events.append(event)

    def close(self) -> None:
        """Write the file. Closing twice is fine. Raises ``OSError`` if it cannot be written."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            events = self._events
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
