"""The flow-control module of a host (section 3.2): messages on a queue pair in a window of N, results from the predecessor.

A message is sent when all results up to the one N before it are here, so that a switch with places for 2N messages never has
to keep one that another takes (message takeover). In addition, the own writes up to there must be acknowledged: everybody's are
then, two windows back, so nobody ever repeats a packet whose place has been taken over. Enqueueing is
:meth:`MessageWindow.send`, dequeueing :meth:`MessageWindow.results`; everything else is the transport's.
"""

import numpy as np

from inanet.proto.netreduce.pipes import Pipe, Result
from inanet.proto.netreduce.plan import Sizes
from inanet.proto.netreduce.ring import Member, RingBroken, check, zeros
from inanet.proto.roce import QueuePair
from inanet.wire.batch import U8
from inanet.wire.netreduce import HEADER_BYTES, Operation


class NotAggregated(RingBroken):
    """What arrived is a neighbour's message: no switch has summed it."""


def inbox_bytes(sizes: Sizes) -> int:
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
