"""Skips for want of privileges, and frames as they arrive from a network."""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from inanet.wire.endpoint import address_of, endpoint
from inanet.xdp.attach import why_not
from inanet.xdp.inbox import Inbox
from inanet.xdp.libbpf import BpfError, NoLibrary
from inanet.xdp.memory import Mode, SharedMemory

OWN = endpoint("10.9.0.1", 7000)
PARENT = endpoint("10.9.0.2", 7000)
CHILDREN = tuple(endpoint(f"10.9.1.{number}", 7000) for number in range(1, 6))
OWN_MAC, PEER_MAC = bytes.fromhex("020000000001"), bytes.fromhex("020000000002")
DROP, PASS, TX, REDIRECT = 1, 2, 3, 4
OpenInbox = Callable[..., Inbox]


def lacking(reason: str) -> None:
    """Skip for want of a privilege; fail instead where the run promises to have it."""
    if os.environ.get("INA_REQUIRE_PRIVILEGED") == "1":
        pytest.fail(f"INA_REQUIRE_PRIVILEGED=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def root_needed() -> None:
    """Skips without what a BPF program needs."""
    reason = why_not()
    if reason is not None:
        lacking(reason)


@pytest.fixture
def shared() -> Iterator[Callable[..., SharedMemory]]:
    """Loads the program on memory of so many slots; everything is freed after the test."""
    with ExitStack() as stack:

        def make(capacity: int, *modes: Mode, **options: object) -> SharedMemory:
            try:
                memory = SharedMemory(capacity, OWN, *modes, **options)  # type: ignore[arg-type]
            except PermissionError as error:
                lacking(f"BPF programs need CAP_BPF and CAP_NET_ADMIN ({error})")
            except NoLibrary as error:
                lacking(str(error))
            except BpfError as error:
                if error.errno == 1:
                    lacking(f"BPF programs need CAP_BPF and CAP_NET_ADMIN ({error})")
                raise
            stack.callback(memory.close)
            return memory

        yield make


@pytest.fixture
def open_inbox(root_needed: None) -> Iterator[OpenInbox]:
    """Loads the program for a worker at an endpoint that hears :data:`PARENT`; everything is freed after the test."""
    with ExitStack() as stack:

        def make(rows: int = 64, at: int = OWN) -> Inbox:
            inbox = Inbox(rows, at)
            stack.callback(inbox.close)
            inbox.follow({(PARENT if at & 0xFFFF else bare(PARENT), 7): 0x0123456789ABCDEF})
            return inbox

        yield make


def bare(endpoint: int) -> int:
    """The same host without a port."""
    return endpoint & ~0xFFFF


def internet_sum(data: bytes) -> int:
    """One's complement sum of 16-bit words, folded (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) & ~1]))
    if len(data) % 2:
        total += data[-1] << 8
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def frame(
    payload: bytes,
    source: int,
    target: int = OWN,
    *,
    partial: bool = False,
    macs: tuple[bytes, bytes] = (PEER_MAC, OWN_MAC),
) -> bytes:
    """Ethernet, IPv4 and UDP around a payload; ``macs`` are the sender's and the receiver's.

    ``partial`` leaves the UDP sum to the hardware, as local senders do.
    """
    (sender, sport), (receiver, dport) = address_of(source), address_of(target)
    addresses = bytes(map(int, sender.split("."))) + bytes(map(int, receiver.split(".")))
    length = 8 + len(payload)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0x4000, 64, 17, 0) + addresses
    ip = ip[:10] + struct.pack("!H", 0xFFFF & ~internet_sum(ip)) + ip[12:]
    pseudo = addresses + struct.pack("!BBH", 0, 17, length)
    udp = struct.pack("!HHHH", sport, dport, length, 0)
    check = internet_sum(pseudo) if partial else 0xFFFF & ~internet_sum(pseudo + udp + payload)
    return macs[1] + macs[0] + b"\x08\x00" + ip + udp[:6] + struct.pack("!H", check) + payload
