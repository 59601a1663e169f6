"""What the kernel knows about a network interface and its neighbours, asked with ioctls on a socket.

Netlink is not needed, which hardened services lack; the answers are those of the socket's network namespace.
"""

import errno
import fcntl
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from inanet.phy.device import is_group
from inanet.phy.interface import owners

_SIOCGIFFLAGS = 0x8913
_SIOCGIFMTU = 0x8921
_SIOCGIFHWADDR = 0x8927
_SIOCGARP = 0x8954
_IFF_LOOPBACK = 0x8
_ATF_COM = 0x2
_IFNAMSIZ = 16
_NO_HARDWARE = bytes(6)
_ARPHRD_ETHER = 1
_ARPHRD_LOOPBACK = 772

#: how long a neighbour's MAC address is used before the kernel is asked again, and given the chance to verify
#: it
TRUSTED = 30.0


@dataclass(frozen=True, slots=True)
class Interface:
    """An Ethernet or the loopback interface, whose ``hardware`` address is zero. ``mtu`` in bytes."""

    name: str
    hardware: bytes
    mtu: int
    loopback: bool


def _ask(sock: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(sock, request, struct.pack("16s24x", name.encode()))


def _names() -> list[str]:
    """Of all interfaces; where netlink is forbidden, of those with an address."""
    try:
        return [name for _, name in socket.if_nameindex()]
    except OSError:
        return sorted(set(owners().values()))


def examine(sock: socket.socket, name: str) -> Interface:
    """Facts about an interface. Raises ``OSError`` naming it if it does not exist or carries no Ethernet
    frames.
    """
    if not 0 < len(name.encode()) < _IFNAMSIZ:
        raise OSError(errno.ENODEV, f"{name!r} is not the name of an interface")
    try:
        family, hardware = struct.unpack_from("@H6s", _ask(sock, _SIOCGIFHWADDR, name), _IFNAMSIZ)
    except OSError as error:
        known = ", ".join(_names())
        raise OSError(error.errno, f"interface {name}: {error.strerror}; there are {known}") from None
    if family not in (_ARPHRD_ETHER, _ARPHRD_LOOPBACK):
        raise OSError(
            errno.EOPNOTSUPP,
            f"interface {name} carries no Ethernet frames (type {family}); use the udp device",
        )
    (flags,) = struct.unpack_from("@H", _ask(sock, _SIOCGIFFLAGS, name), _IFNAMSIZ)
    (mtu,) = struct.unpack_from("@i", _ask(sock, _SIOCGIFMTU, name), _IFNAMSIZ)
    return Interface(name, hardware, mtu, bool(flags & _IFF_LOOPBACK))


class Neighbours:
    """MAC addresses of the hosts on the interface's link, from the kernel's neighbour table.

    The kernel alone resolves and verifies addresses, and only for packets it sends itself. So a destination
    without an answer here is one to be reached through the kernel this time. ``clock`` gives seconds.
    """

    def __init__(self, sock: socket.socket, interface: Interface, clock: Callable[[], float]) -> None:
        self._socket = sock
        self._interface = interface
        self._clock = clock
        #: address to MAC address and when to ask again
        self._known: dict[int, tuple[bytes, float]] = {}

    def find(self, destination: int) -> bytes | None:
        """MAC address for an endpoint; ``None``: resolve or verify it first, by sending through the kernel."""
        if self._interface.loopback:
            return _NO_HARDWARE
        address = destination >> 16
        if is_group(destination):
            # RFC 1112, section 6.4
            return b"\x01\x00\x5e" + (address & 0x7FFFFF).to_bytes(3, "big")
        now = self._clock()
        known = self._known.get(address)
        if known is not None and now < known[1]:
            return known[0]
        hardware = self._table(address)
        if hardware is None:
            return None
        self._known[address] = (hardware, now + TRUSTED)
        # the first transmission of each period goes through the kernel, which then verifies an entry grown
        # old
        return hardware if known is None else None

    def _table(self, address: int) -> bytes | None:
        request = struct.pack(
            "@HH4s8x16xi16x16s",
            socket.AF_INET,
            0,
            address.to_bytes(4, "big"),
            0,
            self._interface.name.encode(),
        )
        try:
            answer = fcntl.ioctl(self._socket, _SIOCGARP, request)
        except OSError:
            # not in the table
            return None
        (flags,) = struct.unpack_from("@i", answer, 32)
        return answer[18:24] if flags & _ATF_COM else None
