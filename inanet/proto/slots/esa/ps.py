"""The PS of ESA: ATP's, in this system's frames."""

from inanet.proto.slots.atp.ps import ParameterServer
from inanet.wire.esa import FRAME


def make_server() -> ParameterServer:
    """The machine."""
    return ParameterServer(FRAME)
