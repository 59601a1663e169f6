"""A worker: the common one, with the toy's framing."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.recovery import Timing
from inanet.proto.slots.source import Source
from inanet.proto.slots.window import Index, Window
from inanet.proto.slots.worker import Answers, Framing, Layout, Mask, Membership, Worker
from inanet.wire.batch import PacketBatch
from tests.proto.slots.toy.job import FRAME, WIDTH, ToyJob

_AT = FRAME.itemsize - 4 * WIDTH


class ToyFraming(Framing):
    def read(self, batch: PacketBatch, index: Index, drops: NDArray[np.int64], now: float) -> Answers:
        offsets = batch.offsets[index]
        frames = batch.arena[offsets[:, None] + np.arange(FRAME.itemsize)].view(FRAME)[:, 0]
        return Answers.unmarked(frames["number"].astype(np.int64), offsets + _AT)

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask, streams: Iterable[Source]
    ) -> None:
        view = frames.view(FRAME)[:, 0]
        view["job"], view["worker"], view["number"] = self.member.job, self.member.index, numbers


def join(member: Membership, job: ToyJob, timing: Timing) -> Worker:
    framing = ToyFraming(member, Layout(WIDTH, FRAME.itemsize, _AT, 32))
    return Worker(framing, Window(job.slots, timing, member.first))
