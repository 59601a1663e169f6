"""What the system says of network interfaces and their offloads, by ioctl(2): no privileges are needed."""

import array
import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR, _SIOCETHTOOL = 0x8915, 0x8946
_ETHTOOL_GGRO = 0x2B
_NAME_BYTES = 16


def interface_of(sock: socket.socket, address: str) -> str:
    """The interface that has an IPv4 address; empty if none has."""
    wanted = socket.inet_aton(address)
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("16s24x", name.encode()))
            # behind the name: family, port, address
            if answer[_NAME_BYTES + 4 : _NAME_BYTES + 8] == wanted:
                return name
    return ""


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
