"""Forwarding ports: ordinary traffic through a user-space wire between two veth cables stays untouched."""

import json
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from inanet.phy.port import FramePort, restore
from inanet.phy.udp import UdpDevice
from inanet.phy.vnet import GSO_UDP_L4, HEADER_BYTES, NEEDS_CSUM, FrameBatch
from inanet.wire.batch import Transmission
from tests.phy.helpers import DEADLINE, carry, numbered
from tests.phy.spaces import Space, cable, open_spaces

needs_root = pytest.mark.privileged("CAP_NET_RAW, and CAP_SYS_ADMIN for namespaces")
ROW = 1052
LEFT, RIGHT = "10.74.0.1", "10.74.0.2"
SOL_PACKET, PACKET_VNET_HDR = 263, 15
ICMP_ECHO, ICMP_ECHO_REPLY = 8, 0


class Wire:
    """Three namespaces: hosts to the left and right, and between them two ports that a thread connects."""

    def __init__(self, stack: ExitStack) -> None:
        self.left, self.middle, self.right = open_spaces(stack, 3)
        cable(self.middle, "m0", self.left, "a0", None, LEFT)
        cable(self.middle, "m1", self.right, "b0", None, RIGHT)
        self.ports = [self.middle.run(lambda name=name: FramePort(name)) for name in ("m0", "m1")]
        for port in self.ports:
            stack.callback(port.close)
        #: headers of what passed: flags, gso_type, gso_size, frame length
        self.seen: list[tuple[int, int, int, int]] = []
        self.failure: BaseException | None = None

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Forward while the block lasts; fails with what the thread failed with."""
        done, stop = os.pipe()
        thread = threading.Thread(target=self._loop, args=(done,))
        thread.start()
        try:
            yield
        finally:
            os.close(stop)
            thread.join()
            os.close(done)
        if self.failure is not None:
            raise self.failure

    def _loop(self, done: int) -> None:
        one, other = self.ports
        poll = select.poll()
        for fd in (one.fileno(), other.fileno(), done):
            poll.register(fd, select.POLLIN)
        try:
            while done not in dict(poll.poll()):
                for port, out in ((one, other), (other, one)):
                    frames = port.receive()
                    if frames is not None:
                        self._note(frames)
                        self._send(out, frames)
        except BaseException as error:
            self.failure = error

    def _note(self, frames: FrameBatch) -> None:
        for at, length in zip(frames.offsets, frames.lengths, strict=True):
            flags, kind, _, size = struct.unpack_from("=BBHH", frames.arena, at)
            self.seen.append((flags, kind, size, int(length)))

    def _send(self, out: FramePort, frames: FrameBatch) -> None:
        sent = out.send(frames)
        writable = select.poll()
        writable.register(out.fileno(), select.POLLOUT)
        while sent < len(frames):
            writable.poll()
            sent += out.send(frames, sent)


@pytest.fixture
def wire(stack: ExitStack) -> Wire:
    return Wire(stack)


def echo(space: Space, address: str, payload: bytes) -> bytes:
    """What comes back from pinging ``address``."""

    def ping() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sock:
            sock.settimeout(DEADLINE)
            body = struct.pack(">HH", 77, 1) + payload
            total = sum(struct.unpack(f">{len(body) // 2}H", body)) + (ICMP_ECHO << 8)
            while total >> 16:
                total = (total & 0xFFFF) + (total >> 16)
            sock.sendto(struct.pack(">BBH", ICMP_ECHO, 0, ~total & 0xFFFF) + body, (address, 0))
            while True:
                answer = sock.recv(65536)[20:]
                if answer[0] == ICMP_ECHO_REPLY:
                    return answer[8:]

    return space.run(ping)


@needs_root
def test_ping_and_arp_pass(wire: Wire) -> None:
    with wire.forwarding():
        assert echo(wire.left, RIGHT, b"over the wire.." * 2) == b"over the wire.." * 2
        # larger than a frame: IP fragments
        large = numbered(1, 4000).tobytes()
        assert echo(wire.right, LEFT, large) == large


@needs_root
def test_tcp_passes_in_super_frames(wire: Wire) -> None:
    data = numbered(1, 8 << 20).tobytes()
    with wire.forwarding():
        listener = wire.right.run(lambda: socket.create_server((RIGHT, 0)))
        with listener:
            listener.settimeout(DEADLINE)
            port = listener.getsockname()[1]
            sender = wire.left.run(lambda: socket.create_connection((RIGHT, port), DEADLINE))
            accepted, _ = listener.accept()
            got = bytearray()

            def read() -> None:
                while chunk := accepted.recv(1 << 20):
                    got.extend(chunk)

            with accepted, sender:
                accepted.settimeout(DEADLINE)
                reader = threading.Thread(target=read)
                reader.start()
                sender.sendall(data)
                sender.shutdown(socket.SHUT_WR)
                reader.join()
            assert bytes(got) == data
    assert any(kind == 1 and length > 20_000 for _, kind, _, length in wire.seen)
    # the sender's kernel left the checksums to the hardware, and nobody on the way did them
    assert all(flags & NEEDS_CSUM for flags, kind, _, _ in wire.seen if kind)
    for port in wire.ports:
        counters = port.counters()
        assert counters["tx_refused"] == counters["kernel_overflow"] == counters["rx_truncated"] == 0


@needs_root
def test_udp_super_frames_pass_whole(wire: Wire, stack: ExitStack) -> None:
    sender = wire.left.run(lambda: UdpDevice(LEFT))
    receiver = wire.right.run(lambda: UdpDevice(RIGHT))
    stack.callback(sender.close)
    stack.callback(receiver.close)
    offsets = np.arange(2000, dtype=np.int64) * ROW
    with wire.forwarding():
        # while it resolves a neighbour, the kernel holds three super-frames and discards the rest
        echo(wire.left, RIGHT, b"resolves")
        carry(sender, receiver, Transmission(receiver.endpoint, numbered(2000, ROW), offsets, ROW))
    assert receiver.counters()["rx_superframes"] == sender.counters()["tx_superframes"]
    # bursts of 237 packets: three full super-frames and a rest, eight times; then one and a rest
    assert wire.seen.count((NEEDS_CSUM, GSO_UDP_L4, ROW, HEADER_BYTES + 42 + 62 * ROW)) == 25


@needs_root
def test_vlan_tags_pass(wire: Wire, stack: ExitStack) -> None:
    sender = wire.left.run(lambda: FramePort("a0"))
    receiver = wire.right.run(lambda: FramePort("b0"))
    stack.callback(sender.close)
    stack.callback(receiver.close)
    ethernet = b"\xff" * 6 + b"\x02\0\0\0\0\x09" + b"\x81\x00\x60\x07"
    plain = bytes(HEADER_BYTES) + ethernet + b"\x88\xb5" + b"a tagged frame"
    # a super-frame of three tagged datagrams, its checksum left open
    udp = struct.pack(">HHHH", 9, 7000, 8 + 300, 0) + numbered(3, 100).tobytes()
    header = struct.pack(">BBHHHBBHII", 0x45, 0, 20 + len(udp), 0, 0x4000, 64, 17, 0, 0x0A4A0001, 0x0A4A0002)
    vnet = struct.pack("=BBHHHH", NEEDS_CSUM, GSO_UDP_L4, 46, 100, 38, 6)
    superframe = vnet + ethernet + b"\x08\x00" + header + udp
    arena = np.frombuffer(plain + superframe, np.uint8).copy()
    lengths = np.array([len(plain), len(superframe)])
    frames = FrameBatch(arena, np.cumsum(lengths) - lengths, lengths)
    arrived: list[bytes] = []
    poll = select.poll()
    poll.register(receiver.fileno(), select.POLLIN)
    with wire.forwarding():
        assert sender.send(frames) == 2
        while len(arrived) < 2:
            assert poll.poll(DEADLINE * 1000)
            got = receiver.receive()
            if got is not None:
                arrived += [got.frame(i) for i in range(len(got)) if b"\x60\x07" in got.frame(i)[:26]]
    # hdr_len is a hint about the sender's memory layout, which the kernel makes anew at every hop
    assert [frame[:2] + frame[4:] for frame in arrived] == [
        sent[:2] + sent[4:] for sent in (plain, superframe)
    ]


@needs_root
@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed")
@pytest.mark.parametrize("options", [[], ["-u", "-b", "50M"], ["-R"]])
def test_iperf3_passes(wire: Wire, options: list[str]) -> None:
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with wire.forwarding():
        server = wire.right.run(
            lambda: subprocess.Popen(["iperf3", "-s", "-1", "--forceflush", "-p", "5201"], **quiet)
        )
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if "listening" in line:
                    break
            client = wire.left.run(
                lambda: subprocess.run(
                    ["iperf3", "-J", "-c", RIGHT, "-p", "5201", "-n", "4M", *options],
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
            )
            assert client.returncode == 0, client.stdout + client.stderr
            assert json.loads(client.stdout)["end"]["sum_received" if options[:1] != ["-u"] else "sum"]
        finally:
            server.kill()
            server.communicate()


@needs_root
def test_frames_the_interface_refuses_are_counted_and_do_not_stop_the_others(wire: Wire) -> None:
    good = bytes(HEADER_BYTES) + b"\xff" * 6 + b"\x02\0\0\0\0\x09" + b"\x88\xb5" + b"payload"
    long = bytes(HEADER_BYTES) + b"\xff" * 12 + b"\x88\xb5" + bytes(5000)
    arena = np.frombuffer(good + long + good, np.uint8).copy()
    lengths = np.array([len(good), len(long), len(good)])
    frames = FrameBatch(arena, np.cumsum(lengths) - lengths, lengths)

    def listen() -> socket.socket:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88B5))
        sock.settimeout(DEADLINE)
        return sock

    with wire.left.run(listen) as listener:
        assert wire.ports[0].send(frames) == 3
        assert listener.recv(2000) == listener.recv(2000) == good[HEADER_BYTES:]
    assert wire.ports[0].counters()["tx_refused"] == 1
    # own frames do not come back
    assert all(kind != 0x88B5 for kind in kinds(wire.ports[0].receive()))


def kinds(frames: FrameBatch | None) -> list[int]:
    """Ethernet types."""
    if frames is None:
        return []
    return [struct.unpack_from(">H", frames.frame(i), HEADER_BYTES + 12)[0] for i in range(len(frames))]


@needs_root
def test_frames_outside_their_arena_are_refused(wire: Wire) -> None:
    frames = FrameBatch(np.zeros(100, np.uint8), np.array([50]), np.array([51]))
    with pytest.raises(ValueError, match=r"frames for m0: offsets 50 to 50 .* 51 B leave the arena of 100 B"):
        wire.ports[0].send(frames)


@needs_root
def test_closing(wire: Wire) -> None:
    port = wire.ports[0]
    port.close()
    port.close()
    assert port.fileno() == -1
    assert port.counters()["kernel_overflow"] == 0
    with pytest.raises(OSError, match="receiving at m0: Bad file descriptor"):
        port.receive()


def test_restoring_a_vlan_tag_moves_what_depends_on_it() -> None:
    stride = 128
    arena = np.zeros(2 * stride, np.uint8)
    original = (
        struct.pack("=BBHHHH", NEEDS_CSUM, GSO_UDP_L4, 42, ROW, 34, 6) + bytes(range(12)) + b"\x08\x00rest"
    )
    for i in range(2):
        arena[i * stride + 4 : i * stride + 4 + len(original)] = np.frombuffer(original, np.uint8)
    words = np.zeros((2, 8), np.uint64)
    headers = words.view(np.uint32)
    headers[:, 14] = len(original)
    control = np.zeros((2, 16), np.uint32)
    for i, (status, tpid) in enumerate([(0x50, 0x88A8), (0, 0)]):
        words[i, 5] = 40
        control[i, :9] = [36, 0, SOL_PACKET, 8, status, 0, 0, 0, tpid << 16 | 0x6007]
    offsets, lengths = np.zeros(2, np.int64), np.zeros(2, np.int64)
    assert restore(headers, words, control, arena, 2, stride, offsets, lengths) == 2
    frames = FrameBatch(arena, offsets, lengths)
    moved = struct.pack("=BBHHHH", NEEDS_CSUM, GSO_UDP_L4, 46, ROW, 38, 6)
    assert frames.frame(0) == moved + bytes(range(12)) + b"\x88\xa8\x60\x07\x08\x00rest"
    assert frames.frame(1) == original
    assert frames.select(np.array([1])).frame(0) == original
