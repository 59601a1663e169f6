"""Machines on devices in virtual time: time stands still while packets are on their way, and then jumps to the next timer."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from inanet.phy.device import Device
from inanet.testing.clock import FakeClock
from inanet.wire.batch import PacketBatch, Transmission


class Stuck(AssertionError):
    """No progress is possible: nothing is on its way and no timer is set, or virtual time ran out."""


class Pumped(Protocol):
    """A machine of any kind, whatever its events are."""

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch."""
        ...

    def transmit(self, now: float) -> Iterable[Transmission]:
        """What is to be sent."""
        ...

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next."""
        ...

    def on_timer(self, now: float) -> None:
        """The time that :meth:`timer` has named has come."""
        ...


def exchange(machine: Pumped, device: Device, now: float) -> bool:
    """Deliver to a machine and send from it what can be at this instant; whether there was anything."""
    moved = False
    while (batch := device.receive()) is not None:
        moved = True
        machine.receive(batch, now)
    if (held := device.flush(now)) is not None:
        moved = True
        machine.receive(held, now)
    for transmission in machine.transmit(now):
        moved = True
        device.send(transmission)
    return moved


def call_due(machine: Pumped, now: float) -> None:
    """Tell a machine the time if it has asked for it."""
    at = machine.timer()
    if at is not None and at <= now:
        machine.on_timer(now)


class Pump:
    """Moves packets between ``machines`` and their ``devices``, both by name; whoever has these mappings may change them.

    ``step`` does what can be done at this instant and says whether there was anything; the default exchanges packets. It may do more,
    as carry control messages. ``timers`` are those of others, which ``wake`` tells the time. ``figures`` are shown when it is stuck.
    """

    def __init__(
        self,
        clock: FakeClock,
        machines: Mapping[Any, Pumped],
        devices: Mapping[Any, Device],
        *,
        step: Callable[[], bool] | None = None,
        timers: Callable[[], Iterable[float | None]] = lambda: (),
        wake: Callable[[float], None] = lambda now: None,
        figures: Callable[[], object] = lambda: "",
    ) -> None:
        self.clock = clock
        self._machines = machines
        self._devices = devices
        self._step = step or self.exchange
        self._timers = timers
        self._wake = wake
        self._figures = figures

    def exchange(self) -> bool:
        """Deliver and send on all machines; whether there was anything."""
        moved = False
        for name in list(self._machines):
            moved |= exchange(self._machines[name], self._devices[name], self.clock.now)
        return moved

    def timer(self) -> float | None:
        """When something happens next unless packets are on their way."""
        times = [machine.timer() for machine in self._machines.values()]
        times += [self._devices[name].timer() for name in self._machines]
        times += self._timers()
        return min((at for at in times if at is not None), default=None)

    def advance(self, to: float) -> None:
        """Let time pass, and tell it to whoever has asked for it."""
        now = self.clock.now = max(self.clock.now, to)
        self._wake(now)
        for machine in self._machines.values():
            call_due(machine, now)

    def run(self, until: Callable[[], bool], deadline: float) -> None:
        """Run until a condition holds. Raises :class:`Stuck` after ``deadline`` seconds of virtual time."""
        stop = self.clock.now + deadline
        while not until():
            # what it has done may have been to tell of events alone
            if self._step() or until():
                continue
            due = self.timer()
            if due is None:
                raise Stuck(
                    f"nothing on its way and no timer set at {self.clock.now:.6f} s; {self._figures()}"
                )
            if due > stop:
                raise Stuck(f"not done after {deadline} s of virtual time; {self._figures()}")
            self.advance(due)

    def settle(self, seconds: float) -> None:
        """Let everything come to rest that does within some seconds."""
        stop = self.clock.now + seconds
        while True:
            if self._step():
                continue
            due = self.timer()
            if due is None or due > stop:
                return
            self.advance(due)
