"""The sending side of per-packet acknowledgement: windows, timers, retransmission under the same sequence number, other lives.

A receiver that was restarted has lost what it had acknowledged, and a sender whose packets are all acknowledged would never hear
of it. So a sender keeps its packets until they have served their purpose, and asks, by the last one once more, whether they are
still there; every acknowledgement has the number of the receiver's life.

Acknowledgements of a life that has ended may come late, after those of the next. So a sender numbers its attempts to send a stream,
and the receiver returns the number. When two lives acknowledge one attempt, the next one begins: its packets were all sent when
the later of the two lived already, so the earlier cannot acknowledge any of them.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.recovery import RetransmissionTimer
from inanet.proto.zebra.packets import Column, EncodedPackets, beyond
from inanet.wire.batch import I64, Transmission
from inanet.wire.zebra import ATTEMPTS

#: A packet is taken for lost, once, when one that was sent this much after it has been answered.
GAP = 3
#: the longest pause between two questions, in first ones
_MOST_PAUSES = 8.0


@dataclass(frozen=True, slots=True)
class Timing:
    """``window`` packets without an answer per stream; retransmission after ``first`` seconds until times have been
    measured, then between ``least`` and ``most``; ``silent`` seconds without progress before somebody is told. Whose gradients
    are all acknowledged asks after ``ask`` seconds, and ever more rarely, whether they are still there.
    """

    window: int = 64
    first: float = 0.05
    least: float = 0.002
    most: float = 1.0
    silent: float = 10.0
    ask: float = 0.25

    def __post_init__(self) -> None:
        if (
            self.window < 1
            or not 0 < self.least <= self.first <= self.most
            or min(self.silent, self.ask) <= 0
        ):
            raise ValueError(f"{self}: a window from 1, 0 < least <= first <= most, silent and ask above 0")


#: of all machines that daemons and ranks run: processes wait for processors
DAEMON_TIMING = Timing(first=0.05, least=0.005)


class RoundTrips:
    """The timeout that the round trips to one destination call for, and the waiting times of its streams."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self._timer = RetransmissionTimer(timing.least, timing.most, first=timing.first, doublings=20)

    @property
    def timeout(self) -> float:
        """Seconds after which an unanswered packet is sent again."""
        return self._timer.timeout

    def measured(self, seconds: float) -> None:
        """Something that was sent once has been answered after so long."""
        self._timer.measure(seconds)
        self._timer.reset()

    def lost(self) -> None:
        """An answer has not come in time."""
        self._timer.back_off()


class Stream:
    """Packets of ``packets`` to every one of ``receivers``; ``base`` is the sequence number of the first.

    With ``group`` a packet goes there first, for a switch to replicate, and only what is sent again goes to each receiver
    that lacks it.
    """

    def __init__(
        self,
        packets: EncodedPackets,
        receivers: Sequence[int],
        round_trips: RoundTrips,
        *,
        group: int | None = None,
        base: int = 0,
    ) -> None:
        self.packets = packets
        self.receivers = tuple(receivers)
        self.base = base
        self.sent = self.repeated = 0
        self._round_trips = round_trips
        self._group = group
        count = len(packets)
        self._acked: NDArray[np.bool_] = np.zeros((len(self.receivers), count), np.bool_)
        self._sent_at: NDArray[np.float64] = np.full(count, np.inf)
        self._times: I64 = np.zeros(count, np.int64)
        #: when an answer came last: what is behind it in a queue is not lost
        self._progress = float("-inf")
        #: the last packet that each receiver has answered
        self._heard: I64 = np.full(len(self.receivers), -1, np.int64)
        #: first packet that somebody lacks, first that has not been sent
        self._low = self._next = 0

    @property
    def done(self) -> bool:
        """Whether everybody has everything."""
        return self._low == len(self.packets)

    @property
    def outstanding(self) -> int:
        """Answers that have not come."""
        return int((~self._acked).sum())

    def lacking(self) -> list[int]:
        """Receivers that lack something."""
        return [at for at, row in zip(self.receivers, self._acked, strict=True) if not row.all()]

    def acknowledge(self, sequences: I64, receiver: int, now: float) -> NDArray[np.bool_]:
        """Enter answers of a receiver, by its place; says which of them are news, bool[n]."""
        index = beyond(sequences, self.base)
        known = np.flatnonzero(index < self._next)
        candidates = known[~self._acked[receiver, index[known]]]
        _, first = np.unique(index[candidates], return_index=True)
        fresh: NDArray[np.bool_] = np.zeros(len(index), np.bool_)
        fresh[candidates[first]] = True
        news = index[fresh]
        self._acked[receiver, news] = True
        if len(news):
            self._progress = now
        self._heard[receiver] = max(int(self._heard[receiver]), int(news.max(initial=-1)))
        single = news[self._times[news] == 1]
        if len(single):
            self._round_trips.measured(now - float(self._sent_at[single].min()))
        whole: NDArray[np.bool_] = np.asarray(self._acked[:, self._low :].all(axis=0))
        self._low += len(whole) if whole.all() else int(np.argmin(whole))
        return fresh

    def transmit(self, now: float) -> list[Transmission]:
        """What is due: packets that were not answered for too long, or later ones were, then new ones as the window allows."""
        out: list[Transmission] = []
        index = np.arange(self._low, self._next)
        lacking = ~self._acked[:, self._low : self._next]
        overdue = np.maximum(self._sent_at[index], self._progress) + self._round_trips.timeout <= now
        passed = (index < self._heard[:, None] - GAP) & (self._times[index] == 1)
        again = lacking & (overdue | passed)
        late = index[again.any(axis=0)]
        if len(late):
            if (lacking & overdue).any():
                self._round_trips.lost()
            self.repeated += len(late)
            for place, receiver in enumerate(self.receivers):
                out += self.packets.to(receiver, index[again[place]])
            self._mark(late, now)
        fresh = np.arange(self._next, min(self._low + self._round_trips.timing.window, len(self.packets)))
        if len(fresh):
            for receiver in self.receivers if self._group is None else (self._group,):
                out += self.packets.to(receiver, fresh)
            self._next = int(fresh[-1]) + 1
            self.sent += len(fresh)
            self._mark(fresh, now)
        return out

    def last(self) -> list[Transmission]:
        """The last packet once more to every receiver, whatever was acknowledged: a question that it answers again."""
        self.repeated += 1
        which = np.array([len(self.packets) - 1], np.int64)
        return [t for receiver in self.receivers for t in self.packets.to(receiver, which)]

    def anew(self, packets: EncodedPackets) -> "Stream":
        """A stream of other packets to the same receivers, over the same path, with the same numbers."""
        return Stream(packets, self.receivers, self._round_trips, group=self._group, base=self.base)

    def _mark(self, which: I64, now: float) -> None:
        self._sent_at[which] = now
        self._times[which] += 1

    def timer(self) -> float | None:
        """When the next packet is to be sent again."""
        window = slice(self._low, self._next)
        waiting = self._sent_at[window][~self._acked[:, window].all(axis=0)]
        return max(float(waiting.min()), self._progress) + self._round_trips.timeout if len(waiting) else None


class Liveness:
    """Which life of a receiver acknowledges a stream, and when to ask whether it still lives: ``ask`` seconds after everything is
    acknowledged for the first time; each pause is twice the one before.
    """

    def __init__(self, ask: float) -> None:
        self.attempt = 0
        self.restarts = 0
        self.due = float("inf")
        self._first = self._pause = ask
        self._life = -1

    def begin(self) -> None:
        """A stream begins."""
        self.attempt, self._life, self.due = 0, -1, float("inf")

    def restarted(self, lives: I64) -> bool:
        """Take the lives, int64[n], of acknowledgements of the running attempt. Whether they are several: then the next attempt
        is to begin.
        """
        if (lives == self._life).all():
            return False
        several = np.unique(lives).tolist()
        if self._life < 0 and len(several) == 1:
            self._life = several[0]
        if several == [self._life]:
            return False
        attempt = (self.attempt + 1) % ATTEMPTS
        self.begin()
        self.attempt = attempt
        self.restarts += 1
        return True

    def acknowledged(self, now: float) -> None:
        """Everything is acknowledged: ask from now on, unless that is known already."""
        if self.due == float("inf"):
            self._pause = self._first
            self.due = now + self._pause

    def asks(self, now: float) -> bool:
        """Whether to ask at this time; if so the next question comes later."""
        if now < self.due:
            return False
        self._pause = min(2 * self._pause, _MOST_PAUSES * self._first)
        self.due = now + self._pause
        return True


class Delivery:
    """Streams to ``receivers``, at most one at each place, which are kept until :meth:`end`: what another life of a receiver has lost
    is sent again. ``key`` is the job's, ``ask`` the pause before the first question.
    """

    def __init__(
        self, receivers: Sequence[int], round_trips: Sequence[RoundTrips], key: int, ask: float
    ) -> None:
        self.streams: list[Stream | None] = [None] * len(receivers)
        self._receivers = receivers
        self._round_trips = round_trips
        self._key = key
        self._liveness = [Liveness(ask) for _ in receivers]
        self._sent = self._repeated = 0

    def begin(self, place: int, packets: EncodedPackets, base: int = 0) -> None:
        """Send packets, the first of which has the sequence number ``base``, instead of what was sent there before."""
        self._forget(place)
        self._liveness[place].begin()
        receiver = [self._receivers[place]]
        self.streams[place] = Stream(packets, receiver, self._round_trips[place], base=base)

    def end(self) -> None:
        """It is over, whatever was acknowledged."""
        for place in range(len(self.streams)):
            self._forget(place)

    def _forget(self, place: int) -> None:
        stream = self.streams[place]
        if stream is not None:
            self._sent += stream.sent
            self._repeated += stream.repeated
            self.streams[place] = None

    def acknowledge(self, place: int, columns: I64, now: float) -> bool:
        """Take acknowledgements of a place's stream, with the headers' ``columns`` int64[n, 8]; whether there was anything new."""
        stream, liveness = self.streams[place], self._liveness[place]
        current = columns[columns[:, Column.FLAGS] & 0x0F == liveness.attempt]
        if stream is None or not len(current):
            return False
        if liveness.restarted(current[:, Column.PAIRS]):
            self._forget(place)
            self.streams[place] = stream.anew(stream.packets.attempted(liveness.attempt, self._key))
            return True
        moved = bool(stream.acknowledge(current[:, Column.SEQUENCE], 0, now).any())
        if stream.done:
            liveness.acknowledged(now)
        return moved

    def _running(self) -> Iterator[tuple[int, Stream]]:
        return ((place, stream) for place, stream in enumerate(self.streams) if stream is not None)

    def transmit(self, now: float, asked: Collection[int] = ()) -> list[Transmission]:
        """What is to be sent; the receivers at ``asked`` places that have acknowledged everything are asked whether they still have it."""
        out: list[Transmission] = []
        for place, stream in self._running():
            out += stream.transmit(now)
            if place in asked and stream.done and self._liveness[place].asks(now):
                out += stream.last()
        return out

    def ask(self, now: float) -> list[Transmission]:
        """Questions to all receivers that have acknowledged everything, if it is time for them."""
        return [
            transmission
            for place, stream in self._running()
            if stream.done and self._liveness[place].asks(now)
            for transmission in stream.last()
        ]

    def timer(self, asked: Collection[int] = ()) -> float | None:
        """When something is to be sent again, or somebody at an ``asked`` place to be asked."""
        times = [stream.timer() for _, stream in self._running()]
        times += [
            self._liveness[place].due for place, stream in self._running() if place in asked and stream.done
        ]
        return min((at for at in times if at is not None), default=None)

    @property
    def done(self) -> bool:
        """Whether every stream that was begun is acknowledged."""
        return all(stream.done for _, stream in self._running())

    def unacknowledged(self) -> list[tuple[int, int, int]]:
        """Places whose streams lack acknowledgements, the receivers' endpoints and how many packets these are."""
        return [
            (place, stream.receivers[0], stream.outstanding)
            for place, stream in self._running()
            if not stream.done
        ]

    @property
    def sent(self) -> int:
        """Packets sent, without repetitions."""
        return self._sent + sum(stream.sent for _, stream in self._running())

    @property
    def repeated(self) -> int:
        """Packets sent again."""
        return self._repeated + sum(stream.repeated for _, stream in self._running())

    @property
    def restarts(self) -> int:
        """How often another life of a receiver was found."""
        return sum(liveness.restarts for liveness in self._liveness)
