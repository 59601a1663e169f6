"""Numbers that have 32 bits on the wire and go on for ever in a machine: iterations, and sequence numbers of pulls."""

from inanet.wire.batch import I64

#: what of a number is on the wire
SERIAL = 0xFFFFFFFF
_HALF = 1 << 31


def low(number: int) -> int:
    """What a header has of ``number``."""
    return number & SERIAL


def ahead(found: I64, of: int) -> I64:
    """How far numbers off the wire, int64[n], are ahead of a machine's own one; negative: behind. Right for up to 2^31."""
    return (found - low(of) + _HALF & SERIAL) - _HALF


def beyond(found: I64, of: int) -> I64:
    """How far numbers off the wire, int64[n], are beyond a machine's own one, from 0 to 2^32 - 1."""
    return found - low(of) & SERIAL
