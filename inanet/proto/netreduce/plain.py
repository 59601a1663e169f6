"""Ring all-reduce on the same queue pairs, where no switch aggregates.

Every message is cut into as many chunks as there are hosts. In n - 1 steps each host passes on a chunk with its own values
added (reduce-scatter), in n - 1 more the sums go round (all-gather). A chunk of a step is one write, behind a header whose tag
tells switches to leave it alone; the window of N messages is the same, and by the same argument a place in the inbox is free
when it is written again: a host sends message m + 2N when m + N is complete, so everybody has begun m + N and is done with m.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from inanet.proto.netreduce.pipes import Pipe, Result
from inanet.proto.netreduce.plan import Sizes
from inanet.proto.netreduce.ring import Member, RingBroken, check, zeros
from inanet.proto.roce import QueuePair
from inanet.wire.batch import U8
from inanet.wire.netreduce import HEADER_BYTES, Operation


def chunk_bytes(sizes: Sizes, hosts: int) -> int:
    """Bytes of a chunk; whole 64-bit values."""
    return -(-(sizes.message_bytes - HEADER_BYTES) // (8 * hosts)) * 8


def inbox_bytes(sizes: Sizes, hosts: int) -> int:
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
        """See :class:`~inanet.proto.netreduce.pipes.Pipe`."""
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
