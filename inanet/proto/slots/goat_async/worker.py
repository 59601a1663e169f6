"""A worker in asynchronous training: sends a gradient, waits until it takes part in an epoch, gets the model.

The gradient goes out fragment by fragment to the nodes of its sub-models, within a window; who keeps a fragment acknowledges
it, and what nobody acknowledges is sent again by time. When all of it has been taken, the worker says so to the PS, and
again with a doubling pause until it gets a result. Then it asks for what lacks, a window at a time.

A step's arrays are overwritten with the sum of the mean gradients of all epochs since the worker's last step: with plain SGD,
what it has to be moved by. All of a host's ranks are one worker, and their gradients' mean is its gradient.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent, Participation, Refused, RoundDone
from inanet.proto.common.plan import Scheduled, TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.goat.frames import LAST_OF_EPOCHS, FrameChecks, heads_of, seal
from inanet.proto.slots.goat.job import GoatAsyncJob
from inanet.proto.slots.goat_async.job import beside, pack, unpack
from inanet.proto.slots.goat_async.tensors import suits
from inanet.proto.slots.window import TIMING, Index, Window
from inanet.proto.slots.worker import Layout, Membership, Silence
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.goat import (
    FRAME,
    FRAME_BYTES,
    MAGIC_VERSION,
    MARKS,
    NO_SUBMODEL,
    PS_NODE,
    SEQUENCE_BITS,
    VALUES,
    VALUES_AT,
    EpochKind,
    Head,
    Kind,
)

#: the longest pause between two words to the PS, seconds
PATIENCE = 0.25


@dataclass(slots=True)
class _Tensor:
    spec: TensorSpec
    #: per fragment: node, sub-model, and the fragment's place in that
    node: Index
    submodel: Index
    place: Index
    #: first fragment of each sub-model by number, -1 where there is none
    first: Index
    #: float32[F, 64]: the model as it was given last
    model: NDArray[np.float32]

    @property
    def fragments(self) -> int:
        return len(self.node)


@dataclass(slots=True)
class _Step:
    """A gradient and its result. ``values`` int32[F, 64]; ``got`` bool[F + 1]."""

    tensor: int
    round: int
    arrays: Sequence[NDArray[Any]]
    values: NDArray[np.int32]
    serial: int
    first: int
    result: NDArray[Any]
    got: NDArray[np.bool_]
    #: the fragments of the result below this one are on their way, once there is one
    asked: int
    #: the epoch of the result; 0: none yet
    epoch: int = 0


class EpochWorker:
    """``window`` fragments at most are sent and not acknowledged, or asked for at a time."""

    def __init__(self, member: Membership, window: int, timing: Timing | None = None) -> None:
        self._checks = FrameChecks(LAST_OF_EPOCHS)
        self._checks.add(member.job, member.key)
        self.member = member
        self.layout = Layout(VALUES, FRAME_BYTES, VALUES_AT, SEQUENCE_BITS)
        self.timing = timing or TIMING
        # acknowledgements of nodes and of the PS overtake each other: only time tells what is lost
        self.window = Window(window, replace(self.timing, gap=1 << 40))
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        #: what the last step took part in
        self.participation: Participation | None = None
        self._tensors: dict[int, _Tensor] = {}
        self._queue: deque[tuple[int, int, Sequence[NDArray[Any]]]] = deque()
        self._step: _Step | None = None
        self._serial = self._epoch = 0
        self._again: Index = np.zeros(0, np.int64)
        self._pause = self.timing.retransmit
        self._say_at = inf
        #: since when there is no answer to what is asked for of a result; how long answers took, lately or mostly
        self._asking_since: float | None = None
        self._answers_took = 0.0
        self._silence = Silence(self.timing.silent)
        self._events: list[NodeEvent] = []
        self._sent = self._sent_again = self._results = self._direct = 0

    # ---------------------------------------------------------------- tensors

    def add_tensor(self, tensor: int, spec: TensorSpec, priority: int = 0) -> None:
        """Make a tensor known. Raises ``ValueError`` for what epochs cannot have (:func:`suits`)."""
        suits(spec)
        nothing = np.zeros(0, np.int64)
        self._tensors[tensor] = _Tensor(
            spec, nothing, nothing, nothing, nothing, np.zeros((0, VALUES), np.float32)
        )

    def schedule(self, tensor: int, scheduled: Sequence[Scheduled]) -> None:
        """Where a tensor's sub-models go."""
        its = self._tensors[tensor]
        fragments = sum(part.count for part in scheduled)
        its.node, its.submodel = np.zeros(fragments, np.int64), np.zeros(fragments, np.int64)
        its.place = np.zeros(fragments, np.int64)
        its.first = np.full(max((part.number for part in scheduled), default=-1) + 1, -1, np.int64)
        its.model = np.zeros((fragments, VALUES), np.float32)
        for part in scheduled:
            where = slice(part.first, part.first + part.count)
            its.node[where], its.submodel[where] = part.nodes[self.member.index], part.number
            its.place[where] = np.arange(part.count)
            its.first[part.number] = part.first

    def drop_tensor(self, tensor: int) -> None:
        """Forget a tensor, and what was to be sent of it."""
        self._tensors.pop(tensor, None)
        self._queue = deque(one for one in self._queue if one[0] != tensor)
        if self._step is not None and self._step.tensor == tensor:
            self._step = None
            self._silence.end()

    # ---------------------------------------------------------------- steps

    def begin(self, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float) -> None:
        """Send a gradient, behind those that have been begun. ``arrays`` are 1-D float32, one per local rank.

        Raises ``KeyError`` for a tensor that is not known.
        """
        self._tensors[tensor]
        self._queue.append((tensor, round_, arrays))
        self._next(now)

    @property
    def _chunk(self) -> int:
        """Fragments of a result that are asked for at a time, and that the PS begins with."""
        return min(MARKS, self.window.capacity)

    def give_up(self, round_: int) -> None:
        """A step has failed: its arrays are left alone from now on. What was sent of it counts, and what it would have been
        moved by is in the next step's result. One that waits is never sent.
        """
        self._queue = deque(one for one in self._queue if one[1] != round_)
        if self._step is not None and self._step.round == round_:
            self._step.arrays = ()

    def _next(self, now: float) -> None:
        while self._step is None and self._queue:
            tensor, round_, arrays = self._queue.popleft()
            its = self._tensors[tensor]
            values = self._quantised(tensor, round_, arrays)
            if values is None:
                continue
            self._serial += 1
            self._step = _Step(
                tensor,
                round_,
                arrays,
                values,
                self._serial,
                self.window.next,
                np.zeros((its.fragments + 1, VALUES), ">f4"),
                np.zeros(its.fragments + 1, np.bool_),
                self._chunk,
            )
            self._pause, self._say_at, self._asking_since = self.timing.retransmit, inf, None
            self._again = self._again[:0]
            self._silence.begin(now)

    def _quantised(
        self, tensor: int, round_: int, arrays: Sequence[NDArray[Any]]
    ) -> NDArray[np.int32] | None:
        """The host's gradient as integers, int32[F, 64], or None with an event that says why there is none."""
        its, job = self._tensors[tensor], self.member.job
        total = np.zeros(its.spec.elements)
        for local, array in enumerate(arrays):
            bad = np.flatnonzero(~np.isfinite(array))
            if len(bad):
                self._events.append(Refused(job, round_, tensor, local, int(bad[0])))
                return None
            total += array
        scaled = np.rint(total * (its.spec.factor / len(arrays)))
        # the sum of all workers' has to fit
        large = np.flatnonzero(np.abs(scaled) * self.member.workers >= 2.0**31)
        if len(large):
            self._events.append(RoundDone(job, round_, tensor, int(large[0])))
            return None
        values = np.zeros(its.fragments * VALUES, np.int32)
        values[: len(scaled)] = scaled
        return values.reshape(its.fragments, VALUES)

    def _finish(self, step: _Step, now: float) -> None:
        its = self._tensors[step.tensor]
        head = step.result.view(">i4")[-1]
        bits = int(head[Head.PARTICIPANTS]) & 0xFFFFFFFF
        self.participation = Participation(
            step.epoch,
            tuple(worker for worker in range(self.member.workers) if bits >> worker & 1),
            int(head[Head.AWAITED]),
            int(head[Head.STALENESS]),
        )
        model = step.result[:-1].astype(np.float32)
        moved = (model - its.model).reshape(-1)[: its.spec.elements]
        for array in step.arrays:
            array[:] = moved
        self._epoch = step.epoch
        if step.arrays:
            its.model = model
        self._events.append(RoundDone(self.member.job, step.round, step.tensor, -1, self.participation))
        self._step = None
        self._silence.end()
        self._next(now)

    # ---------------------------------------------------------------- packets in

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take acknowledgements, results, and what the PS asks for."""
        reason = self._checks.reasons(batch, np.arange(len(batch)))
        theirs = batch.sources == np.uint64(self.member.results or self.member.switch)
        reason[(reason == Drop.OK) & ~theirs] = Drop.FOREIGN_HOST
        sound = np.flatnonzero(reason == Drop.OK)
        frames = heads_of(batch, sound)
        kinds = frames["kind"]
        expected = np.isin(kinds, (Kind.RESULT, EpochKind.ACK, EpochKind.REPEAT))
        reason[sound[~expected | (frames["bitmap"] != self.member.bit)]] = Drop.BAD_TYPE
        if len(sound):
            self._silence.heard(now)
        ats = batch.offsets[sound] + VALUES_AT
        mine = reason[sound] == Drop.OK
        for kind, act in (
            (EpochKind.ACK, self._acknowledged),
            (Kind.RESULT, self._answered),
            (EpochKind.REPEAT, self._asked),
        ):
            those = np.flatnonzero(mine & (kinds == kind))
            if len(those):
                reason[sound[those]] = act(batch, frames[those], ats[those], now)
        self.drops += np.bincount(reason, minlength=DROP_CODES)

    def _acknowledged(
        self, batch: PacketBatch, frames: NDArray[Any], ats: Index, now: float
    ) -> NDArray[np.uint8]:
        step = self._step
        reason = np.full(len(frames), Drop.DUPLICATE, np.uint8)
        if step is None:
            return reason
        its = self._tensors[step.tensor]
        submodels = frames["submodel"].astype(np.int64)
        current = (frames["number"] == step.serial) & (submodels < len(its.first))
        first = its.first[np.where(current, submodels, 0)]
        numbers = step.first + first + frames["fragment"].astype(np.int64)
        current &= (first >= 0) & (numbers < step.first + its.fragments)
        numbers = np.where(current, numbers, -1)
        # one by one would be slow, and copies of one number in a batch are sorted out by the window
        order = np.argsort(numbers, kind="stable")
        fresh = np.zeros(len(frames), np.bool_)
        fresh[order] = self.window.accept(numbers[order], now)
        reason[fresh] = Drop.OK
        if self._all_taken(step) and self._say_at == inf:
            # answers of the PS take as long as acknowledgements
            self._say_at, self._pause = now, self.window.timeout
        return reason

    def _all_taken(self, step: _Step) -> bool:
        return self.window.base >= step.first + len(step.values)

    def _answered(
        self, batch: PacketBatch, frames: NDArray[Any], ats: Index, now: float
    ) -> NDArray[np.uint8]:
        step = self._step
        reason = np.full(len(frames), Drop.DUPLICATE, np.uint8)
        if step is None:
            return reason
        epochs, places = frames["number"].astype(np.int64), frames["fragment"].astype(np.int64)
        if not step.epoch:
            later = epochs[epochs > self._epoch]
            if not len(later):
                return reason
            step.epoch = int(later[0])
            self._taken(step, now)
        good = (epochs == step.epoch) & (places < len(step.got))
        good[good] = ~step.got[places[good]]
        for k in np.flatnonzero(good).tolist():
            if step.got[places[k]]:
                good[k] = False
                continue
            step.got[places[k]] = True
            step.result[places[k]] = batch.arena[ats[k] : ats[k] + 4 * VALUES].view(">f4")
        reason[good] = Drop.OK
        self._results += int(np.count_nonzero(good))
        if good.any():
            if step.got.all():
                self._finish(step, now)
                return reason
            self._measure(now)
            self._pause = self._patience
            lacking = np.flatnonzero(~step.got)
            # all that was asked for is here: ask for the next; else give it time
            self._say_at = now if lacking[0] >= step.asked else now + self._pause
        return reason

    def _measure(self, now: float) -> None:
        """Something of a result has come."""
        if self._asking_since is not None:
            took, mean = now - self._asking_since, self._answers_took
            self._answers_took = max(took, mean + (took - mean) / 8)
            self._asking_since = None

    @property
    def _patience(self) -> float:
        """Seconds before a part of a result is asked for again: all workers ask at once, and each waits for its turn."""
        return max(self.window.timeout, min(2 * self._answers_took, self.timing.retransmit_max))

    def _taken(self, step: _Step, now: float) -> None:
        """There is a result: all of the gradient has come, whatever acknowledgements are lost."""
        self.window.accept(np.arange(self.window.base, step.first + len(step.values)), now)
        self._again = self._again[:0]

    def _asked(self, batch: PacketBatch, frames: NDArray[Any], ats: Index, now: float) -> NDArray[np.uint8]:
        step = self._step
        reason = np.full(len(frames), Drop.UNMATCHED, np.uint8)
        if step is None or step.epoch:
            return reason
        for k in np.flatnonzero(frames["number"] == step.serial).tolist():
            marks = unpack(batch.arena[ats[k] : ats[k] + 4 * VALUES].view(">i4"))
            places = int(frames["fragment"][k]) + np.flatnonzero(marks)
            self._again = np.union1d(self._again, places[places < len(step.values)])
            reason[k] = Drop.OK
        return reason

    # ---------------------------------------------------------------- packets out

    def transmit(self, now: float) -> list[Transmission]:
        """What is lost, what is new, what the PS has asked for, and what there is to say to it."""
        step = self._step
        if step is None:
            return []
        lost = self.window.lost(now) - step.first
        fresh = self.window.fresh(self.window.capacity, step.first + len(step.values), now) - step.first
        places = np.concatenate([lost, self._again, fresh]).astype(np.int64)
        self._sent += len(places)
        self._sent_again += len(lost) + len(self._again)
        self._again = self._again[:0]
        frames = [self._contributions(step, places)] if len(places) else []
        if self._say_at <= now:
            frames.append(self._word(step))
            self._say_at = now + self._pause
            self._pause = max(self._pause, min(2 * self._pause, PATIENCE))
            if step.epoch and self._asking_since is None:
                self._asking_since = now
        if not frames:
            return []
        raw = beside(frames)
        seal(raw, np.uint64(self.member.key))
        offsets = np.arange(len(raw), dtype=np.int64) * FRAME_BYTES
        return [Transmission(self.member.switch, raw.reshape(-1), offsets, FRAME_BYTES)]

    def _frames(self, count: int, kind: int, step: _Step) -> NDArray[Any]:
        frames = np.zeros(count, FRAME)
        frames["magic"], frames["kind"], frames["job"] = MAGIC_VERSION, kind, self.member.job
        frames["number"], frames["bitmap"] = step.serial, self.member.bit
        return frames

    def _contributions(self, step: _Step, places: Index) -> NDArray[Any]:
        its = self._tensors[step.tensor]
        frames = self._frames(len(places), Kind.DATA, step)
        frames["node"], frames["submodel"] = its.node[places], its.submodel[places]
        frames["fragment"], frames["values"] = its.place[places], step.values[places]
        self._direct += int(np.count_nonzero(its.node[places] == PS_NODE))
        return frames

    def _word(self, step: _Step) -> NDArray[Any]:
        """That all has been sent, and what of the result lacks."""
        frames = self._frames(1, EpochKind.READY, step)
        lacking = np.flatnonzero(~step.got)
        start = int(lacking[0])
        marks = np.zeros(MARKS, np.bool_)
        step.asked = start + self._chunk
        marks[lacking[lacking < step.asked] - start] = True
        frames["node"], frames["submodel"] = PS_NODE, NO_SUBMODEL
        frames["fragment"], frames["values"] = start, pack(marks)
        return frames

    # ---------------------------------------------------------------- time

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next; None while no step is under way."""
        if self._step is None:
            return None
        late = self.window.timer()
        return min(self._silence.due, self._say_at, inf if late is None else late)

    def on_timer(self, now: float) -> None:
        """Report silence; what is due leaves with the next :meth:`transmit`."""
        self.window.look()
        if self._step is not None:
            self._events += self._silence.report(self.member.job, "switch", now)

    def events(self) -> list[NodeEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- figures

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; of the last step its epoch, and how many took part in that."""
        last = self.participation
        return {
            "rows_sent": self._sent,
            "retransmissions": self._sent_again,
            "resent_by_gap": self.window.resent_by_gap,
            "resent_by_time": self.window.resent_by_time,
            "bypassed": 0,
            "results_in": self._results,
            "window": self.window.capacity,
            "in_flight": self.window.in_flight,
            "direct": self._direct,
        } | ({} if last is None else {"epoch": last.epoch, "participants": len(last.workers)})

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since the start, by the label of every reason."""
        return {reason.label: int(self.drops[reason]) for reason in Drop if reason is not Drop.OK}


def join(member: Membership, job: GoatAsyncJob, timing: Timing) -> EpochWorker:
    """The worker of a job as its plan describes it."""
    return EpochWorker(member, job.window, timing)
