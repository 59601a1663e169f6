"""GOAT at a worker: every fragment goes to the node that its sub-model has for this worker."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import Scheduled
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.goat.frames import FrameChecks, heads_of, seal
from inanet.proto.slots.goat.job import GoatJob
from inanet.proto.slots.window import Index, Window
from inanet.proto.slots.worker import Answers, Layout, Mask, Membership, Worker
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.goat import (
    FRAME,
    FRAME_BYTES,
    MAGIC_VERSION,
    NO_SUBMODEL,
    PS_NODE,
    SEQUENCE_BITS,
    VALUES,
    VALUES_AT,
    Kind,
)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A tensor's sub-models, one entry each: first fragment, number, node for this worker, lane (:class:`LaneWindow`).
    ``end`` is behind the last.
    """

    first: Index
    number: Index
    node: Index
    lane: Index
    end: int


class LaneWindow(Window):
    """A window whose fragments take several ways: only what has left later on the same *lane* tells that one is lost.

    A lane is the nodes of all workers: sub-models that agree in these are summed in the order in which they are sent.
    """

    def __init__(self, capacity: int, timing: Timing, first: int = 0) -> None:
        super().__init__(capacity, timing, first)
        self._lane: Index = np.zeros(self._size, np.int64)
        self._reached: Index = np.full(1, first - 1, np.int64)

    def assign(self, numbers: Index, lanes: Index) -> None:
        """Say which lanes fragments are on; they have just left."""
        missing = int(lanes.max(initial=0)) + 1 - len(self._reached)
        if missing > 0:
            self._reached = np.append(self._reached, np.full(missing, -1, np.int64))
        self._lane[numbers % self._size] = lanes

    def accept(self, numbers: Index, now: float) -> NDArray[np.bool_]:
        """See :meth:`Window.accept`."""
        new = super().accept(numbers, now)
        accepted = numbers[new]
        np.maximum.at(self._reached, self._lane[accepted % self._size], accepted)
        return new

    def _overtaken(self, waiting: Index) -> NDArray[np.bool_]:
        furthest = self._reached[self._lane[waiting % self._size]]
        later: NDArray[np.bool_] = waiting + self.timing.gap <= furthest
        return later


class GoatWorker(Worker):
    """``window`` fragments at most in flight, the same for all workers and the PS.

    Memory is a sub-model's own, so the window has nothing to do with slots: it bounds what the PS remembers.
    """

    def __init__(self, member: Membership, window: int, timing: Timing | None = None) -> None:
        self._checks = FrameChecks()
        self._checks.add(member.job, member.key)
        super().__init__(member, Layout(VALUES, FRAME_BYTES, VALUES_AT, SEQUENCE_BITS), window, timing=timing)
        self._lanes = LaneWindow(window, self.timing, member.first)
        self.window = self._lanes
        self._schedules: dict[int, _Schedule] = {}
        #: lanes by what tells them apart; 0 is the PS's own
        self._lane_of: dict[tuple[int, ...], int] = {(PS_NODE,) * member.workers: 0}
        self._direct = 0

    def schedule(self, tensor: int, scheduled: Sequence[Scheduled]) -> None:
        """Where a tensor's sub-models go; without one, a tensor goes to the PS."""
        rows = sorted(
            (
                its.first,
                its.number,
                its.nodes[self.member.index],
                self._lane_of.setdefault(its.nodes, len(self._lane_of)),
                its.count,
            )
            for its in scheduled
        )
        table = np.array(rows, np.int64).reshape(len(rows), 5)
        end = rows[-1][0] + rows[-1][4] if rows else 0
        self._schedules[tensor] = _Schedule(table[:, 0], table[:, 1], table[:, 2], table[:, 3], end)

    def drop_tensor(self, tensor: int) -> None:
        """Forget a tensor; rounds of it that have begun go on, by way of the PS alone."""
        super().drop_tensor(tensor)
        self._schedules.pop(tensor, None)

    def _read(self, batch: PacketBatch, index: Index, now: float) -> Answers:
        index = self._sized(batch, index)
        reason = self._checks.reasons(batch, index)
        heads = heads_of(batch, index)
        reason[(reason == Drop.OK) & (heads["kind"] != Kind.RESULT)] = Drop.BAD_TYPE
        good = reason == Drop.OK
        if not good.all():
            self.drops += np.bincount(reason[~good], minlength=DROP_CODES)
        low = heads["number"][good].astype(np.int64)
        none = np.zeros(len(low), np.bool_)
        return Answers(low, batch.offsets[index[good]] + VALUES_AT, none, none, np.full(len(low), -1))

    def _dress(self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask) -> None:
        view = frames.view(FRAME)[:, 0]
        view["magic"] = MAGIC_VERSION
        view["kind"] = Kind.DATA
        view["job"] = self.member.job
        view["number"] = numbers & 0xFFFFFFFF
        view["bitmap"] = self.member.bit
        view["node"], view["submodel"] = PS_NODE, NO_SUBMODEL
        lanes = np.zeros(len(numbers), np.int64)
        for stream in self._streams:
            if stream.first is None:
                break
            stop = self.window.next if stream.count is None else stream.first + stream.count
            mine = np.flatnonzero((numbers >= stream.first) & (numbers < stop))
            places = numbers[mine] - stream.first
            view["fragment"][mine] = places
            its = self._schedules.get(stream.tensor.tensor)
            if its is None or not len(its.first):
                continue
            # what goes out a second time, under other exponents, has no slots
            scheduled = places < its.end
            mine, places = mine[scheduled], places[scheduled]
            part = np.searchsorted(its.first, places, side="right") - 1
            view["node"][mine] = its.node[part]
            view["submodel"][mine] = its.number[part]
            view["fragment"][mine] = places - its.first[part]
            lanes[mine] = its.lane[part]
        self._lanes.assign(numbers, lanes)
        self._direct += int(np.count_nonzero(view["node"][again:] == PS_NODE))
        seal(frames, np.uint64(self.member.key))

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``direct`` are fragments that no switch was to sum."""
        return {**super().stats(), "direct": self._direct}


def join(member: Membership, job: GoatJob, timing: Timing) -> GoatWorker:
    """The worker of a job as its plan describes it."""
    return GoatWorker(member, job.window, timing)
