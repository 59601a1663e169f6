"""Exponents at the root: where switches cannot compare, they go there directly, one byte for each block.

Every worker sends the exponents of its blocks, 1024 a packet, to the root, and the root sends the largest of each back to
everybody. The packets are XAgg's (:mod:`inanet.wire.xagg`): DATA up, RESULT down, with the job's keyed tag and a checksum;
``gradient`` is the part of the table, 1024 blocks, ``shard`` the tensor, ``host`` the worker's bit. Taking a maximum twice
changes nothing, so repetition is all that loss needs: a worker repeats until it is answered, the root answers what is
complete. Packets are built and read by batch.

What an exponent means is up to the tensor (:mod:`inanet.proto.slots.stream`): in its first round the block's own, later
the one that a block needs if what was carried over does not suit it, else 0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.header import tag_of
from inanet.kernels.jit import njit
from inanet.proto.common.plan import NodePlan
from inanet.proto.common.recovery import RetransmissionTimer
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
    TAG_WORD,
    VALUES,
    Kind,
)

Index = NDArray[np.int64]
Bytes = NDArray[np.uint8]
#: blocks whose exponents fit a packet: a part of a table
PART = PAYLOAD_BYTES
#: bytes that all workers of a job together may have unanswered at the root, and each of them at least
WINDOW_BYTES, LEAST_BYTES = 1 << 20, 1 << 15
#: parts that the root keeps together
PAGE = 64

_SHORT, _OVERSIZED = int(Drop.SHORT), int(Drop.OVERSIZED)
_MAGIC, _TYPE, _TAG, _CHECKSUM = (
    int(Drop.BAD_MAGIC),
    int(Drop.BAD_TYPE),
    int(Drop.BAD_TAG),
    int(Drop.BAD_CHECKSUM),
)
# as plain numbers, because members of an enumeration are slow for numpy to understand
_OK, _DUPLICATE, _STALE = int(Drop.OK), int(Drop.DUPLICATE), int(Drop.STALE_ROUND)
_FOREIGN_HOST, _FOREIGN_JOB = int(Drop.FOREIGN_HOST), int(Drop.FOREIGN_JOB)
_BAD_FRAGMENT, _AGAIN = int(Drop.BAD_FRAGMENT), 255
_DATA, _RESULT = int(Kind.DATA), int(Kind.RESULT)
_OPTIONS = {"cache": True, "nogil": True, "_nrt": False}
_i64, _u8 = types.int64[::1], types.uint8[::1]


@njit(types.uint32(types.int32[::1], types.uint64), **_OPTIONS)
def _tag(words: Any, key: int) -> Any:
    return tag_of(
        np.uint32(words[0]),
        np.uint32(words[1]),
        np.uint32(words[2]),
        np.uint32(words[3]),
        np.uint32(words[4]),
        key,
    )


@njit(types.void(_u8, types.uint32[::1], _i64, _u8, _i64, types.uint64), **_OPTIONS)
def _write(arena: Any, head: Any, parts: Any, exponents: Any, ats: Any, key: int) -> None:
    """Write packets side by side: word 2 is their part, the others are ``head``'s; their exponents begin at ``ats`` and end with
    the table.
    """
    for k in range(parts.size):
        words = arena[k * ROW_BYTES : (k + 1) * ROW_BYTES].view(np.int32)
        for j in range(TAG_WORD):
            words[j] = np.int32(head[j])
        words[2] = np.int32(parts[k])
        values = arena[k * ROW_BYTES + 4 * HEADER_WORDS : k * ROW_BYTES + 4 * CHECKSUM_WORD]
        count = min(PART, exponents.size - ats[k])
        for j in range(count):
            values[j] = exponents[ats[k] + j]
        words[TAG_WORD] = np.int32(_tag(words, key))
        words[CHECKSUM_WORD] = np.int32(row_checksum(words, HEADER_WORDS, VALUES))


@njit(types.void(_u8, _i64, _i64, types.int64, types.uint64, types.int64[:, ::1], _u8), **_OPTIONS)
def _read(arena: Any, offsets: Any, lengths: Any, kind: int, key: int, fields: Any, reason: Any) -> None:
    """Host, part, round and tensor of packets of a kind into ``fields``, int64[n, 4]; ``reason[k]`` says why one is none."""
    for k in range(offsets.size):
        at = offsets[k]
        if lengths[k] != ROW_BYTES:
            reason[k] = _SHORT if lengths[k] < ROW_BYTES else _OVERSIZED
            continue
        words = arena[at : at + ROW_BYTES].view(np.int32)
        if arena[at] != MAGIC_VERSION:
            reason[k] = _MAGIC
        elif np.int64(arena[at + 1]) != kind:
            reason[k] = _TYPE
        elif np.uint32(words[TAG_WORD]) != _tag(words, key):
            reason[k] = _TAG
        elif np.uint32(words[CHECKSUM_WORD]) != row_checksum(words, HEADER_WORDS, VALUES):
            reason[k] = _CHECKSUM
        else:
            reason[k] = _OK
            for j in range(4):
                fields[k, j] = np.int64(np.uint32(words[1 + j]))
            fields[k, 3] &= 0xFFFF


@njit(types.void(_u8, _i64, _i64, _u8), **_OPTIONS)
def _copy(arena: Any, offsets: Any, parts: Any, table: Any) -> None:
    """Copy exponents of packets into their parts of a table."""
    for k in range(parts.size):
        at, start = offsets[k] + 4 * HEADER_WORDS, parts[k] * PART
        for j in range(min(PART, table.size - start)):
            table[start + j] = arena[at + j]


@njit(types.void(_u8, _i64, _i64, _i64, types.uint32[::1], types.uint8[:, ::1], types.int64, _u8), **_OPTIONS)
def _raise(
    arena: Any, offsets: Any, entries: Any, hosts: Any, bitmaps: Any, maxima: Any, full: int, reason: Any
) -> None:
    """Take packets into entries of a page, each host once; ``reason[k]`` is ``DUPLICATE`` for what is in already, or 255 if the
    entry is complete besides.
    """
    for k in range(entries.size):
        entry, host = entries[k], np.uint32(hosts[k])
        if bitmaps[entry] & host:
            reason[k] = _AGAIN if bitmaps[entry] == full else _DUPLICATE
            continue
        at = offsets[k] + 4 * HEADER_WORDS
        for j in range(PART):
            maxima[entry, j] = max(maxima[entry, j], arena[at + j])
        bitmaps[entry] |= host
        reason[k] = _OK


def _by_round(fields: Index, sound: Index) -> Iterator[tuple[int, int, Index]]:
    """Tensor, round, and which of the packets ``sound`` are theirs."""
    rounds = fields[sound, 2:]
    if len(sound) and (rounds == rounds[0]).all():
        yield int(rounds[0, 1]), int(rounds[0, 0]), sound
        return
    for round_, tensor in np.unique(rounds, axis=0).tolist():
        yield tensor, round_, sound[(rounds == (round_, tensor)).all(axis=1)]


def _packets(
    to: int, head: tuple[int, int, int, int, int], parts: Index, exponents: Bytes, ats: Index, key: int
) -> Transmission:
    arena = np.zeros(len(parts) * ROW_BYTES, np.uint8)
    _write(arena, np.array(head, np.uint32), parts, exponents, ats, key)
    return Transmission(to, arena, np.arange(len(parts), dtype=np.int64) * ROW_BYTES, ROW_BYTES)


def _head(kind: int, job: int, host: int, round_: int, tensor: int) -> tuple[int, int, int, int, int]:
    return MAGIC_VERSION | kind << 8 | job << 16, host, 0, round_ & 0xFFFFFFFF, tensor


@dataclass(slots=True)
class Question:
    """The exponents of one round of one tensor, uint8[blocks]: a worker's ``own``, and the largest in ``table`` as far as they are
    agreed, ``agreed[p]`` for part *p*.
    """

    tensor: int
    round: int
    table: Bytes
    own: Bytes = field(init=False)
    agreed: NDArray[np.bool_] = field(init=False)
    #: of each part: whether it is unanswered, when it leaves next and how long it waits then, when it left first, how often
    waits: NDArray[np.bool_] = field(init=False)
    due: NDArray[np.float64] = field(init=False)
    interval: NDArray[np.float64] = field(init=False)
    sent_at: NDArray[np.float64] = field(init=False)
    times: Index = field(init=False)

    def __post_init__(self) -> None:
        parts = -(-len(self.table) // PART)
        self.own = np.zeros_like(self.table)
        self.agreed, self.waits = np.zeros(parts, np.bool_), np.zeros(parts, np.bool_)
        self.due, self.interval, self.sent_at = np.zeros(parts), np.zeros(parts), np.zeros(parts)
        self.times = np.zeros(parts, np.int64)

    @property
    def done(self) -> bool:
        """Whether all of it is agreed."""
        return bool(self.agreed.all())

    def agreed_from(self, part: int) -> int:
        """The first part from here on that is not agreed."""
        rest = self.agreed[part:]
        return part + (len(rest) if rest.all() else int(np.argmin(rest)))


class Agreement(Protocol):
    """The way on which exponents are agreed."""

    @property
    def room(self) -> int:
        """Parts that may be offered before one is answered."""
        ...

    def offer(self, question: Question, part: int, exponents: Bytes, now: float) -> None:
        """Send this worker's exponents from the beginning of a part on."""
        ...


class ExponentClient:
    """A worker's side. ``root`` is an address, ``bit`` the worker's own. What is not answered is repeated after the timeout,
    ``least`` to ``most`` seconds by the round trips seen, and then with pauses that grow by half.

    By half: data waits for the answer in a tensor's first round, and one worker's loss holds up all.
    """

    def __init__(
        self,
        job: int,
        root: int,
        bit: int,
        key: int,
        *,
        workers: int = 1,
        least: float = 0.01,
        most: float = 0.5,
    ) -> None:
        self.job, self.root, self.bit, self.key = job, root, bit, key
        self.window = max(WINDOW_BYTES // workers, LEAST_BYTES) // ROW_BYTES
        self._most = most
        self._timer = RetransmissionTimer(least, most)
        #: questions with parts that are not answered, by tensor and the round's 32 bits
        self._open: dict[tuple[int, int], Question] = {}
        self._waiting = 0
        #: answers to repeated parts since the last to one that was sent once
        self._unclear = 0
        #: nothing is due before this
        self._due = inf
        self.repeated = 0

    @property
    def room(self) -> int:
        """Parts that may be offered before one is answered."""
        return self.window - self._waiting

    def offer(self, question: Question, part: int, exponents: Bytes, now: float) -> None:
        """Send this worker's exponents from the beginning of a part on, until they are answered."""
        self._open[question.tensor, question.round & 0xFFFFFFFF] = question
        question.own[part * PART : part * PART + len(exponents)] = exponents
        parts = slice(part, part + -(-len(exponents) // PART))
        question.waits[parts], question.due[parts] = True, now
        self._waiting += parts.stop - part
        self._due = min(self._due, now)

    def receive(self, batch: PacketBatch, index: Index, now: float) -> Bytes:
        """Take packets ``index`` that have come from the root; what became of each (:class:`~inanet.wire.drops.Drop`)."""
        reason, fields = np.zeros(len(index), np.uint8), np.zeros((len(index), 4), np.int64)
        _read(
            batch.arena,
            batch.offsets[index],
            batch.lengths[index],
            _RESULT,
            self.key,
            fields,
            reason,
        )
        sound = np.flatnonzero(reason == _OK)
        if not len(sound):
            return reason
        jobs = batch.arena[batch.offsets[index[sound], None] + np.arange(2, 4)].view("<u2")[:, 0]
        reason[sound[jobs != self.job]] = _FOREIGN_JOB
        sound = sound[jobs == self.job]
        for tensor, round_, mine in _by_round(fields, sound):
            reason[mine] = _DUPLICATE
            question = self._open.get((tensor, round_))
            if question is None:
                continue
            parts = fields[mine, 1]
            beyond = parts >= len(question.agreed)
            reason[mine[beyond]] = _BAD_FRAGMENT
            mine, parts = mine[~beyond], parts[~beyond]
            parts, which = np.unique(parts, return_index=True)
            new = question.waits[parts]
            self._take(question, batch, batch.offsets[index[mine[which[new]]]], parts[new], now)
            reason[mine[which[new]]] = _OK
        return reason

    def _take(self, question: Question, batch: PacketBatch, offsets: Index, parts: Index, now: float) -> None:
        _copy(batch.arena, offsets, parts, question.table)
        sent = parts[question.times[parts] == 1]
        self._unclear = 0 if len(sent) else self._unclear + len(parts)
        if self._unclear > self._waiting:
            # all of a window was repeated: the timeout is too short rather than the network bad
            sent = parts
        if len(sent):
            self._timer.measure(now - float(question.sent_at[sent].mean()), len(sent) / self._waiting)
        question.waits[parts], question.agreed[parts] = False, True
        self._waiting -= len(parts)
        if not question.waits.any():
            del self._open[question.tensor, question.round & 0xFFFFFFFF]
        if not self._waiting:
            self._due = inf

    def transmit(self, now: float) -> list[Transmission]:
        """What is new, and what has waited too long for its answer."""
        if self._due > now:
            return []
        out = []
        for question in self._open.values():
            parts = np.flatnonzero(question.waits & (question.due <= now))
            if not len(parts):
                continue
            again = question.times[parts] > 0
            self.repeated += int(np.count_nonzero(again))
            question.times[parts] += 1
            question.sent_at[parts[~again]] = now
            question.interval[parts] = np.where(
                again, np.minimum(1.5 * question.interval[parts], self._most), self._timer.timeout
            )
            question.due[parts] = now + question.interval[parts]
            head = _head(_DATA, self.job, self.bit, question.round, question.tensor)
            out.append(_packets(self.root, head, parts, question.own, parts * PART, self.key))
        self._due = min(
            (float(question.due[question.waits].min(initial=inf)) for question in self._open.values()),
            default=inf,
        )
        return out

    def timer(self) -> float | None:
        """When :meth:`transmit` has something to repeat, or before that."""
        return self._due if self._waiting else None


@dataclass(slots=True)
class _Page:
    """What the root has of up to 64 parts of a round: who is in, and the maxima."""

    bitmaps: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(PAGE, np.uint32))
    maxima: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((PAGE, PART), np.uint8))


@dataclass(slots=True)
class _RootJob:
    key: int
    members: dict[int, int]
    full: int
    #: per tensor the last two rounds, pages by number: nobody begins a third before everybody has answers to the first
    tables: dict[int, dict[int, dict[int, _Page]]] = field(default_factory=dict)

    def table(self, tensor: int, round_: int) -> dict[int, _Page] | None:
        """The pages of a round, unless it is older than those kept."""
        rounds = self.tables.setdefault(tensor, {})
        if round_ not in rounds:
            if len(rounds) > 1 and not all(is_newer(round_, known) for known in rounds):
                return None
            rounds[round_] = {}
            while len(rounds) > 2:
                del rounds[next(r for r in rounds if not any(is_newer(r, other) for other in rounds))]
        return rounds[round_]


class ExponentRoot(TensorServer):
    """The root's side, for any number of jobs. A machine of its own with an address of its own."""

    def __init__(self) -> None:
        self._jobs: dict[int, _RootJob] = {}
        self._out: list[Transmission] = []
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)

    def add_job(self, job: int, key: int, members: Mapping[int, int]) -> None:
        """Serve a job; ``members`` maps the addresses of its workers to their bits."""
        full = 0
        for bit in members.values():
            full |= bit
        self._jobs[job] = _RootJob(key, dict(members), full)

    def serve(self, plan: NodePlan) -> None:
        job = plan.switched
        assert job is not None, "a plan without a switch"
        self.add_job(job.number, plan.key, members_of(job.workers))

    def remove_job(self, job: int) -> None:
        self._jobs.pop(job, None)

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take packets of workers."""
        long = batch.lengths >= 4
        self.drops[Drop.SHORT] += int(np.count_nonzero(~long))
        index = np.flatnonzero(long)
        numbers = batch.arena[batch.offsets[index, None] + np.arange(2, 4)].view("<u2")[:, 0]
        for number in np.unique(numbers).tolist():
            mine = index[numbers == number]
            job = self._jobs.get(number)
            if job is None:
                self.drops[Drop.FOREIGN_JOB] += len(mine)
            else:
                reason = self._take(number, job, batch, mine)
                self.drops += np.bincount(reason, minlength=DROP_CODES)

    def _take(self, number: int, job: _RootJob, batch: PacketBatch, index: Index) -> Bytes:
        offsets, sources = batch.offsets[index], batch.sources[index]
        reason, fields = np.zeros(len(index), np.uint8), np.zeros((len(index), 4), np.int64)
        _read(batch.arena, offsets, batch.lengths[index], _DATA, job.key, fields, reason)
        for source in np.unique(sources).tolist():
            others = (sources == source) & (fields[:, 0] != job.members.get(source, 0))
            reason[(reason == _OK) & others] = _FOREIGN_HOST
        sound = np.flatnonzero(reason == _OK)
        for tensor, round_, these in _by_round(fields, sound):
            table = job.table(tensor, round_)
            if table is None:
                reason[these] = _STALE
                continue
            head = _head(_RESULT, number, 0, round_, tensor)
            pages = fields[these, 1] // PAGE
            for page in np.unique(pages).tolist():
                mine = these[pages == page]
                became = reason[mine]
                entries = fields[mine, 1] - page * PAGE
                its = table.setdefault(page, _Page())
                hosts, bitmaps = fields[mine, 0], its.bitmaps
                _raise(batch.arena, offsets[mine], entries, hosts, bitmaps, its.maxima, job.full, became)
                complete = entries[(became == _OK) & (bitmaps[entries] == job.full)]
                self._answer(job, head, its, page, np.unique(complete), list(job.members))
                again = became == _AGAIN
                for source in np.unique(sources[mine[again]]).tolist():
                    asked = entries[again & (sources[mine] == source)]
                    self._answer(job, head, its, page, np.unique(asked), [source])
                became[again] = _DUPLICATE
                reason[mine] = became
        return reason

    def _answer(
        self,
        job: _RootJob,
        head: tuple[int, int, int, int, int],
        its: _Page,
        page: int,
        entries: Index,
        to: list[int],
    ) -> None:
        if len(entries):
            exponents = its.maxima.reshape(-1)
            one = _packets(to[0], head, entries + page * PAGE, exponents, entries * PART, job.key)
            self._out += [Transmission(member, one.arena, one.offsets, one.length) for member in to]

    def transmit(self, now: float) -> list[Transmission]:
        """Answers to what has become complete, or was asked for again."""
        out, self._out = self._out, []
        return out

    def stats(self) -> dict[str, int]:
        return {"exponent_packets": int(self.drops[Drop.OK])}

    def drops_by_reason(self) -> dict[str, int]:
        return drops_by_label(self.drops)
