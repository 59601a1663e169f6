"""A machine on a device of its own beside a node: its packets need an address to be told apart by (bound endpoints)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from inanet.aio.driver import Driver
from inanet.phy.device import Device
from inanet.proto.common.events import NodeEvent
from inanet.proto.common.machine import RunnableMachine
from inanet.wire.drops import Drop


def device_drops(counters: Mapping[str, int]) -> dict[str, int]:
    """Drops that a device's counters tell of, by reason."""
    return {
        Drop.KERNEL_OVERFLOW.label: counters.get("kernel_overflow", 0),
        Drop.INJECTED.label: counters.get("injected", 0),
    }


class MachineRunner:
    """Runs ``machine`` on ``device``; ``on_event`` is called for every event, inside the event loop."""

    def __init__(
        self,
        machine: RunnableMachine,
        device: Device,
        on_event: Callable[[NodeEvent], None] = lambda _event: None,
    ) -> None:
        self.machine = machine
        self.device = device
        self.driver = Driver(machine, device, on_event)

    def figures(self) -> dict[str, int]:
        """Counters of machine and device."""
        return {**self.machine.stats(), **self.device.counters(), "tx_refused": self.driver.refused}

    def drops(self) -> dict[str, int]:
        """Packets dropped, by reason."""
        return {**self.machine.drops_by_reason(), **device_drops(self.device.counters())}

    def close(self) -> None:
        """Stop driving, close the device."""
        self.driver.close()


class MachineRunners:
    """Everything beside one node. Figures of what was closed stay."""

    def __init__(self) -> None:
        self._live: list[MachineRunner] = []
        self._figures: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()

    def __iter__(self) -> Iterator[MachineRunner]:
        return iter(list(self._live))

    def add(self, runner: MachineRunner) -> None:
        """Count it in."""
        self._live.append(runner)

    def close(self, runner: MachineRunner) -> None:
        runner.close()
        self._live.remove(runner)
        self._figures.update(runner.figures())
        self._drops.update(runner.drops())

    def figures(self) -> Counter[str]:
        """The sum of all counters, by name."""
        return sum((Counter(one.figures()) for one in self), self._figures.copy())

    def drops(self) -> Counter[str]:
        """The sum of all drops, by reason."""
        return sum((Counter(one.drops()) for one in self), self._drops.copy())
