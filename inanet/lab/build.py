"""Applying a layout to the system through netlink, and reading it back.

Every operation is made true if it is not: applied to a complete lab nothing changes, applied to a part of one
the rest is added. No uvloop in a process that uses this: it and pyroute2 get in each other's way.
"""

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import TC_H_ROOT

from inanet.lab import namespaces, remains
from inanet.lab.layout import (
    HOST_INTERFACE,
    Bridge,
    Interface,
    Namespace,
    Operation,
    Route,
    Router,
    Shaper,
    Veth,
    namespace,
    operations,
)
from inanet.lab.model import Topology
from inanet.service.exits import Failure

#: Seconds within which listeners answer a querier, and after which a switch trusts its own table. The
#: kernel's 10 s mean that a new lab floods multicast for that long.
_QUERY_RESPONSE = 1
#: The kernel counts bridge times in hundredths of a second.
_CENTISECONDS = 100
_TBF_HANDLE = 0x10000


class LabError(Failure):
    """A lab could not be built; the message names the operation that failed and why."""


#: seconds the kernel may take to remove the cables of a namespace that is gone
_REMOVAL_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A shaper as the kernel has it, and what it has carried since. Bytes as on the wire: every packet of a
    super-frame with its own headers.
    """

    rate: int
    """bits per second"""
    limit: int
    """bytes its queue holds, the bucket's included"""
    sent_bytes: int
    sent_packets: int
    drops: int


def build(topology: Topology, lab: str, check: Callable[[], None] = lambda: None) -> None:
    """Have the lab ``lab`` of this topology and nothing else under its name.

    ``check`` is called between namespaces and may raise to give up. Raises :class:`LabError`, or
    :class:`inanet.lab.namespaces.Unprivileged`.
    """
    namespaces.require_privileges()
    plan = operations(topology, lab)
    wanted = {operation.namespace for operation in plan}
    remains.dismantle([name for name in namespaces.labs().get(lab, []) if name not in wanted])
    for name, group in itertools.groupby(plan, key=lambda operation: operation.namespace):
        check()
        _apply(name, list(group))
    for name in sorted(wanted):
        namespaces.inside(name, partial(_prune, _interfaces(plan, name)))


def remove(lab: str, grace: float = remains.GRACE) -> list[str]:
    """Take a lab down with all processes in it. Returns the names of the namespaces that were removed."""
    namespaces.require_privileges()
    names = namespaces.labs().get(lab, [])
    remains.dismantle(names, grace)
    return names


def shape(lab: str, node: str, interface: str) -> Shape | None:
    """The shaper of an interface; ``None`` if it has none. Raises ``OSError`` without such a namespace."""

    def read() -> Shape | None:
        with IPRoute() as netlink:
            found = _tbf(netlink, _index(netlink, interface))
        if found is None:
            return None
        parameters = found.get_nested("TCA_OPTIONS", "TCA_TBF_PARMS")
        stats = found.get_nested("TCA_STATS2", "TCA_STATS_BASIC")
        queue = found.get_nested("TCA_STATS2", "TCA_STATS_QUEUE")
        return Shape(
            8 * parameters["rate"], parameters["limit"], stats["bytes"], stats["packets"], queue["drops"]
        )

    return namespaces.inside(namespace(lab, node), read)


def add_address(lab: str, host: str, address: str) -> None:
    """Give a host of a bridged lab a further address. Raises ``OSError`` without such a namespace."""

    def work() -> None:
        with IPRoute() as netlink:
            index = _index(netlink, HOST_INTERFACE)
            netlink.addr("replace", index=index, address=address, prefixlen=24)

    namespaces.inside(namespace(lab, host), work)


def _ensure_soon(operation: Operation, netlink: IPRoute) -> None:
    """Ensure an operation, again while what is in its way is on its way out: the kernel takes the cables of a
    namespace that was just removed down in its own time.
    """
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while True:
        try:
            ensure(operation, netlink)
        except NetlinkError as error:
            if error.code != errno.ENODEV or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _apply(name: str, group: Sequence[Operation]) -> None:
    if isinstance(group[0], Namespace):
        try:
            namespaces.create(name)
        except OSError as error:
            raise LabError(f"network namespace {name}: {error.strerror} ({error.filename})") from error

    def work() -> None:
        with IPRoute() as netlink:
            for operation in group:
                try:
                    _ensure_soon(operation, netlink)
                except (NetlinkError, OSError) as error:
                    text = error.args[1] if len(error.args) > 1 else str(error)
                    raise LabError(f"{operation}: {text}") from error

    namespaces.inside(name, work)


def _interfaces(plan: Iterable[Operation], name: str) -> set[str]:
    mine = {op.name for op in plan if isinstance(op, Bridge | Veth) and op.namespace == name}
    return mine | {op.peer_name for op in plan if isinstance(op, Veth) and op.peer_namespace == name} | {"lo"}


def _prune(keep: set[str]) -> None:
    """Remove what an earlier version of the topology had. Devices that a kernel puts into every new
    namespace of its own accord (tunl0 and the like) refuse, and may stay.
    """
    with IPRoute() as netlink:
        for link in netlink.get_links():
            if link.get_attr("IFLA_IFNAME") not in keep:
                with contextlib.suppress(NetlinkError):
                    netlink.link("del", index=link["index"])


@singledispatch
def ensure(operation: Operation, netlink: IPRoute) -> None:
    """Make one operation true; ``netlink`` and the calling thread are in its namespace."""
    raise TypeError(f"no operation: {operation!r}")


@ensure.register
def _(operation: Namespace, netlink: IPRoute) -> None:
    netlink.link("set", index=_index(netlink, "lo"), state="up")
    _sysctl("net/ipv6/conf/all/disable_ipv6", "1")
    _sysctl("net/ipv6/conf/default/disable_ipv6", "1")


@ensure.register
def _(operation: Bridge, netlink: IPRoute) -> None:
    if not netlink.link_lookup(ifname=operation.name):
        netlink.link("add", ifname=operation.name, kind="bridge")
    settings = {"br_mcast_snooping": int(operation.snooping)}
    if operation.snooping:
        # the response time before the querier: the kernel waits that long from the moment it is switched on
        settings["br_mcast_query_response_intvl"] = _QUERY_RESPONSE * _CENTISECONDS
        settings["br_mcast_querier"] = int(operation.querier)
    index = _index(netlink, operation.name)
    for key, value in settings.items():
        netlink.link("set", index=index, kind="bridge", **{key: value})


@ensure.register
def _(operation: Veth, netlink: IPRoute) -> None:
    here = _ends(netlink, operation.name)
    there = namespaces.inside(operation.peer_namespace, lambda: _look(operation.peer_name))
    if here is not None and there is not None and here == (there[1], there[0]):
        return
    if there is not None:
        namespaces.inside(operation.peer_namespace, lambda: _delete(operation.peer_name))
    for index in netlink.link_lookup(ifname=operation.name):
        netlink.link("del", index=index)
    # one request makes both ends where they belong: at no time is there an end anywhere else
    handle = os.open(namespaces.path(operation.peer_namespace), os.O_RDONLY | os.O_CLOEXEC)
    try:
        peer = {"ifname": operation.peer_name, "net_ns_fd": handle}
        netlink.link("add", ifname=operation.name, kind="veth", peer=peer)
    finally:
        os.close(handle)


@ensure.register
def _(operation: Interface, netlink: IPRoute) -> None:
    index = _index(netlink, operation.name)
    settings: dict[str, Any] = {"state": "up"}
    if operation.mtu is not None:
        settings["mtu"] = operation.mtu
    if operation.master is not None:
        settings["master"] = _index(netlink, operation.master)
    netlink.link("set", index=index, **settings)
    if operation.address is not None:
        address, _, length = operation.address.partition("/")
        for found in netlink.get_addr(index=index):
            if (found.get_attr("IFA_ADDRESS"), found["prefixlen"]) != (address, int(length)):
                netlink.addr(
                    "del", index=index, address=found.get_attr("IFA_ADDRESS"), prefixlen=found["prefixlen"]
                )
        netlink.addr("replace", index=index, address=address, prefixlen=int(length))


@ensure.register
def _(operation: Shaper, netlink: IPRoute) -> None:
    index = _index(netlink, operation.name)
    if operation.rate is not None:
        netlink.tc(
            "replace",
            "tbf",
            index=index,
            handle=_TBF_HANDLE,
            rate=operation.rate // 8,
            burst=operation.burst,
            latency=round(operation.latency * 1e6),
        )
    elif _tbf(netlink, index) is not None:
        netlink.tc("del", index=index, parent=TC_H_ROOT)


@ensure.register
def _(operation: Route, netlink: IPRoute) -> None:
    if not operation.gateways:
        netlink.route("replace", dst=operation.network, oif=_index(netlink, HOST_INTERFACE))
    elif len(operation.gateways) == 1:
        netlink.route("replace", dst=operation.network, gateway=operation.gateways[0])
    else:
        hops = [{"gateway": gateway} for gateway in operation.gateways]
        netlink.route("replace", dst=operation.network, multipath=hops)


@ensure.register
def _(operation: Router, netlink: IPRoute) -> None:
    _sysctl("net/ipv4/ip_forward", "1")
    _sysctl("net/ipv4/fib_multipath_hash_policy", "1")


def _sysctl(key: str, value: str) -> None:
    """Set a kernel setting of the calling thread's network namespace, if this kernel has it."""
    place = Path("/proc/sys", key)
    if place.exists():
        place.write_text(value)


def _index(netlink: IPRoute, name: str) -> int:
    for index in netlink.link_lookup(ifname=name):
        return int(index)
    raise OSError(0, f"there is no interface {name}")


def _ends(netlink: IPRoute, name: str) -> tuple[int, int] | None:
    """Index of a veth interface and of its other end, which tell whether two are one cable."""
    for link in _links(netlink, name):
        kind = link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND")
        return (link["index"], link.get_attr("IFLA_LINK") or 0) if kind == "veth" else (link["index"], 0)
    return None


def _links(netlink: IPRoute, name: str) -> Iterator[Any]:
    for index in netlink.link_lookup(ifname=name):
        yield from netlink.get_links(index)


def _look(name: str) -> tuple[int, int] | None:
    with IPRoute() as netlink:
        return _ends(netlink, name)


def _delete(name: str) -> None:
    with IPRoute() as netlink:
        netlink.link("del", index=_index(netlink, name))


def _tbf(netlink: IPRoute, index: int) -> Any | None:
    for found in netlink.get_qdiscs(index):
        if found["index"] == index and found.get_attr("TCA_KIND") == "tbf":
            return found
    return None
