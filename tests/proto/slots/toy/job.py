"""What the plan of a toy job says, and its packets."""

from dataclasses import dataclass

import numpy as np

from inanet.proto.common.checks import in_range
from inanet.proto.common.plan import TensorJob

WIDTH = 32
FRAME = np.dtype([("job", "u1"), ("worker", "u1"), ("number", ">u4"), ("values", ">i4", WIDTH)])


@dataclass(frozen=True, slots=True)
class ToyJob(TensorJob):
    """``slots`` fragments have a place at a time."""

    slots: int

    def __post_init__(self) -> None:
        TensorJob.__post_init__(self)
        in_range("slots", self.slots, 1, 1 << 16)
