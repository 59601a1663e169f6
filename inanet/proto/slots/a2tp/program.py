"""A2TP on a switch: ATP's program where a collision marks the occupant as well, and packets may bypass their slot."""

from inanet.proto.slots.atp.policy import Variant
from inanet.proto.slots.atp.program import AtpProgram
from inanet.wire.a2tp import HEADER_BYTES


class A2tpProgram(AtpProgram):
    """See :class:`~inanet.proto.slots.atp.program.AtpProgram`."""

    name = "a2tp"
    variant = Variant(head=HEADER_BYTES, marks=True, preempts=False)
