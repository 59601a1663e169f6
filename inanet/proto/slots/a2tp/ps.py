"""The PS of A2TP: ATP's, in this system's frames."""

from inanet.proto.slots.atp.ps import atp_server
from inanet.proto.slots.ps import SumServer
from inanet.wire.a2tp import FRAME


def make_server() -> SumServer:
    """The machine."""
    return atp_server(FRAME)
