"""The PS of A2TP: ATP's, in this system's frames."""

from inanet.proto.slots.atp.ps import ParameterServer
from inanet.wire.a2tp import FRAME


def make_server() -> ParameterServer:
    """The machine."""
    return ParameterServer(FRAME)
