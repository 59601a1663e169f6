"""Several machines of one process on devices, carried along by whoever waits for one of them."""

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from inanet.phy.device import Device
from inanet.wire.batch import PacketBatch, Transmission

#: longest wait for a descriptor or another thread before looking again, seconds
_LOOK = 0.02


class Machine(Protocol):
    """The core contract."""

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch."""
        ...

    def transmit(self, now: float) -> Sequence[Transmission]:
        """What is to be sent."""
        ...

    def timer(self) -> float | None:
        """Next deadline."""
        ...

    def on_timer(self, now: float) -> None:
        """A deadline has come."""
        ...

    def events(self) -> Sequence[Any]:
        """What has happened."""
        ...


class _Station:
    def __init__(self, name: str, machine: Machine, device: Device) -> None:
        self.name = name
        self.machine = machine
        self.device = device
        self._unsent: deque[tuple[Transmission, int]] = deque()

    def step(self, now: float) -> bool:
        """Deliver and send what can be; whether there was anything."""
        moved = False
        while (batch := self.device.receive()) is not None:
            moved = True
            self.machine.receive(batch, now)
            self._send(now)
        held = self.device.flush(now)
        if held is not None:
            moved = True
            self.machine.receive(held, now)
        due = self.machine.timer()
        if due is not None and due <= now:
            self.machine.on_timer(now)
        return self._send(now) or moved

    def _send(self, now: float) -> bool:
        self._unsent.extend((transmission, 0) for transmission in self.machine.transmit(now))
        moved = False
        while self._unsent:
            transmission, start = self._unsent.popleft()
            taken = self.device.send(transmission, start)
            moved |= taken > 0
            if start + taken < len(transmission):
                self._unsent.appendleft((transmission, start + taken))
                break
        return moved

    def timer(self) -> float | None:
        times = [at for at in (self.machine.timer(), self.device.timer()) if at is not None]
        return min(times, default=None)


class Stations:
    """Machines by name, each with its device. Threads may share it: one carries all along while others wait."""

    def __init__(self, parts: Mapping[str, tuple[Machine, Device]]) -> None:
        self._stations = [_Station(name, *part) for name, part in parts.items()]
        self._changed = threading.Condition()
        self._poll = select.poll()
        self._descriptors = False
        #: whether a thread waits for descriptors: a poll object serves one at a time
        self._polling = False
        for station in self._stations:
            try:
                self._poll.register(station.device.fileno(), select.POLLIN)
            except OSError:
                continue
            self._descriptors = True

    def do(self, action: Callable[[float], Any], listen: Callable[[str, Any], None]) -> Any:
        """Call ``action`` with the time, then carry everything along once; ``listen`` is told of events, by name."""
        with self._changed:
            result = action(time.monotonic())
            self._carry(listen)
            self._changed.notify_all()
            return result

    def wait(self, until: Callable[[], bool], listen: Callable[[str, Any], None], deadline: float) -> bool:
        """Carry everything along until a condition holds; False if it does not by ``deadline`` (monotonic seconds)."""
        with self._changed:
            while True:
                self._carry(listen)
                if until():
                    self._changed.notify_all()
                    return True
                now = time.monotonic()
                if now >= deadline:
                    return False
                self._idle(min(_LOOK, deadline - now, self._next(now)))

    def _carry(self, listen: Callable[[str, Any], None]) -> None:
        moving = True
        while moving:
            moving = False
            now = time.monotonic()
            for station in self._stations:
                moving |= station.step(now)
                for event in station.machine.events():
                    listen(station.name, event)

    def _next(self, now: float) -> float:
        times = [station.timer() for station in self._stations]
        return max(min((at for at in times if at is not None), default=now + _LOOK) - now, 0.0)

    def _idle(self, seconds: float) -> None:
        if not self._descriptors or self._polling:
            self._changed.wait(seconds)
            return
        # others may begin something meanwhile; what they send wakes this thread
        self._polling = True
        self._changed.release()
        try:
            self._poll.poll(max(1, round(1000 * seconds)))
        finally:
            self._changed.acquire()
            self._polling = False
            # they look once this thread has carried what has come
            self._changed.notify_all()

    def replace(self, name: str, machine: Machine) -> None:
        """Put another machine in the place of one, at its device; what was still to be sent is not."""
        with self._changed:
            for place, station in enumerate(self._stations):
                if station.name == name:
                    self._stations[place] = _Station(name, machine, station.device)

    def close(self) -> None:
        with self._changed:
            for station in self._stations:
                station.device.close()
