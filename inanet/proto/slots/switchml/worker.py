"""SwitchML at a worker: a pool of slots with two versions, one fragment in flight for each.

Fragment *s* uses slot ``s mod pool`` in version ``(s div pool) mod 2``. The count goes on over rounds and tensors, so that
the alternation survives them: beginning again with version 0 would make new fragments look like duplicates of old ones.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import gather
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.source import Arrays, Source, Tensor
from inanet.proto.slots.switchml.job import SwitchMLJob
from inanet.proto.slots.switchml.packetwise import PacketwiseStream
from inanet.proto.slots.window import TIMING, Index, Window
from inanet.proto.slots.worker import Answers, Framing, Layout, Mask, Membership, Worker
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.switchml import DATA, FRAMES, MAX_SLOTS, SET_BIT, SIZES, VALUES_AT, frame_bytes


class SwitchMLFraming(Framing):
    """``pool`` is the job's share of slots at the switch; ``values`` (64 or 256) what a packet carries.

    Exponents of floats are those of the number format's blocks, agreed with the root, so that the bits are those of every other
    system; the packets' own two are 0. With ``packetwise`` they are the packets' own (:mod:`inanet.proto.slots.switchml.packetwise`):
    float32 tensors only, no root.
    """

    def __init__(self, member: Membership, pool: int, values: int, packetwise: bool) -> None:
        if not 1 <= pool <= MAX_SLOTS or values not in SIZES:
            raise ValueError(f"a pool of 1 to {MAX_SLOTS} slots, {list(SIZES)} values; not {pool}, {values}")
        super().__init__(member, Layout(values, frame_bytes(values), VALUES_AT, 32))
        self.pool = pool
        self._packetwise = packetwise
        self.asks_root = not packetwise
        self._kind = DATA << 4 | SIZES[values]

    def source(self, tensor: Tensor, round_: int, arrays: Arrays) -> Source:
        """How a round becomes fragments."""
        if self._packetwise and tensor.format.uses_exponents:
            return PacketwiseStream(tensor, round_, arrays, self.layout.width, self.pool)
        return super().source(tensor, round_, arrays)

    def read(self, batch: PacketBatch, index: Index, drops: NDArray[np.int64], now: float) -> Answers:
        """Results are packets of the job's number and size."""
        heads = np.empty((len(index), VALUES_AT), np.uint8)
        gather(batch.arena, batch.offsets[index], heads)
        kind = heads[:, 0] & 0xF7 == self._kind
        mine = heads[:, 1] == self.member.job & 0xFF
        drops[Drop.BAD_TYPE] += int(np.count_nonzero(~kind))
        drops[Drop.FOREIGN_JOB] += int(np.count_nonzero(kind & ~mine))
        good = kind & mine
        low = np.ascontiguousarray(heads[good, 2:6]).view("<u4")[:, 0].astype(np.int64)
        return Answers.unmarked(low, batch.offsets[index[good]] + VALUES_AT)

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask, streams: Iterable[Source]
    ) -> None:
        """Slot and version follow from the number."""
        view = frames.view(FRAMES[self.layout.width])[:, 0]
        view["kind"] = self._kind
        view["job"] = self.member.job & 0xFF
        view["packet_id"] = numbers & 0xFFFFFFFF
        view["pool_index"] = numbers % self.pool + np.where(numbers // self.pool % 2 == 1, SET_BIT, 0)
        for stream in streams:
            if isinstance(stream, PacketwiseStream) and stream.first is not None:
                mine = (numbers >= stream.first) & (numbers < stream.first + (stream.count or 0))
                view["exponents"][mine] = stream.exponents(numbers[mine] - stream.first)


def switchml_worker(
    member: Membership, pool: int, *, values: int = 256, packetwise: bool = False, timing: Timing = TIMING
) -> Worker:
    """A worker, see :class:`SwitchMLFraming`."""
    framing = SwitchMLFraming(member, pool, values, packetwise)
    return Worker(framing, Window(pool, timing, member.first))


def join(member: Membership, job: SwitchMLJob, timing: Timing) -> Worker:
    """The worker of a job as its plan describes it."""
    return switchml_worker(member, job.slots, values=job.values or 256, timing=timing)
