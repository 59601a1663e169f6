"""Parameter servers that are gone and may come back: a job waits for them as it would for its coordinator (root restart)."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class LostServers:
    """By name; each is waited for ``seconds``."""

    seconds: float
    _since: dict[str, tuple[float, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._since)

    def __contains__(self, name: str) -> bool:
        return name in self._since

    def lose(self, name: str, why: str, now: float) -> bool:
        """One is gone; False if that was known."""
        if name in self._since:
            return False
        self._since[name] = (now + self.seconds, why)
        return True

    def fill(self, name: str) -> bool:
        """One is back; False if it was not missed."""
        return self._since.pop(name, None) is not None

    def timer(self) -> float | None:
        """When the first of them is late."""
        return min((deadline for deadline, _ in self._since.values()), default=None)

    def late(self, now: float) -> tuple[str, str] | None:
        """One that has not come back in time, and why it is gone."""
        return next(((name, why) for name, (at, why) in sorted(self._since.items()) if now >= at), None)
