"""What the plan of a SwitchML job says."""

from dataclasses import dataclass

from inanet.proto.common.checks import in_range
from inanet.proto.common.plan import TensorJob


@dataclass(frozen=True, slots=True)
class SwitchMLJob(TensorJob):
    """``slots`` are the job's own, its pool; packets carry ``values`` (0: as many as the system's largest)."""

    slots: int
    values: int = 0

    def __post_init__(self) -> None:
        TensorJob.__post_init__(self)
        in_range("slots", self.slots, 1, 1 << 16)
        in_range("values", self.values, 0, 1 << 10)
