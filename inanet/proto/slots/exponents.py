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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.header import tag_of
from inanet.kernels.jit import njit
from inanet.proto.common.plan import NodePlan
from inanet.proto.slots.ps import TensorServer, drops_by_label
from inanet.proto.slots.tenants import members_of
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.serial import is_newer
from inanet.wire.xagg import (
    CHECKSUM_WORD,
    HEADER_WORDS,
    MAGIC_VERSION,
    PAYLOAD_BYTES,
    ROW_BYTES,
    ROW_WORDS,
    TAG_WORD,
    VALUES,
    Kind,
    MalformedPacket,
    decode,
)

#: blocks whose exponents fit a packet
GROUP = PAYLOAD_BYTES
#: packets that a worker may have unanswered
WINDOW = 96


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
        packet = _packet(
            Kind.DATA,
            self.job,
            self.bit,
            group,
            question.round & 0xFFFFFFFF,
            question.tensor,
            exponents,
            self.key,
        )
        where = (question.tensor, question.round & 0xFFFFFFFF, group)
        self._pending[where] = _Pending(question, packet, now, self._timeout)

    def forget(self, question: Question) -> None:
        """Stop asking: the round has been given up."""
        self._pending = {w: p for w, p in self._pending.items() if p.question is not question}

    def receive(self, batch: PacketBatch, index: int) -> Drop:
        """Take one packet that has come from the root."""
        packet = _read(batch.packet(index), Kind.RESULT, self.key)
        if isinstance(packet, Drop):
            return packet
        if packet.job != self.job:
            return Drop.FOREIGN_JOB
        pending = self._pending.pop((packet.tensor, packet.round, packet.group), None)
        if pending is None:
            return Drop.DUPLICATE
        question, start = pending.question, packet.group * GROUP
        part = question.table[start : start + GROUP]
        part[:] = packet.exponents[: len(part)]
        question.agreed[packet.group] = True
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
        packet = _read(data, Kind.DATA, job.key)
        if isinstance(packet, Drop):
            return packet
        if job.members.get(source) != packet.host:
            return Drop.FOREIGN_HOST
        rounds = job.tables.setdefault(packet.tensor, {})
        table = rounds.get(packet.round)
        if table is None:
            if len(rounds) > 1 and not all(is_newer(packet.round, known) for known in rounds):
                return Drop.STALE_ROUND
            table = rounds[packet.round] = _Table()
            while len(rounds) > 2:
                del rounds[next(r for r in rounds if not any(is_newer(r, other) for other in rounds))]
        bitmap = table.bitmaps.get(packet.group, 0)
        if bitmap & packet.host:
            if bitmap == job.full:
                self._answer(job, packet, table, [source])
            return Drop.DUPLICATE
        known = table.maxima.get(packet.group)
        table.maxima[packet.group] = (
            packet.exponents if known is None else np.maximum(known, packet.exponents)
        )
        table.bitmaps[packet.group] = bitmap | packet.host
        if bitmap | packet.host == job.full:
            self._answer(job, packet, table, list(job.members))
        return Drop.OK

    def _answer(self, job: _RootJob, packet: "_Exponents", table: _Table, to: list[int]) -> None:
        maxima = table.maxima[packet.group]
        answer = _packet(
            Kind.RESULT, packet.job, 0, packet.group, packet.round, packet.tensor, maxima, job.key
        )
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


class _Exponents(NamedTuple):
    """One packet, read."""

    job: int
    host: int
    group: int
    round: int
    tensor: int
    #: uint8[1024]
    exponents: NDArray[np.uint8]


@njit("void(int32[::1], uint64)", cache=True, nogil=True)
def _seal(words: Any, key: int) -> None:
    """Write tag and checksum of a row."""
    words[TAG_WORD] = np.int32(
        tag_of(
            np.uint32(words[0]),
            np.uint32(words[1]),
            np.uint32(words[2]),
            np.uint32(words[3]),
            np.uint32(words[4]),
            key,
        )
    )
    words[CHECKSUM_WORD] = np.int32(row_checksum(words, HEADER_WORDS, VALUES))


def _packet(
    kind: Kind,
    job: int,
    host: int,
    group: int,
    round_: int,
    tensor: int,
    exponents: NDArray[np.uint8],
    key: int,
) -> bytes:
    words = np.zeros(ROW_WORDS, np.int32)
    words[:TAG_WORD].view(np.uint32)[:] = (MAGIC_VERSION | kind << 8 | job << 16, host, group, round_, tensor)
    words[HEADER_WORDS:].view(np.uint8)[: len(exponents)] = exponents
    _seal(words, key)
    return words.tobytes()


def _read(data: bytes, kind: Kind, key: int) -> _Exponents | Drop:
    """A packet of exponents, or why it is none."""
    if len(data) == ROW_BYTES:
        words = np.frombuffer(data, np.int32)
        sealed = words.copy()
        _seal(sealed, key)
        w0, host, group, round_, w4 = words[:TAG_WORD].view(np.uint32).tolist()
        whole = words[TAG_WORD] == sealed[TAG_WORD] and words[CHECKSUM_WORD] == sealed[CHECKSUM_WORD]
        if whole and w0 & 0xFFFF == MAGIC_VERSION | kind << 8:
            values = words[HEADER_WORDS:CHECKSUM_WORD].view(np.uint8)
            return _Exponents(w0 >> 16, host, group, round_, w4 & 0xFFFF, values)
    try:
        decode(data, key)
    except MalformedPacket as error:
        return Drop[error.reason.upper()]
    return Drop.BAD_TYPE


def _transmission(destination: int, packets: list[bytes]) -> Transmission:
    size = len(packets[0])
    # writable, as devices have it
    arena = np.frombuffer(bytearray().join(packets), np.uint8)
    return Transmission(destination, arena, np.arange(len(packets), dtype=np.int64) * size, size)
