"""A worker: the common one, with the toy's framing."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.recovery import Timing
from inanet.proto.slots.window import Index
from inanet.proto.slots.worker import Answers, Layout, Mask, Membership, Worker
from inanet.wire.batch import PacketBatch
from tests.proto.slots.toy.job import FRAME, WIDTH, ToyJob

_AT = FRAME.itemsize - 4 * WIDTH


class ToyWorker(Worker):
    def _read(self, batch: PacketBatch, index: Index, now: float) -> Answers:
        offsets = batch.offsets[self._sized(batch, index)]
        frames = batch.arena[offsets[:, None] + np.arange(FRAME.itemsize)].view(FRAME)[:, 0]
        none = np.zeros(len(offsets), np.bool_)
        return Answers(
            frames["number"].astype(np.int64), offsets + _AT, none, none, np.full(len(offsets), -1)
        )

    def _dress(self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask) -> None:
        view = frames.view(FRAME)[:, 0]
        view["job"], view["worker"], view["number"] = self.member.job, self.member.index, numbers


def join(member: Membership, job: ToyJob, timing: Timing) -> ToyWorker:
    return ToyWorker(member, Layout(WIDTH, FRAME.itemsize, _AT, 32), job.slots, timing=timing)
