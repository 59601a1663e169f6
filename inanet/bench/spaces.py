"""Network namespaces without a name and cables between them, for measurements in one process. They vanish with it."""

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from inanet.lab.namespaces import in_thread

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
