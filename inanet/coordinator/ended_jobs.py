"""What became of earlier jobs, to tell their members when they come back."""

#: How many ended jobs are remembered.
_MOST_ENDED = 256


class Ended:
    """The latest that ended, by key."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}

    def remember(self, key: int, text: str) -> None:
        """A job is over, or goes on under another key; its members may come back and ask."""
        self._words[key] = text
        if len(self._words) > _MOST_ENDED:
            del self._words[next(iter(self._words))]

    def of(self, key: int) -> str | None:
        """What became of a job; None if nobody knows that it ended."""
        return self._words.get(key)
