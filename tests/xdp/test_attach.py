"""Attaching: what is refused and why, that nothing is replaced, and that nothing is left."""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from inanet.aio.attachment import interface_of
from inanet.cli import xdp_probe
from inanet.xdp import attach
from inanet.xdp.attach import Attachment, Unavailable
from inanet.xdp.libbpf import NoLibrary, attached_program
from inanet.xdp.memory import Mode, SharedMemory, processors
from tests.phy.spaces import Space, cable, open_spaces
from tests.xdp.conftest import OWN, OpenInbox

pytestmark = pytest.mark.privileged("loads BPF programs and makes network namespaces")

#: holds the program on interface 'left' until its standard input ends
HOLDER = """
import sys
from inanet.wire.endpoint import endpoint
from inanet.xdp.attach import Attachment, load
memory = load(16, endpoint("10.9.0.1", 7000), "generic")
attachment = Attachment(memory, "left", "generic")
print("attached", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pair() -> Iterator[tuple[Space, Space]]:
    """Two namespaces, 'left' at 10.9.0.1 and 'right' at 10.9.0.2."""
    with ExitStack() as stack:
        one, other = open_spaces(stack, 2)
        cable(one, "left", other, "right", "10.9.0.1", "10.9.0.2")
        yield one, other


def index(name: str = "left") -> int:
    """Of an interface of this thread's namespace."""
    return socket.if_nametoindex(name)


@pytest.mark.parametrize("mode", ["native", "generic"])
def test_on_and_off(shared: Callable[..., SharedMemory], pair: tuple[Space, Space], mode: Mode) -> None:
    memory = shared(16, mode)

    def body() -> None:
        assert attached_program(index()) == 0
        attachment = Attachment(memory, "left", mode)
        assert attached_program(index()) != 0
        attachment.close()
        attachment.close()
        assert attached_program(index()) == 0

    pair[0].run(body)


def test_another_program_is_left_alone(
    shared: Callable[..., SharedMemory], pair: tuple[Space, Space]
) -> None:
    first, second = shared(16, "generic", "native"), shared(16, "generic", "native")

    def body() -> None:
        held = Attachment(first, "left", "native")
        there = attached_program(index())
        for mode in ("native", "generic"):
            with pytest.raises(Unavailable, match=f"driver: left has an XDP program already .{there} in"):
                Attachment(second, "left", mode)  # type: ignore[arg-type]
        assert attached_program(index()) == there
        held.close()

    pair[0].run(body)


def test_a_program_that_ip_link_has_put_there_is_left_alone(
    shared: Callable[..., SharedMemory], pair: tuple[Space, Space]
) -> None:
    """Without a link of its own, as ``ip link set DEVICE xdp`` attaches: that one could be replaced."""
    memory = shared(16, "generic", "native")
    put = ctypes.CDLL("libbpf.so.1").bpf_xdp_attach

    def body() -> None:
        for held, flag in (("generic", 1 << 1), ("native", 1 << 2)):
            fd = memory.program(held).fd  # type: ignore[arg-type]
            assert put(index(), fd, flag, None) == 0
            there = attached_program(index())
            for mode in ("native", "generic"):
                with pytest.raises(Unavailable, match=f"driver: left has an XDP program already .{there} in"):
                    Attachment(memory, "left", mode)  # type: ignore[arg-type]
            assert attached_program(index()) == there
            assert put(index(), -1, flag, None) == 0

    pair[0].run(body)


def test_refusals_are_one_line(shared: Callable[..., SharedMemory], pair: tuple[Space, Space]) -> None:
    memory = shared(16, "native")

    # what counts is what the other end may send
    pair[1].run(lambda: pair[1].setup("right", mtu=9000))

    def body() -> None:
        with pytest.raises(Unavailable, match=r"^driver: there is no interface nowhere$"):
            Attachment(memory, "nowhere", "native")
        with pytest.raises(
            Unavailable,
            match=r"^driver: left has an MTU of 1500, .*: 3498 at most; of a veth, the other end's counts",
        ):
            Attachment(memory, "left", "native")
        pair[0].setup("left", mtu=9000)
        with pytest.raises(
            Unavailable, match=r"^driver: left has an MTU of 9000, .*: ip link set left mtu 3498"
        ):
            Attachment(memory, "left", "native")

    pair[0].run(body)
    for space, name in zip(pair, ("left", "right"), strict=True):
        space.run(partial(space.setup, name, mtu=3498))
    pair[0].run(lambda: Attachment(memory, "left", "native").close())


def test_a_link_that_fragments_do_not_fit(pair: tuple[Space, Space]) -> None:
    def body() -> None:
        pair[0].setup("left", mtu=576)
        with pytest.raises(
            Unavailable, match=r"^driver: left has an MTU of 576, fragments need 1080: ip link"
        ):
            interface_of("10.9.0.1", "udp")
        pair[0].setup("left", mtu=1080)
        assert interface_of("10.9.0.1", "udp") == "left"
        pair[0].setup("left", mtu=1072)
        assert interface_of("10.9.0.1", "rawip") == "left"

    pair[0].run(body)


def test_jumbo_frames_are_no_matter_to_workers_and_generic_mode(
    shared: Callable[..., SharedMemory], open_inbox: OpenInbox, pair: tuple[Space, Space]
) -> None:
    memory, inbox = shared(16, "generic"), open_inbox()
    for side, name in enumerate(("left", "right")):
        pair[side].run(lambda side=side, name=name: pair[side].setup(name, mtu=9000))  # type: ignore[misc]

    def body() -> None:
        for program, mode in ((memory, "generic"), (inbox, "native"), (inbox, "generic")):
            held = Attachment(program, "left", mode)  # type: ignore[arg-type]
            # an aggregator beside a worker, on the same interface
            with pytest.raises(Unavailable, match="left has an XDP program already"):
                Attachment(memory, "left", "generic")
            held.close()

    pair[0].run(body)


def test_four_capabilities_are_enough(pair: tuple[Space, Space], root_needed: None) -> None:
    """CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON, CAP_BPF; CAP_NET_RAW is for transports, not for programs."""

    def body() -> None:
        # of this thread alone, which ends with this function
        wanted = 1 << 12 | 1 << 13 | 1 << 38 | 1 << 39
        header = struct.pack("=Ii", 0x20080522, 0)
        sets = ctypes.create_string_buffer(24)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, sets) == 0
        _, permitted, inherited, _, more_permitted, more_inherited = struct.unpack("=6I", sets.raw)
        fewer = struct.pack(
            "=6I", wanted & 0xFFFFFFFF, permitted, inherited, wanted >> 32, more_permitted, more_inherited
        )
        assert libc.capset(header, fewer) == 0
        for load_it in (lambda: attach.load(16, OWN, "native"), lambda: attach.load_inbox(16, OWN)):
            program = load_it()
            Attachment(program, "left", "native").close()
            program.close()

    pair[0].run(body)


def test_it_goes_when_its_process_is_killed(root_needed: None, pair: tuple[Space, Space]) -> None:
    def body() -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            assert attached_program(index()) != 0
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        assert attached_program(index()) == 0

    pair[0].run(body)


def test_ordinary_traffic_passes(shared: Callable[..., SharedMemory], pair: tuple[Space, Space]) -> None:
    memory = shared(16, "native")
    attachment = pair[0].run(lambda: Attachment(memory, "left", "native"))
    listener = pair[0].run(lambda: socket.create_server(("10.9.0.1", 7000)))
    with listener:
        peer = pair[1].run(lambda: socket.create_connection(("10.9.0.1", 7000), timeout=10))
        accepted, _ = listener.accept()
        with peer, accepted:
            peer.sendall(b"x" * 100_000)
            accepted.settimeout(10)
            received = 0
            while received < 100_000:
                received += len(accepted.recv(1 << 16))
    attachment.close()
    assert memory.kernel_drops().sum() == 0


def test_reasons_without_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = tmp_path / "vmlinux"
    present.touch()
    attach.require(release="6.1.0-amd64", capabilities=1 << 12 | 1 << 38 | 1 << 39, btf=present)
    attach.require(release="6.1", capabilities=1 << 21, btf=present)
    with pytest.raises(Unavailable, match=r"^kernel: Linux 5.10.0 is older than 5.17$"):
        attach.require(release="5.10.0", capabilities=1 << 21, btf=present)
    with pytest.raises(Unavailable, match=r"^kernel: Linux 5.17.3 is older than 5.18$"):
        attach.require(release="5.17.3", capabilities=1 << 21, btf=present, oldest=attach.OLDEST_FOR_WORKERS)
    with pytest.raises(Unavailable, match=r"^no BTF: .*missing"):
        attach.require(release="6.1.0", capabilities=1 << 21, btf=tmp_path / "absent")
    with pytest.raises(Unavailable, match=r"^permission: without CAP_BPF, CAP_PERFMON no XDP"):
        attach.require(release="6.1.0", capabilities=1 << 12, btf=present)
    with pytest.raises(Unavailable, match=r"^kernel: processors are numbered up to 1024, the program knows"):
        attach.require(release="6.1.0", capabilities=1 << 21, btf=present, cpus=1025)
    for listed, count in (("0-1\n", 2), ("0\n", 1), ("0-3,8-1023\n", 1024)):
        present.write_text(listed)
        assert processors(present) == count

    def absent() -> None:
        raise NoLibrary("libbpf.so.1: not there")

    monkeypatch.setattr(attach, "library", absent)
    with pytest.raises(Unavailable, match=r"^no libbpf: libbpf.so.1: not there .apt-get install"):
        attach.require(release="6.1.0", capabilities=1 << 21, btf=present)


def test_more_memory_than_a_program_can_address(root_needed: None) -> None:
    for gib in (26, 400):
        with pytest.raises(Unavailable, match=rf"^memory: \d+ slots .{gib - 1} GiB. are more than a program"):
            attach.load((gib << 30) // 1052, OWN, "generic")


def test_the_doctor_says_it(monkeypatch: pytest.MonkeyPatch, root_needed: None) -> None:
    assert [(finding.name, finding.status) for finding in xdp_probe.xdp()] == [
        ("xdp", "OK"),
        ("xdp_worker", "OK"),
    ]
    monkeypatch.setattr(attach, "why_not", lambda: "permission: without CAP_BPF no XDP program can be loaded")
    monkeypatch.setattr(attach, "why_not_workers", lambda: "kernel: Linux 5.17.3 is older than 5.18")
    aggregator, worker = xdp_probe.xdp()
    assert (aggregator.status, worker.status) == ("WARN", "WARN")
    assert "ina-agg aggregates in user space: permission: without CAP_BPF" in aggregator.detail
    assert "CAP_BPF" in aggregator.fix
    assert "ina-worker takes results from its socket: kernel: Linux 5.17.3" in worker.detail
    assert "newer kernel" in worker.fix
