"""What stands between a worker's messages and its queue pairs: put one in, get the sum of all ranks' out, in order."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from inanet.proto.netreduce.ring import Member
from inanet.proto.roce import QueuePair
from inanet.wire.batch import U8
from inanet.wire.netreduce import Operation


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
