"""A worker in asynchronous training: sends a gradient, waits until it takes part in an epoch, gets the model.

The gradient goes out fragment by fragment to the nodes of its sub-models, within the common worker's window; who keeps a
fragment acknowledges it, and what nobody acknowledges is sent again by time. When all of it has been taken, the worker says so
to the PS, and again with a doubling pause until it gets a result. Then it asks for what lacks, a window at a time.

A step's arrays are overwritten with the sum of the mean gradients of all epochs since the worker's last step: with plain SGD,
what it has to be moved by. All of a host's ranks are one worker, and their gradients' mean is its gradient.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import Participation
from inanet.proto.common.plan import Scheduled
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.exponents import Agreement
from inanet.proto.slots.goat.frames import LAST_OF_EPOCHS, FrameChecks, heads_of, seal
from inanet.proto.slots.goat.job import GoatAsyncJob
from inanet.proto.slots.goat.worker import LAYOUT, Schedule, write_heads
from inanet.proto.slots.goat_async.job import beside, pack, unpack
from inanet.proto.slots.goat_async.tensors import suits
from inanet.proto.slots.source import Arrays, Source, Tensor
from inanet.proto.slots.window import TIMING, Index, Window
from inanet.proto.slots.worker import Answers, Framing, Mask, Membership, Worker
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.goat import (
    FRAME,
    MARKS,
    PS_NODE,
    VALUES,
    VALUES_AT,
    EpochKind,
    Head,
    Kind,
)

#: the longest pause between two words to the PS, seconds
PATIENCE = 0.25


class Step(Source):
    """A gradient and its result."""

    def __init__(self, tensor: Tensor, round_: int, arrays: Arrays, framing: "EpochFraming") -> None:
        super().__init__(tensor, round_, arrays)
        self._framing = framing
        self._chunk = min(MARKS, framing.window.capacity)
        self._overflow = -1
        #: number of the gradient among the worker's
        self.serial = 0
        #: the epoch of the result; 0: none yet
        self.epoch = 0
        #: uint8[F, 256]: the fragments that leave, big-endian
        self._values: NDArray[np.uint8] = np.zeros((0, 4 * VALUES), np.uint8)
        self._acknowledged = 0
        #: the PS asks for these fragments again
        self.again: Index = np.zeros(0, np.int64)
        #: big-endian float32[F + 1, 64], and which fragments of it are here
        self._result: NDArray[Any] = np.zeros((0, VALUES), ">f4")
        self._got: NDArray[np.bool_] = np.zeros(0, np.bool_)
        #: the fragments of the result below this one are on their way, once there is one
        self._asked = self._chunk
        self._pause = 0.0
        #: when there is something to say to the PS
        self.say_at = inf
        #: since when there is no answer to what is asked for of a result
        self._asking_since: float | None = None

    # ---------------------------------------------------------------- the gradient

    def detach(self) -> bool:
        """What was sent counts, and what it would have been moved by is in the next step's result. A step that waits is never
        sent.
        """
        self.arrays = ()
        return self.opened

    def open(self) -> None:
        """Quantise the gradient, or have a reason why there is none."""
        self.opened = True
        spec, workers = self.tensor.spec, self._framing.member.workers
        self.ready = self.count = 0
        total = np.zeros(spec.elements)
        for local, array in enumerate(self.arrays):
            bad = np.flatnonzero(~np.isfinite(array))
            if len(bad):
                self.refusal = local, int(bad[0])
                return
            total += array
        scaled = np.rint(total * (spec.factor / len(self.arrays)))
        # the sum of all workers' has to fit
        large = np.flatnonzero(np.abs(scaled) * workers >= 2.0**31)
        if len(large):
            self._overflow = int(large[0])
            return
        fragments = self._framing.model(self.tensor.tensor).shape[0]
        values = np.zeros(fragments * VALUES, ">i4")
        values[: len(scaled)] = scaled
        self._values = values.view(np.uint8).reshape(fragments, 4 * VALUES)
        self._result = np.zeros((fragments + 1, VALUES), ">f4")
        self._got = np.zeros(fragments + 1, np.bool_)
        self.ready = self.count = fragments
        self._pause = self._framing.window.timing.retransmit
        self.serial = self._framing.begin(self)

    def advance(self, client: Agreement | None, now: float) -> None:
        """Tell the PS when all of the gradient has been taken."""
        if self.serial and self.say_at == inf and self._acknowledged == self.count:
            # answers of the PS take as long as acknowledgements
            self.say_at, self._pause = now, self._framing.window.timeout

    def place(self, fragments: Index, arena: NDArray[np.uint8], at: int, stride: int) -> None:
        places = at + np.arange(len(fragments)) * stride
        arena[places[:, None] + np.arange(4 * VALUES)] = self._values[fragments]

    def take(self, arena: NDArray[np.uint8], ats: Index, fragments: Index) -> None:
        self._acknowledged += len(fragments)

    def asked(self, head: Any, marks: NDArray[np.bool_]) -> Drop:
        """The PS asks for fragments again, or has got them all."""
        if head["number"] != self.serial or self.epoch:
            return Drop.UNMATCHED
        places = int(head["fragment"]) + np.flatnonzero(marks)
        self.again = np.union1d(self.again, places[places < len(self._values)])
        return Drop.OK

    # ---------------------------------------------------------------- its result

    def answered(self, batch: PacketBatch, heads: NDArray[Any], ats: Index, now: float) -> NDArray[np.uint8]:
        """Take fragments of a result; what became of each packet (:class:`~inanet.wire.drops.Drop`)."""
        reason = np.full(len(heads), Drop.DUPLICATE, np.uint8)
        framing = self._framing
        epochs, places = heads["number"].astype(np.int64), heads["fragment"].astype(np.int64)
        if not self.epoch:
            later = epochs[epochs > framing.epoch]
            if not len(later):
                return reason
            self.epoch = int(later[0])
            # all of the gradient has come, whatever acknowledgements are lost
            assert self.first is not None
            framing.window.complete(self.first + len(self._values), now)
            self._acknowledged = len(self._values)
            self.again = self.again[:0]
        good = np.flatnonzero((epochs == self.epoch) & (places < len(self._got)))
        # a copy may be in the same batch
        good = good[np.unique(places[good], return_index=True)[1]]
        good = good[~self._got[places[good]]]
        if not len(good):
            return reason
        reason[good] = Drop.OK
        self._got[places[good]] = True
        values = batch.arena[ats[good][:, None] + np.arange(4 * VALUES)]
        self._result.view(np.uint8).reshape(-1, 4 * VALUES)[places[good]] = values
        if not self._got.all():
            if self._asking_since is not None:
                framing.measure(now - self._asking_since)
                self._asking_since = None
            self._pause = framing.patience
            # all that was asked for is here: ask for the next; else give it time
            self.say_at = now if int(np.argmin(self._got)) >= self._asked else now + self._pause
        return reason

    def word(self, now: float) -> NDArray[Any]:
        """That all has been sent, and what of the result lacks: a frame."""
        self.say_at = now + self._pause
        self._pause = max(self._pause, min(2 * self._pause, PATIENCE))
        if self.epoch and self._asking_since is None:
            self._asking_since = now
        frames = np.zeros(1, FRAME)
        write_heads(frames, EpochKind.READY, self._framing.member, self.serial)
        lacking = np.flatnonzero(~self._got)
        start = int(lacking[0])
        marks = np.zeros(MARKS, np.bool_)
        self._asked = start + self._chunk
        marks[lacking[lacking < self._asked] - start] = True
        frames["fragment"], frames["values"] = start, pack(marks)
        return frames

    # ---------------------------------------------------------------- the end

    @property
    def overflow(self) -> int:
        """The first element of the gradient that is too large for the factor, or -1."""
        return self._overflow

    @property
    def finished(self) -> bool:
        return self.opened and bool(self._got.all())

    def finish(self) -> None:
        if not self.serial:
            return
        head = self._result.view(">i4")[-1]
        bits = int(head[Head.PARTICIPANTS]) & 0xFFFFFFFF
        inside = tuple(worker for worker in range(self._framing.member.workers) if bits >> worker & 1)
        self.participation = Participation(
            self.epoch, inside, int(head[Head.AWAITED]), int(head[Head.STALENESS])
        )
        before, model = self._framing.model(self.tensor.tensor), self._result[:-1].astype(np.float32)
        moved = (model - before).reshape(-1)[: self.tensor.spec.elements]
        for array in self.arrays:
            array[:] = moved
        if self.arrays:
            before[:] = model
        self._framing.end(self.participation)


class EpochFraming(Framing):
    """Acknowledgements are what the common worker counts; words and results are the step's under way."""

    asks_root = False

    def __init__(self, member: Membership, window: Window) -> None:
        super().__init__(member, LAYOUT)
        self.window = window
        self._checks = FrameChecks(LAST_OF_EPOCHS)
        self._checks.add(member.job, member.key)
        self._schedules: dict[int, Schedule] = {}
        #: float32[F, 64] of each tensor: the model as it was given last
        self._models: dict[int, NDArray[np.float32]] = {}
        self._step: Step | None = None
        self._serial = 0
        #: of the last result
        self.epoch = 0
        self._last: Participation | None = None
        #: how long answers of the PS took, lately or mostly
        self._answers_took = 0.0
        self._results = self._direct = self._again = 0

    # ---------------------------------------------------------------- tensors and steps

    def add(self, tensor: Tensor, priority: int) -> None:
        suits(tensor.spec)

    def schedule(self, tensor: int, scheduled: Sequence[Scheduled]) -> None:
        its = self._schedules[tensor] = Schedule.of(scheduled, self.member.index, {})
        self._models[tensor] = np.zeros((its.end, VALUES), np.float32)

    def source(self, tensor: Tensor, round_: int, arrays: Arrays) -> Source:
        return Step(tensor, round_, arrays, self)

    def model(self, tensor: int) -> NDArray[np.float32]:
        """float32[F, 64]: the model of a tensor as it was given last."""
        return self._models[tensor]

    def begin(self, step: Step) -> int:
        """A step is under way from now on; the number of its gradient."""
        self._step = step
        self._serial += 1
        return self._serial

    def end(self, participation: Participation) -> None:
        """The step under way has its result."""
        self._step, self._last, self.epoch = None, participation, participation.epoch

    def measure(self, took: float) -> None:
        """Something of a result has come, so many seconds after it was asked for."""
        self._answers_took = max(took, self._answers_took + (took - self._answers_took) / 8)

    @property
    def patience(self) -> float:
        """Seconds before a part of a result is asked for again: all workers ask at once, and each waits for its turn."""
        return max(self.window.timeout, min(2 * self._answers_took, self.window.timing.retransmit_max))

    # ---------------------------------------------------------------- packets in

    def read(self, batch: PacketBatch, index: Index, drops: NDArray[np.int64], now: float) -> Answers:
        """Acknowledgements; results and what the PS asks for go to the step under way."""
        reason = self._checks.reasons(batch, index)
        heads = heads_of(batch, index)
        kinds = heads["kind"]
        expected = np.isin(kinds, (Kind.RESULT, EpochKind.ACK, EpochKind.REPEAT))
        reason[(reason == Drop.OK) & (~expected | (heads["bitmap"] != self.member.bit))] = Drop.BAD_TYPE
        ats = batch.offsets[index] + VALUES_AT
        numbers, known = self._acknowledged(heads)
        acks = np.flatnonzero((reason == Drop.OK) & (kinds == EpochKind.ACK))
        reason[acks[~known[acks]]] = Drop.DUPLICATE
        acks = acks[known[acks]]
        # copies of one number in a batch are sorted out by the window, which counts them
        reason[acks] = Drop.OK
        others = np.flatnonzero((reason == Drop.OK) & (kinds != EpochKind.ACK))
        results = others[kinds[others] == Kind.RESULT]
        if len(results):
            step = self._step
            reason[results] = (
                Drop.DUPLICATE if step is None else step.answered(batch, heads[results], ats[results], now)
            )
            self._results += int(np.count_nonzero(reason[results] == Drop.OK))
        for k in others[kinds[others] == EpochKind.REPEAT].tolist():
            marks = unpack(batch.arena[ats[k] : ats[k] + 4 * VALUES].view(">i4"))
            reason[k] = Drop.UNMATCHED if self._step is None else self._step.asked(heads[k], marks)
        counted = np.delete(reason, acks)
        drops += np.bincount(counted, minlength=DROP_CODES)
        return Answers.unmarked(numbers[acks], ats[acks])

    def _acknowledged(self, heads: NDArray[Any]) -> tuple[Index, Mask]:
        """Numbers in the window of what acknowledgements are for, and whether they are for the step under way."""
        step = self._step
        if step is None or step.first is None:
            return np.zeros(len(heads), np.int64), np.zeros(len(heads), np.bool_)
        its = self._schedules[step.tensor.tensor]
        places = its.places(heads["submodel"].astype(np.int64), heads["fragment"].astype(np.int64))
        return step.first + places, (places >= 0) & (heads["number"] == step.serial)

    # ---------------------------------------------------------------- packets out

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask, streams: Iterable[Source]
    ) -> None:
        step = self._step
        assert step is not None
        assert step.first is not None
        self._address(step, frames.view(FRAME)[:, 0], numbers - step.first)
        seal(frames, np.uint64(self.member.key))

    def _address(self, step: Step, view: NDArray[Any], places: Index) -> None:
        write_heads(view, Kind.DATA, self.member, step.serial)
        view["node"], view["submodel"], view["fragment"], _ = self._schedules[step.tensor.tensor].tags(places)
        self._direct += int(np.count_nonzero(view["node"] == PS_NODE))

    def own(self, now: float, busy: bool) -> NDArray[np.uint8] | None:
        """What the PS has asked for, and what there is to say to it."""
        step = self._step
        if step is None or (not len(step.again) and step.say_at > now):
            return None
        said = []
        if len(step.again):
            again = np.zeros(len(step.again), FRAME)
            step.place(step.again, again.view(np.uint8), VALUES_AT, FRAME.itemsize)
            self._address(step, again, step.again)
            self._again += len(again)
            step.again = step.again[:0]
            said.append(again)
        if step.say_at <= now:
            said.append(step.word(now))
        frames = beside(said)
        seal(frames, np.uint64(self.member.key))
        return frames

    def timer(self) -> float:
        return inf if self._step is None else self._step.say_at

    def stats(self, stats: dict[str, int]) -> dict[str, int]:
        """``direct`` are fragments that no switch was to sum; of the last step its epoch, and how many took part in that."""
        more = {
            "rows_sent": stats["rows_sent"] + self._again,
            "retransmissions": stats["retransmissions"] + self._again,
            "results_in": self._results,
            "direct": self._direct,
        }
        if self._last is not None:
            more |= {"epoch": self._last.epoch, "participants": len(self._last.workers)}
        return stats | more


def epoch_worker(member: Membership, window: int, timing: Timing = TIMING) -> Worker:
    """A worker: ``window`` fragments at most are sent and not acknowledged, or asked for at a time."""
    # acknowledgements of nodes and of the PS overtake each other: only time tells what is lost
    made = Window(window, replace(timing, gap=1 << 40), member.first)
    return Worker(EpochFraming(member, made), made)


def join(member: Membership, job: GoatAsyncJob, timing: Timing) -> Worker:
    """The worker of a job as its plan describes it."""
    return epoch_worker(member, job.window, timing)
