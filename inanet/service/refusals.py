"""Who was turned away of late, for those who look for the reason elsewhere: people, and jobs that wait for somebody."""

from collections.abc import Sequence
from dataclasses import dataclass

from inanet.messages.text import clip

#: Seconds for which a refusal is remembered after it was last repeated.
REMEMBERED = 60.0
#: How many are.
MOST = 16


@dataclass(frozen=True, slots=True)
class Sought:
    """Somebody for whom others may wait: a part of ``job``, or, without one, a server of all jobs."""

    name: str
    job: str = ""


class Refusals:
    """The latest, each once."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, Sought | None]] = {}

    def add(self, reason: str, now: float, whom: Sought | None = None) -> None:
        """Somebody was refused with this sentence."""
        self._seen.pop(reason, None)
        self._seen[reason] = now, whom
        if len(self._seen) > MOST:
            del self._seen[next(iter(self._seen))]

    def came(self, whom: Sought) -> None:
        """Somebody was let in after all: nobody waits for it any more."""
        self._seen = {reason: (at, None if was == whom else was) for reason, (at, was) in self._seen.items()}

    def forget(self, job: str) -> None:
        """A job has ended, or needs nobody any more: who was turned away from it is not of the next one of its name."""
        self._seen = {
            reason: (at, None if was is not None and was.job == job else was)
            for reason, (at, was) in self._seen.items()
        }

    def latest(self, now: float) -> tuple[str, ...]:
        """The sentences, the oldest first."""
        return tuple(reason for reason, (at, _) in self._seen.items() if now - at <= REMEMBERED)

    def of(self, job: str, now: float) -> dict[str, str]:
        """The last sentence for each who was to be a part of a job; for each server without one. By name."""
        return {
            whom.name: reason
            for reason, (at, whom) in self._seen.items()
            if whom is not None and whom.job == job and now - at <= REMEMBERED
        }

    def explain(self, words: Sequence[str], job: str, now: float) -> tuple[str, ...]:
        """What a job waits for, ranks first, each with the reason why it does not come, if it was turned away."""
        parts, servers = self.of(job, now), self.of("", now)
        found = []
        for word in words:
            if word.startswith(("rank ", "ranks ")):
                reasons = list(parts.values())
            else:
                reasons = [reason for name, reason in servers.items() if word.endswith(f" {name}")]
            found.append(clip(f"{word} (turned away: {'; '.join(reasons)})") if reasons else word)
        return tuple(found)
