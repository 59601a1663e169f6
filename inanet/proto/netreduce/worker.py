"""A worker of a NetReduce job: rounds in, packets out, results in, rounds done.

All workers of a ring begin the same rounds in the same order. What the ring does is decided when it is
connected: in mode ``auto`` a first message of zeros goes round, and what arrives is either a sum, or the
predecessor's own message; then no switch serves the ring, and the job runs as ring all-reduce on the same
queue pairs.

*Rounds*: integers and floats under block exponents are the streams of the other switched systems, with a message for a
fragment, so their bits are the same (number format). Exponents need no root here: a switch that keeps packets compares
bytes as well as it adds, so they are messages of their own in front of the data. *Raw* floats are float32,
added in the order of ranks, as the FPGA did.

*Message window* (section 3.2): a message is sent when all results up to the one N before it are here, so that
a switch with places for 2N messages never has to keep one that another takes (message takeover). In addition, the own
writes up to there must be acknowledged: everybody's are then, two windows back, so nobody ever repeats a
packet whose place has been taken over. Enqueueing is :meth:`MessageWindow.send`, dequeueing
:meth:`MessageWindow.results`; everything else is the transport's.

*Plain ring*: where no switch aggregates, every message is cut into as many chunks as there are hosts. In n -
1 steps each host passes on a chunk with its own values added (reduce-scatter), in n - 1 more the sums go
round (all-gather). A chunk of a step is one write, behind a header whose tag tells switches to leave it
alone; the window of N messages is the same, and by the same argument a place in the inbox is free when it is
written again: a host sends message m + 2N when m + N is complete, so everybody has begun m + N and is done
with m.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent, Refused, RoundDone
from inanet.proto.common.plan import TensorSpec
from inanet.proto.netreduce.ring import Member, RingBroken, Sizes, check, zeros
from inanet.proto.roce import (
    Attributes,
    ChannelAdapter,
    Completion,
    Event,
    Peer,
    ProtectionDomain,
    QueuePair,
    Received,
    Status,
)
from inanet.proto.slots.exponents import PART, Agreement, Question
from inanet.proto.slots.source import Arrays, Index, Source, Tensor
from inanet.proto.slots.stream import Stream
from inanet.proto.slots.worker import Silence
from inanet.wire.batch import U8, PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.endpoint import show
from inanet.wire.netreduce import HEADER_BYTES, Operation
from inanet.wire.roce import timeout_seconds


@dataclass(slots=True)
class Result:
    """Values of a message, summed over the ring; valid until the next message is sent. ``operation`` as it was sent."""

    operation: Operation
    values: U8


class Pipe(ABC):
    """``outlet`` is the queue pair to the successor, whose writes lie ``base`` bytes from the beginning of its inbox."""

    def __init__(self, member: Member, outlet: QueuePair, inbox: U8) -> None:
        self.member = member
        self.outlet = outlet
        self.inbox = inbox
        #: messages handed over, results given back, own writes acknowledged: counted from 0
        self.sent = self.received = self.completed = 0
        self._results: deque[Result] = deque()

    @property
    def room(self) -> int:
        """Messages that may be sent now: those of a window after the oldest without a result (section 3.2)."""
        return min(self.received, self.completed) + self.member.sizes.window - self.sent

    @abstractmethod
    def buffer(self) -> U8:
        """Where the values of the next message go; uint8, a message's bytes without the header."""

    @abstractmethod
    def send(self, operation: Operation) -> None:
        """Send what has been put into :meth:`buffer`."""

    @abstractmethod
    def arrived(self, immediate: int) -> None:
        """A write of the predecessor has arrived. Raises :class:`~inanet.proto.netreduce.ring.RingBroken`."""

    @abstractmethod
    def acknowledged(self, wr_id: int) -> None:
        """A write of this worker is done with."""

    def results(self) -> list[Result]:
        """Results since the last call, in the order in which messages were sent."""
        results = list(self._results)
        self._results.clear()
        return results


class NotAggregated(RingBroken):
    """What arrived is a neighbour's message: no switch has summed it."""


def window_inbox_bytes(sizes: Sizes) -> int:
    """Bytes that the predecessor's writes need: two windows of messages."""
    return 2 * sizes.window * sizes.message_bytes


class MessageWindow(Pipe):
    """Messages of fixed length, which a switch sums on their way."""

    def __init__(self, member: Member, outlet: QueuePair, inbox: U8) -> None:
        super().__init__(member, outlet, inbox)
        self._buffers = zeros(member.sizes.window * member.sizes.message_bytes)
        self._operations: list[Operation] = [Operation.ADD] * (2 * member.sizes.window)

    def buffer(self) -> U8:
        """Its message N before is acknowledged, so nobody reads it."""
        return self._slot(self._buffers, self.sent % self.member.sizes.window)[HEADER_BYTES:]

    def _slot(self, buffer: U8, slot: int) -> U8:
        size = self.member.sizes.message_bytes
        return buffer[slot * size : (slot + 1) * size]

    def send(self, operation: Operation) -> None:
        """Put the header in front, and write to the successor; the immediate data is the MsgID."""
        sizes, message = self.member.sizes, self.member.first + self.sent
        data = self._slot(self._buffers, self.sent % sizes.window)
        header = self.member.header(message, operation)
        data[:HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
        place = self.sent % (2 * sizes.window)
        self._operations[place] = operation
        self._post(self.sent)
        self.sent += 1

    def _post(self, number: int) -> None:
        sizes = self.member.sizes
        data = self._slot(self._buffers, number % sizes.window)
        place = number % (2 * sizes.window) * sizes.message_bytes
        self.outlet.post_write(data, place, self.member.first + number & 0xFFFFFFFF, wr_id=number)

    @property
    def unacknowledged(self) -> int:
        """Packets of this connection that come before the oldest message that is not acknowledged."""
        return self.completed * self.member.sizes.length

    def resume(self, outlet: QueuePair) -> None:
        """Go on with another queue pair, whose first sequence number is that of :attr:`unacknowledged`: the successor takes what
        it has already for repetitions.
        """
        self.outlet = outlet
        for number in range(self.completed, self.sent):
            self._post(number)

    def arrived(self, immediate: int) -> None:
        """Check that it is the next result, summed over all ranks."""
        member, place = self.member, self.received % (2 * self.member.sizes.window)
        data = self._slot(self.inbox, place)
        operation = self._operations[place]
        message = member.first + self.received
        if self.received >= self.sent:
            raise RingBroken(
                f"job {member.job}, ring {member.ring}, rank {member.rank}: message {message & 0xFFFFFFFF} of rank"
                f" {member.predecessor} arrived before this rank has sent its own: no switch sums it"
            )
        header = check(member, data, message, operation, plain=False, length=member.sizes.length)
        if header.aggregated == 0:
            raise NotAggregated(
                f"job {member.job}, ring {member.ring}, rank {member.rank}: message {header.message} of rank"
                f" {member.predecessor} is its own and no sum: the switch does not serve the ring; register it there, or run"
                " the job in mode auto or ring"
            )
        if header.aggregated != member.hosts or immediate != header.message:
            raise RingBroken(
                f"job {member.job}, ring {member.ring}, rank {member.rank}: {header} is summed over {header.aggregated} of"
                f" {member.hosts} ranks: the switch has another idea of the ring"
            )
        self.received += 1
        self._results.append(Result(operation, data[HEADER_BYTES:]))

    def acknowledged(self, wr_id: int) -> None:
        """Writes complete in order."""
        self.completed = wr_id + 1


def chunk_bytes(sizes: Sizes, hosts: int) -> int:
    """Bytes of a chunk; whole 64-bit values."""
    return -(-(sizes.message_bytes - HEADER_BYTES) // (8 * hosts)) * 8


def ring_inbox_bytes(sizes: Sizes, hosts: int) -> int:
    """Bytes that the predecessor's writes need: two windows of messages, all steps of each."""
    return 2 * sizes.window * 2 * (hosts - 1) * (HEADER_BYTES + chunk_bytes(sizes, hosts))


@dataclass(slots=True)
class _Turn:
    """A message on its way round: values of this host, then sums; the step that arrives next, and writes acknowledged."""

    operation: Operation
    values: U8
    step: int = 0
    acknowledged: int = 0


class PlainRing(Pipe):
    """``offset`` is where the inbox of plain writes begins in the successor's memory."""

    def __init__(self, member: Member, outlet: QueuePair, inbox: U8, offset: int) -> None:
        super().__init__(member, outlet, inbox)
        sizes, hosts = member.sizes, member.hosts
        self._offset = offset
        self._chunk = chunk_bytes(sizes, hosts)
        self._write = HEADER_BYTES + self._chunk
        self._steps = 2 * (hosts - 1)
        #: sums, padded to whole chunks, and copies of what is being written, by message and step
        self._turns: list[_Turn] = [
            _Turn(Operation.ADD, zeros(self._chunk * hosts)) for _ in range(2 * sizes.window)
        ]
        self._copies = zeros(2 * sizes.window * self._steps * self._write)
        #: writes of the predecessor for messages that have not been begun here
        self._early: deque[int] = deque()

    def buffer(self) -> U8:
        return self._turn(self.sent).values[: self.member.sizes.message_bytes - HEADER_BYTES]

    def _turn(self, message: int) -> _Turn:
        return self._turns[message % len(self._turns)]

    def send(self, operation: Operation) -> None:
        """The first step, and those that have come early."""
        turn = self._turn(self.sent)
        turn.operation, turn.step, turn.acknowledged = operation, 0, 0
        self.sent += 1
        self._pass_on(self.sent - 1, 0)
        early, self._early = self._early, deque()
        for immediate in early:
            self.arrived(immediate)

    def _pass_on(self, message: int, step: int) -> None:
        """Write the chunk of a step to the successor."""
        member, turn = self.member, self._turn(message)
        place = (message % len(self._turns)) * self._steps + step
        data = self._copies[place * self._write : (place + 1) * self._write]
        header = member.header(member.first + message, turn.operation, plain=True, length=step)
        data[:HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
        data[HEADER_BYTES:] = self._part(turn, (member.rank - step) % member.hosts)
        self.outlet.post_write(data, self._offset + place * self._write, place, wr_id=message)

    def _part(self, turn: _Turn, chunk: int) -> U8:
        return turn.values[chunk * self._chunk : (chunk + 1) * self._chunk]

    def arrived(self, immediate: int) -> None:
        """Add a chunk, or take it for the sum; pass it on until it has been everywhere."""
        member = self.member
        slot, step = divmod(immediate, self._steps)
        message = self.received + (slot - self.received) % len(self._turns)
        if message >= self.sent:
            self._early.append(immediate)
            return
        turn = self._turn(message)
        data = self.inbox[immediate * self._write : (immediate + 1) * self._write]
        check(member, data, member.first + message, turn.operation, plain=True, length=step)
        if step != turn.step:
            raise RingBroken(
                f"job {member.job}, ring {member.ring}, rank {member.rank}: step {step} of rank {member.predecessor} where"
                f" {turn.step} was due"
            )
        chunk = self._part(turn, (member.rank - step - 1) % member.hosts)
        if step < member.hosts - 1:
            combine(turn.operation, chunk, data[HEADER_BYTES:])
        else:
            chunk[:] = data[HEADER_BYTES:]
        turn.step += 1
        if turn.step < self._steps:
            self._pass_on(message, turn.step)
        while self.received < self.sent and self._turn(self.received).step == self._steps:
            done = self._turn(self.received)
            size = member.sizes.message_bytes - HEADER_BYTES
            self._results.append(Result(done.operation, done.values[:size]))
            self.received += 1

    def acknowledged(self, wr_id: int) -> None:
        """A message's writes lie between those of others: it is done with when all of them are."""
        self._turn(wr_id).acknowledged += 1
        while self.completed < self.sent and self._turn(self.completed).acknowledged == self._steps:
            self.completed += 1


def combine(operation: Operation, target: U8, source: U8) -> None:
    """Fold one chunk into another of the same size."""
    dtype = _DTYPES[operation]
    into, more = target.view(dtype), source.view(dtype)
    if operation in (Operation.ADD, Operation.ADD_FLOAT):
        np.add(into, more, out=into)
    else:
        np.maximum(into, more, out=into)


_DTYPES = {
    Operation.ADD: np.int32,
    Operation.MAX32: np.int32,
    Operation.MAX64: np.int64,
    Operation.MAX8: np.uint8,
    Operation.ADD_FLOAT: np.float32,
}


class RawStream(Source):
    """A round of float32 as it is; NaN and infinities go through, as in any IEEE sum. ``width`` values, little-endian, make a message.

    Raises ``ValueError`` for other types.
    """

    def __init__(self, tensor: Tensor, round_: int, arrays: Arrays, width: int) -> None:
        super().__init__(tensor, round_, arrays)
        spec = tensor.spec
        if spec.dtype != "f32":
            raise ValueError(
                f"tensor {spec.name!r}: raw floats are f32, not {spec.dtype}; use the int32 format"
            )
        tensor.format.bind(arrays)
        self.width = width
        self._values: NDArray[np.float32] = np.zeros(spec.elements, np.float32)
        self._messages = max(1, -(-spec.elements // width))
        self._taken = 0

    def open(self) -> None:
        self.opened = True
        self._values[:] = self.arrays[0]
        for array in self.arrays[1:]:
            self._values += array
        self.ready = self.count = self._messages

    def advance(self, client: Agreement | None, now: float) -> None:
        """Everything may leave at once."""

    def place(self, fragments: Index, arena: NDArray[np.uint8], at: int, stride: int) -> None:
        for k, fragment in enumerate(fragments.tolist()):
            part = self._values[fragment * self.width : (fragment + 1) * self.width]
            begin = at + k * stride
            arena[begin : begin + part.nbytes] = part.view(np.uint8)
            arena[begin + part.nbytes : begin + 4 * self.width] = 0

    def take(self, arena: NDArray[np.uint8], ats: Index, fragments: Index) -> None:
        self._taken += len(fragments)
        for at, fragment in zip(ats.tolist(), fragments.tolist(), strict=True):
            part = self._values[fragment * self.width : (fragment + 1) * self.width]
            part.view(np.uint8)[:] = arena[at : at + part.nbytes]

    @property
    def finished(self) -> bool:
        return self.opened and self._taken == self._messages

    def finish(self) -> None:
        if self.tensor.spec.op == "mean":
            self._values /= np.float32(self.tensor.format.ranks)
        for array in self.arrays:
            array[:] = self._values


class RingAgreement:
    """Exponents as messages of the ring: what a stream offers is collected here until it leaves, ``size`` bytes a message."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._offered: dict[int, tuple[Question, U8]] = {}
        #: what was offered last
        self.question: Question | None = None

    @property
    def room(self) -> int:
        """All of it at once: that is a message or two."""
        return 1 << 30

    def offer(self, question: Question, part: int, exponents: NDArray[np.uint8], now: float) -> None:
        """Collect this host's exponents."""
        _, mine = self._offered.setdefault(id(question), (question, np.zeros(len(question.table), np.uint8)))
        mine[part * PART : part * PART + len(exponents)] = exponents
        self.question = question

    def messages(self, question: Question) -> int:
        """How many messages they take."""
        return -(-len(question.table) // self._size)

    def place(self, question: Question, message: int, out: U8) -> None:
        """Write one of them."""
        _, mine = self._offered[id(question)]
        part = mine[message * self._size : (message + 1) * self._size]
        out[: len(part)] = part
        out[len(part) :] = 0

    def take(self, question: Question, message: int, values: U8) -> None:
        """What all hosts have agreed on, of one message; in order."""
        part = question.table[message * self._size : (message + 1) * self._size]
        part[:] = values[: len(part)]
        if message + 1 == self.messages(question):
            question.agreed[:] = True
            del self._offered[id(question)]


class Round:
    """A round of one tensor: its messages in order, those of exponents first. ``values`` are 32-bit values of a message."""

    def __init__(
        self, tensor: Tensor, round_: int, arrays: Sequence[NDArray[Any]], values: int, *, raw: bool
    ) -> None:
        self.source: Source = (
            RawStream(tensor, round_, arrays, values)
            if raw and tensor.format.uses_exponents
            else Stream(tensor, round_, arrays, values)
        )
        self._swaps = isinstance(self.source, Stream)
        self._question: Question | None = None
        self._sent = 0
        #: the message after its last, over all rounds, once that has left; and since when it has all results
        self.end: int | None = None
        self.since: float | None = None

    def advance(self, agreement: RingAgreement, now: float) -> None:
        """See what may leave by now."""
        agreement.question = None
        self.source.advance(agreement, now)
        self._question = self._question or agreement.question

    def _exponents(self, agreement: RingAgreement) -> int:
        return 0 if self._question is None else agreement.messages(self._question)

    def can_send(self, agreement: RingAgreement) -> bool:
        """Whether its next message is known."""
        return self.source.opened and self._sent < self._exponents(agreement) + self.source.ready

    def has_sent(self, agreement: RingAgreement) -> bool:
        """Whether all its messages have left."""
        count = self.source.count
        return count is not None and self._sent == self._exponents(agreement) + count

    def unsent(self, agreement: RingAgreement) -> int:
        """Messages that have not left, as far as their number is known."""
        return self._exponents(agreement) + (self.source.count or 0) - self._sent

    def put(self, agreement: RingAgreement, out: U8) -> tuple[Operation, int]:
        """Write the next message's values; its operation, and its number within the round."""
        number, first = self._sent, self._exponents(agreement)
        self._sent += 1
        if self._question is not None and number < first:
            agreement.place(self._question, number, out)
            return Operation.MAX8, number
        self.source.place(np.array([number - first], np.int64), out, 0, len(out))
        if not self._swaps:
            return Operation.ADD_FLOAT, number
        # streams are made for framings with big-endian values
        out.view(np.int32).byteswap(inplace=True)
        return Operation.ADD, number

    def take(self, agreement: RingAgreement, number: int, values: U8) -> None:
        """The result of a message."""
        first = self._exponents(agreement)
        if self._question is not None and number < first:
            agreement.take(self._question, number, values)
            return
        if self._swaps:
            values.view(np.int32).byteswap(inplace=True)
        self.source.take(values, np.zeros(1, np.int64), np.array([number - first], np.int64))


#: seconds after which a round with all results is done although the successor has not acknowledged its own: more often than
#: not it has them, and has gone
LINGER = 2.0
#: code of the longest acknowledgement timeout of queue pairs that are connected again, a second
_SLOWEST = 18


@dataclass(frozen=True, slots=True)
class Broken:
    """The ring cannot go on, and no round that runs will end: ``reason`` is a sentence with what to do."""

    job: int
    reason: str


class NetReduceWorker:
    """``endpoint`` is the host's address and the UDP source port of its packets; ``numbers`` are the queue pair numbers
    towards the predecessor and the successor, ``psn`` the first sequence number of both.

    With ``raw`` floats are summed as float32 and not under block exponents. Nothing heard for ``silent`` seconds is
    reported.
    """

    def __init__(
        self,
        member: Member,
        endpoint: int,
        *,
        numbers: tuple[int, int] = (0x11, 0x12),
        psn: int = 0,
        raw: bool = False,
        silent: float = 5.0,
    ) -> None:
        self.member = member
        self.raw = raw
        sizes = member.sizes
        self._plain_at = window_inbox_bytes(sizes)
        self._inbox = zeros(self._plain_at + ring_inbox_bytes(sizes, member.hosts))
        self._domain = ProtectionDomain()
        region = self._domain.register(self._inbox)
        #: this host's ends, to be told to the predecessor and to the successor
        self.inlet = Peer(endpoint, numbers[0], psn, region.key, region.base)
        self.outlet = Peer(endpoint, numbers[1], psn)
        self._adapter = ChannelAdapter(endpoint >> 16)
        self._pairs: tuple[QueuePair, QueuePair] | None = None
        self._pipe: Pipe | None = None
        #: whether the first message has told what the ring does
        self._settled = member.mode != "auto"
        self._agreement = RingAgreement(sizes.message_bytes - HEADER_BYTES)
        self._tensors: dict[int, Tensor] = {}
        self._rounds: deque[Round] = deque()
        self._expected: deque[tuple[Round, int]] = deque()
        self._events: list[NodeEvent | Broken] = []
        self._silence = Silence(silent)
        self._broken = False
        #: why there is no successor any more, if that did not matter
        self._gone: str | None = None
        #: since when queue pairs give up, one after the other
        self._waiting: float | None = None
        self.revived = 0
        #: how often in a row, without an acknowledgement in between
        self._again = 0
        #: what queue pairs have counted that were replaced
        self._past: dict[str, int] = {}
        #: acknowledgements to come that are of messages before the ring became a plain one
        self._stale = 0
        self._messages = 0

    def connect(self, successor: Peer, predecessor: Peer) -> None:
        """Connect to the successor's inlet and the predecessor's outlet."""
        attributes = self.member.attributes
        inward = QueuePair(self.inlet, predecessor, domain=self._domain, attributes=attributes)
        outward = QueuePair(self.outlet, successor, attributes=attributes)
        for pair in (inward, outward):
            pair.connect()
            self._adapter.add(pair)
        # as many as there are places in the inbox: each is posted again when it has been used
        inward.post_receive(count=2 * self.member.sizes.window * 2 * self.member.hosts)
        self._pairs = inward, outward
        if self.member.mode == "ring":
            self._pipe = self._plain()
        else:
            self._pipe = MessageWindow(self.member, outward, self._inbox[: self._plain_at])
        if not self._settled:
            self._pipe.buffer()[:] = 0
            self._pipe.send(Operation.ADD)

    def _plain(self) -> PlainRing:
        assert self._pairs is not None
        return PlainRing(self.member, self._pairs[1], self._inbox[self._plain_at :], self._plain_at)

    # ---------------------------------------------------------------- rounds

    @property
    def mode(self) -> str | None:
        """``switch`` or ``ring``, once it is known."""
        if not self._settled or self._pipe is None:
            return None
        return "ring" if isinstance(self._pipe, PlainRing) else "switch"

    def add_tensor(self, tensor: int, spec: TensorSpec) -> None:
        """Make a tensor known under a number, the same on all workers. Raises ``ValueError`` for what cannot be summed."""
        self._tensors[tensor] = Tensor(tensor, spec, self.member.ranks)

    def drop_tensor(self, tensor: int) -> None:
        """Forget a tensor; rounds of it that have begun go on."""
        self._tensors.pop(tensor, None)

    def begin(self, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float) -> None:
        """Start this host's part in a round. ``arrays`` are 1-D, one per local rank, overwritten by the result.

        Raises ``ValueError`` for arrays that do not suit the tensor, ``KeyError`` for a tensor that is not known.
        """
        values = self.member.sizes.values
        self._rounds.append(Round(self._tensors[tensor], round_, arrays, values, raw=self.raw))
        self._silence.begin(now)
        self._turn(now)

    def give_up(self, round_: int) -> None:
        """A round has failed for everybody: its messages go on, its arrays are left alone from now on."""
        for one in self._rounds:
            if one.source.round == round_:
                one.source.detach()

    def _turn(self, now: float) -> None:
        """Send what may leave, take what is there, end what is done."""
        pipe = self._pipe
        if pipe is None or self._broken or not self._settled:
            return
        busy = True
        while busy:
            for result in pipe.results():
                one, number = self._expected.popleft()
                one.take(self._agreement, number, result.values)
            self._advance(now)
            busy = self._gone is None and self._send(pipe)
        if self._gone is not None and self._rounds:
            self._break(self._gone)

    def _advance(self, now: float) -> None:
        """Open, feed and end rounds, in order."""
        ahead: set[int] = set()
        for one in list(self._rounds):
            source = one.source
            tensor = source.tensor.tensor
            if not source.opened and tensor not in ahead:
                source.open()
            if source.opened:
                one.advance(self._agreement, now)
            if source.finished and not ahead and self._is_safe(one, now):
                self._finish(one)
            else:
                ahead.add(tensor)
        if not self._rounds:
            self._silence.end()

    def _is_safe(self, one: Round, now: float) -> bool:
        """Whether the successor has what this worker owes it: it may never hear of this worker again once a round is done."""
        assert self._pipe is not None
        one.since = now if one.since is None else one.since
        # nothing of later rounds has left if it was not known to have sent everything
        one.end = self._pipe.sent if one.end is None else one.end
        acknowledged = self._pipe.completed >= one.end
        return acknowledged or self._gone is not None or now >= one.since + LINGER

    def _send(self, pipe: Pipe) -> bool:
        """Messages of the oldest rounds as far as the window reaches; whether results may have come with that."""
        before = pipe.received
        for one in self._rounds:
            while pipe.room > 0 and one.can_send(self._agreement):
                operation, number = one.put(self._agreement, pipe.buffer())
                self._expected.append((one, number))
                pipe.send(operation)
                self._messages += 1
            if not one.has_sent(self._agreement):
                break
            if one.end is None:
                one.end = pipe.sent
        return pipe.received > before

    def _finish(self, one: Round) -> None:
        self._rounds.remove(one)
        source = one.source
        source.finish()
        job, tensor = self.member.job, source.tensor
        if source.refusal is not None:
            self._events.append(Refused(job, source.round, tensor.tensor, *source.refusal))
        else:
            self._events.append(RoundDone(job, source.round, tensor.tensor, tensor.format.overflow))

    # ---------------------------------------------------------------- packets

    @property
    def groups(self) -> frozenset[int]:
        """None: see :class:`~inanet.proto.common.machine.Machine`."""
        return frozenset()

    @property
    def lacking(self) -> int:
        """Packets of results that the oldest round still lacks."""
        if not self._rounds:
            return 0
        unsent = max(0, self._rounds[0].unsent(self._agreement))
        return (unsent + len(self._expected)) * self.member.sizes.length

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take whole IPv4 packets."""
        self._adapter.receive(batch, now)
        self._silence.heard(now)
        self._listen(now)

    def _listen(self, now: float) -> None:
        """See what the queue pairs say."""
        for pair, event in self._adapter.events():
            if self._broken:
                return
            try:
                self._hear(pair, event, now)
            except NotAggregated as error:
                if self._settled:
                    self._break(str(error))
                    return
                self._fall_back()
            except RingBroken as error:
                self._break(str(error))
                return
        self._turn(now)

    def _fall_back(self) -> None:
        """No switch serves the ring."""
        assert self._pipe is not None
        self._stale = self._pipe.sent - self._pipe.completed
        self._pipe, self._settled = self._plain(), True

    def _hear(self, pair: QueuePair, event: Event, now: float) -> None:
        assert self._pairs is not None
        assert self._pipe is not None
        if pair not in self._pairs:
            # what a queue pair leaves behind that has been replaced
            return
        if isinstance(event, Received):
            pair.post_receive()
            self._pipe.arrived(event.immediate)
            if not self._settled:
                # the first message, and it is a sum
                self._pipe.results()
                self._settled = True
        elif isinstance(event, Completion) and event.status is Status.SUCCESS:
            self._waiting, self._again = None, 0
            if self._stale:
                self._stale -= 1
            else:
                self._pipe.acknowledged(event.wr_id)
        elif self._can_wait(event, now):
            self._revive(now)
        else:
            self._lost(pair, event)

    def _lost(self, pair: QueuePair, event: Event) -> None:
        """A connection is gone. That of the successor is not missed when everything has its result."""
        assert self._pairs is not None
        assert self._pipe is not None
        inward = pair is self._pairs[0]
        name = f"job {self.member.job}, ring {self.member.ring}, rank {self.member.rank}"
        other = (self.member.rank + (-1 if inward else 1)) % self.member.hosts
        # a switch acknowledges nothing itself: whoever is missing, all connections look alike
        sums = not inward and isinstance(self._pipe, MessageWindow)
        held = (
            " (or a rank farther on is missing, without whom the switch has no sums to send)" if sums else ""
        )
        reason = (
            f"{name}: the connection {'from' if inward else 'to'} rank {other} ({show(pair.remote.endpoint)}) is gone:"
            f" {event}{held}; start the ring again in its next epoch, without the host that does not answer"
        )
        if inward or self._pipe.received < self._pipe.sent:
            raise RingBroken(reason)
        self._gone = self._gone or reason

    def _can_wait(self, event: Event, now: float) -> bool:
        """Whether the queue pair to the successor has given up, but a peer may still be late."""
        member = self.member
        if not isinstance(event, Completion) or event.status is not Status.RETRY_EXC_ERR:
            return False
        if self._waiting is None:
            self._waiting = now
        return member.patient and now - self._waiting < member.skew and isinstance(self._pipe, MessageWindow)

    def _revive(self, now: float) -> None:
        """Another queue pair to the successor, from the oldest unacknowledged message on, with twice the timeout."""
        assert self._pairs is not None
        assert isinstance(self._pipe, MessageWindow)
        inward, gone = self._pairs
        self._adapter.remove(gone)
        for name, value in gone.stats().items():
            if name not in ("pending", "unacknowledged"):
                self._past[name] = self._past.get(name, 0) + value
        psn = self.outlet.psn + self._pipe.unacknowledged & 0xFFFFFF
        self._again += 1
        outward = QueuePair(replace(self.outlet, psn=psn), gone.remote, attributes=self._slower(now))
        outward.connect()
        self._adapter.add(outward)
        self._pairs = inward, outward
        self.revived += 1
        self._pipe.resume(outward)

    def _slower(self, now: float) -> Attributes:
        """Attributes with a timeout that doubles from queue pair to queue pair: whoever waits long for somebody need not repeat
        itself all the time, as the switch has its packets. None outlives the patience.
        """
        attributes, tries = self.member.attributes, self.member.attributes.retry_cnt + 1
        left = self.member.skew - (now - (now if self._waiting is None else self._waiting))
        timeout = max(attributes.timeout, min(attributes.timeout + self._again, _SLOWEST))
        while timeout > attributes.timeout and (timeout_seconds(timeout) or 0.0) * tries > left:
            timeout -= 1
        return replace(attributes, timeout=timeout)

    def _break(self, reason: str) -> None:
        self._broken = True
        self._events.append(Broken(self.member.job, reason))

    def transmit(self, now: float) -> list[Transmission]:
        """Packets of both queue pairs."""
        return self._adapter.transmit(now)

    # ---------------------------------------------------------------- time

    def timer(self) -> float | None:
        times = [self._adapter.timer()]
        if self._rounds and not self._broken:
            since = self._rounds[0].since
            times.append(None if since is None else since + LINGER)
            times.append(self._silence.due)
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Repeat what is not acknowledged, report silence."""
        self._adapter.on_timer(now)
        if self._rounds:
            self._events += self._silence.report(self.member.job, "ring", now)
        self._listen(now)

    def events(self) -> list[NodeEvent | Broken]:
        """What happened since the last call. ``Refused`` has local rank -1 where another host holds the NaN or Inf."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- figures

    def stats(self) -> dict[str, int]:
        """Counters since the start: messages, and those of both queue pairs together."""
        totals = dict(self._past)
        for pair in self._pairs or ():
            for name, value in pair.stats().items():
                totals[name] = totals.get(name, 0) + value
        received = 0 if self._pipe is None else self._pipe.received
        return {
            "messages_sent": self._messages,
            "messages_received": received,
            "revived": self.revived,
            **totals,
        }

    def drops_by_reason(self) -> dict[str, int]:
        return {
            reason.label: count
            for reason in Drop
            if (count := self._adapter.drops_by_reason().get(reason.label, 0))
        }
