"""A2TP's framing: ATP's (:mod:`inanet.wire.atp`) with one byte more, the marks, at offset 10. 275 B; 309 B in a frame.

The paper speaks of one bit *Col*, the public program carries a whole byte of which it uses bit 0. A second bit says that
the packet bypasses the switch: in the public program that is the retransmission flag, which makes a first transmission
indistinguishable from a repetition. A switch with the public program ignores the bit; towards one, senders of the
``artifact`` profile set the retransmission flag as well.
"""

from enum import IntFlag

from inanet.wire.atp import TRAILER_BYTES, VALUES, frame_type


class Mark(IntFlag):
    """Byte 10."""

    NONE = 0
    #: another fragment wanted the slot while this one had it
    COL = 0x01
    #: beyond the sender's aggregator window: to the PS, with what its slot holds
    BYPASS = 0x02


FRAME = frame_type("col")
HEADER_BYTES = 15
FRAME_BYTES = HEADER_BYTES + 4 * VALUES + TRAILER_BYTES
#: with the Ethernet and IPv4 headers of the public programs
LINK_FRAME_BYTES = 34 + FRAME_BYTES
assert FRAME.itemsize == FRAME_BYTES
