"""GOAT's program for asynchronous training, with the registers that tell gradients apart and what is published."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.program import Verdicts
from inanet.proto.slots.goat.program import GoatProgram
from inanet.proto.slots.goat_async import policy
from inanet.proto.slots.goat_async.policy import Calls
from inanet.proto.slots.registers import DEFAULT_BUDGET
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.goat import FRAME, FRAME_BYTES, MAGIC_VERSION, Kind

#: register bytes of a slot beside those of synchronous training: parities, and the epoch of the last sum
PARITY_BYTES = 8
_WORKERS = 32


class EpochProgram(GoatProgram):
    """See :class:`~inanet.proto.slots.goat.program.GoatProgram`, and :mod:`inanet.proto.slots.goat_async.policy`.

    Counters as there: ``bypassed`` are contributions that were passed on to the PS because their slot's sum was on its way,
    ``first`` those that opened a slot, ``answered`` sums that were sent again.
    """

    name = "goat-async"
    extra = PARITY_BYTES

    def __init__(self, *, budget: int = DEFAULT_BUDGET, age: float = 1.0) -> None:
        super().__init__(budget=budget, age=age)
        self.calls = _silence(0, np.zeros(self.file.slots, np.uint32), np.zeros(self.file.slots, np.uint32))
        #: jobs and their sub-models, as the rows of :attr:`calls` have them
        self._rows: list[tuple[int, int]] = []
        self._drawn: NDArray[np.int64] = np.zeros((self.file.slots, 4), np.int64)
        self._many: NDArray[np.int64] = np.zeros(1, np.int64)

    def register_bytes(self) -> int:
        return super().register_bytes() + PARITY_BYTES * self.file.slots

    def _lay_out(self) -> None:
        """Put the sub-models of all jobs one after the other, and what is known of them with them."""
        super()._lay_out()
        before, rows = (
            self.calls,
            [(job, k) for job in sorted(self._held) for k in range(len(self._held[job]))],
        )
        after = _silence(len(rows), before.parity, before.sent)
        was = {key: row for row, key in enumerate(self._rows)}
        for row, key in enumerate(rows):
            old = was.get(key)
            if old is not None:
                for name in ("need", "mask", "epoch", "revision", "newest"):
                    getattr(after, name)[row] = getattr(before, name)[old]
        self.calls, self._rows = after, rows

    # ---------------------------------------------------------------- packets

    def _run(self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float) -> None:
        policy.run(
            self.file.registers,
            self.routes,
            self.calls,
            batch.arena,
            batch.offsets,
            batch.lengths,
            batch.sources,
            verdicts.action,
            verdicts.target,
            verdicts.reason,
            self.counts,
            self._drawn,
            self._many,
            now,
        )

    def spilled(self) -> list[Transmission]:
        """Sums that were completed by what was published since the last call."""
        many = int(self._many[0])
        if not many:
            return []
        self._many[0] = 0
        drawn = self._drawn[:many]
        frames = np.zeros(many, FRAME)
        jobs = drawn[:, 0]
        frames["magic"], frames["kind"], frames["job"] = MAGIC_VERSION, Kind.SUM, jobs
        frames["node"], frames["submodel"] = self.routes.own[jobs], drawn[:, 1]
        frames["fragment"] = drawn[:, 2]
        arena = frames.view(np.uint8).reshape(-1)
        policy.draw(self.file.registers, self.routes, arena, drawn, FRAME_BYTES)
        out = []
        for job in np.unique(jobs).tolist():
            offsets = np.flatnonzero(jobs == job) * FRAME_BYTES
            out.append(Transmission(int(self.routes.to_ps[job]), arena, offsets, FRAME_BYTES))
        return out

    def published(self, job: int) -> dict[int, tuple[int, int, int]]:
        """What is known of a job's sub-models: (epoch, revision, K_t^s) by number."""
        first = self.routes.at[job]
        calls = self.calls
        return {
            k: (int(calls.epoch[first + k]), int(calls.revision[first + k]), int(calls.need[first + k]))
            for k in range(len(self._held[job]))
        }


def _silence(rows: int, parity: NDArray[np.uint32], sent: NDArray[np.uint32]) -> Calls:
    """Nothing is published yet."""
    return Calls(
        need=np.zeros(rows, np.int64),
        mask=np.zeros(rows, np.uint32),
        epoch=np.zeros(rows, np.uint32),
        revision=np.zeros(rows, np.uint32),
        newest=np.zeros((rows, _WORKERS), np.uint32),
        parity=parity,
        sent=sent,
    )
