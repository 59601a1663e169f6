"""ESA's framing: ATP's (:mod:`inanet.wire.atp`) with the fragment's priority in one byte more, at offset 10.

ESA has no public program; the byte stands where A2TP has its marks, so that switches handle one header length. The greater
number is the more urgent.
"""

from inanet.wire.atp import TRAILER_BYTES, VALUES, frame_type

FRAME = frame_type("priority")
HEADER_BYTES = 15
FRAME_BYTES = HEADER_BYTES + 4 * VALUES + TRAILER_BYTES
MAX_PRIORITY = 255
assert FRAME.itemsize == FRAME_BYTES
