"""One end of a reliable connection: RDMA WRITE out, RDMA WRITE in. No sockets, no clock.

Packets are whole IPv4 packets (:mod:`inanet.wire.roce`). The contract is that of all protocol cores here: feed
:meth:`QueuePair.receive`, send what :meth:`QueuePair.transmit` gives, call :meth:`QueuePair.on_timer` when
:meth:`QueuePair.timer` says so, read :meth:`QueuePair.events`; after each of the first and third, transmit again. Several
queue pairs of a host share a device through :class:`~inanet.proto.roce.adapter.ChannelAdapter`.

*Reliability* is go-back-N: a NAK or the acknowledgement timeout sends everything from the first unacknowledged packet again,
``retry_cnt`` times without progress. *Flow* is bounded by a window of packets; end-to-end credits are not counted
(acknowledgements say so), "receiver not ready" stands in for them. *Congestion*: marked packets are answered by notifications,
notifications slow the sender down (:mod:`inanet.proto.roce.dcqcn`).
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from inanet.proto.roce.build import (
    ACK_LENGTH,
    CNP_LENGTH,
    OVERHEAD,
    build_acknowledgement,
    build_notification,
    build_writes,
    notification_template,
    template,
)
from inanet.proto.roce.dcqcn import NOTIFICATION_INTERVAL, Rate
from inanet.proto.roce.memory import ProtectionDomain
from inanet.proto.roce.parse import parse
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
_ENDINGS = {
    Nak.INVALID_REQUEST: Status.REM_INV_REQ_ERR,
    Nak.REMOTE_ACCESS: Status.REM_ACCESS_ERR,
    Nak.REMOTE_OPERATION: Status.REM_OP_ERR,
}
_REFUSALS = {
    SYNDROME_NAK | Nak.INVALID_REQUEST: AsyncError.QP_REQ_ERR,
    SYNDROME_NAK | Nak.REMOTE_ACCESS: AsyncError.QP_ACCESS_ERR,
}


@dataclass(frozen=True, slots=True)
class _Write:
    """A posted WRITE: packets ``first`` to ``first + packets - 1`` of the connection."""

    wr_id: int
    data: U8
    address: int
    key: int
    immediate: int
    first: int
    packets: int

    @property
    def end(self) -> int:
        return self.first + self.packets


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
        self._writes: deque[_Write] = deque()
        self._receives: deque[int] = deque()
        self._events: list[Event] = []
        self._posted = 0
        #: in SQD, the packet that sending stops before
        self._stop: int | None = None
        self._retries = self._rnr_retries = 0
        self._deadline: float | None = None
        self._not_before: float | None = None
        self._notified: float | None = None
        self._notify = False
        self._rate = Rate(attributes.line_rate) if attributes.line_rate is not None else None
        self._paced: float | None = None

    # ---------------------------------------------------------------- states

    @property
    def state(self) -> State:
        """Where the queue pair is."""
        return self._state

    @property
    def rate(self) -> Rate | None:
        """Its rate under congestion control; ``None`` without a line rate."""
        return self._rate

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
            begun = int(self._row[Column.HIGH])
            self._stop = next((write.end for write in self._writes if write.end >= begun), begun)
            self._enter(state)
            self._drained()
        else:
            self._stop = self._stop if state is State.SQD else None
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
        for write in self._writes:
            self._events.append(Completion(write.wr_id, status or Status.WR_FLUSH_ERR))
            status = None
        for wr_id in self._receives:
            self._events.append(Completion(wr_id, Status.WR_FLUSH_ERR))
        self._writes.clear()
        self._receives.clear()
        self._deadline = self._not_before = self._paced = None
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
        packets = max(-(-data.nbytes // self.attributes.path_mtu), 1)
        write = _Write(
            wr_id,
            data.reshape(-1).view(np.uint8),
            self.remote.base + offset,
            self.remote.key if key is None else key,
            -1 if immediate is None else immediate,
            self._posted,
            packets,
        )
        self._posted += packets
        self._writes.append(write)

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
        """Take what a device has received."""
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
        self._acknowledged(now)
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
        if self._rate is not None:
            for _ in range(notified):
                self._rate.notify(now)

    def _acknowledged(self, now: float) -> None:
        """Complete what acknowledgements cover, then go on as they say."""
        row = self._row
        done = int(row[Column.UNACKED])
        if row[Column.PROGRESS]:
            self._retries = self._rnr_retries = 0
            self._deadline = self._timeout(now) if done < row[Column.HIGH] else None
            self._not_before = None
            while self._writes and self._writes[0].end <= done:
                self._events.append(Completion(self._writes.popleft().wr_id, Status.SUCCESS))
            self._drained()
        went_back, not_ready, ended = row[[Column.WENT_BACK, Column.NOT_READY, Column.ENDED]].tolist()
        row[Column.PROGRESS] = row[Column.WENT_BACK] = 0
        row[Column.NOT_READY] = row[Column.ENDED] = -1
        if went_back or ended >= 0:
            self._counts["naks_received"] += 1
        if ended >= 0:
            self._fail(_ENDINGS.get(Nak(ended) if ended < len(Nak) else Nak.INVALID_REQUEST))
        elif not_ready >= 0:
            self._counts["rnr_naks_received"] += 1
            self._wait_for_receive(not_ready, now)
        elif went_back:
            self._again(now)

    def _drained(self) -> None:
        if self._stop is not None and self._row[Column.UNACKED] >= self._stop and self._state is State.SQD:
            self._events.append(Drained())
            self._stop = int(self._row[Column.UNACKED])

    def _again(self, now: float) -> None:
        """Go back, unless that was done too often already."""
        if self._retries >= self.attributes.retry_cnt:
            self._fail(Status.RETRY_EXC_ERR)
            return
        self._retries += 1
        self._row[Column.NEXT] = self._row[Column.UNACKED]
        self._deadline = self._timeout(now)

    def _wait_for_receive(self, timer: int, now: float) -> None:
        if self._rnr_retries >= self.attributes.rnr_retry != 7:
            self._fail(Status.RNR_RETRY_EXC_ERR)
            return
        self._rnr_retries += 1
        self._not_before = now + RNR_SECONDS[timer]
        self._deadline = None

    def _timeout(self, now: float) -> float | None:
        seconds = timeout_seconds(self.attributes.timeout)
        return None if seconds is None else now + seconds

    # ---------------------------------------------------------------- packets out

    def transmit(self, now: float) -> list[Transmission]:
        """Packets to send now: answers first, then what window, rate and peer allow of the posted WRITEs."""
        out = self._answers()
        if self._state in SENDING and (self._not_before is None or now >= self._not_before):
            self._not_before = None
            out += self._requests(now)
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

    def _requests(self, now: float) -> list[Transmission]:
        row = self._row
        first = int(row[Column.NEXT])
        end = min(int(row[Column.UNACKED]) + self.attributes.window, self._posted)
        if self._stop is not None:
            end = min(end, self._stop)
        count = self._allowed(end - first, now)
        if count <= 0:
            return []
        arena = np.empty(count * (self.attributes.path_mtu + OVERHEAD), np.uint8)
        offsets, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
        at = done = 0
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
                self.attributes.path_mtu,
                index,
                packets,
                write.packets,
                self.local.psn + first + done,
                write.address,
                write.key,
                write.immediate,
                self.attributes.ack_every,
                offsets[done : done + packets],
                lengths[done : done + packets],
            )
            done += packets
        high = int(row[Column.HIGH])
        self._counts["packets_sent"] += count
        self._counts["retransmissions"] += max(min(first + count, high) - first, 0)
        row[Column.NEXT], row[Column.HIGH] = first + count, max(high, first + count)
        if self._deadline is None:
            self._deadline = self._timeout(now)
        if self._rate is not None:
            self._rate.sent(at, now)
        return self._runs(arena, offsets, lengths)

    def _allowed(self, count: int, now: float) -> int:
        """How many of ``count`` packets the rate lets go now."""
        self._paced = None
        if self._rate is None or count <= 0:
            return count
        size = self.attributes.path_mtu + OVERHEAD
        allowed = max(self._rate.allowance(now) // size, int(now >= self._rate.ready(size)))
        if allowed < count:
            # what is due after these have left
            self._paced = max(now, self._rate.ready(size)) + allowed * size * 8 / self._rate.current
        return min(count, allowed)

    def _runs(self, arena: U8, offsets: I64, lengths: I64) -> list[Transmission]:
        """One transmission for each run of packets of equal length."""
        bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
        return [
            Transmission(self._destination, arena, offsets[begin:end], int(lengths[begin]))
            for begin, end in pairwise(bounds)
        ]

    # ---------------------------------------------------------------- time

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next."""
        times = [at for at in (self._deadline, self._not_before, self._paced) if at is not None]
        return min(times, default=None)

    def on_timer(self, now: float) -> None:
        """Time has come: for the acknowledgement timeout, and for :meth:`transmit` to be called."""
        if self._deadline is not None and now >= self._deadline:
            self._counts["timeouts"] += 1
            self._again(now)

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
        return len(self._writes)

    def stats(self) -> dict[str, int]:
        """Counters since it was made, by name; ``retransmissions`` are among ``packets_sent``."""
        return {**self._counts, "unacknowledged": self.unacknowledged, "pending": self.pending}

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since it was made, by the label of every reason."""
        return {reason.label: int(self.drops[reason]) for reason in Drop if reason is not Drop.OK}

    def __str__(self) -> str:
        return f"queue pair {self.local.number:#x} to {show(self.remote.endpoint)}, {self.remote.number:#x}"
