"""What the plan of a job of ATP's family says: ATP, A2TP, ESA."""

from dataclasses import dataclass

from inanet.proto.common.checks import are_endpoints, in_range
from inanet.proto.common.plan import TensorJob


@dataclass(frozen=True, slots=True)
class AtpJob(TensorJob):
    """``ps`` is the system's PS. Fragments are hashed to ``slots`` slots: the job's ``own``, or ones that jobs share, of which it may
    hold ``quota`` at a time (0: as many as there are).
    """

    ps: int
    slots: int
    own: bool = False
    quota: int = 0

    def __post_init__(self) -> None:
        TensorJob.__post_init__(self)
        are_endpoints((self.ps,))
        in_range("slots", self.slots, 1, 1 << 16)
        in_range("quota", self.quota, 0, (1 << 31) - 1)
