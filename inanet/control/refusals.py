"""Who was turned away of late, for those who look for the reason elsewhere."""

#: Seconds for which a refusal is remembered after it was last repeated.
REMEMBERED = 60.0
#: How many are.
MOST = 16


class Refusals:
    """The latest, each once."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def add(self, reason: str, now: float) -> None:
        """Somebody was refused with this sentence."""
        self._seen.pop(reason, None)
        self._seen[reason] = now
        if len(self._seen) > MOST:
            del self._seen[next(iter(self._seen))]

    def latest(self, now: float) -> tuple[str, ...]:
        """The sentences, the oldest first."""
        return tuple(reason for reason, at in self._seen.items() if now - at <= REMEMBERED)
