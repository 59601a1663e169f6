"""What the plan of a NetReduce job in datagrams says, and how its slots become rings."""

from dataclasses import dataclass

from inanet.proto.common.checks import in_range
from inanet.proto.common.plan import MAX_WORKERS, TensorJob

#: messages in flight, of as many packets as the job's slots allow: small tensors are padded to whole messages
WINDOW = 8


@dataclass(frozen=True, slots=True)
class NetReduceJob(TensorJob):
    """``slots`` are places of packets in the switch, the job's own; its hosts have ``rings``, one for each rank of a host, if the
    slots are enough (:func:`rings_of`).
    """

    slots: int
    rings: int = 1

    def __post_init__(self) -> None:
        TensorJob.__post_init__(self)
        in_range("slots", self.slots, 1, 1 << 16)
        in_range("rings", self.rings, 1, MAX_WORKERS)


def rings_of(slots: int, rings: int) -> int:
    """How many of ``rings`` there are in so many slots, which they share: each needs messages of two packets at least."""
    return max(1, min(rings, slots // (4 * WINDOW)))
