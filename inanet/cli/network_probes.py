"""Probes of the network as the data plane uses it. Traffic stays on 127.0.0.1 and is a few packets."""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from inanet.cli.findings import Finding
from inanet.config.daemons import Node
from inanet.phy import interface
from inanet.service import addresses
from inanet.units import show_bytes
from inanet.wire.xagg import ROW_BYTES

#: Seconds that a packet on loopback may take before it counts as not delivered.
PATIENCE = 1.0
#: From the block for use inside an organisation (RFC 2365).
GROUP = "239.255.73.65"
#: Header bytes of IPv4 and UDP.
OVERHEAD = 28
#: Three super-frames keep a link busy; more saves system calls.
_SEND_BUFFER = 208 << 10
_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104
_SEGMENTS = 4
_LOOPBACK_FLAG, _UP_FLAG = 0x8, 0x1


def buffers() -> Iterator[Finding]:
    """Whether the kernel grants the socket buffers that the daemons ask for by default."""
    wishes = (
        ("receive buffer", "rmem_max", socket.SO_RCVBUF, Node().receive_buffer, Node().receive_buffer),
        ("send buffer", "wmem_max", socket.SO_SNDBUF, Node().send_buffer, _SEND_BUFFER),
    )
    for name, limit, option, wish, enough in wishes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, option, wish)
            # the kernel doubles the number for its own book-keeping
            granted = sock.getsockopt(socket.SOL_SOCKET, option) // 2
        if granted < enough:
            detail = f"{show_bytes(granted)} of {show_bytes(wish)} granted: smaller windows, lower throughput"
            fix = f"sudo sysctl -w net.core.{limit}={wish}   # and in /etc/sysctl.d/inanet.conf, to stay"
            yield Finding(name, "WARN", detail, fix)
        else:
            yield Finding(name, "OK", f"{show_bytes(granted)} of {show_bytes(wish)} granted")


def segmentation() -> Iterator[Finding]:
    """UDP_SEGMENT out and UDP_GRO in: one system call for many packets."""
    fix = "use Linux 5.0 or later, outside sandboxes that have their own network stack"
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(PATIENCE)
        control = [(_SOL_UDP, _UDP_SEGMENT, struct.pack("=H", ROW_BYTES))]
        try:
            receiver.setsockopt(_SOL_UDP, _UDP_GRO, 1)
            sender.sendmsg([bytes(_SEGMENTS * ROW_BYTES)], control, 0, receiver.getsockname())
            length = len(receiver.recv(1 << 16))
        except OSError as error:
            yield Finding("udp segmentation", "WARN", f"{error}: every packet costs a system call", fix)
            return
    if length == ROW_BYTES:
        yield Finding("udp segmentation", "WARN", "packets are sent in one call but not received in one", fix)
    else:
        yield Finding("udp segmentation", "OK", f"{length // ROW_BYTES} packets in one call, both ways")


def multicast() -> Iterator[Finding]:
    """IPv4 multicast on the loopback interface, which results may take."""
    loopback = socket.inet_aton("127.0.0.1")
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        try:
            receiver.bind((GROUP, 0))
            receiver.settimeout(PATIENCE)
            receiver.setsockopt(
                socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + loopback
            )
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, loopback)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
            sender.sendto(b"inanet", receiver.getsockname())
            receiver.recv(64)
        except OSError as error:
            detail = f"{error}: results go to each child by itself"
            yield Finding("multicast", "WARN", detail, "sudo ip link set lo multicast on")
            return
    yield Finding("multicast", "OK", "IPv4 multicast works on loopback")


def merging() -> Iterator[Finding]:
    """Whether interfaces with a device behind them merge packets that they receive (GRO)."""
    on: list[str] = []
    off: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            if interface.is_hardware(name):
                merges = interface.merges(sock, name)
                (off if merges is False else on).append(name)
    for name in off:
        detail = f"{name} has GRO off: every packet that it receives goes through the stack alone"
        yield Finding("gro", "WARN", detail, f"sudo ethtool -K {name} gro on")
    if on and not off:
        yield Finding("gro", "OK", f"on: {', '.join(on)}")


def flooding(root: Path = Path("/sys/class/net")) -> Iterator[Finding]:
    """Whether bridges of this machine send multicast to every port."""
    snooping = []
    for bridge in sorted(
        path for path in root.iterdir() if (path / "bridge" / "multicast_snooping").exists()
    ):
        if (bridge / "bridge" / "multicast_snooping").read_text().strip() == "0":
            detail = f"{bridge.name} floods multicast: results for one group fill the ports of all others"
            fix = f"sudo ip link set {bridge.name} type bridge mcast_snooping 1 mcast_querier 1"
            yield Finding("multicast flooding", "WARN", detail, fix)
        else:
            snooping.append(bridge.name)
    if snooping:
        yield Finding(
            "multicast flooding", "OK", f"{', '.join(snooping)}: only ports that have asked get multicast"
        )


def mtu(root: Path = Path("/sys/class/net")) -> Iterator[Finding]:
    """Whether a packet of 256 values fits every interface that is up."""
    smallest = ROW_BYTES + OVERHEAD
    fitting = []
    for link in sorted(path for path in root.iterdir() if (path / "mtu").exists()):
        flags = int((link / "flags").read_text(), 16)
        size = int((link / "mtu").read_text())
        if flags & _LOOPBACK_FLAG or not flags & _UP_FLAG:
            continue
        if size < smallest:
            detail = f"{link.name} has {size} bytes, a packet needs {smallest}: the kernel would fragment it"
            yield Finding("mtu", "WARN", detail, f"sudo ip link set {link.name} mtu 1500")
        else:
            fitting.append(f"{link.name} {size}")
    if fitting:
        yield Finding("mtu", "OK", ", ".join(fitting))


def own_addresses() -> Iterator[Finding]:
    """The addresses of this machine: which one its name means, and which would be a bad choice for
    ``listen``.
    """
    present = addresses.interfaces()
    good = [
        f"{name} {address}"
        for name, address in present.items()
        if addresses.suspicion(address, present) is None
    ]
    bad = [
        f"{name} {address} {addresses.suspicion(address, present)}"
        for name, address in present.items()
        if name != "lo" and addresses.suspicion(address, present) is not None
    ]
    if good:
        yield Finding("addresses", "OK", f"for node.listen: {', '.join(good)}")
    else:
        detail = "only loopback: all nodes must run on this machine"
        yield Finding("addresses", "WARN", detail, "sudo ip address add ADDRESS/PREFIX dev INTERFACE")
    for text in bad:
        yield Finding("addresses", "WARN", text, 'in the configuration: listen = "another interface"')
    yield from _host_name(good)


def _host_name(good: list[str]) -> Iterator[Finding]:
    """Whether the machine's own name is an address that others reach."""
    name = socket.gethostname()
    instead = (
        f'in the configuration: listen = "{good[0].partition(" ")[0]}"' if good else "add an address first"
    )
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield Finding("host name", "WARN", f"{name} does not resolve ({error}): do not listen on it", instead)
        return
    if (why := addresses.suspicion(address)) is not None:
        yield Finding(
            "host name", "WARN", f"{name} resolves to {address}, which {why}: do not listen on it", instead
        )
    else:
        yield Finding("host name", "OK", f"{name} resolves to {address}")
