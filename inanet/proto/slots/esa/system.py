"""ESA: ATP with priorities. A more urgent fragment takes the slot, and what was in it goes to the PS."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.recovery import Timing
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.atp.policy import Variant
from inanet.proto.slots.atp.program import AtpProgram
from inanet.proto.slots.atp.ps import atp_server
from inanet.proto.slots.atp.worker import AtpPace, Marking, make_worker
from inanet.proto.slots.ps import SumServer
from inanet.proto.slots.source import Source, Tensor
from inanet.proto.slots.window import TIMING, Index
from inanet.proto.slots.worker import Mask, Membership, Worker
from inanet.wire.atp import MARK_AT
from inanet.wire.esa import FRAME, HEADER_BYTES, MAX_PRIORITY


class EsaProgram(AtpProgram):
    """See :class:`~inanet.proto.slots.atp.program.AtpProgram`. What was evicted leaves through :meth:`spilled`."""

    name = "esa"
    variant = Variant(head=HEADER_BYTES, marks=False, preempts=True)


def make_server() -> SumServer:
    """The machine."""
    return atp_server(FRAME)


class EsaMarking(Marking):
    """Tensors have a priority, 0 to 255, the greater the more urgent; all workers give a tensor the same one.

    Which tensors are urgent is for the job to say: those that the next step needs first, or those of a job that waits for
    communication most of its time.
    """

    frame_type = FRAME

    def add(self, tensor: Tensor, priority: int) -> None:
        if not 0 <= priority <= MAX_PRIORITY:
            raise ValueError(
                f"tensor {tensor.spec.name!r}: priorities are 0 to {MAX_PRIORITY}, not {priority}"
            )
        tensor.priority = priority

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, slots: Mask, streams: Iterable[Source]
    ) -> None:
        for stream in streams:
            if stream.first is None:
                break
            frames[numbers >= stream.first, MARK_AT] = stream.tensor.priority


def esa_worker(
    member: Membership, window: int, slots: int, *, initial: int = 50, timing: Timing = TIMING
) -> Worker:
    """ESA's; ``initial`` fragments may be in flight at first."""
    return make_worker(member, window, slots, EsaMarking(), AtpPace(initial, window), timing)


def join(member: Membership, job: AtpJob, timing: Timing) -> Worker:
    """The worker of a job as its plan describes it."""
    return esa_worker(member, job.window, job.slots, initial=job.window, timing=timing)
