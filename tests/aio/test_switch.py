"""The switch on an event loop: reads, timers, and ports that could not send everything."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from inanet.aio.switch import READ_BUDGET, SwitchDriver


class Port:
    """A port on one end of a socket pair; it blocks until it is resumed so many times."""

    def __init__(self, stack: ExitStack, resumes: int = 0) -> None:
        self.name = "p"
        self.far, self.near = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        stack.callback(self.far.close)
        self.near.setblocking(False)
        self.got: list[bytes] = []
        self.resumes, self.most = resumes, 0

    def fileno(self) -> int:
        return self.near.fileno()

    def read(self, now: float) -> bool:
        try:
            self.got.append(self.near.recv(100))
        except BlockingIOError:
            return False
        return True

    @property
    def blocked(self) -> bool:
        return bool(self.got) and self.resumes > 0

    def resume(self) -> None:
        self.resumes -= 1

    def counters(self) -> dict[str, int]:
        return {}


class Switch:
    """Two ports and a timer."""

    def __init__(self, ports: list[Port], due: float = float("inf")) -> None:
        self.ports = ports
        self.due = due
        self.fired: list[float] = []

    def endpoints(self) -> dict[str, int]:
        return {}

    def timer(self) -> float:
        return self.due

    def on_timer(self, now: float) -> None:
        self.fired.append(now)
        self.due = now + 0.002 if len(self.fired) < 3 else float("inf")

    def stats(self) -> dict[str, object]:
        return {
            "stages": {"parse": 5},
            "registers": {"held": {"atp": 100}},
            "recirculations": 7,
            "programs": {"atp": {"occupied_3": 2, "packets": 9}},
            "drops": {"no_route": 1},
        }

    def close(self) -> None:
        for port in self.ports:
            port.near.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


async def until(condition: object) -> None:
    """Let the loop turn until a condition holds."""
    async with asyncio.timeout(10):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(0)


async def turns() -> None:
    """Time enough for whatever is still watched to be called."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_everything_that_arrives_is_read_and_ports_that_block_are_resumed(stack: ExitStack) -> None:
    ports = [Port(stack), Port(stack, resumes=3)]
    driver = SwitchDriver(Switch(ports))
    for i in range(3 * READ_BUDGET):
        ports[0].far.send(b"%d" % i)
    ports[1].far.send(b"x")
    await until(lambda: len(ports[0].got) == 3 * READ_BUDGET and ports[1].resumes == 0)
    assert ports[0].got == [b"%d" % i for i in range(3 * READ_BUDGET)]
    assert driver.reads == 3 * READ_BUDGET + 1
    # nothing is watched for writing any more: another turn resumes nobody
    await turns()
    assert ports[1].resumes == 0
    assert not driver.blocked
    driver.close()
    assert all(port.near.fileno() == -1 for port in ports)


async def test_timers_fire_when_they_are_due(stack: ExitStack) -> None:
    switch = Switch([Port(stack)], time.monotonic() + 0.002)
    first = switch.due
    driver = SwitchDriver(switch)
    await until(lambda: len(switch.fired) == 3)
    assert switch.fired[0] >= first
    assert switch.fired == sorted(switch.fired)
    driver.close()


async def test_closing_while_a_port_blocks(stack: ExitStack) -> None:
    port = Port(stack, resumes=10**9)
    driver = SwitchDriver(Switch([port]))
    port.far.send(b"x")
    await until(lambda: port.resumes < 10**9)
    driver.close()
    left = port.resumes
    await turns()
    assert port.resumes == left


async def test_a_port_that_was_read_is_left_alone_for_a_pause(stack: ExitStack) -> None:
    patient, hasty = Port(stack), Port(stack)
    drivers = [SwitchDriver(Switch([patient]), 3600.0), SwitchDriver(Switch([hasty]), 0.001)]
    for port in (patient, hasty):
        port.far.send(b"1")
    await until(lambda: patient.got and hasty.got)
    for port in (patient, hasty):
        port.far.send(b"2")
    await until(lambda: len(hasty.got) == 2)
    assert patient.got == [b"1"]
    drivers[1].leave(hasty)
    hasty.far.send(b"3")
    await turns()
    assert len(hasty.got) == 2
    for driver in drivers:
        driver.close()


async def test_metrics(stack: ExitStack) -> None:
    driver = SwitchDriver(Switch([Port(stack)]))
    samples = {(one.name, one.labels): one.value for one in driver.samples()}
    assert samples == {
        ("inanet_switch_packets", ("parse",)): 5,
        ("inanet_switch_register_bytes", ("atp",)): 100,
        ("inanet_switch_recirculations", ()): 7,
        ("inanet_switch_slots", ("atp", "3")): 2,
        ("inanet_packets_dropped", ("no_route",)): 1,
    }
    driver.close()
