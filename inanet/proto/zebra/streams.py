"""Streams to several machines at once, one place each, and what they sent in all."""

from inanet.proto.zebra.stream import Stream


class Streams:
    """``streams`` has a stream at every place that something goes to, ``None`` at the others."""

    def __init__(self, places: int) -> None:
        self.streams: list[Stream | None] = [None] * places
        self._sent = self._repeated = 0

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

    @property
    def sent(self) -> int:
        """Packets sent, without repetitions."""
        return self._sent + sum(stream.sent for stream in self.streams if stream is not None)

    @property
    def repeated(self) -> int:
        """Packets sent again."""
        return self._repeated + sum(stream.repeated for stream in self.streams if stream is not None)
