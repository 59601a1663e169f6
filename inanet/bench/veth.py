"""Two network namespaces of this process's own with a virtual cable between them; gone when they are closed."""

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeVar

from inanet.lab.namespaces import in_thread, require_privileges
from inanet.service.exits import Failure

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_DEADLINE = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _new_namespace() -> int:
    _call(_libc.unshare(_CLONE_NEWNET), "unshare")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Cable:
    """Namespaces 0 (``10.77.0.1``, interface ``near``) and 1 (``10.77.0.2``, ``far``).

    Raises :class:`~inanet.service.exits.Failure` without the privilege, and ``ImportError`` without pyroute2.
    """

    ADDRESSES = ("10.77.0.1", "10.77.0.2")
    NAMES = ("near", "far")

    def __init__(self) -> None:
        from pyroute2 import IPRoute

        require_privileges()
        self._stack = ExitStack()
        self._fds = [in_thread(_new_namespace) for _ in range(2)]
        for fd in self._fds:
            self._stack.callback(os.close, fd)
        self.macs: list[bytes] = []

        def connect() -> None:
            with IPRoute() as netlink:
                netlink.link(
                    "add",
                    ifname=self.NAMES[0],
                    kind="veth",
                    peer={"ifname": self.NAMES[1], "net_ns_fd": self._fds[1]},
                )

        def set_up(side: int) -> None:
            with IPRoute() as netlink:
                for name in ("lo", self.NAMES[side]):
                    netlink.link("set", index=netlink.link_lookup(ifname=name)[0], state="up")
                index = netlink.link_lookup(ifname=self.NAMES[side])[0]
                netlink.addr("add", index=index, address=self.ADDRESSES[side], prefixlen=24)

        def settle(side: int) -> None:
            end = time.monotonic() + _DEADLINE
            with IPRoute() as netlink:
                index = netlink.link_lookup(ifname=self.NAMES[side])[0]
                while True:
                    link = netlink.get_links(index)[0]
                    if link.get_attr("IFLA_OPERSTATE") == "UP":
                        break
                    if time.monotonic() > end:
                        raise Failure("a virtual cable does not come up")
                self.macs.append(bytes.fromhex(link.get_attr("IFLA_ADDRESS").replace(":", "")))

        try:
            self.run(0, connect)
            for work in (set_up, settle):
                for side in range(2):
                    self.run(side, lambda work=work, side=side: work(side))  # type: ignore[misc]
        except BaseException:
            self._stack.close()
            raise

    def run(self, side: int, work: Callable[[], T]) -> T:
        """Call ``work`` inside a namespace; sockets and processes that it makes belong there."""

        def body() -> T:
            _call(_libc.setns(self._fds[side], _CLONE_NEWNET), "setns")
            return work()

        return in_thread(body)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
