"""One end of a reliable connection: RDMA WRITE out, RDMA WRITE in. No sockets, no clock.

Packets are whole IPv4 packets (:mod:`inanet.wire.roce`). The contract is that of all protocol cores here: feed
:meth:`QueuePair.receive`, send what :meth:`QueuePair.transmit` gives, call :meth:`QueuePair.on_timer` when
:meth:`QueuePair.timer` says so, read :meth:`QueuePair.events`; after each of the first and third, transmit again. Several
queue pairs of a host share a device through :class:`~inanet.proto.roce.queue_pair.ChannelAdapter`.

What is served is :mod:`inanet.proto.roce.serve`'s. End-to-end credits are
not counted (acknowledgements say so): "receiver not ready" stands in for them. Packets that the network has marked are
answered by notifications.

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
from numpy.typing import NDArray

from inanet.proto.common.recovery import RetransmissionTimer
from inanet.proto.roce.dcqcn import NOTIFICATION_INTERVAL, Rate
from inanet.proto.roce.packets import (
    ACK_LENGTH,
    CNP_LENGTH,
    OVERHEAD,
    build_acknowledgement,
    build_notification,
    build_writes,
    notification_template,
    parse,
    template,
)
from inanet.proto.roce.serve import Column, serve
from inanet.proto.roce.verbs import (
    SENDING,
    SERVING,
    TRANSITIONS,
    AsyncError,
    Attributes,
    Completion,
    Drained,
    Event,
    Failed,
    Peer,
    ProtectionDomain,
    Received,
    State,
    Status,
)
from inanet.wire.batch import I64, U8, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.endpoint import show
from inanet.wire.roce import (
    MAX_MESSAGE,
    NO_CREDITS,
    PORT,
    PSN_MASK,
    RNR_SECONDS,
    SYNDROME_ACK,
    SYNDROME_NAK,
    Nak,
    timeout_seconds,
)

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


_IMMEDIATE_LIMIT = 1 << 32
_COUNTS = (
    "packets_sent",
    "retransmissions",
    "timeouts",
    "naks_sent",
    "naks_received",
    "rnr_naks_received",
    "acks_sent",
    "cnps_sent",
    "cnps_received",
    "marked_received",
)
_REFUSALS = {
    SYNDROME_NAK | Nak.INVALID_REQUEST: AsyncError.QP_REQ_ERR,
    SYNDROME_NAK | Nak.REMOTE_ACCESS: AsyncError.QP_ACCESS_ERR,
}


class QueuePair:
    """A queue pair of this host, ``local``, connected to ``remote``; both ends must agree on ``path_mtu``.

    ``domain`` holds the regions that the peer may write to. It begins in RESET: :meth:`connect` takes it to RTS, or
    :meth:`modify` step by step.
    """

    def __init__(
        self,
        local: Peer,
        remote: Peer,
        *,
        domain: ProtectionDomain | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        self.local, self.remote = local, remote
        self.domain = domain or ProtectionDomain()
        self.attributes = attributes or Attributes()
        #: packets dropped, by reason
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._head = template(
            local.endpoint, remote.endpoint, remote.number, self.attributes.partition, self.attributes.dscp
        )
        self._notification_head = notification_template(self._head)
        self._numbers: I64 = np.array([local.number], np.int64)
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._reset()

    def _reset(self) -> None:
        attributes = self.attributes
        self._state = State.RESET
        row: I64 = np.zeros(len(Column), np.int64)
        row[Column.NUMBER], row[Column.REMOTE] = self.local.number, self.remote.endpoint >> 16
        row[Column.MTU], row[Column.PARTITION] = attributes.path_mtu, attributes.partition
        row[Column.EXPECTED], row[Column.SQ_PSN] = self.remote.psn, self.local.psn
        row[Column.RNR_TIMER] = attributes.min_rnr_timer
        row[[Column.NAK, Column.NOT_READY, Column.ENDED]] = -1
        self._row = row
        self._requester = Requester(row, self._head, self._destination, attributes, self._counts)
        self._receives: deque[int] = deque()
        self._events: list[Event] = []
        self._notified: float | None = None
        self._notify = False
        self._told_drained = False

    # ---------------------------------------------------------------- states

    @property
    def state(self) -> State:
        """Where the queue pair is."""
        return self._state

    @property
    def rate(self) -> Rate | None:
        """Its rate under congestion control; ``None`` without a line rate."""
        return self._requester.rate

    def modify(self, state: State) -> None:
        """Go to another state.

        RESET forgets everything that was posted, without completions; ERR completes it with WR_FLUSH_ERR; SQD finishes the
        messages that have begun, then says :class:`~inanet.proto.roce.verbs.Drained`. Raises ``ValueError`` for a transition
        that verbs do not allow.
        """
        if state not in TRANSITIONS[self._state]:
            allowed = ", ".join(sorted(next_.name for next_ in TRANSITIONS[self._state]))
            raise ValueError(
                f"{self}: no way from {self._state.name} to {state.name}; it can go to {allowed}"
            )
        if state is State.RESET:
            self._reset()
        elif state is State.ERR:
            self._fail(None)
        elif state is State.SQD and self._state is State.RTS:
            self._requester.stop_after_begun()
            self._told_drained = False
            self._enter(state)
            self._say_drained()
        else:
            if state is State.RTS:
                self._requester.stop = None
            self._enter(state)

    def connect(self) -> None:
        """From RESET by INIT and RTR to RTS. Raises ``ValueError`` in any other state."""
        for state in (State.INIT, State.RTR, State.RTS):
            self.modify(state)

    def _enter(self, state: State) -> None:
        self._state = state
        self._row[Column.SERVING], self._row[Column.SENDING] = state in SERVING, state in SENDING

    def _fail(self, status: Status | None) -> None:
        """Into ERR; the oldest WRITE completes with ``status`` if there is one, everything else is flushed."""
        self._events += self._requester.abandon(status)
        self._events += [Completion(wr_id, Status.WR_FLUSH_ERR) for wr_id in self._receives]
        self._receives.clear()
        self._enter(State.ERR)

    # ---------------------------------------------------------------- posting

    def post_write(
        self,
        data: NDArray[np.generic],
        offset: int,
        immediate: int | None = None,
        *,
        wr_id: int = 0,
        key: int | None = None,
    ) -> None:
        """Write the bytes of a contiguous array to ``offset`` from the peer's base; leave the array alone until it completes.

        ``key`` names another region than the peer's own. ``immediate`` (32 bits) consumes a receive at the peer and is
        delivered there. Order is kept. In ERR the request completes at once, flushed. Raises ``ValueError`` before RTS and
        for what does not fit a request.
        """
        if self._state in (State.RESET, State.INIT, State.RTR):
            raise ValueError(f"{self}: WRITE posted in {self._state.name}; connect it first")
        if not data.flags.c_contiguous or data.nbytes > MAX_MESSAGE:
            raise ValueError(f"{self}: a WRITE takes a contiguous array of up to {MAX_MESSAGE} B")
        if immediate is not None and not 0 <= immediate < _IMMEDIATE_LIMIT:
            raise ValueError(f"{self}: immediate data has 32 bits; {immediate} does not fit")
        if self._state is State.ERR:
            self._events.append(Completion(wr_id, Status.WR_FLUSH_ERR))
            return
        self._requester.post(
            data.reshape(-1).view(np.uint8),
            self.remote.base + offset,
            self.remote.key if key is None else key,
            -1 if immediate is None else immediate,
            wr_id,
        )

    def post_receive(self, wr_id: int = 0, count: int = 1) -> None:
        """Post ``count`` receives, each good for one WRITE with immediate data. Raises ``ValueError`` in RESET."""
        if self._state is State.RESET:
            raise ValueError(f"{self}: receive posted in RESET; go to INIT first")
        if self._state is State.ERR:
            self._events += [Completion(wr_id, Status.WR_FLUSH_ERR)] * count
            return
        self._receives.extend([wr_id] * count)
        self._row[Column.RECEIVES] = len(self._receives)

    # ---------------------------------------------------------------- packets in

    def receive(self, batch: PacketBatch, now: float) -> None:
        fields = parse(batch, self.local.endpoint >> 16, self._numbers, self.drops)
        self.take(batch, fields, now)

    def take(self, batch: PacketBatch, fields: I64, now: float) -> None:
        """Take those packets of a parsed batch that are for this queue pair."""
        row, count = self._row, len(fields)
        placements, messages = np.empty((count, 4), np.int64), np.empty((count, 4), np.int64)
        serve(fields, row, self.domain.table, placements, messages, self.drops)
        if row[Column.PLACED]:
            self.domain.place(batch.arena, placements, int(row[Column.PLACED]))
        for immediate, region, offset, length in messages[: row[Column.MESSAGES]].tolist():
            key = self.domain.key_of(region)
            self._events.append(Received(immediate, offset, length, key, self._receives.popleft()))
        self._congestion(now)
        completions, ending = self._requester.acknowledged(now)
        self._events += completions
        if completions:
            self._say_drained()
        if ending is not None:
            self._fail(ending)
        refusal = _REFUSALS.get(int(row[Column.NAK]))
        if refusal is not None and self._state in SERVING:
            self._events.append(Failed(refusal))
            self._fail(None)

    def _congestion(self, now: float) -> None:
        row = self._row
        marked, notified = int(row[Column.MARKED]), int(row[Column.CNPS])
        row[Column.MARKED] = row[Column.CNPS] = 0
        self._counts["marked_received"] += marked
        self._counts["cnps_received"] += notified
        due = self._notified is None or now - self._notified >= NOTIFICATION_INTERVAL
        if marked and due:
            self._notify, self._notified = True, now
        if self.rate is not None:
            for _ in range(notified):
                self.rate.notify(now)

    def _say_drained(self) -> None:
        if self._state is State.SQD and not self._told_drained and self._requester.drained():
            self._told_drained = True
            self._events.append(Drained())

    # ---------------------------------------------------------------- packets out

    def transmit(self, now: float) -> list[Transmission]:
        """Packets to send now: answers first, then what window, rate and peer allow of the posted WRITEs."""
        out = self._answers()
        if self._state in SENDING:
            out += self._requester.transmit(now)
        return out

    def _answers(self) -> list[Transmission]:
        row, out = self._row, []
        expected, nak = int(row[Column.EXPECTED]), int(row[Column.NAK])
        if nak >= 0 or row[Column.ACK_DUE]:
            packet = np.zeros(ACK_LENGTH, np.uint8)
            psn, syndrome = (expected, nak) if nak >= 0 else (expected - 1, SYNDROME_ACK | NO_CREDITS)
            build_acknowledgement(packet, self._head, psn & PSN_MASK, syndrome, int(row[Column.MSN]))
            out.append(self._alone(packet))
            self._counts["naks_sent" if nak >= 0 else "acks_sent"] += 1
            row[Column.NAK], row[Column.ACK_DUE] = -1, 0
        if self._notify:
            packet = np.zeros(CNP_LENGTH, np.uint8)
            build_notification(packet, self._notification_head)
            out.append(self._alone(packet))
            self._counts["cnps_sent"] += 1
            self._notify = False
        return out

    def _alone(self, packet: U8) -> Transmission:
        return Transmission(self._destination, packet, np.zeros(1, np.int64), len(packet))

    @property
    def _destination(self) -> int:
        return self.remote.endpoint >> 16 << 16 | PORT

    # ---------------------------------------------------------------- time

    def timer(self) -> float | None:
        return self._requester.timer()

    def on_timer(self, now: float) -> None:
        """Time has come: for the acknowledgement timeout, and for :meth:`transmit` to be called."""
        ending = self._requester.on_timer(now)
        if ending is not None:
            self._fail(ending)

    # ---------------------------------------------------------------- what happened

    def events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def unacknowledged(self) -> int:
        """Packets that have left and are not acknowledged."""
        return int(self._row[Column.HIGH] - self._row[Column.UNACKED])

    @property
    def pending(self) -> int:
        """WRITEs that have not completed."""
        return self._requester.pending

    def stats(self) -> dict[str, int]:
        """Counters since it was made, by name; ``retransmissions`` are among ``packets_sent``."""
        return {**self._counts, "unacknowledged": self.unacknowledged, "pending": self.pending}

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since it was made, by the label of every reason."""
        return {reason.label: int(self.drops[reason]) for reason in Drop if reason is not Drop.OK}

    def __str__(self) -> str:
        return f"queue pair {self.local.number:#x} to {show(self.remote.endpoint)}, {self.remote.number:#x}"


class ChannelAdapter:
    """Queue pairs of ``address``, an IPv4 address as an integer. Contract as for :class:`QueuePair`."""

    def __init__(self, address: int) -> None:
        self.address = address
        #: packets dropped before it was known for which queue pair they are, by reason
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._pairs: dict[int, QueuePair] = {}
        self._numbers: I64 = np.zeros(0, np.int64)

    def add(self, pair: QueuePair) -> None:
        """Serve a queue pair. Raises ``ValueError`` for another host's and for a number that is taken."""
        number = pair.local.number
        if pair.local.endpoint >> 16 != self.address:
            raise ValueError(f"{pair} does not belong to this host")
        if number in self._pairs:
            raise ValueError(f"queue pair number {number:#x} is taken on this host")
        self._pairs[number] = pair
        self._renumber()

    def remove(self, pair: QueuePair) -> None:
        """No longer serve a queue pair. Raises ``KeyError`` if it is not served."""
        del self._pairs[pair.local.number]
        self._renumber()

    def _renumber(self) -> None:
        self._numbers = np.array(list(self._pairs), np.int64)

    def receive(self, batch: PacketBatch, now: float) -> None:
        fields = parse(batch, self.address, self._numbers, self.drops)
        for pair in self._pairs.values():
            pair.take(batch, fields, now)

    def transmit(self, now: float) -> list[Transmission]:
        """Packets of all queue pairs to send now."""
        return [transmission for pair in self._pairs.values() for transmission in pair.transmit(now)]

    def timer(self) -> float | None:
        times = [at for pair in self._pairs.values() if (at := pair.timer()) is not None]
        return min(times, default=None)

    def on_timer(self, now: float) -> None:
        """Time has come for some queue pair."""
        for pair in self._pairs.values():
            pair.on_timer(now)

    def events(self) -> list[tuple[QueuePair, Event]]:
        """What happened since the last call, by queue pair."""
        return [(pair, event) for pair in self._pairs.values() for event in pair.events()]

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped by the adapter and its queue pairs, by the label of every reason."""
        total = self.drops + sum(pair.drops for pair in self._pairs.values())
        return {reason.label: int(total[reason]) for reason in Drop if reason is not Drop.OK}
