"""Small collectives between the ranks of one host, in shared memory: no socket and no agent on the way.

A job whose ranks are all on one host gets a piece of memory from its agent, mapped by every rank. To reduce a small tensor, a
rank copies it there and counts up; when all ranks have counted as far, each of them sums all copies for itself, with the number
format of any other round, so that all get the same bits. The memory has room for :data:`DEPTH` collectives per rank, used in
turn. A rank overwrites its copy only when all have read it, which they count as well. Ranks look at each other's words and
copies only: what a rank has called, and with which array, it remembers by itself.

Layout: a line of 64 bytes for all, then one per rank (words of :class:`Word`), then per rank :data:`DEPTH` entries of
:data:`ENTRY_BYTES`: the length of the call's description (uint32), the description (msgpack), and at :data:`DATA_OFFSET` the
tensor. A rank's words have one writer; the line for all has the last collective that all ranks have put here. Who waits looks
for a moment if each rank has a processor to itself, then gives the processor to others a few times, then sleeps on the line for
all (futex(2)). What nearly all calls are, float32 with a prologue, is three calls of compiled code
(:mod:`inanet.client.meeting`). Python has no fences: only processors that keep stores in order have exchanges (:data:`ORDERED`).
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from inanet.client import meeting
from inanet.client.conversation import Outcome
from inanet.errors import FabricError, InaError, MismatchError, WorkerLostError, refusal_error
from inanet.messages.segments import DATA_OFFSET, DEPTH, ENTRY_BYTES, LINE_BYTES, MOST_BYTES, Word, lines_of
from inanet.proto.common.formats import Format, make_format
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec, difference, tensor_spec

#: how often a rank with a processor to itself looks, some 20 us, and how often it gives the processor to others, before it sleeps
LOOKS = 4000
YIELDS = 20
#: seconds between two looks at what the agent has said, while asleep
SLICE_SECONDS = 0.05
#: seconds between two looks at whether others have read their results, when a rank is :data:`DEPTH` collectives ahead of them
READ_SECONDS = 1e-4
#: tensors whose state is kept, the same on all ranks
MOST_TENSORS = 1024
#: fragments that compiled code sums at a time
MOST_FRAGMENTS = 64

#: whether this machine may have exchanges
ORDERED = meeting.SYS_FUTEX >= 0
_CGROUP = Path("/sys/fs/cgroup/cpu.max")


class KnownCall:
    """What a rank calls, as often as it likes: name, dtype, shape, op, mode, factor, propagate, the same on all ranks."""

    def __init__(self, what: tuple[Any, ...], ranks: int) -> None:
        packed = msgpack.packb(what)
        #: as it lies in an entry
        self.description = np.frombuffer(len(packed).to_bytes(4, "little") + packed, np.uint8)
        self.address = self.description.ctypes.data
        self.spec = _spec(packed)
        self.title = self.spec.name or f"{self.spec.dtype}{list(self.spec.shape)}"
        #: what compiled code takes, if it sums such tensors
        self.form: NDArray[np.int64] | None = None
        self.exponents = np.zeros(0, np.uint8)
        self._format: Format | None = None
        if self.spec.dtype == "f32" and self.spec.mode is ExponentMode.PROLOGUE:
            self._format = format_ = make_format(self.spec, ranks)
            self.form = addresses_of(format_)
            self.exponents = np.zeros(min(format_.fragments, MOST_FRAGMENTS) * format_.blocks, np.uint8)


def addresses_of(format_: Format) -> NDArray[np.int64]:
    """A format of float32 for compiled code, which must not outlive it: addresses of tables, clamp, fragments, blocks."""
    tables = format_.tables
    assert tables is not None
    places = [table.ctypes.data for table in tables.arrays[:6]]
    return np.array([*places, tables.limit, format_.fragments, format_.blocks], np.int64)


@dataclass(slots=True, eq=False)
class _Entry:
    """A collective that this rank has put into the memory and not read yet."""

    #: its number in this memory
    number: int
    #: what lies in the memory may be written to by other processes
    call: KnownCall
    dtype: np.dtype[Any]
    size: int
    outcome: Outcome
    #: address of the array that the result is wanted in at once; 0: in ``outcome.result``
    out: int = field(default=0)


class Exchange:
    """One rank's side of a job's exchange.

    ``memory`` is the shared memory (buffer protocol, :func:`~inanet.messages.segments.exchange_bytes` long, zeroed at first); ``ranks`` are the job's, sorted;
    ``watch(outcome, since)`` is called now and then while a collective is waited for, since that time (time.monotonic), and raises
    the error that ended the job if it is over. Threads may use an exchange at the same time.
    """

    def __init__(
        self, memory: Any, ranks: Sequence[int], rank: int, watch: Callable[[Outcome, float], None]
    ) -> None:
        self._ranks = tuple(ranks)
        self._mine = self._ranks.index(rank)
        self._watch = watch
        count = len(self._ranks)
        root = np.frombuffer(memory, np.uint8)
        end = LINE_BYTES * (1 + count)
        self._lines = lines_of(memory, count)
        self._entries = root[end : end + count * DEPTH * ENTRY_BYTES].reshape(count, DEPTH, ENTRY_BYTES)
        self._base = root.ctypes.data
        self._places = self._entries.ctypes.data
        self._patience = np.array([0, meeting.FEW], np.int64)
        self._looks = LOOKS if count <= processors() else 0
        self._lock = threading.Lock()
        self._posted = 0
        self._unread: deque[_Entry] = deque()
        #: least recently used first
        self._tensors: dict[TensorSpec, LocalTensor] = {}
        #: why exponents here may differ from those of the other ranks, which ends the job
        self._lost: InaError | None = None
        #: by what was called
        self._calls: dict[tuple[Any, ...], KnownCall] = {}
        #: the same by arguments of :meth:`inanet.client.job.Job.all_reduce` that were found to be right
        self.checked: dict[tuple[Any, ...], KnownCall] = {}

    # ------------------------------------------------------------ calling

    def called(self, seq: int) -> None:
        """Tell the others that this rank has called its collective ``seq``, wherever."""
        with self._lock:
            # another thread may have been faster with the next one
            if not _reached(int(self._lines[self._mine, Word.CALLED]), seq):
                self._lines[self._mine, Word.CALLED] = seq & 0xFFFFFFFF

    def fits(self, view: NDArray[Any]) -> bool:
        """Whether tensors of this size are reduced here; the same on all ranks that call the same collective."""
        return 0 < view.nbytes <= MOST_BYTES

    def make_room(self, outcome: Outcome, seconds: float) -> None:
        """Wait up to ``seconds`` for a free entry, for :meth:`post` to follow.

        Then raises ``TimeoutError``, with who is waited for in ``outcome``, or the error that ended the job.
        """
        begun = time.monotonic()
        while behind := self._behind():
            oldest = self._oldest()
            if oldest is not None and oldest.number <= self._posted + 1 - DEPTH:
                try:
                    self.finish(oldest.outcome, begun + seconds)
                except TimeoutError:
                    outcome.awaited, outcome.awaited_ranks = (
                        oldest.outcome.awaited,
                        oldest.outcome.awaited_ranks,
                    )
                    raise
                continue
            rank = self._ranks[behind[0]]
            outcome.awaited_ranks = (rank,)
            outcome.awaited = f"rank {rank} of this host has {DEPTH} results to take before it"
            # nobody wakes this rank when another has read its results
            self._watch(outcome, begun)
            left = [place for place in behind if self._lines[place, Word.LEFT]]
            # it may have read before it left
            if left and left[0] in self._behind():
                raise gone(self._ranks[left[0]])
            if time.monotonic() >= begun + seconds:
                raise TimeoutError
            time.sleep(READ_SECONDS)

    def call(self, what: tuple[Any, ...]) -> KnownCall:
        """``what``: name, dtype, shape, op, mode, factor, propagate. Raises ``ValueError`` for what no number format can do."""
        call = self._calls.get(what)
        if call is None:
            if len(self._calls) >= MOST_TENSORS:
                self._calls.clear()
                self.checked.clear()
            call = self._calls[what] = KnownCall(what, len(self._ranks))
        return call

    def post(self, call: KnownCall, view: NDArray[Any], outcome: Outcome, *, in_place: bool = False) -> bool:
        """Put a tensor into the memory; False, and nothing was done, if there is no room. :meth:`finish` takes the result, with
        ``in_place`` to where the tensor is. Calls follow each other. If this is interrupted, the job is over.
        """
        contiguous = view.flags.carray
        source = view if contiguous else np.ascontiguousarray(view)
        address, size = source.__array_interface__["data"][0], source.nbytes
        out = address if in_place and contiguous else 0
        with self._lock:
            if self._lost is not None:
                raise self._lost
            number = self._posted + 1
            slot = self._places + (self._mine * DEPTH + number % DEPTH) * ENTRY_BYTES
            if not meeting.post(
                self._base,
                len(self._ranks),
                self._mine,
                number - DEPTH,
                number,
                outcome.seq,
                slot,
                call.address,
                call.description.size,
                address,
                size,
            ):
                return False
            self._posted = outcome.place = number
            self._unread.append(_Entry(number, call, view.dtype, size, outcome, out))
        return True

    def _oldest(self) -> _Entry | None:
        with self._lock:
            return self._unread[0] if self._unread else None

    def _behind(self) -> list[int]:
        """Positions of ranks that have not read what lies in the next entry."""
        floor = self._posted + 1 - DEPTH
        if floor <= 0:
            return []
        read = self._lines[:, Word.READ].tolist()
        return [place for place, count in enumerate(read) if not _reached(count, floor)]

    # ------------------------------------------------------------ results

    def poll(self, outcome: Outcome) -> None:
        """Take the result of a collective, and of all before it, if every rank has put its part there.

        Raises the error with which :meth:`finish` would not wait for that.
        """
        number = outcome.place
        if outcome.finished:
            return
        late = self._late(number)
        if late is None:
            self._take_through(number)
        else:
            self._check(late, number, outcome)

    def finish(self, outcome: Outcome, deadline: float) -> None:
        """Take the results of a collective and of all before it; ``outcome`` is finished then.

        Raises ``TimeoutError`` at ``deadline`` (time.monotonic), or the error that ended the job; who is late then is in
        ``outcome.awaited`` and ``outcome.awaited_ranks``.
        """
        if outcome.finished:
            return
        if self._lost is not None:
            raise self._lost
        self._await(outcome.place, outcome, deadline)
        self._take_through(outcome.place)

    def let_go(self, outcome: Outcome) -> None:
        """The array of a collective that is not finished is its caller's again."""
        with self._lock:
            for entry in self._unread:
                if entry.outcome is outcome:
                    entry.out = 0

    def _take_through(self, number: int) -> None:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            while self._unread and self._unread[0].number <= number:
                entry = self._unread[0]
                try:
                    error = self._sum(entry)
                    self._lines[self._mine, Word.READ] = entry.number & 0xFFFFFFFF
                    self._unread.popleft()
                    entry.outcome.finish(error)
                except BaseException as cause:
                    # done again, it might have other exponents than on the other ranks
                    self._lost = FabricError(
                        f"reducing {entry.outcome.name!r} in shared memory was cut short by {type(cause).__name__}: {cause}",
                        round=entry.outcome.seq,
                    )
                    if isinstance(cause, Exception):
                        raise self._lost from cause
                    raise

    def _late(self, number: int) -> int | None:
        """Position of a rank that has not put this collective into the memory, if there is one."""
        late = meeting.late(self._base, len(self._ranks), _ARRIVED, number)
        return int(late) if late >= 0 else None

    def _await(self, number: int, outcome: Outcome, deadline: float) -> None:
        begun = time.monotonic()
        looks, yields = self._looks, YIELDS
        while True:
            left = deadline - time.monotonic()
            late = meeting.wait(
                self._base,
                len(self._ranks),
                _ARRIVED,
                _ARRIVED,
                number,
                looks,
                yields,
                int(max(0.0, min(left, SLICE_SECONDS)) * 1e9),
                self._patience,
            )
            if late < 0:
                return
            looks = yields = 0
            outcome.awaited_ranks = (self._ranks[late],)
            outcome.awaited = f"rank {self._ranks[late]} of this host did not call it yet"
            self._watch(outcome, begun)
            self._check(late, number, outcome)
            if time.monotonic() >= deadline:
                raise TimeoutError

    def _check(self, late: int, number: int, outcome: Outcome) -> None:
        """Raise if the rank at ``late`` will not put this collective into the memory."""
        line = self._lines[late].tolist()
        if _reached(int(self._lines[late, Word.ARRIVED]), number):
            return
        rank = self._ranks[late]
        if line[Word.LEFT]:
            raise gone(rank)
        if _reached(line[Word.CALLED], outcome.seq):
            raise MismatchError(
                f"ranks do not agree: as its collective {outcome.seq}, rank {rank} called something else than {outcome.name!r}, "
                f"which rank {self._ranks[self._mine]} called; all ranks must reduce the same tensors in the same order",
                round=outcome.seq,
                ranks=(self._ranks[self._mine], rank),
            )

    def _sum(self, entry: _Entry) -> InaError | None:
        """Sum one collective to where it is wanted."""
        outcome, call = entry.outcome, entry.call
        if call.form is not None:
            result = None if entry.out else np.empty(entry.size // entry.dtype.itemsize, entry.dtype)
            code = meeting.sum32(
                self._places + entry.number % DEPTH * ENTRY_BYTES,
                DEPTH * ENTRY_BYTES,
                len(self._ranks),
                call.address,
                call.description.size,
                entry.size // 4,
                call.form,
                call.exponents,
                not call.spec.propagate,
                entry.out if result is None else result.ctypes.data,
            )
            if code == meeting.SUMMED:
                outcome.result = result
                return None
        # what was in the way is found out step by step
        said = [self._description(position, entry.number) for position in range(len(self._ranks))]
        said[self._mine] = own = call.description.tobytes()[4:]
        spec = call.spec
        if any(other != own for other in said):
            specs = [_spec(description) for description in said]
            # what is said of modes does not count where nothing is rounded
            if any(other != spec for other in specs):
                return self._disagreement(outcome.seq, specs)
        tensor = self._tensors.pop(spec, None)
        try:
            if tensor is None:
                tensor = LocalTensor(spec, len(self._ranks))
                if len(self._tensors) >= MOST_TENSORS:
                    del self._tensors[next(iter(self._tensors))]
        except ValueError as error:
            return FabricError(str(error), round=outcome.seq)
        self._tensors[spec] = tensor
        end = DATA_OFFSET + entry.size
        copies = self._entries[:, entry.number % DEPTH, DATA_OFFSET:end]
        arrays = [data.copy().view(entry.dtype) for data in copies]
        refusal = tensor.reduce(arrays)
        if refusal is not None:
            return refusal_error(refusal, self._ranks, outcome.seq)
        outcome.result = arrays[0]
        return None

    def _description(self, position: int, number: int) -> bytes:
        entry = self._entries[position, number % DEPTH]
        length = min(int(entry[:4].view(np.uint32)[0]), DATA_OFFSET - 4)
        packed: bytes = entry[4 : 4 + length].tobytes()
        return packed

    def _disagreement(self, seq: int, specs: list[TensorSpec]) -> MismatchError:
        """The same error on all ranks: what the first one that differs from the first rank has."""
        position = next(place for place, spec in enumerate(specs) if spec != specs[0])
        differs = difference(specs[0], specs[position])
        assert differs is not None
        name, one, other = differs
        ranks = (self._ranks[0], self._ranks[position])
        return MismatchError(
            f"ranks do not agree: {name} is {one} on rank {ranks[0]} but {other} on rank {ranks[1]}; all ranks must reduce the "
            "same tensors in the same order",
            field=name,
            values=(one, other),
            round=seq,
            ranks=ranks,
        )

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Tell the others that this rank has left. What is on its way stays unfinished."""
        self._lines[self._mine, Word.LEFT] = 1


#: offsets in a line
_ARRIVED = 4 * int(Word.ARRIVED)


def processors() -> int:
    """How many this process may use at a time: fewer than there are, where its affinity or its control group says so."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CGROUP.read_text().split()
        if quota != "max":
            count = min(count, int(quota) // int(period))
    return count


def gone(rank: int) -> WorkerLostError:
    """The error for a rank that has left."""
    return WorkerLostError(
        f"rank {rank} is gone: it left while others were in a collective with it", ranks=(rank,)
    )


def _spec(description: bytes) -> TensorSpec:
    name, dtype, shape, op, mode, factor, propagate = msgpack.unpackb(description)
    return tensor_spec(name, dtype, tuple(shape), op, mode, factor, propagate)


def _reached(count: int, number: int) -> bool:
    """Whether a counter modulo 2^32 has come to ``number`` or further."""
    return (count - number) & 0xFFFFFFFF < 1 << 31
