"""ESA on a switch: ATP's program where a more urgent fragment takes the slot, and the partial sum goes to the PS."""

from inanet.proto.slots.atp.policy import Variant
from inanet.proto.slots.atp.program import AtpProgram
from inanet.wire.esa import HEADER_BYTES


class EsaProgram(AtpProgram):
    """See :class:`~inanet.proto.slots.atp.program.AtpProgram`. What was evicted leaves through :meth:`spilled`."""

    name = "esa"
    variant = Variant(head=HEADER_BYTES, marks=False, preempts=True)
