"""Network namespaces of a test's own, and virtual cables between them. They vanish with the test."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from pyroute2 import IPRoute

from tests.phy.conftest import CLONE_NEWNET, lacking
from tests.phy.helpers import DEADLINE

Answer = TypeVar("Answer")
_libc = ctypes.CDLL(None, use_errno=True)


def in_thread(body: Callable[[], Answer]) -> Answer:
    """Run ``body`` in a thread of its own, which may change its namespace, and hand on what it returns or
    raises.
    """
    outcome: list[Answer] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(body())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


class Space:
    """A network namespace, which lives as long as this object is open or a socket in it is."""

    def __init__(self) -> None:
        def make() -> int:
            if _libc.unshare(CLONE_NEWNET) != 0:
                return -ctypes.get_errno()
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        self.fd = in_thread(make)
        if self.fd < 0:
            lacking(f"making a network namespace needs CAP_SYS_ADMIN ({os.strerror(-self.fd)})")
        self.run(lambda: self.setup("lo"))

    def run(self, body: Callable[[], Answer]) -> Answer:
        """Run ``body`` in this namespace; sockets and processes it makes belong there."""

        def inside() -> Answer:
            if _libc.setns(self.fd, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "entering a network namespace")
            return body()

        return in_thread(inside)

    def setup(self, name: str, address: str | None = None, **attributes: object) -> None:
        """Set an interface up, in the namespace of this thread; ``address`` gets a /24."""
        with IPRoute() as netlink:
            index = netlink.link_lookup(ifname=name)[0]
            if address is not None:
                netlink.addr("add", index=index, address=address, prefixlen=24)
            netlink.link("set", index=index, state="up", **attributes)

    def bridge(self, name: str, ports: list[str]) -> None:
        """Connect interfaces of the namespace of this thread by a switch."""
        with IPRoute() as netlink:
            netlink.link("add", ifname=name, kind="bridge")
            index = netlink.link_lookup(ifname=name)[0]
            for port in ports:
                netlink.link("set", index=netlink.link_lookup(ifname=port)[0], master=index)
        self.setup(name)

    def close(self) -> None:
        """Let go of the namespace."""
        os.close(self.fd)


def open_spaces(stack: ExitStack, count: int) -> list[Space]:
    """Namespaces that are closed with ``stack``; skips without the privilege."""
    spaces = []
    for _ in range(count):
        spaces.append(Space())
        stack.callback(spaces[-1].close)
    return spaces


def cable(
    one: Space, name: str, other: Space, other_name: str, address: str | None, other_address: str | None
) -> None:
    """A veth pair between two namespaces, both ends up; ends with an address have a /24."""

    def make() -> None:
        with IPRoute() as netlink:
            netlink.link("add", ifname=name, kind="veth", peer={"ifname": other_name, "net_ns_fd": other.fd})
        one.setup(name, address)

    one.run(make)
    other.run(lambda: other.setup(other_name, other_address))
    one.run(lambda: _await_carrier(name))
    other.run(lambda: _await_carrier(other_name))


def _await_carrier(name: str) -> None:
    """The kernel starts queues in the background when a cable is plugged in; before, it loses packets."""
    end = time.monotonic() + DEADLINE
    with IPRoute() as netlink:
        index = netlink.link_lookup(ifname=name)[0]
        while netlink.get_links(index)[0].get_attr("IFLA_OPERSTATE") != "UP":
            if time.monotonic() > end:
                raise AssertionError(f"{name} does not come up")
