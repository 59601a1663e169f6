"""Small collectives between the ranks of one host, in shared memory: no socket and no agent on the way.

A job whose ranks are all on one host gets a piece of memory from its agent, mapped by every rank. To reduce a small tensor, a
rank copies it there and counts up; when all ranks have counted as far, each of them sums all copies for itself, with the number
format of any other round, so that all get the same bits. The memory has room for :data:`DEPTH` collectives per rank, used in
turn. A rank overwrites its copy only when all have read it, which they count as well. Ranks look at each other's words and
copies only: what a rank has called, and with which array, it remembers by itself.

Layout: one line of 64 bytes per rank (words of :class:`Word`), then per rank :data:`DEPTH` entries of :data:`ENTRY_BYTES`: the
length of the call's description (uint32), the description (msgpack), and at :data:`DATA_OFFSET` the tensor. Every word has one
writer. Waiting gives the processor to others a few times, then sleeps on the word (futex(2)). A count must not be seen before
the copy that it speaks of, and Python has no fences: only processors that keep stores in order have exchanges
(:data:`ORDERED`).
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from inanet.client.conversation import Outcome
from inanet.errors import FabricError, InaError, MismatchError, WorkerLostError, refusal_error
from inanet.messages.segments import DATA_OFFSET, DEPTH, ENTRY_BYTES, LINE_BYTES, MOST_BYTES
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import TensorSpec, difference, tensor_spec

#: how often the processor is given to others before a rank sleeps
YIELDS = 20
#: seconds between two looks at what the agent has said, while asleep
SLICE_SECONDS = 0.05
#: seconds between two looks at whether others have read their results, when a rank is :data:`DEPTH` collectives ahead of them
READ_SECONDS = 1e-4
#: tensors whose state is kept, the same on all ranks
MOST_TENSORS = 1024

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
#: futex(2) in the kernel's table, of processors that keep stores, and loads, in order
_SYS_FUTEX = {"x86_64": 202, "s390x": 238}.get(os.uname().machine, -1)
#: whether this machine may have exchanges
ORDERED = _SYS_FUTEX >= 0
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word(IntEnum):
    """Words of a rank's line, uint32 each, modulo 2^32."""

    #: collectives that the rank has put into this memory
    ARRIVED = 0
    #: collectives of this memory whose copies it has read
    READ = 1
    #: number of the last collective that it has called, here or at the agent
    CALLED = 2
    #: 1 once the rank has left the job
    LEFT = 3


@dataclass(slots=True, eq=False)
class _Entry:
    """A collective that this rank has put into the memory and not read yet."""

    #: its number in this memory
    number: int
    #: of the call; what lies in the memory may be written to by other processes
    description: bytes
    dtype: np.dtype[Any]
    size: int
    outcome: Outcome


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
        words = LINE_BYTES // 4
        self._lines = root[: count * LINE_BYTES].view(np.uint32).reshape(count, words)
        self._entries = root[count * LINE_BYTES :].reshape(count, DEPTH, ENTRY_BYTES)
        self._base = root.ctypes.data
        self._others = [position for position in range(count) if position != self._mine]
        self._lock = threading.Lock()
        self._posted = 0
        self._unread: deque[_Entry] = deque()
        #: least recently used first
        self._tensors: dict[TensorSpec, LocalTensor] = {}
        #: why exponents here may differ from those of the other ranks, which ends the job
        self._lost: InaError | None = None

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
        if self._lost is not None:
            raise self._lost
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
            gone = [place for place in behind if self._lines[place, Word.LEFT]]
            # it may have read before it left
            if gone and gone[0] in self._behind():
                raise _gone(self._ranks[gone[0]])
            if time.monotonic() >= begun + seconds:
                raise TimeoutError
            time.sleep(READ_SECONDS)

    def post(self, what: tuple[Any, ...], view: NDArray[Any], outcome: Outcome) -> None:
        """Put a tensor into the memory, where there is room; :meth:`finish` takes the result. Calls follow each other.

        ``what``: name, dtype, shape, op, mode, factor, propagate, the same on all ranks. If this is interrupted, the job is over.
        """
        description = msgpack.packb(what)
        with self._lock:
            number = self._posted + 1
            entry = self._entries[self._mine, number % DEPTH]
            entry[:4].view(np.uint32)[0] = len(description)
            entry[4 : 4 + len(description)] = np.frombuffer(description, np.uint8)
            body = entry[DATA_OFFSET : DATA_OFFSET + view.nbytes].view(view.dtype)
            np.copyto(body.reshape(view.shape), view)
            self._unread.append(_Entry(number, description, view.dtype, view.nbytes, outcome))
            self._posted = number
            # in this order: who sees that this rank has called it looks once more whether it has arrived
            self._lines[self._mine, Word.ARRIVED] = number & 0xFFFFFFFF
            self._lines[self._mine, Word.CALLED] = outcome.seq & 0xFFFFFFFF
        _wake(self._address(self._mine, Word.ARRIVED))

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
        number = self._number(outcome)
        if number == 0:
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
        number = self._number(outcome)
        if number == 0:
            return
        if self._lost is not None:
            raise self._lost
        self._await(number, outcome, deadline)
        self._take_through(number)

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

    def _number(self, outcome: Outcome) -> int:
        """The collective's number in this memory, 0 if it is finished."""
        with self._lock:
            return next((entry.number for entry in self._unread if entry.outcome is outcome), 0)

    def _late(self, number: int) -> int | None:
        """Position of a rank that has not put this collective into the memory, if there is one."""
        arrived = self._lines[:, Word.ARRIVED].tolist()
        for position in self._others:
            if not _reached(arrived[position], number):
                return position
        return None

    def _await(self, number: int, outcome: Outcome, deadline: float) -> None:
        yields = 0
        begun = time.monotonic()
        while (late := self._late(number)) is not None:
            if yields < YIELDS:
                yields += 1
                os.sched_yield()
                continue
            seen = int(self._lines[late, Word.ARRIVED])
            if _reached(seen, number):
                # it came in between, and wakes nobody any more
                continue
            outcome.awaited_ranks = (self._ranks[late],)
            outcome.awaited = f"rank {self._ranks[late]} of this host did not call it yet"
            self._watch(outcome, begun)
            self._check(late, number, outcome)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            _sleep(self._address(late, Word.ARRIVED), seen, min(left, SLICE_SECONDS))

    def _check(self, late: int, number: int, outcome: Outcome) -> None:
        """Raise if the rank at ``late`` will not put this collective into the memory."""
        line = self._lines[late].tolist()
        if _reached(int(self._lines[late, Word.ARRIVED]), number):
            return
        rank = self._ranks[late]
        if line[Word.LEFT]:
            raise _gone(rank)
        if _reached(line[Word.CALLED], outcome.seq):
            raise MismatchError(
                f"ranks do not agree: as its collective {outcome.seq}, rank {rank} called something else than {outcome.name!r}, "
                f"which rank {self._ranks[self._mine]} called; all ranks must reduce the same tensors in the same order",
                round=outcome.seq,
                ranks=(self._ranks[self._mine], rank),
            )

    def _sum(self, entry: _Entry) -> InaError | None:
        """Sum one collective into ``outcome.result``, which belongs to nobody else."""
        outcome, own = entry.outcome, entry.description
        said = [self._description(position, entry.number) for position in range(len(self._ranks))]
        said[self._mine] = own
        spec = _spec(own)
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
        _wake(self._address(self._mine, Word.ARRIVED))

    def _address(self, position: int, word: Word) -> int:
        return self._base + position * LINE_BYTES + 4 * word


def _gone(rank: int) -> WorkerLostError:
    return WorkerLostError(
        f"rank {rank} is gone: it left while others were in a collective with it", ranks=(rank,)
    )


def _spec(description: bytes) -> TensorSpec:
    name, dtype, shape, op, mode, factor, propagate = msgpack.unpackb(description)
    return tensor_spec(name, dtype, tuple(shape), op, mode, factor, propagate)


def _reached(count: int, number: int) -> bool:
    """Whether a counter modulo 2^32 has come to ``number`` or further."""
    return (count - number) & 0xFFFFFFFF < 1 << 31


def _sleep(address: int, seen: int, seconds: float) -> None:
    """Sleep while the word at ``address`` is ``seen``, for at most ``seconds``."""
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _libc.syscall(
        ctypes.c_long(_SYS_FUTEX),
        ctypes.c_void_p(address),
        _FUTEX_WAIT,
        ctypes.c_uint32(seen),
        ctypes.byref(limit),
        None,
        0,
    )


def _wake(address: int) -> None:
    """Wake whoever sleeps on the word at ``address``."""
    _libc.syscall(ctypes.c_long(_SYS_FUTEX), ctypes.c_void_p(address), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)
