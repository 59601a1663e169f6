"""What a switch runs: a program turns every packet of a batch into a verdict, rewriting packets in place.

A switch aggregates as its hardware would: a packet comes in, passes its slot, and leaves, perhaps with other values in
it, perhaps not at all. So a program keeps no logs and sends nothing by itself; it edits the batch and says where each
packet goes. The few packets that must leave *beside* the one that came in (a partial sum that was evicted, a slot that
aged out) are spilled into an arena of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inanet.wire.batch import PacketBatch, Transmission


class Action(IntEnum):
    """Where a packet goes when the program is done with it."""

    #: forward by the switch's tables, as any other packet
    PASS = 0
    #: absorbed or refused; ``reason`` says which (``Drop.OK``: its values are in a slot)
    DROP = 1
    #: to the endpoint or port that ``target`` names
    UNICAST = 2
    #: to every member of the group that ``target`` names
    GROUP = 3
    #: back to where it came from
    REPLY = 4


class Verdicts:
    """Verdicts for up to ``capacity`` packets, one entry each; only the first ``len(batch)`` mean anything.

    ``action`` uint8 (:class:`Action`), ``target`` int64 (an endpoint for UNICAST, a group's number for GROUP), ``length``
    int64 (bytes of the packet from now on, never more than it had room for), ``reason`` uint8
    (:class:`~inanet.wire.drops.Drop`), ``mark`` uint8 (1: set congestion experienced in the IP header), ``passes`` uint8
    (passes through the pipeline, 1 without recirculation).
    """

    def __init__(self, capacity: int) -> None:
        self.action: NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        self.target: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.length: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.reason: NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        self.mark: NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        self.passes: NDArray[np.uint8] = np.ones(capacity, np.uint8)


class Program(Protocol):
    """The switch side of one system. Sans-IO; ``now`` is seconds on the caller's clock."""

    #: name users select it by
    name: str

    def process(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None:
        """Judge a batch of this system's packets, each beginning at its INA header, and edit them in place.

        ``congested[i]`` is 1 when the queue that packet *i* is bound for stands above its ECN threshold, or when it came
        with congestion experienced in its IP header.
        """
        ...

    def spilled(self) -> list[Transmission]:
        """Packets that leave beside those of the batches since the last call."""
        ...

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next."""
        ...

    def on_timer(self, now: float) -> None:
        """Slots that nobody has touched for too long are given up."""
        ...

    def register_bytes(self) -> int:
        """Bytes of the switch's register file that the program's slots take."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``occupied_<job>`` is what a job holds now."""
        ...


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Whom a switch exchanges a job's packets with. ``uplinks``: all their endpoints, and where a packet from one goes that the
    program lets pass (0: nowhere); ``group``: those that what is for all workers goes to.
    """

    uplinks: dict[int, int]
    group: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """What jobs can have of a program: see :class:`inanet.messages.services.Service`."""

    slots: int
    own: bool = True
    quota: int = 0
    values: int = 0
    rings: int = 1


class SystemProgram(Program, Protocol):
    """A system's program, whose jobs come and go. ``passes`` that a packet takes through the pipeline, as a rule."""

    passes: int

    def offer(self, limit: int | None, most_passes: int) -> Offer:
        """What the next job can have. ``limit`` is what one job may have: its share where jobs have shares, its quota where
        they share; a packet makes ``most_passes`` at most.
        """
        ...

    def add_job(self, tenant: Any) -> None:
        """Serve a job of a configuration file (:class:`~inanet.proto.slots.tenants.Tenant`). Raises ``ValueError`` for one that
        cannot be, :class:`~inanet.proto.common.refusal.NoRoom` for one that there are no registers for.
        """
        ...

    def serve(self, job: Any, key: int, here: int) -> Neighbours:
        """Serve a job of a plan (the system's type), whose secret is ``key``, at the endpoint ``here``. Raises as :meth:`add_job`."""
        ...

    def follow(self, job: Any) -> None:
        """A later version of a job's plan. Raises ``ValueError`` if it cannot be followed."""
        ...

    def hold(self, job: int, scheduled: Sequence[Any]) -> None:
        """Have the next sub-models of a job, by its number, where parts of tensors have slots of their own."""
        ...

    def remove_job(self, job: int) -> None:
        """Forget a job, by its number. Raises ``KeyError`` if it is not served."""
        ...
