"""The moment in which an aggregator may come back into the tree: no packet of any round is on its way (quiet moment).

Hosts are asked to begin no round from a certain one on. When all have said that they hold, and everything
begun is finished and confirmed, the plan may change as if the job started. Hosts must not be held for long:
if the moment does not come soon, they go on, and it is tried again later; unless what waits for it insists.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from inanet.coordinator.round_ledger import RoundLedger

#: Pause after an attempt, in multiples of how long hosts are held; after each one that fails twice as long as before, up to
#: so many times.
_PAUSE = 10
_MOST_PAUSES = 32


@dataclass(frozen=True, slots=True)
class Mark:
    """What hosts are asked: to begin no round from ``before`` on; ``nonce`` tells one attempt from another."""

    nonce: int
    before: int


@dataclass(slots=True)
class _Attempt:
    names: tuple[str, ...]
    mark: Mark
    deadline: float
    held: set[str] = field(default_factory=set)


class QuietMoment:
    """Aggregators that wait for that moment, and the attempt being made. ``seconds``: how long hosts hold."""

    def __init__(self, ledger: RoundLedger, seconds: float) -> None:
        self._ledger = ledger
        self._seconds = seconds
        self._names: set[str] = set()
        #: those of them that are not to be tried again later
        self._insists: set[str] = set()
        self._attempt: _Attempt | None = None
        self._not_before = 0.0
        self._nonce = 0
        #: attempts that failed since one did not
        self._failed = 0

    def add(self, name: str) -> None:
        """An aggregator would like to come back."""
        self._names.add(name)

    def insist(self, name: str) -> None:
        """Something that has to be done first, and for which hosts hold as long as it takes."""
        if name not in self._insists:
            self._insists.add(name)
            self._names.add(name)
            self.cancel()

    def discard(self, name: str) -> None:
        """It is gone again."""
        self._names.discard(name)
        self._insists.discard(name)

    def number(self) -> int:
        """A nonce for whoever else asks hosts to hold."""
        self._nonce += 1
        return self._nonce

    def cancel(self) -> None:
        """Hosts have been sent a plan and hold no longer."""
        self._attempt = None
        if self._insists:
            self._not_before = 0.0

    def propose(self, now: float) -> Mark | None:
        """Start an attempt if one is due: what to ask the hosts."""
        if not self._names or self._attempt is not None or now < self._not_before:
            return None
        self.number()
        self._not_before = now + _PAUSE * self._seconds * min(2**self._failed, _MOST_PAUSES)
        mark = Mark(self._nonce, self._ledger.newest + 1)
        deadline = math.inf if self._insists else now + self._seconds
        self._attempt = _Attempt(tuple(sorted(self._names)), mark, deadline)
        return mark

    def held(self, host: str, nonce: int, hosts: Collection[str]) -> Mark | None:
        """A host holds. If one had begun more than it was asked to: the mark that lets the others catch up."""
        attempt = self._attempt
        if attempt is None or nonce != attempt.mark.nonce:
            return None
        attempt.held.add(host)
        before = self._ledger.newest + 1
        if not attempt.held.issuperset(hosts) or before <= attempt.mark.before:
            return None
        attempt.mark = Mark(nonce, before)
        return attempt.mark

    def ready(self, hosts: Collection[str]) -> tuple[str, ...] | None:
        """Those that may come in now, and wait no longer; nobody, if all that hosts hold for have gone again. None if the
        moment has not come.
        """
        attempt = self._attempt
        if attempt is None or not attempt.held.issuperset(hosts) or not self._ledger.quiet:
            return None
        self._attempt, self._failed = None, 0
        names = tuple(name for name in attempt.names if name in self._names)
        self._names -= set(names)
        if self._insists & set(attempt.names):
            # it was no attempt of theirs that others would have to wait after
            self._insists -= set(attempt.names)
            self._not_before = 0.0
        return names

    def is_late(self, now: float) -> bool:
        """Whether hosts have held for long enough."""
        return self._attempt is not None and now >= self._attempt.deadline

    def fail(self, hosts: Collection[str]) -> tuple[tuple[str, ...], str]:
        """Give the attempt up: for whom it was, and what it waited for."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return (), ""
        self._failed += 1
        late = sorted(set(hosts) - attempt.held)
        reason = f"no answer from {', '.join(late)}, asked to hold" if late else self._ledger.unquiet()
        return attempt.names, f"{reason or 'nothing was waited for'} within {self._seconds:g} s"

    def timer(self, idle: bool) -> float | None:
        """When the attempt is late; if ``idle``, when the next one is due."""
        if self._attempt is not None:
            return self._attempt.deadline if math.isfinite(self._attempt.deadline) else None
        return self._not_before if idle and self._names else None
