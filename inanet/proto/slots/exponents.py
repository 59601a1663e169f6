"""Exponents at the root: where switches cannot compare, they go there directly, a thousandth of the bytes.

Every worker sends the exponents of its blocks, 1024 a packet, to the root, and the root sends the largest of each back to
everybody. The packets are XAgg's (:mod:`inanet.wire.xagg`): DATA up, RESULT down, with the job's keyed tag and a checksum;
``gradient`` is the group of 1024 blocks, ``shard`` the tensor, ``host`` the worker's bit. Taking a maximum twice changes
nothing, so repetition is all that loss needs: a worker repeats until it is answered, the root answers what is complete.

What an exponent means is up to the tensor (:mod:`inanet.proto.slots.stream`): in its first round the block's own, later
the one that a block needs if what was carried over does not suit it, else 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import NodePlan
from inanet.proto.slots.ps import TensorServer, drops_by_label
from inanet.proto.slots.tenants import members_of
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.serial import is_newer
from inanet.wire.xagg import PAYLOAD_BYTES, Kind, MalformedPacket, Packet, decode

#: blocks whose exponents fit a packet
GROUP = PAYLOAD_BYTES
#: packets that a worker may have unanswered
WINDOW = 32


@dataclass(slots=True)
class Question:
    """The exponents of one round of one tensor, as far as they are agreed: ``agreed[g]`` for group *g* of ``table``."""

    tensor: int
    round: int
    table: NDArray[np.uint8]
    agreed: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.agreed = np.zeros(-(-len(self.table) // GROUP), np.bool_)

    @property
    def done(self) -> bool:
        """Whether all of it is agreed."""
        return bool(self.agreed.all())


@dataclass(slots=True)
class _Pending:
    question: Question
    packet: bytes
    due: float
    interval: float


class ExponentClient:
    """A worker's side. ``root`` is an address, ``bit`` the worker's own; ``timeout`` seconds grow by half up to ``longest``.

    By half: data waits for the answer in a tensor's first round, and one worker's loss holds up all.
    """

    def __init__(
        self, job: int, root: int, bit: int, key: int, *, timeout: float = 0.01, longest: float = 0.5
    ) -> None:
        self.job, self.root, self.bit, self.key = job, root, bit, key
        self._timeout, self._longest = timeout, longest
        self._pending: dict[tuple[int, int, int], _Pending] = {}
        self.repeated = 0

    @property
    def room(self) -> int:
        """Groups that may be offered before one is answered."""
        return WINDOW - len(self._pending)

    def offer(self, question: Question, group: int, exponents: NDArray[np.uint8], now: float) -> None:
        """Send this worker's exponents of a group, until they are answered."""
        packet = Packet(
            Kind.DATA,
            job=self.job,
            host=self.bit,
            gradient=group,
            round=question.round & 0xFFFFFFFF,
            shard=question.tensor,
            plan=0,
            attempt=0,
            payload=exponents.tobytes().ljust(PAYLOAD_BYTES, b"\0"),
        ).encode(self.key)
        where = (question.tensor, question.round & 0xFFFFFFFF, group)
        self._pending[where] = _Pending(question, packet, now, self._timeout)

    def forget(self, question: Question) -> None:
        """Stop asking: the round has been given up."""
        self._pending = {w: p for w, p in self._pending.items() if p.question is not question}

    def receive(self, batch: PacketBatch, index: int) -> Drop:
        """Take one packet that has come from the root."""
        try:
            packet = decode(batch.packet(index), self.key)
        except MalformedPacket as error:
            return Drop[error.reason.upper()]
        if packet.kind is not Kind.RESULT or packet.job != self.job:
            return Drop.BAD_TYPE if packet.kind is not Kind.RESULT else Drop.FOREIGN_JOB
        pending = self._pending.pop((packet.shard, packet.round, packet.gradient), None)
        if pending is None:
            return Drop.DUPLICATE
        question, start = pending.question, packet.gradient * GROUP
        part = question.table[start : start + GROUP]
        part[:] = np.frombuffer(packet.payload, np.uint8)[: len(part)]
        question.agreed[packet.gradient] = True
        return Drop.OK

    def transmit(self, now: float) -> list[Transmission]:
        """What is new, and what has waited too long for its answer."""
        out = []
        for pending in self._pending.values():
            if pending.due <= now:
                self.repeated += pending.interval > self._timeout
                pending.due = now + pending.interval
                pending.interval = min(1.5 * pending.interval, self._longest)
                out.append(pending.packet)
        return [_transmission(self.root, out)] if out else []

    def timer(self) -> float | None:
        """When :meth:`transmit` has something to repeat."""
        return min((pending.due for pending in self._pending.values()), default=None)


@dataclass(slots=True)
class _Table:
    """What the root has of one round: per group, who is in and the maxima."""

    bitmaps: dict[int, int] = field(default_factory=dict)
    maxima: dict[int, NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(slots=True)
class _RootJob:
    key: int
    members: dict[int, int]
    full: int
    #: per tensor the last two rounds: nobody begins a third before everybody has answers to the first
    tables: dict[int, dict[int, _Table]] = field(default_factory=dict)


class ExponentRoot(TensorServer):
    """The root's side, for any number of jobs. A machine of its own with an address of its own."""

    def __init__(self) -> None:
        self._jobs: dict[int, _RootJob] = {}
        self._out: dict[int, list[bytes]] = {}
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)

    def add_job(self, job: int, key: int, members: Mapping[int, int]) -> None:
        """Serve a job; ``members`` maps the addresses of its workers to their bits."""
        full = 0
        for bit in members.values():
            full |= bit
        self._jobs[job] = _RootJob(key, dict(members), full)

    def serve(self, plan: NodePlan) -> None:
        """Serve the job of a plan."""
        job = plan.switched
        assert job is not None, "a plan without a switch"
        self.add_job(job.number, plan.key, members_of(job.workers))

    def remove_job(self, job: int) -> None:
        """Forget a job."""
        self._jobs.pop(job, None)

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take packets of workers."""
        for index in range(len(batch)):
            self.drops[self._take(batch.packet(index), int(batch.sources[index]))] += 1

    def _take(self, data: bytes, source: int) -> Drop:
        job = self._jobs.get(int.from_bytes(data[2:4], "little"))
        if job is None:
            return Drop.FOREIGN_JOB
        try:
            packet = decode(data, job.key)
        except MalformedPacket as error:
            return Drop[error.reason.upper()]
        if packet.kind is not Kind.DATA:
            return Drop.BAD_TYPE
        if job.members.get(source) != packet.host:
            return Drop.FOREIGN_HOST
        rounds = job.tables.setdefault(packet.shard, {})
        table = rounds.get(packet.round)
        if table is None:
            if len(rounds) > 1 and not all(is_newer(packet.round, known) for known in rounds):
                return Drop.STALE_ROUND
            table = rounds[packet.round] = _Table()
            while len(rounds) > 2:
                del rounds[next(r for r in rounds if not any(is_newer(r, other) for other in rounds))]
        bitmap = table.bitmaps.get(packet.gradient, 0)
        if bitmap & packet.host:
            if bitmap == job.full:
                self._answer(job, packet, table, [source])
            return Drop.DUPLICATE
        mine = np.frombuffer(packet.payload, np.uint8)
        known = table.maxima.get(packet.gradient)
        table.maxima[packet.gradient] = mine if known is None else np.maximum(known, mine)
        table.bitmaps[packet.gradient] = bitmap | packet.host
        if bitmap | packet.host == job.full:
            self._answer(job, packet, table, list(job.members))
        return Drop.OK

    def _answer(self, job: _RootJob, packet: Packet, table: _Table, to: list[int]) -> None:
        answer = Packet(
            Kind.RESULT,
            job=packet.job,
            host=0,
            gradient=packet.gradient,
            round=packet.round,
            shard=packet.shard,
            plan=0,
            attempt=0,
            payload=table.maxima[packet.gradient].tobytes(),
        ).encode(job.key)
        for endpoint in to:
            self._out.setdefault(endpoint, []).append(answer)

    def transmit(self, now: float) -> list[Transmission]:
        """Answers to what has become complete, or was asked for again."""
        out, self._out = self._out, {}
        return [_transmission(endpoint, packets) for endpoint, packets in out.items()]

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        return {"exponent_packets": int(self.drops[Drop.OK])}

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since the start, by the label of every reason."""
        return drops_by_label(self.drops)


def _transmission(destination: int, packets: list[bytes]) -> Transmission:
    size = len(packets[0])
    # writable, as devices have it
    arena = np.frombuffer(bytearray().join(packets), np.uint8)
    return Transmission(destination, arena, np.arange(len(packets), dtype=np.int64) * size, size)
