"""A fabric in virtual time whose aggregators have their slots in the kernel, every packet through the real program."""

import random
import select as polling
from collections.abc import Callable

import numpy as np

from inanet.phy.device import Device
from inanet.phy.gather import join, select
from inanet.phy.wrapper import Wrapper
from inanet.proto.tree.node import Node
from inanet.testing.fabric import VirtualFabric
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint
from inanet.xdp.inbox import Inbox
from inanet.xdp.memory import Mode, SharedMemory
from inanet.xdp.slots import KernelSlots
from inanet.xdp.worker import InboxDevice
from tests.xdp.conftest import PASS, REDIRECT, TX, frame

HEAD = 42


class KernelDevice(Wrapper):
    """Shows what arrives to the program first; its device gets what the program sends, the node what it passes."""

    def __init__(self, device: Device, memory: SharedMemory, mode: Mode) -> None:
        super().__init__(device)
        self._program = memory.program(mode)
        self.forwarded = 0

    def receive(self) -> PacketBatch | None:
        """What is left for user space; batches of which nothing is left are passed over."""
        while (batch := self._device.receive()) is not None:
            left = self._run(batch)
            if len(left):
                return left
        return None

    def flush(self, now: float) -> PacketBatch | None:
        """As :meth:`receive`, for what a fault injector has held back."""
        batch = self._device.flush(now)
        if batch is None:
            return None
        left = self._run(batch)
        return left if len(left) else None

    def _run(self, batch: PacketBatch) -> PacketBatch:
        passed = []
        for index in range(len(batch)):
            arrived = frame(batch.packet(index), int(batch.sources[index]), self.endpoint)
            verdict, out, _ = self._program.test_run(arrived)
            if verdict == PASS:
                passed.append(index)
            elif verdict in (TX, REDIRECT):
                self.forwarded += 1
                target = endpoint(".".join(map(str, out[30:34])), int.from_bytes(out[36:38], "big"))
                payload = np.frombuffer(out[HEAD:], np.uint8)
                self._device.send(Transmission(target, payload, np.zeros(1, np.int64), len(payload)))
        return select(batch, np.array(passed, np.int64))


class KernelFabric(VirtualFabric):
    """As :class:`~inanet.testing.fabric.VirtualFabric`; nodes whose names begin with ``a`` have their slots in the kernel.

    ``load`` makes the memory of one, for a number of slots and an endpoint.
    """

    def __init__(
        self,
        load: Callable[[int, int, Mode], SharedMemory],
        mode: Mode,
        *arguments: object,
        **options: object,
    ) -> None:
        self._load = load
        self._mode = mode
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def start(self, name: str) -> None:
        """Aggregators get their memory from the program."""
        super().start(name)
        if name.startswith("a"):
            memory = self._load(self.capacity, self.devices[name].endpoint, self._mode)
            self.nodes[name] = Node(name, KernelSlots(memory), self.timing, random.Random(name).random)
            self.devices[name] = KernelDevice(self.devices[name], memory, self._mode)

    def step(self) -> bool:
        """Also what programs have reported."""
        progress = super().step()
        for node in self.nodes.values():
            slots = node.slots
            if isinstance(slots, KernelSlots) and polling.select([slots.fileno()], [], [], 0)[0]:
                node.attend(self.clock.now)
                progress = True
        return progress


class Interface(Wrapper):
    """Shows what arrives to a worker's program first; what that passes is the socket's."""

    def __init__(self, device: Device, inbox: Inbox) -> None:
        super().__init__(device)
        self._program = inbox.program("native")

    def receive(self) -> PacketBatch | None:
        """What is left of all that has arrived, as for a worker that has been busy with something else."""
        left = []
        while (batch := self._device.receive()) is not None:
            left.append(join([self._left(batch)]))
        return join(left) if sum(map(len, left)) else None

    def flush(self, now: float) -> PacketBatch | None:
        """As :meth:`receive`, for what a fault injector has held back."""
        batch = self._device.flush(now)
        left = None if batch is None else self._left(batch)
        return left if left is not None and len(left) else None

    def _left(self, batch: PacketBatch) -> PacketBatch:
        passed = []
        for index in range(len(batch)):
            arrived = frame(batch.packet(index), int(batch.sources[index]), self.endpoint)
            if self._program.test_run(arrived)[0] == PASS:
                passed.append(index)
        return select(batch, np.array(passed, np.int64))


class InboxFabric(VirtualFabric):
    """As :class:`~inanet.testing.fabric.VirtualFabric`; workers, whose names begin with ``w``, get results through a ring.

    ``load`` makes that of one, for an endpoint.
    """

    def __init__(self, load: Callable[[int], Inbox], *arguments: object, **options: object) -> None:
        self._load = load
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def start(self, name: str) -> None:
        """Workers get a program in front of their device."""
        super().start(name)
        if name.startswith("w"):
            device = self.devices[name]
            inbox = self._load(device.endpoint)
            self.nodes[name] = Node(
                name, self.capacity, self.timing, random.Random(name).random, inbox.follow
            )
            self.devices[name] = InboxDevice(Interface(device, inbox), inbox)
