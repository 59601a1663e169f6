"""GOAT at a worker: every fragment goes to the node that its sub-model has for this worker."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import Scheduled
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.goat.frames import FrameChecks, heads_of, seal
from inanet.proto.slots.goat.job import GoatJob
from inanet.proto.slots.source import Source
from inanet.proto.slots.window import TIMING, Index, Lanes, Window
from inanet.proto.slots.worker import Answers, Framing, Layout, Mask, Membership, Worker
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

LAYOUT = Layout(VALUES, FRAME_BYTES, VALUES_AT, SEQUENCE_BITS)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A tensor's sub-models in the order of their fragments, one entry each: first fragment, number, node for this worker,
    lane (:class:`~inanet.proto.slots.window.Lanes`). ``end`` is behind the last fragment.
    """

    first: Index
    number: Index
    node: Index
    lane: Index
    end: int

    @classmethod
    def of(cls, scheduled: Sequence[Scheduled], worker: int, lanes: dict[tuple[int, ...], int]) -> "Schedule":
        """For a worker, by index. A lane is the nodes of all workers: sub-models that agree in these are summed in the order in
        which they are sent. ``lanes`` are those known, and grow.
        """
        parts = sorted(scheduled, key=lambda part: part.first)
        rows = [
            (part.first, part.number, part.nodes[worker], lanes.setdefault(part.nodes, len(lanes)))
            for part in parts
        ]
        table = np.array(rows, np.int64).reshape(len(rows), 4)
        end = parts[-1].first + parts[-1].count if parts else 0
        return cls(table[:, 0], table[:, 1], table[:, 2], table[:, 3], end)

    def tags(self, places: Index) -> tuple[Index, Index, Index, Index]:
        """Node, sub-model, fragment of that, and lane of fragments of the tensor that have a sub-model."""
        part = np.searchsorted(self.first, places, side="right") - 1
        return self.node[part], self.number[part], places - self.first[part], self.lane[part]

    def places(self, submodels: Index, fragments: Index) -> Index:
        """The fragments of the tensor that fragments of sub-models are, -1 for those of none."""
        order = np.argsort(self.number)
        part = order[np.minimum(np.searchsorted(self.number, submodels, sorter=order), len(order) - 1)]
        stop = np.append(self.first[1:], self.end)[part]
        places = self.first[part] + fragments
        return np.where((self.number[part] == submodels) & (places < stop), places, -1)


def write_heads(view: NDArray[Any], kind: int, member: Membership, numbers: Index | int) -> None:
    """Write what frames of a worker begin with, :data:`~inanet.wire.goat.FRAME` [n]; they go to the PS until they are addressed."""
    view["magic"], view["kind"], view["job"] = MAGIC_VERSION, kind, member.job
    view["number"], view["bitmap"] = numbers, member.bit
    view["node"], view["submodel"] = PS_NODE, NO_SUBMODEL


class GoatFraming(Framing):
    """Memory is a sub-model's own, so the window has nothing to do with slots: it bounds what the PS remembers."""

    def __init__(self, member: Membership, lanes: Lanes) -> None:
        super().__init__(member, LAYOUT)
        self._checks = FrameChecks()
        self._checks.add(member.job, member.key)
        self._lanes = lanes
        self._schedules: dict[int, Schedule] = {}
        #: lanes by what tells them apart; 0 is the PS's own
        self._lane_of: dict[tuple[int, ...], int] = {(PS_NODE,) * member.workers: 0}
        self._direct = 0

    def schedule(self, tensor: int, scheduled: Sequence[Scheduled]) -> None:
        """Where a tensor's sub-models go; without one, a tensor goes to the PS."""
        self._schedules[tensor] = Schedule.of(scheduled, self.member.index, self._lane_of)

    def drop(self, tensor: int) -> None:
        """A tensor is forgotten; rounds of it that have begun go on by way of the PS alone."""
        self._schedules.pop(tensor, None)

    def read(self, batch: PacketBatch, index: Index, drops: NDArray[np.int64], now: float) -> Answers:
        reason = self._checks.reasons(batch, index)
        heads = heads_of(batch, index)
        reason[(reason == Drop.OK) & (heads["kind"] != Kind.RESULT)] = Drop.BAD_TYPE
        good = reason == Drop.OK
        if not good.all():
            drops += np.bincount(reason[~good], minlength=DROP_CODES)
        low = heads["number"][good].astype(np.int64)
        return Answers.unmarked(low, batch.offsets[index[good]] + VALUES_AT)

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask, streams: Iterable[Source]
    ) -> None:
        view = frames.view(FRAME)[:, 0]
        write_heads(view, Kind.DATA, self.member, numbers & 0xFFFFFFFF)
        lanes = np.zeros(len(numbers), np.int64)
        for stream in streams:
            if stream.first is None:
                break
            stop = np.inf if stream.count is None else stream.first + stream.count
            mine = np.flatnonzero((numbers >= stream.first) & (numbers < stop))
            places = numbers[mine] - stream.first
            view["fragment"][mine] = places
            its = self._schedules.get(stream.tensor.tensor)
            if its is None or not len(its.first):
                continue
            # what goes out a second time, under other exponents, has no slots
            scheduled = places < its.end
            mine, places = mine[scheduled], places[scheduled]
            view["node"][mine], view["submodel"][mine], view["fragment"][mine], lanes[mine] = its.tags(places)
        self._lanes.assign(numbers, lanes)
        self._direct += int(np.count_nonzero(view["node"][again:] == PS_NODE))
        seal(frames, np.uint64(self.member.key))

    def stats(self, stats: dict[str, int]) -> dict[str, int]:
        """``direct`` are fragments that no switch was to sum."""
        return stats | {"direct": self._direct}


def goat_worker(member: Membership, window: int, timing: Timing = TIMING) -> Worker:
    """A worker: ``window`` fragments at most in flight, the same for all workers and the PS."""
    lanes = Lanes()
    return Worker(GoatFraming(member, lanes), Window(window, timing, member.first, lanes))


def join(member: Membership, job: GoatJob, timing: Timing) -> Worker:
    """The worker of a job as its plan describes it."""
    return goat_worker(member, job.window, timing)
