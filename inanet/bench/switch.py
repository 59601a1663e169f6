"""``ina bench switch``: gradient through every program of the emulated switch, over every kind of port, on one core.

The switch runs in this thread. A round is sent to its ports first; then the switch reads until it has judged it all, and
that is what is timed: the processor time of this thread, system calls and delivery of what it sends included. Senders and
receivers are on the other side of the cable and not in the figures. ``gbps`` is gradient (for ``forward``, payload) that
came in from workers, per second of that time; ``wall_gbps`` the same by the clock on the wall, which other processes
lengthen. Where a PS answers, its answers are rounds of their own: ``answer_ns`` is the time for one, which goes out to all
four workers.

The switch is in one of several network namespaces without a name, which vanish with the process; cables lead to its senders.
"""

import ctypes
import os
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inanet.bench.marks import Mark
from inanet.bench.switch_loads import FRAGMENTS, LOADS, WORKERS, Load, Rounds, registration
from inanet.bench.tables import Column, aligned
from inanet.lab.namespaces import in_thread
from inanet.phy.mmsg import HEADER_WORDS, address_in_memory, request_buffer, transmit
from inanet.phy.packet import open_packet_socket
from inanet.phy.port import FramePort
from inanet.phy.ring import FrameRing, without
from inanet.phy.sockets import SO_SNDBUFFORCE
from inanet.phy.udp import MAX_PAYLOAD, SEGMENTS, TRUESIZE, UdpDevice
from inanet.phy.vnet import FrameBatch
from inanet.proto.common.program import Verdicts
from inanet.switch.framed import FrameSwitch
from inanet.switch.pipeline import Pipeline
from inanet.switch.port import Switch
from inanet.switch.programs import RAW_ETHERTYPE
from inanet.switch.rebuild import Rebuilder
from inanet.switch.tables import Tables
from inanet.switch.udp import UdpSwitch
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
#: seconds that the kernel may take to bring an interface up
_PATIENCE = 10.0


class Space:
    """A namespace, closed with ``stack``. Raises ``OSError`` without the privilege."""

    def __init__(self, stack: ExitStack) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

        def make() -> int:
            if self._libc.unshare(_CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "making a network namespace needs root, or CAP_SYS_ADMIN")
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        self.fd = in_thread(make)
        stack.callback(os.close, self.fd)

    def run(self, body: Callable[[], T]) -> T:
        """Call ``body`` inside; sockets that it opens stay there."""

        def inside() -> T:
            if self._libc.setns(self.fd, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "entering a network namespace")
            return body()

        return in_thread(inside)


def cable(one: Space, name: str, other: Space, other_name: str, addresses: list[str]) -> bytes:
    """A veth pair; the other end has ``addresses`` (/24). Returns the hardware address of the other end."""
    from pyroute2 import IPRoute

    def begin() -> None:
        with IPRoute() as netlink:
            netlink.link("add", ifname=name, kind="veth", peer={"ifname": other_name, "net_ns_fd": other.fd})
            netlink.link("set", index=netlink.link_lookup(ifname=name)[0], state="up")

    def end() -> bytes:
        with IPRoute() as netlink:
            index = netlink.link_lookup(ifname=other_name)[0]
            for address in addresses:
                netlink.addr("add", index=index, address=address, prefixlen=24)
            netlink.link("set", index=index, state="up")
            return bytes.fromhex(netlink.get_links(index)[0].get_attr("IFLA_ADDRESS").replace(":", ""))

    def wait(name: str) -> None:
        """Until the kernel, in the background, has started the queue of an interface: before, it loses packets."""
        deadline = time.monotonic() + _PATIENCE
        with IPRoute() as netlink:
            index = netlink.link_lookup(ifname=name)[0]
            while netlink.get_links(index)[0].get_attr("IFLA_OPERSTATE") != "UP":
                if time.monotonic() > deadline:
                    raise OSError(f"{name} does not come up")

    one.run(begin)
    hardware = other.run(end)
    one.run(lambda: wait(name))
    other.run(lambda: wait(other_name))
    return hardware


#: the switch's address and the PS's
SWITCH, PS = "10.76.0.254", "10.76.0.100"
HARDWARE = 0x02_00_00_00_76_FE
BUFFER = 32 << 20


class Wrong(Exception):
    """Sums that are not what they must be: there is nothing to measure."""


class Injector:
    """Sends frames out of ``interface``, and hears none."""

    def __init__(self, interface: str) -> None:
        self._socket = open_packet_socket()
        request_buffer(self._socket, SO_SNDBUFFORCE, socket.SO_SNDBUF, BUFFER)
        self._socket.bind((interface, 0))

    def send(self, frames: FrameBatch, start: int = 0) -> int:
        count = len(frames) - start
        words, iovecs = np.zeros((count, HEADER_WORDS), np.uint64), np.zeros((count, 2), np.uint64)
        iovecs[:, 0] = frames.offsets[start:] + address_in_memory(frames.arena)
        iovecs[:, 1] = frames.lengths[start:]
        words[:, 2] = address_in_memory(iovecs) + np.arange(count, dtype=np.uint64) * 16
        words[:, 3] = 1
        return self.send_messages(words, 0, count, frames.lengths[start:])

    def send_messages(
        self, words: NDArray[np.uint64], first: int, count: int, sizes: NDArray[np.int64]
    ) -> int:
        table, at = address_in_memory(words), first
        while at < first + count:
            sent = transmit(self._socket.fileno(), table + at * HEADER_WORDS * 8, first + count - at)
            if sent < 0:
                break
            at += sent
        return at - first

    def close(self) -> None:
        self._socket.close()


class Cabled:
    """A switch between two cables: all workers behind one, the PS behind the other."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.middle, self.left, self.right = Space(stack), Space(stack), Space(stack)
        self.addresses = [f"10.76.0.{i + 1}" for i in range(WORKERS)]
        self.hardware = [
            int.from_bytes(cable(self.middle, "p0", self.left, "e0", self.addresses), "big"),
            int.from_bytes(cable(self.middle, "p1", self.right, "e0", [PS]), "big"),
        ]
        self.devices = {
            name: self.open(self.middle, partial(FramePort, name, rcvbuf=BUFFER, sndbuf=BUFFER))
            for name in ("p0", "p1")
        }
        self.senders = [self.open(space, lambda: Injector("e0")) for space in (self.left, self.right)]
        self.tables = Tables(HARDWARE, endpoint(SWITCH, 0) >> 16)
        for address in self.addresses:
            self.tables.give_host(endpoint(address, 0) >> 16, self.hardware[0], 0)
        self.tables.give_host(endpoint(PS, 0) >> 16, self.hardware[1], 1)

    def open(self, space: Space, make: Callable[[], Any]) -> Any:
        """Something with sockets in a namespace, closed with the stack."""
        made = space.run(make)
        self.stack.callback(made.close)
        return made

    def header(self, side: int, source: int, destination: int, raw: bool, marked: bool) -> NDArray[np.uint8]:
        """Headers of frames to the switch."""
        kind = RAW_ETHERTYPE if raw else 0x0800
        ethernet = (
            HARDWARE.to_bytes(6, "big") + self.hardware[side].to_bytes(6, "big") + kind.to_bytes(2, "big")
        )
        ip = bytes([0x45, 3 if marked else 0, 0, 0, 0, 0, 0x40, 0, 64, 1 if raw else 17, 0, 0])
        ip += (source >> 16).to_bytes(4, "big") + (destination >> 16).to_bytes(4, "big")
        ports = (source & 0xFFFF).to_bytes(2, "big") + (destination & 0xFFFF).to_bytes(2, "big") + bytes(4)
        return np.frombuffer(bytes(10) + ethernet + ip + ports, np.uint8)

    def sender(
        self, side: int, header: NDArray[np.uint8], raw: bool, segments: int
    ) -> Callable[[NDArray[Any]], None]:
        """Sends packets (structured) in super-frames of so many segments."""
        rebuilder, port = Rebuilder(14), self.senders[side]

        def send(packets: NDArray[Any]) -> None:
            length, arena = packets.dtype.itemsize, packets.view(np.uint8)
            step = len(packets) if raw else segments
            for first in range(0, len(packets), step):
                offsets = np.arange(first, min(first + step, len(packets)), dtype=np.int64) * length
                for frames, _ in rebuilder.frames(port, header, raw, arena, offsets, length):
                    if frames.send(0) < len(frames):
                        raise Wrong("the send buffer is full")

        return send


MARKS = (
    Mark("forward", "gbps", {"program": "forward", "phy": "packet"}, least=15.0, unit="Gbit/s"),
    Mark("switchml", "gbps", {"program": "switchml-256", "phy": "packet"}, least=8.0, unit="Gbit/s"),
    Mark("a2tp", "gbps", {"program": "a2tp-62", "phy": "packet"}, least=4.5, unit="Gbit/s"),
    Mark("a2tp-raw", "gbps", {"program": "a2tp-62", "phy": "ring"}, least=3.0, unit="Gbit/s"),
)
#: a round must have passed the switch within this
PATIENCE = 10.0
#: what a sum of all workers' values is
SUM = WORKERS * (WORKERS + 1) // 2
#: payload of the forwarded super-frames, and how many of them are a round
_SEGMENT, _SEGMENTS, _FRAMES = 1052, 62, 64


def row(
    program: str, phy: str, bits: int, fragments: int, cpu: list[float], wall: list[float]
) -> dict[str, Any]:
    """A row from the times of rounds of ``fragments`` that carry ``bits``."""
    own, all_in = statistics.median(cpu), statistics.median(wall)
    return {
        "program": program,
        "phy": phy,
        "gbps": bits / own / 1e9,
        "ns_per_fragment": own / fragments * 1e9,
        "wall_gbps": bits / all_in / 1e9,
        "rounds": len(cpu),
    }


class Timed:
    """Times of rounds, until they have taken ``seconds`` of processor time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.cpu: list[float] = []
        self.wall: list[float] = []

    @property
    def enough(self) -> bool:
        """Whether that long has been measured; the first round warms up and does not count."""
        return len(self.cpu) > 3 and sum(self.cpu[1:]) >= self._seconds

    def drain(self, switch: Switch, done: Callable[[], bool]) -> None:
        """Have the switch read until ``done``; that is one round."""
        poll = select.poll()
        ports = {port.fileno(): port for port in switch.ports}
        for fd in ports:
            poll.register(fd, select.POLLIN)
        end = time.monotonic() + PATIENCE
        cpu, wall = time.thread_time(), time.perf_counter()
        while not done():
            ready = poll.poll(100)
            for fd, _ in ready:
                while ports[fd].read(time.monotonic()):
                    pass
            if not ready and time.monotonic() > end:
                raise Wrong(f"a round did not pass the switch: {switch.stats()}")
        self.cpu.append(time.thread_time() - cpu)
        self.wall.append(time.perf_counter() - wall)


def kernel(load: Load, seconds: float) -> dict[str, Any]:
    """The program alone: batches in memory, no ports."""
    workers, ps = [endpoint("10.76.0.1", 4000 + i) for i in range(WORKERS)], endpoint(PS, 9)
    program = registration(load, workers, ps).program
    rounds, timed, verdicts = Rounds(load), Timed(seconds), Verdicts(FRAGMENTS)
    calm = np.full(FRAGMENTS, load.system == "a2tp", np.uint8)
    length = rounds.frame.itemsize
    offsets, lengths = np.arange(FRAGMENTS) * length, np.full(FRAGMENTS, length, np.int64)
    while not timed.enough:
        batches = [
            PacketBatch(packets.view(np.uint8), offsets, lengths, np.full(FRAGMENTS, source, np.uint64))
            for packets, source in zip(rounds.next(), workers, strict=True)
        ]
        cpu, wall = time.thread_time(), time.perf_counter()
        for batch in batches:
            program.process(batch, calm, verdicts, 0.0)
        timed.cpu.append(time.thread_time() - cpu)
        timed.wall.append(time.perf_counter() - wall)
        _check(batches[-1].arena.view(rounds.frame))
        answers = rounds.answers()
        if answers is not None:
            source = np.full(FRAGMENTS, ps, np.uint64)
            program.process(
                PacketBatch(answers.view(np.uint8), offsets, lengths, source), calm, verdicts, 0.0
            )
    return _row(rounds, "kernel", timed)


def _row(rounds: Rounds, phy: str, timed: Timed, answered: Timed | None = None) -> dict[str, Any]:
    load, fragments = rounds.load, rounds.fragments * WORKERS
    found = row(load.name, phy, fragments * load.values * 32, fragments, timed.cpu[1:], timed.wall[1:])
    if answered is not None and answered.cpu:
        found["answer_ns"] = statistics.median(answered.cpu[1:]) / rounds.fragments * 1e9
    return found


def _check(packets: NDArray[Any]) -> None:
    if not len(packets) or (packets["values"] != SUM).any():
        raise Wrong(f"a sum is not {SUM}: {packets['values'][:2]}")


def _read(device: UdpDevice, count: int, frame: np.dtype[Any]) -> None:
    """Read and check ``count`` results that wait at a device, or are about to."""
    poll = select.poll()
    poll.register(device.fileno(), select.POLLIN)
    while count > 0:
        batch = device.receive()
        if batch is None:
            if not poll.poll(PATIENCE * 1000):
                raise Wrong(f"{count} results of a round have not come")
            continue
        count -= len(batch)
        first = batch.packet(len(batch) - 1)
        _check(np.frombuffer(first, frame))


def udp(load: Load, seconds: float) -> dict[str, Any]:
    """Datagrams over loopback, as an unprivileged switch has them."""
    with ExitStack() as stack:
        hosts = [UdpDevice(rcvbuf=BUFFER) for _ in range(WORKERS + 1)]
        for host in hosts:
            stack.callback(host.close)
        *workers, ps = [host.endpoint for host in hosts]
        one = registration(load, workers, ps)
        one = replace(one, ports=(range(1),), raw=False)
        switch = UdpSwitch(Pipeline([one]), rcvbuf=BUFFER)
        stack.callback(switch.close)
        to = switch.endpoint(one.name)

        def send(host: int, packets: NDArray[Any]) -> None:
            length = packets.dtype.itemsize
            offsets = np.arange(len(packets), dtype=np.int64) * length
            transmission = Transmission(to, packets.view(np.uint8), offsets, length)
            sent = hosts[host].send(transmission)
            if sent < len(packets):
                raise Wrong(f"{sent} of {len(packets)} packets fit into the buffers of this machine")

        # a round must fit into the buffers that this user may have
        room = hosts[0].rcvbuf // TRUESIZE * min(SEGMENTS, MAX_PAYLOAD // Rounds(load).frame.itemsize)
        return _rounds(Rounds(load, min(FRAGMENTS, room)), "udp", seconds, switch, send, hosts)


def _rounds(
    rounds: Rounds,
    phy: str,
    seconds: float,
    switch: Any,
    send: Callable[[int, NDArray[Any]], None],
    hosts: list[UdpDevice] | None,
) -> dict[str, Any]:
    """Rounds of all workers, and of the PS where there is one."""
    timed, answered, fragments = Timed(seconds), Timed(seconds), rounds.fragments
    stages = switch.pipeline.stages

    def judge(part: Timed, packets: int) -> None:
        """Have the switch judge so many packets, all of which are on their way."""
        judged = stages["slot"] + packets
        part.drain(switch, lambda: stages["slot"] >= judged)

    while not timed.enough:
        before = stages["slot"]
        for worker, packets in enumerate(rounds.next()):
            send(worker, packets)
        judge(timed, WORKERS * fragments)
        answers = rounds.answers()
        if answers is not None:
            if hosts is not None:
                _read(hosts[WORKERS], fragments, rounds.frame)
            send(WORKERS, answers)
            judge(answered, fragments)
        assert stages["slot"] - before == (WORKERS + (answers is not None)) * fragments
        if hosts is not None:
            for host in hosts[:WORKERS]:
                _read(host, fragments, rounds.frame)
    drops = switch.stats()["drops"]
    if drops:
        raise Wrong(f"packets were dropped: {drops}")
    return _row(rounds, phy, timed, answered)


def packet(load: Load, seconds: float, raw: bool = False) -> dict[str, Any]:
    """UDP in super-frames through packet sockets; or, ``raw``, frames of ethertype 0x0700 through a ring."""
    with ExitStack() as stack:
        cabled = Cabled(stack)
        port = 0 if raw else 48_864
        ports = [0] * (WORKERS + 1) if raw else [4000 + i for i in range(WORKERS)] + [port]
        members = [endpoint(*one) for one in zip([*cabled.addresses, PS], ports, strict=True)]
        one = registration(load, members[:WORKERS], members[WORKERS], port, raw)
        rings = {}
        if raw:
            for name, device in cabled.devices.items():
                device.filter(without(RAW_ETHERTYPE))
                rings[name] = cabled.open(cabled.middle, partial(FrameRing, name, RAW_ETHERTYPE))
        switch = FrameSwitch(Pipeline([one]), cabled.devices, cabled.tables, rings=rings)
        marked = load.system == "a2tp"
        to = endpoint(SWITCH, port)
        senders = [
            cabled.sender(
                int(i == WORKERS),
                cabled.header(int(i == WORKERS), member, to, raw, marked),
                raw,
                load.segments,
            )
            for i, member in enumerate(members)
        ]
        hosts = None
        if not raw:
            hosts = [
                cabled.open(
                    cabled.right if i == WORKERS else cabled.left,
                    partial(UdpDevice, [*cabled.addresses, PS][i], ports[i], rcvbuf=BUFFER),
                )
                for i in range(WORKERS + 1)
            ]

        def send(host: int, packets: NDArray[Any]) -> None:
            senders[host](packets)

        return _rounds(Rounds(load), "ring" if raw else "packet", seconds, switch, send, hosts)


def forward(seconds: float) -> dict[str, Any]:
    """Ordinary super-frames from one port to another."""
    with ExitStack() as stack:
        cabled = Cabled(stack)
        switch = FrameSwitch(Pipeline([]), cabled.devices, cabled.tables)
        receiver = cabled.open(cabled.right, lambda: UdpDevice(PS, 9000, rcvbuf=BUFFER))
        source, to = endpoint(cabled.addresses[0], 9000), receiver.endpoint
        header = cabled.header(0, source, to, False, False).copy()
        header[10:16] = np.frombuffer(cabled.hardware[1].to_bytes(6, "big"), np.uint8)
        send = cabled.sender(0, header, False, _SEGMENTS)
        packets = np.zeros(_SEGMENTS * _FRAMES, np.dtype([("payload", "u1", _SEGMENT)]))
        timed, port = Timed(seconds), cabled.devices["p1"]

        def pass_on(total: int) -> None:
            timed.drain(switch, lambda: port.counters()["tx_frames"] >= total)

        arrived = 0
        while not timed.enough:
            send(packets)
            arrived += _FRAMES
            pass_on(arrived)
            got = 0
            while got < len(packets) and (batch := receiver.receive()) is not None:
                got += len(batch)
        if receiver.counters()["rx_superframes"] < arrived:
            raise Wrong(f"{receiver.counters()['rx_superframes']} of {arrived} super-frames arrived whole")
        fragments = len(packets)
        return row("forward", "packet", fragments * _SEGMENT * 8, fragments, timed.cpu[1:], timed.wall[1:])


def _subjects(seconds: float) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    yield "forward", "packet", lambda: forward(seconds)
    for load in LOADS:
        yield load.name, "kernel", partial(kernel, load, seconds)
        yield load.name, "udp", partial(udp, load, seconds)
        yield load.name, "packet", partial(packet, load, seconds)
        if load.system in ("atp", "a2tp"):
            yield load.name, "ring", partial(packet, load, seconds, raw=True)


def run(
    seconds: float = 0.5, only: str = "", say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """All rows whose program and kind of port contain ``only``; ``seconds`` of processor time each.

    ``ok`` says that every sum was right and nothing was lost; ``lacking`` what could not be had here, and ``marks`` what
    the figures are held against.
    """
    rows: list[dict[str, Any]] = []
    lacking: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for program, phy, measure in _subjects(seconds):
        name = f"{program} {phy}"
        if only not in name:
            continue
        say(name)
        try:
            rows.append(measure())
        except Wrong as error:
            wrong[name] = str(error)
        except (ImportError, OSError) as error:
            lacking[name] = str(error)
    return {
        "schema": 1,
        "ok": bool(rows) and not wrong,
        "rows": rows,
        "wrong": wrong,
        "lacking": lacking,
        "marks": [mark.judge(rows) for mark in MARKS],
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """The rows as lines."""
    yield "# gradient that came in per second of the switch's processor time (for forward: payload); one core"
    columns: dict[str, Column] = {
        "program": "",
        "phy": "",
        "Gbit/s": ("gbps", ".2f"),
        "ns/fragment": ("ns_per_fragment", ".0f"),
        "ns/answer": ("answer_ns", ".0f"),
        "Gbit/s by the clock": ("wall_gbps", ".2f"),
    }
    yield from aligned(columns, result["rows"])
    for name, why in (*result["wrong"].items(), *result["lacking"].items()):
        yield f"# {name}: {why}"
    for mark in result["marks"]:
        shown = "not measured" if mark["met"] is None else f"{mark['value']:.2f} {mark['unit']}"
        verdict = {True: "met", False: "missed", None: ""}[mark["met"]]
        yield f"# mark {mark['name']}: at least {mark['least']:g} {mark['unit']}: {shown} {verdict}".rstrip()
