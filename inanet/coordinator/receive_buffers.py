"""Receive buffers shared by neighbours: windows such that everybody's together fit (receive budgets).

A node has one receive buffer, filled by its children and its parents in all trees of all jobs. Each of them
may have its share in flight and no more, so a buffer never overflows, whatever the others do.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a node receives: data-plane ``endpoint``, and the ``window`` in fragments each neighbour may
    fill.
    """

    endpoint: int
    window: int
    #: it can receive IP multicast
    listens: bool = False


class ReceiveBuffers:
    """How many neighbours send to each endpoint, by job."""

    def __init__(self) -> None:
        self._senders: dict[int, dict[int, int]] = {}
        #: grows with every change
        self.generation = 0

    def declare(self, job: int, senders: Mapping[int, int]) -> None:
        """Replace what a job says: endpoint to number of neighbours that send there."""
        if self._senders.get(job) != senders:
            self._senders[job] = dict(senders)
            self.generation += 1

    def withdraw(self, job: int) -> None:
        """The job is over."""
        if self._senders.pop(job, None):
            self.generation += 1

    def destination(self, endpoint: int, rx_window: int) -> Destination:
        """The destination of a node whose buffer holds ``rx_window`` fragments; the window is at least 1."""
        senders = sum(job.get(endpoint, 0) for job in self._senders.values())
        return Destination(endpoint, max(1, rx_window // max(1, senders)))
