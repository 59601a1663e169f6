"""Control messages of one member, in order and once each, over as many connections as that takes (continued connections).

A connection that breaks loses what was on its way, and neither end knows what that was. So both count the messages they
send and take, and keep the frames that the other end has not said it has heard. When the member calls again and proves with
the session's secret that it is the same, both send what the other lacks, and nothing has happened for the machines above.
"""

from collections import deque
from collections.abc import Iterator

#: Messages after which the other end is told how many were heard.
HEARD_EVERY = 64
#: Bytes kept for an end that does not say what it has heard; with more on its way a connection cannot be continued.
MOST_KEPT = 8 << 20


class Delivery:
    """One end's count of both directions."""

    def __init__(self) -> None:
        #: messages taken
        self.received = 0
        self._sent = 0
        #: the newest frames sent, those before them are known to be heard or were given up
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self._keeps = True

    def send(self, frame: bytes) -> bytes:
        """Count a frame that is about to be sent, or was to be; it is returned as it is."""
        self._sent += 1
        if self._keeps:
            self._kept.append(frame)
            self._bytes += len(frame)
            while self._bytes > MOST_KEPT:
                self._bytes -= len(self._kept.popleft())
        return frame

    def take(self) -> int | None:
        """Count a message that has come; how many there were, if the other end should hear of it now."""
        self.received += 1
        return self.received if self.received % HEARD_EVERY == 0 else None

    def heard(self, count: int) -> None:
        """The other end has taken so many messages."""
        while self._kept and self._sent - len(self._kept) < count:
            self._bytes -= len(self._kept.popleft())

    def keep_nothing(self) -> None:
        """The other end cannot continue: do not keep frames for it."""
        self._keeps = False
        self._kept.clear()
        self._bytes = 0

    def continues(self, count: int) -> bool:
        """Whether an end that has taken so many messages can be sent all that it lacks."""
        return self._sent - len(self._kept) <= count <= self._sent

    def lacking(self, count: int) -> Iterator[bytes]:
        """The frames that an end lacks which has taken so many messages."""
        self.heard(count)
        return iter(tuple(self._kept))
