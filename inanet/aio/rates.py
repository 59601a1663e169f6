"""Negotiated rates at a node: what was granted is held by its pacer; a worker says when it sends and what it loses."""

import asyncio
from collections.abc import Callable, Iterable

from inanet.member.member import Member
from inanet.phy.pacing import Pacer, default_burst
from inanet.planning.negotiation import PERIOD, RateRequests
from inanet.planning.rates import LEAST, Grant, Rates
from inanet.proto.tree.node import Node

#: A pacer's rate as long as nothing limits it, bits per second.
UNLIMITED = 1e12


class Pace:
    """Holds the sum of all grants, at most ``limit`` bits per second, with a ``pacer``."""

    def __init__(self, pacer: Pacer, limit: float | None, burst: int | None = None) -> None:
        """``burst``: bytes, if it is not to follow from the rate."""
        self._pacer = pacer
        self._limit = limit or UNLIMITED
        self._burst = burst
        self._rates = Rates()
        #: grants that were followed
        self.grants = 0

    @property
    def rate(self) -> float:
        """Bits per second that are held now."""
        return min(self._limit, max(LEAST, self._rates.total))

    def granted(self, grant: Grant) -> None:
        """Take a grant, unless a newer one was there before."""
        if self._rates.granted(grant):
            self.grants += 1
            self._apply()

    def released(self, job: int) -> None:
        """What was granted for a job no longer stands."""
        self._rates.restart(job)
        self._apply()

    def _apply(self) -> None:
        rate = self.rate
        self._pacer.set_rate(rate, self._burst or default_burst(rate))


def rate_requests(node: Node, job: int, limit: int | None) -> RateRequests:
    """A worker's side of negotiation, with its node's own counters."""

    def counts() -> tuple[int, int]:
        stats = node.stats()
        return stats["rows_sent"], stats["retransmissions"]

    return RateRequests(job, lambda: node.sends(job), counts, limit or 0)


class RateReporter:
    """Looks after the members of a worker's host while they have rounds: every period, and when it is poked."""

    def __init__(self, members: Callable[[], Iterable[Member]], flush: Callable[[], None]) -> None:
        self._members = members
        self._flush = flush
        self._poked = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._attend())

    def poke(self) -> None:
        """A round has begun, or something has arrived that lets it begin."""
        self._look()
        self._poked.set()

    def _look(self) -> bool:
        """Let every member say what it has to say; whether any has rounds."""
        now = asyncio.get_running_loop().time()
        busy = False
        for member in self._members():
            if not member.watched:
                continue
            member.negotiate(now)
            busy = busy or member.busy or (member.rate_requests is not None and member.rate_requests.active)
        self._flush()
        return busy

    async def _attend(self) -> None:
        while True:
            await self._poked.wait()
            self._poked.clear()
            while self._look():  # noqa: ASYNC110 - what is looked at are counters, which wake nobody
                await asyncio.sleep(PERIOD)

    def close(self) -> None:
        self._task.cancel()
