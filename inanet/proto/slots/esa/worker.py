"""ESA at a worker: ATP's, with the fragment's priority in the frame."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.atp.worker import AtpWorker
from inanet.proto.slots.window import Index
from inanet.proto.slots.worker import Mask, Membership
from inanet.wire.atp import MARK_AT
from inanet.wire.esa import FRAME, MAX_PRIORITY


class EsaWorker(AtpWorker):
    """Tensors have a priority, the greater the more urgent; all workers give a tensor the same one.

    Which tensors are urgent is for the job to say: those that the next step needs first, or those of a job that waits for
    communication most of its time.
    """

    frame_type = FRAME

    def add_tensor(self, tensor: int, spec: TensorSpec, priority: int = 0) -> None:
        """See :meth:`Worker.add_tensor <inanet.proto.slots.worker.Worker.add_tensor>`; ``priority`` is 0 to 255."""
        if not 0 <= priority <= MAX_PRIORITY:
            raise ValueError(f"tensor {spec.name!r}: priorities are 0 to {MAX_PRIORITY}, not {priority}")
        super().add_tensor(tensor, spec)
        self._tensors[tensor].priority = priority

    def _dress(self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask) -> None:
        super()._dress(frames, numbers, again, slots)
        for stream in self._streams:
            if stream.first is None:
                break
            frames[numbers >= stream.first, MARK_AT] = stream.tensor.priority


def join(member: Membership, job: AtpJob, timing: Timing) -> EsaWorker:
    """The worker of a job as its plan describes it."""
    return EsaWorker(member, job.window, job.slots, initial=job.window, timing=timing)
