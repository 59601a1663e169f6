"""What stands between a worker's messages and its queue pairs: put one in, get the sum of all ranks' out, in
order.

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
from dataclasses import dataclass

import numpy as np

from inanet.proto.netreduce.ring import Member, RingBroken, Sizes, check, zeros
from inanet.proto.roce import QueuePair
from inanet.wire.batch import U8
from inanet.wire.netreduce import HEADER_BYTES, Operation


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
        """See :class:`~inanet.proto.netreduce.pipes.Pipe`. Its message N before is acknowledged, so nobody reads it."""
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
