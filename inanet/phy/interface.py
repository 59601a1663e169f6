"""What the system says of network interfaces and their offloads, by ioctl(2): no privileges are needed."""

import array
import fcntl
import socket
import struct
from enum import IntEnum
from pathlib import Path

_SIOCETHTOOL = 0x8946
_SIOCGIFCONF = 0x8912
#: More addresses than this are cut off.
_MOST_INTERFACES = 1024
_ETHTOOL_GGRO = 0x2B


def owners() -> dict[str, str]:
    """The interface of every IPv4 address of this machine, by address; an interface may have several.

    Asks with an ioctl on a socket: that needs no netlink, which hardened services lack, and sees the network
    namespace of this thread, which /sys may not.
    """
    # struct ifreq: a name and a union whose largest member, struct ifmap, has two longs and 8 bytes
    entry = 16 + 2 * struct.calcsize("l") + 8
    buffer = array.array("B", bytes(_MOST_INTERFACES * entry))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        filled, _ = struct.unpack("iP", fcntl.ioctl(handle, _SIOCGIFCONF, request))
    found: dict[str, str] = {}
    for start in range(0, filled, entry):
        # an address that has a label of its own (eth0:1) belongs to the interface all the same
        name = bytes(buffer[start : start + 16]).partition(b"\0")[0].decode().partition(":")[0]
        found.setdefault(socket.inet_ntoa(bytes(buffer[start + 20 : start + 24])), name)
    return found


def interface_of(address: str) -> str:
    """The interface that has an IPv4 address; empty if none has."""
    return owners().get(address, "")


class Feature(IntEnum):
    """What an interface may do for the processor: requests of ``SIOCETHTOOL``."""

    #: checksums of what is sent; without it super-frames are cut before they are sent
    CHECKSUMS = 0x17
    #: packets that arrive are merged
    RECEIVE_MERGING = 0x2C


def set_feature(interface: str, what: Feature, on: bool) -> None:
    """In the namespace of this thread. Raises ``OSError``."""
    value = array.array("I", [what, on])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), value.buffer_info()[0]))


def is_hardware(interface: str, root: Path = Path("/sys/class/net")) -> bool:
    """Whether there is a device behind it: between namespaces, messages stay merged without GRO."""
    return (root / interface / "device").exists()


def merges(sock: socket.socket, interface: str) -> bool | None:
    """Whether an interface merges packets that it receives (GRO); None: it does not say."""
    value = array.array("I", [_ETHTOOL_GGRO, 0])
    request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
    try:
        fcntl.ioctl(sock, _SIOCETHTOOL, request)
    except OSError:
        return None
    return bool(value[1])
