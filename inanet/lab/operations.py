"""The steps of building a lab, as data.

Each says how things shall be, not how to get there, so applying one twice does nothing the second time. Namespaces
are full names (``ina.star4.w0``).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace exists, its loopback is up."""

    name: str


@dataclass(frozen=True, slots=True)
class Sysctl:
    """``/proc/sys/net/<key>`` of a namespace holds ``value``. Kernels without an ``optional`` key are left alone."""

    namespace: str
    key: str
    value: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Bridge:
    """A bridge exists and is up; multicast as asked for."""

    namespace: str
    name: str
    snooping: bool
    querier: bool


@dataclass(frozen=True, slots=True)
class Cable:
    """A veth pair joins two namespaces; its ends are up, bridge ports where a bridge is named."""

    namespace: str
    name: str
    far_namespace: str
    far_name: str
    mtu: int
    bridge: str | None = None
    far_bridge: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """An interface has an IPv4 address (``prefix`` bits of network)."""

    namespace: str
    interface: str
    address: str
    prefix: int


@dataclass(frozen=True, slots=True)
class Route:
    """Packets for ``destination`` leave by ``gateways`` (equal shares), or straight by ``interface``."""

    namespace: str
    destination: str
    gateways: tuple[str, ...] = ()
    interface: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What leaves an interface passes a token bucket: bits per second, bytes, seconds."""

    namespace: str
    interface: str
    rate: int
    burst: int
    latency: float


Operation = Namespace | Sysctl | Bridge | Cable | Address | Route | Shape
