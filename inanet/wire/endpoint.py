"""Data-plane addresses as integers: ``ipv4 << 16 | port``.

One integer is cheap to compare inside a kernel, to store in numpy arrays and to use as a dictionary key. Framings
without ports (raw IPv4) use port 0.
"""

from ipaddress import IPv4Address


def endpoint(address: str, port: int) -> int:
    """Endpoint of a dotted IPv4 address and a port (0 to 65535).

    Raises ``ValueError`` for anything else, naming it.
    """
    if not 0 <= port <= 0xFFFF:
        raise ValueError(f"port {port} is not between 0 and 65535")
    return int(IPv4Address(address)) << 16 | port


def address_of(value: int) -> tuple[str, int]:
    """The dotted IPv4 address and the port of an endpoint."""
    return str(IPv4Address(value >> 16)), value & 0xFFFF


def show(value: int) -> str:
    """``"10.0.0.1:7000"``, for messages."""
    address, port = address_of(value)
    return f"{address}:{port}"
