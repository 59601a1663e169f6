"""The PS of ESA: ATP's, in this system's frames."""

from inanet.proto.slots.atp.ps import atp_server
from inanet.proto.slots.ps import SumServer
from inanet.wire.esa import FRAME


def make_server() -> SumServer:
    """The machine."""
    return atp_server(FRAME)
