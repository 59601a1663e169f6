"""What all ports of a switch have in common, and what an event loop needs to know of a switch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from inanet.phy.device import Device
from inanet.phy.fault import FaultInjector
from inanet.proto.common.plan import SwitchedJob
from inanet.switch.egress import EgressQueue


@dataclass(frozen=True, slots=True)
class Faults:
    """Impairments of what arrives at a port; probabilities per packet, ``delay`` in seconds at most.

    A corrupt packet is a lost one: the FCS of a real link would find the damage, and public framings have nothing
    that could.
    """

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0

    @property
    def active(self) -> bool:
        """Whether any fault is on."""
        return any((self.drop, self.duplicate, self.reorder, self.corrupt, self.delay))

    def around(self, device: Device, number: int, clock: Callable[[], float]) -> Device:
        """The device of port ``number`` with these faults; every port draws its own."""
        if not self.active:
            return device
        return FaultInjector(
            device,
            self.seed * 65_537 + number,
            clock,
            drop=1 - (1 - self.drop) * (1 - self.corrupt),
            duplicate=self.duplicate,
            reorder=self.reorder,
            delay=(0.0, self.delay),
        )


@dataclass(frozen=True, slots=True)
class PortOptions:
    """Egress queue of a port (:class:`~inanet.switch.egress.EgressQueue`: bit/s, bytes, bytes) and its faults."""

    rate: float | None = None
    depth: int = 1 << 20
    ecn: int | None = None
    faults: Faults = Faults()

    def queue(self, name: str) -> EgressQueue:
        """The egress queue of the port ``name``."""
        return EgressQueue(name, self.rate, self.depth, self.ecn)


class SwitchPort(Protocol):
    """A port as an event loop sees it."""

    name: str

    def fileno(self) -> int:
        """Descriptor to watch; :meth:`read` when it is readable, :meth:`resume` when it is writable and
        :attr:`blocked`.
        """
        ...

    def read(self, now: float) -> bool:
        """One drain step: what has arrived passes through the switch. False: nothing was there."""
        ...

    @property
    def blocked(self) -> bool:
        """Whether something waits to be sent."""
        ...

    def resume(self) -> None:
        """Send what waits."""
        ...

    def counters(self) -> dict[str, int]:
        """Totals of device and egress queue, by name."""
        ...


class Switch(Protocol):
    """A switch as an event loop sees it."""

    #: a :class:`~inanet.switch.pipeline.Pipeline`
    pipeline: Any

    @property
    def ports(self) -> list[SwitchPort]:
        """All ports."""
        ...

    def endpoints(self) -> dict[str, int]:
        """Where the packets of each program, by its name, can be sent to."""
        ...

    def serve(self, program: str, job: SwitchedJob, key: int) -> None:
        """Have a program serve the job of a plan from now on; ports may come with it.

        Raises ``ValueError`` for a job that it cannot serve, :class:`~inanet.proto.common.refusal.NoRoom` for one that it has no
        slots for.
        """
        ...

    def dismiss(self, program: str, job: int, leave: Callable[[SwitchPort], None]) -> None:
        """Have a program forget a job, by its number; ``leave`` is called with every port that is closed then, before it is."""
        ...

    def timer(self) -> float:
        """When :meth:`on_timer` wants to be called next."""
        ...

    def on_timer(self, now: float) -> None:
        """Age slots, sample occupancy, release delayed packets."""
        ...

    def stats(self) -> dict[str, object]:
        """All figures: the pipeline's, ``drops`` by reason, ``ports`` by name."""
        ...

    def close(self) -> None:
        """Close all ports; figures stay readable."""
        ...
