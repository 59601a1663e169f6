"""Virtual time."""


class FakeClock:
    """Seconds that pass when somebody says so; calling it gives the time, as a daemon's clock would."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Let time pass; returns the new time. Raises ``ValueError`` for a step backwards."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards ({seconds} s)")
        self.now += seconds
        return self.now
