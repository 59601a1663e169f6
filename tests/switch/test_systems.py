"""The systems' own machines on sockets around a switch, as they will run: same bits as one host, with losses on the way."""

import select
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from ipaddress import IPv4Address
from typing import Any

import numpy as np
import pytest

from inanet.phy.udp import UdpDevice
from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.slots.a2tp.system import a2tp_worker
from inanet.proto.slots.atp.ps import atp_server
from inanet.proto.slots.atp.worker import atp_worker
from inanet.proto.slots.esa.system import esa_worker
from inanet.proto.slots.ps import PSJob
from inanet.proto.slots.switchml.worker import switchml_worker
from inanet.proto.slots.worker import Membership, Worker
from inanet.switch.pipeline import Pipeline
from inanet.switch.port import Faults, PortOptions, Switch
from inanet.switch.programs import Job, Registration, build
from inanet.switch.udp import UdpSwitch
from inanet.wire.endpoint import endpoint
from tests.switch.test_framed_switch import HARDWARE, OWN, PORT, Rack, hardware_of, neighbour

DEADLINE = 20.0
JOB, WORKERS, WINDOW, SLOTS, ELEMENTS = 3, 3, 32, 24, 20_000
WORKER: Mapping[str, Callable[..., Worker]] = {
    "switchml": switchml_worker,
    "atp": atp_worker,
    "esa": esa_worker,
    "a2tp": a2tp_worker,
}
LOSSY = PortOptions(faults=Faults(5, drop=0.02, duplicate=0.02, reorder=0.02))


class Sockets:
    """Machines at UDP sockets, driven together with a switch; the last is the PS."""

    def __init__(self, devices: list[UdpDevice]) -> None:
        self.devices = devices
        *self.members, self.ps = [device.endpoint for device in devices]
        self.machines: list[Any] = []
        self.events: list[Any] = []

    def registration(self, system: str, ports: range) -> Registration:
        """The program of a system with the one job."""
        own = SLOTS if system == "switchml" else None
        job = Job(JOB, tuple(self.members), 0 if own else self.ps, own)
        return build(system, [job], memory=100_000, age=1.0, ports=(ports,), raw=False)

    def populate(self, system: str, at: int, results: int) -> list[np.ndarray]:
        """Workers (and a PS) that send to ``at``, in their first round; returns their arrays."""
        make = WORKER[system]
        for index in range(WORKERS):
            place = Membership(JOB, index, WORKERS, WORKERS, at, results)
            self.machines.append(make(place, SLOTS) if system == "switchml" else make(place, WINDOW, SLOTS))
        if system != "switchml":
            server = atp_server(self.machines[0].framing.frame_type)
            bits = {member: 1 << index for index, member in enumerate(self.members)}
            server.add_job(PSJob(JOB, bits, [at], WINDOW, SLOTS, switches=[at]))
            self.machines.append(server)
        spec = TensorSpec("t", "i32", (ELEMENTS,), "sum", ExponentMode.NONE)
        rng = np.random.default_rng(1)
        arrays = [rng.integers(-(1 << 28), 1 << 28, ELEMENTS, np.int32) for _ in range(WORKERS)]
        for worker, array in zip(self.machines, arrays, strict=False):
            worker.add_tensor(0, spec)
            worker.begin(0, 1, [array], time.monotonic())
        return arrays

    def run(self, switch: Switch) -> None:
        """Drive everything until the round is done everywhere; fails when that takes too long."""
        end = time.monotonic() + DEADLINE
        ports = {port.fileno(): port for port in switch.ports}
        hosts = {device.fileno(): number for number, device in enumerate(self.devices)}
        poll = select.poll()
        for fd in (*ports, *hosts):
            poll.register(fd, select.POLLIN)
        while sum(isinstance(event, RoundDone) for event in self.events) < WORKERS:
            assert time.monotonic() < end, switch.stats()
            for number, machine in enumerate(self.machines):
                now = time.monotonic()
                due = machine.timer()
                if due is not None and due <= now:
                    machine.on_timer(now)
                for transmission in machine.transmit(now):
                    self.devices[number].send(transmission)
                self.events += machine.events()
            for fd, _ in poll.poll(1):
                if fd in ports:
                    while ports[fd].read(time.monotonic()):
                        pass
                elif hosts[fd] < len(self.machines):
                    number = hosts[fd]
                    while (batch := self.devices[number].receive()) is not None:
                        self.machines[number].receive(batch, time.monotonic())
            if switch.timer() <= time.monotonic():
                switch.on_timer(time.monotonic())


def check(sockets: Sockets, switch: Switch, system: str, arrays: list[np.ndarray]) -> None:
    """Run the round; every array must hold the sum, in spite of losses, and by the switch's work."""
    expected = np.sum(arrays, axis=0, dtype=np.int32)
    sockets.run(switch)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    stats: Any = switch.stats()
    assert stats["drops"]["injected"] > 0
    assert stats["programs"][system]["completed"] > 0
    refused = {"no_route", "foreign_host", "bad_checksum", "egress_full", "queue_full"}
    assert not refused & stats["drops"].keys()


@pytest.mark.parametrize("system", WORKER)
def test_sums_over_sockets_are_right_under_loss(stack: ExitStack, system: str) -> None:
    devices = [UdpDevice() for _ in range(WORKERS + 1)]
    for device in devices:
        stack.callback(device.close)
    sockets = Sockets(devices)
    switch = UdpSwitch(Pipeline([sockets.registration(system, range(1))]), default=LOSSY)
    stack.callback(switch.close)
    arrays = sockets.populate(system, switch.endpoint(system), 0)
    check(sockets, switch, system, arrays)


@pytest.mark.privileged("CAP_NET_RAW, and CAP_SYS_ADMIN for namespaces")
@pytest.mark.parametrize("system", WORKER)
def test_sums_through_frames_are_right_under_loss(stack: ExitStack, system: str) -> None:
    rack = Rack(stack, WORKERS + 1)
    rack.open_udp()
    sockets = Sockets(rack.udp)
    options = dict.fromkeys(rack.devices, LOSSY)
    switch = rack.switch(sockets.registration(system, range(PORT, PORT + 1)), options=options)
    for number, (host, address) in enumerate(zip(rack.hosts, rack.addresses, strict=True)):
        switch.tables.give_host(int(IPv4Address(address)), host.run(hardware_of), number)
        # an address that is being resolved again and again on a lossy cable is another test's subject
        host.run(lambda: neighbour(OWN, HARDWARE))
    arrays = sockets.populate(system, endpoint(OWN, PORT), 0 if system == "switchml" else sockets.ps)
    check(sockets, switch, system, arrays)
