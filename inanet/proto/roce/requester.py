"""The sending half of a queue pair: posted WRITEs, what of them may leave, and when to go back.

*Reliability* is go-back-N (InfiniBand 9.7.5.1, 9.7.6, 9.9.2.1): a NAK or the acknowledgement timeout sends everything from
the first unacknowledged packet again, ``retry_cnt`` times without progress. *Flow* is bounded by a window of packets, by the
peer's "receiver not ready", and by the rate that congestion leaves (:mod:`inanet.proto.roce.dcqcn`).

*Patience*: an acknowledgement is overdue after the time of the queue pair's attributes or, adaptively, as round trips have taken.
A fixed time that finds losses soon takes every peer for lost that waits for a processor. Adaptive ones, which network cards
have under that name, too, follow the measured round trip as TCP's do (RFC 6298): its mean and four deviations, of packets that
were sent once only, and twice as long after each time that nothing had come (Karn). They are never shorter than the attribute
says, and never longer than :data:`LONGEST` times that. A peer that says that packets are missing shows that the network loses
some: then it pays to look for losses soon, and the time is the attribute's until :data:`CALM` round trips have been clean; or
twice the shortest time lately from a packet's first sending to its acknowledgement, before which nothing can be overdue.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from inanet.proto.common.recovery import RetransmissionTimer
from inanet.proto.roce.dcqcn import Rate
from inanet.proto.roce.packets import OVERHEAD, build_writes
from inanet.proto.roce.serve import Column
from inanet.proto.roce.verbs import Attributes, Completion, Status
from inanet.wire.batch import I64, U8, Transmission
from inanet.wire.roce import RNR_SECONDS, Nak, timeout_seconds

#: the most that an adaptive time is of the attribute's, and how often that doubles it
LONGEST = 8
_DOUBLINGS = 3
#: clean round trips since the last loss after which late peers are reckoned with again
CALM = 32
#: how much longer the shortest time may become from one acknowledgement to the next
FORGETTING = 1.05


class Overdue:
    """Of one connection; packets are counted from its first on."""

    def __init__(self, attributes: Attributes) -> None:
        self._base = timeout_seconds(attributes.timeout)
        self._adaptive = attributes.adaptive and self._base is not None
        #: the packet, one past it, that is being timed, and when it left
        self._timed: tuple[int, float] | None = None
        #: whether it has been sent again since
        self._unsure = False
        #: the shortest time to an acknowledgement, slowly forgotten
        self._shortest = inf
        self._timer = RetransmissionTimer(
            self._base or 0.0, LONGEST * (self._base or 0.0), doublings=_DOUBLINGS
        )
        self._lossy = 0

    def sent(self, end: int, now: float) -> None:
        """A packet that asks for an acknowledgement, ``end - 1``, has left for the first time."""
        if self._adaptive and self._timed is None:
            self._timed, self._unsure = (end, now), False

    def went_back(self, *, overdue: bool) -> None:
        """Packets are sent again, because nothing has come or because the peer lacks some: what is timed is ambiguous now."""
        self._unsure = True
        if overdue:
            self._timer.back_off()
        else:
            self._lossy = CALM

    def acknowledged(self, done: int, now: float) -> None:
        """Everything before packet ``done`` has arrived."""
        if self._timed is None or done < self._timed[0]:
            return
        trip, self._timed = now - self._timed[1], None
        self._shortest = min(trip, FORGETTING * self._shortest)
        if self._unsure:
            return
        self._timer.reset()
        self._lossy = max(self._lossy - 1, 0)
        self._timer.measure(trip)

    @property
    def seconds(self) -> float | None:
        """How long to wait from now on; ``None``: for ever."""
        if self._base is None or not self._adaptive:
            return self._base
        if self._lossy:
            least = 0.0 if self._shortest == inf else 2 * self._shortest
            return min(max(self._base, least), LONGEST * self._base)
        return self._timer.timeout


_ENDINGS = {
    Nak.INVALID_REQUEST: Status.REM_INV_REQ_ERR,
    Nak.REMOTE_ACCESS: Status.REM_ACCESS_ERR,
    Nak.REMOTE_OPERATION: Status.REM_OP_ERR,
}
#: ``rnr_retry`` that never gives up
_WITHOUT_END = 7
#: packets that wait for the rate leave together, as many as take this long (seconds) and at most so many
_PACE = 1e-4
_MOST_PACED = 16


@dataclass(frozen=True, slots=True)
class Write:
    """A posted WRITE: packets ``first`` to ``end - 1`` of the connection; ``immediate`` is -1 for none."""

    wr_id: int
    data: U8
    address: int
    key: int
    immediate: int
    first: int
    packets: int

    @property
    def end(self) -> int:
        """One past its last packet."""
        return self.first + self.packets


class Requester:
    """The send queue of one connection.

    ``row`` is the queue pair's state (:class:`~inanet.proto.roce.serve.Column`), shared with its kernels; ``head`` the
    template of its packets; ``counts`` where packets and retries are counted.
    """

    def __init__(
        self, row: I64, head: U8, destination: int, attributes: Attributes, counts: dict[str, int]
    ) -> None:
        self._row = row
        self._head = head
        self._destination = destination
        self._attributes = attributes
        self._counts = counts
        self._writes: deque[Write] = deque()
        #: packets of everything that was posted
        self.posted = 0
        #: the packet that sending stops before, while the queue drains
        self.stop: int | None = None
        #: a window that nobody was asked to acknowledge would stand still
        self._every = min(attributes.ack_every, max(attributes.window // 2, 1))
        self.rate = Rate(attributes.line_rate) if attributes.line_rate is not None else None
        self._retries = self._rnr_retries = 0
        self._overdue = Overdue(attributes)
        self._deadline: float | None = None
        self._not_before: float | None = None
        self._paced: float | None = None

    @property
    def pending(self) -> int:
        """WRITEs that have not completed."""
        return len(self._writes)

    def post(self, data: U8, address: int, key: int, immediate: int, wr_id: int) -> None:
        """Queue a WRITE."""
        packets = max(-(-len(data) // self._attributes.path_mtu), 1)
        self._writes.append(Write(wr_id, data, address, key, immediate, self.posted, packets))
        self.posted += packets

    def stop_after_begun(self) -> None:
        """Send no message that has not begun."""
        begun = int(self._row[Column.HIGH])
        self.stop = next((write.end for write in self._writes if write.first < begun <= write.end), begun)

    def drained(self) -> bool:
        """Whether everything before the stop is acknowledged."""
        return self.stop is not None and int(self._row[Column.UNACKED]) >= self.stop

    def abandon(self, status: Status | None) -> list[Completion]:
        """Complete everything: the oldest WRITE with ``status`` if there is one, the rest flushed."""
        flushed = Status.WR_FLUSH_ERR
        completions = [Completion(write.wr_id, flushed) for write in self._writes]
        if status is not None and completions:
            completions[0] = Completion(completions[0].wr_id, status)
        self._writes.clear()
        self._deadline = self._not_before = self._paced = None
        return completions

    # ---------------------------------------------------------------- acknowledgements

    def acknowledged(self, now: float) -> tuple[list[Completion], Status | None]:
        """Act on what the kernel has found in acknowledgements: WRITEs that are complete, and why the connection must end,
        if it must.
        """
        row = self._row
        completions: list[Completion] = []
        if row[Column.PROGRESS]:
            done = int(row[Column.UNACKED])
            self._retries = self._rnr_retries = 0
            self._overdue.acknowledged(done, now)
            self._deadline = self._timeout(now) if done < row[Column.HIGH] else None
            self._not_before = None
            while self._writes and self._writes[0].end <= done:
                completions.append(Completion(self._writes.popleft().wr_id, Status.SUCCESS))
        went_back, not_ready, ended = row[[Column.WENT_BACK, Column.NOT_READY, Column.ENDED]].tolist()
        row[Column.PROGRESS] = row[Column.WENT_BACK] = 0
        row[Column.NOT_READY] = row[Column.ENDED] = -1
        if went_back or ended >= 0:
            self._counts["naks_received"] += 1
        if ended >= 0:
            # codes that reliable connections do not have are taken for the general one
            return completions, _ENDINGS.get(Nak(ended) if ended < len(Nak) else Nak.INVALID_REQUEST)
        if not_ready >= 0:
            self._counts["rnr_naks_received"] += 1
            return completions, self._wait(not_ready, now)
        return completions, self._again(now, overdue=False) if went_back else None

    def on_timer(self, now: float) -> Status | None:
        """Go back if the acknowledgement is overdue; the status if that was done too often."""
        if self._deadline is None or now < self._deadline:
            return None
        self._counts["timeouts"] += 1
        return self._again(now, overdue=True)

    def _again(self, now: float, *, overdue: bool) -> Status | None:
        self._overdue.went_back(overdue=overdue)
        if self._retries >= self._attributes.retry_cnt:
            return Status.RETRY_EXC_ERR
        self._retries += 1
        self._row[Column.NEXT] = self._row[Column.UNACKED]
        # while the peer has asked for patience nothing is overdue
        self._deadline = self._timeout(now) if self._not_before is None else None
        return None

    def _wait(self, timer: int, now: float) -> Status | None:
        if self._rnr_retries >= self._attributes.rnr_retry != _WITHOUT_END:
            return Status.RNR_RETRY_EXC_ERR
        self._rnr_retries += 1
        self._not_before = now + RNR_SECONDS[timer]
        self._deadline = None
        return None

    def _timeout(self, now: float) -> float | None:
        seconds = self._overdue.seconds
        return None if seconds is None else now + seconds

    def timer(self) -> float | None:
        """When there is something to do without a packet having come."""
        times = [at for at in (self._deadline, self._not_before, self._paced) if at is not None]
        return min(times, default=None)

    # ---------------------------------------------------------------- packets out

    def transmit(self, now: float) -> list[Transmission]:
        """What window, rate and peer let go now."""
        if self._not_before is not None:
            if now < self._not_before:
                return []
            self._not_before = None
        row = self._row
        first = int(row[Column.NEXT])
        end = min(int(row[Column.UNACKED]) + self._attributes.window, self.posted)
        if self.stop is not None:
            end = min(end, self.stop)
        self._paced = None
        out: list[Transmission] = []
        while first < end and (count := self._affordable(end - first, now)):
            out += self._send(first, count, now)
            first += count
        return out

    def _affordable(self, left: int, now: float) -> int:
        """How many of ``left`` packets the rate lets go; if none, the timer is set for the next ones."""
        rate = self.rate
        if rate is None:
            return left
        size = self._attributes.path_mtu + OVERHEAD
        allowed = rate.allowance(now) // size
        # a call for every single packet would cost more than the packet
        chunk = min(left, _MOST_PACED, max(int(rate.current * _PACE / 8) // size, 1))
        ready = rate.ready(chunk * size)
        if now < ready:
            self._paced = ready
            return 0
        return min(left, max(allowed, chunk))

    def _send(self, first: int, count: int, now: float) -> list[Transmission]:
        """Packets ``first`` to ``first + count - 1`` of the connection."""
        row = self._row
        arena = np.empty(count * (self._attributes.path_mtu + OVERHEAD), np.uint8)
        offsets, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
        at = done = ended = 0
        for write in self._writes:
            if done == count:
                break
            index = first + done - write.first
            if index >= write.packets:
                continue
            packets = min(count - done, write.packets - index)
            at = build_writes(
                arena,
                at,
                self._head,
                write.data,
                self._attributes.path_mtu,
                index,
                packets,
                write.packets,
                int(row[Column.SQ_PSN]) + first + done,
                write.address,
                write.key,
                write.immediate,
                self._every,
                offsets[done : done + packets],
                lengths[done : done + packets],
            )
            done += packets
            if index + packets == write.packets:
                ended = write.end
        high = int(row[Column.HIGH])
        self._counts["packets_sent"] += count
        self._counts["retransmissions"] += max(min(first + count, high) - first, 0)
        row[Column.NEXT], row[Column.HIGH] = first + count, max(high, first + count)
        if ended > high:
            self._overdue.sent(ended, now)
        if self._deadline is None:
            self._deadline = self._timeout(now)
        if self.rate is not None:
            self.rate.sent(at, now)
        # one transmission for each run of packets of equal length
        bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), count]
        return [
            Transmission(self._destination, arena, offsets[begin:end], int(lengths[begin]))
            for begin, end in pairwise(bounds)
        ]
