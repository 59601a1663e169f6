"""Large private tensors of the ranks of one host: each rank reads the others' memory, and writes its own only.

Each rank sums its share of the tensor, a range of fragments, from all ranks' tensors into its own (process_vm_readv(2), a piece
at a time that fits the cache), with the number format of any other round; then it reads the other shares from those who summed
them. Nothing is copied to shared memory and back. In the memory that they share (:mod:`inanet.client.exchange`), ranks tell where
their tensors lie and how far they are. Nobody writes into another process, so a process that dies, and even another one that has
got its number, can spoil nothing but a result that nobody takes: at the end of each step all others are looked at.

It is done where all ranks of a call wait for it, with float32, a prologue and contiguous arrays of their own. Otherwise, and where
the system does not let processes read each other (Yama, seccomp, namespaces), all ranks let the agent do it. Which of
both, all ranks find out alike: by the word :attr:`Word.ANNOUNCED` of each, twice the collective's number, plus one for who would
read; and by the same word of the line for all, :attr:`Word.DECIDED`, which is written once for a collective: by the first rank
that finds that all would read, or by one that would, but has found a reason against it (its time is up, descriptions differ).
"""

import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.client import meeting
from inanet.client.conversation import Outcome
from inanet.client.exchange import MOST_FRAGMENTS, SLICE_SECONDS, YIELDS, KnownCall, gone
from inanet.errors import InaError, RoundTimeout, WorkerLostError, refusal_error
from inanet.kernels.exponents import first_nonfinite
from inanet.kernels.layout import BLOCK
from inanet.messages.segments import Word, lines_of, notes_offset
from inanet.proto.common.local import Refusal, nonfinite

#: smallest tensor that is worth it, bytes
LEAST_BYTES = 4 << 20
#: fragments summed at a time: with those of the other ranks, they stay in the cache
PIECE = MOST_FRAGMENTS
_TOKEN_BYTES = 16
#: where token and description begin in them
_TOKEN, _DESCRIPTION = 64, 128
#: longest description, bytes
_MOST_DESCRIBED = 3072
_ABLE, _UNABLE = 1, 2


class Note(IntEnum):
    """What a rank tells of a collective, int64 each."""

    #: where its tensor lies, its process, and where there its token lies
    ADDRESS = 0
    PROCESS = 1
    TOKEN = 2
    #: what it refuses of its share: position of the rank to blame or -1, element, bits of the value
    BLAMED = 3
    ELEMENT = 4
    BITS = 5


_word = {word: 4 * int(word) for word in Word}
_log = logging.getLogger("inanet")


class PeerMemory:
    """One rank's side. ``memory``, ``ranks`` and ``watch`` as for :class:`~inanet.client.exchange.Exchange`. One thread at a time."""

    def __init__(
        self, memory: Any, ranks: Sequence[int], rank: int, watch: Callable[[Outcome, float], None]
    ) -> None:
        self._ranks = tuple(ranks)
        self._mine = self._ranks.index(rank)
        self._watch = watch
        count = len(self._ranks)
        root = np.frombuffer(memory, np.uint8)
        self._base = root.ctypes.data
        self._lines = lines_of(memory, count)
        self._notes = root[notes_offset(count, 0) : notes_offset(count, count)].reshape(count, -1)
        #: columns are of :class:`Note`
        self._told = self._notes[:, :_TOKEN].view(np.int64)
        self._patience = np.array([0, meeting.FEW], np.int64)
        #: collectives that were done here
        self._done = 0
        self._token = np.frombuffer(os.urandom(_TOKEN_BYTES), np.uint8)
        #: whether all ranks can read each other; None: not known yet
        self._able: bool | None = None
        self._pids = np.zeros(count, np.int64)
        self._ends: dict[int, int] = {}
        self._alive = select.poll()
        self._scratch = np.zeros(0, np.uint8)

    @property
    def able(self) -> bool:
        """Whether ranks can read each other, as far as it is known."""
        return self._able is not False

    def fits(self, view: NDArray[Any], dtype: str, op: str, mode: str) -> bool:
        """Whether this rank would read such a tensor of the others."""
        return (
            self._able is not False
            and dtype == "f32"
            and view.nbytes >= LEAST_BYTES
            and mode == "prologue"
            and op in ("sum", "mean")
            and bool(view.flags.carray)
        )

    # ------------------------------------------------------------ agreeing

    def called(self, seq: int) -> None:
        """This rank has called collective ``seq`` at the agent."""
        self._count_up(Word.ANNOUNCED, 2 * seq, 2 * seq)

    def agree(
        self,
        call: KnownCall,
        view: NDArray[Any],
        outcome: Outcome,
        deadline: float,
        called: Callable[[int], None],
    ) -> bool:
        """Wait until all ranks have called a collective; whether all of them would do it here. If not, nothing was done.
        ``called`` is told that this rank has called it.

        Raises the error that ended the job.
        """
        notes = self._notes[self._mine]
        if call.description.size > _MOST_DESCRIBED:
            return False
        told = self._told[self._mine]
        told[Note.ADDRESS] = view.__array_interface__["data"][0]
        told[Note.PROCESS], told[Note.TOKEN], told[Note.BLAMED] = os.getpid(), self._token.ctypes.data, -1
        notes[_TOKEN : _TOKEN + _TOKEN_BYTES] = self._token
        notes[_DESCRIPTION : _DESCRIPTION + call.description.size] = call.description
        seq = outcome.seq
        self._count_up(Word.ANNOUNCED, 2 * seq + 1, 2 * seq)
        # in this order: who sees that this rank has called it looks once more whether it has announced it
        called(seq)
        wanted = self._all_would(call, outcome, deadline)
        if not meeting.decide(self._base + _word[Word.DECIDED], seq, wanted):
            return False
        if self._able is None:
            self._try(outcome, deadline)
        return bool(self._able)

    def _all_would(self, call: KnownCall, outcome: Outcome, deadline: float) -> bool:
        seq = outcome.seq
        if not self._await(Word.ANNOUNCED, 2 * seq, outcome, deadline, "did not call it yet", elsewhere=True):
            return False
        if any(word != (2 * seq + 1) & 0xFFFFFFFF for word in self._lines[:, Word.ANNOUNCED].tolist()):
            return False
        # of what differs, the agent tells everybody
        where = slice(_DESCRIPTION, _DESCRIPTION + call.description.size)
        return all((notes[where] == call.description).all() for notes in self._notes)

    def _try(self, outcome: Outcome, deadline: float) -> None:
        """Find out whether all ranks can read each other; in the job's first collective that is done here."""
        hindrance = self._open()
        self._count_up(Word.ABLE, _UNABLE if hindrance else _ABLE, _ABLE)
        self._await(Word.ABLE, _ABLE, outcome, deadline, "is not done with its part")
        self._able = not (self._lines[:, Word.ABLE] == _UNABLE).any()
        if hindrance and self._mine == 0:
            _log.warning(
                "ranks of this host cannot read each other's memory (%s): private tensors are copied to shared memory and "
                "back, which takes about twice as long; 'ina doctor' says what to do",
                hindrance,
            )

    def _open(self) -> str:
        """Why this rank cannot read one of the others; empty if it can."""
        for position in self._others():
            told = self._told[position].tolist()
            pid = told[Note.PROCESS]
            try:
                # in this order: whoever has the token afterwards has had the number
                self._ends[position] = end = os.pidfd_open(pid)
            except OSError as error:
                return f"pidfd_open: {error.strerror}"
            room = np.zeros(_TOKEN_BYTES, np.uint8)
            code = meeting.read_process(pid, told[Note.TOKEN], room.ctypes.data, _TOKEN_BYTES)
            if code:
                return f"process_vm_readv: {os.strerror(code)}"
            if (room != self._notes[position][_TOKEN : _TOKEN + _TOKEN_BYTES]).any():
                return "other namespaces of processes"
            self._alive.register(end, select.POLLIN)
            self._pids[position] = pid
        return ""

    # ------------------------------------------------------------ summing

    def reduce(self, call: KnownCall, view: NDArray[Any], outcome: Outcome, deadline: float) -> None:
        """A collective that all ranks have agreed to do here. Its own error is in ``outcome``.

        Raises what ends the job, also at the ``deadline`` (time.monotonic).
        """
        flat = view.reshape(-1)
        count, ranks, form = flat.size, len(self._ranks), call.form
        assert form is not None
        fragments = -(-count // BLOCK)
        shares = [fragments * position // ranks for position in range(ranks + 1)]
        addresses = self._told[:, Note.ADDRESS].copy()
        if self._scratch.size == 0:
            self._scratch = np.zeros((ranks - 1) * PIECE * BLOCK * 4, np.uint8)
        lo, hi = shares[self._mine], shares[self._mine + 1]
        failed = np.zeros(2, np.int64)
        code = meeting.sum_share(
            self._pids,
            addresses,
            self._mine,
            lo,
            hi,
            count,
            PIECE,
            form,
            call.exponents,
            not call.spec.propagate,
            self._scratch,
            failed,
        )
        if code == meeting.FAILED:
            raise self._gone(int(failed[0]), int(failed[1]))
        if code >= 0:
            self._blame(flat, addresses, int(code) * BLOCK, min(hi * BLOCK, count))
        self._done += 1
        self._step(Word.SUMMED, outcome, deadline)
        refusal = self._refusal(call)
        if refusal is None:
            for position in self._others():
                begin, end = shares[position] * BLOCK * 4, min(shares[position + 1] * BLOCK, count) * 4
                if begin < end:
                    self._read(
                        position, addresses[position] + begin, addresses[self._mine] + begin, end - begin
                    )
        self._step(Word.FETCHED, outcome, deadline)
        outcome.finish(None if refusal is None else refusal_error(refusal, self._ranks, outcome.seq))

    def _others(self) -> list[int]:
        """Positions, from this rank's neighbour on: not all begin with the same one."""
        count = len(self._ranks)
        return [(self._mine + step) % count for step in range(1, count)]

    def _read(self, position: int, remote: int, local: int, size: int) -> None:
        code = meeting.read_process(int(self._pids[position]), int(remote), int(local), size)
        if code:
            raise self._gone(position, code)

    def _blame(self, flat: NDArray[Any], addresses: NDArray[np.int64], low: int, high: int) -> None:
        """Note whose NaN or infinity is in the way between two elements of this rank's share."""
        for position in range(len(self._ranks)):
            if position == self._mine:
                values = flat[low:high]
            else:
                values = np.empty(high - low, np.float32)
                self._read(position, addresses[position] + 4 * low, values.ctypes.data, values.nbytes)
            index = int(first_nonfinite(values.view(np.uint32), False))
            if index >= 0:
                told = self._told[self._mine]
                told[Note.ELEMENT] = low + index
                told[Note.BITS] = values.view(np.uint32)[index]
                told[Note.BLAMED] = position
                return

    def _refusal(self, call: KnownCall) -> Refusal | None:
        """What the ranks refuse, the same on all of them."""
        blamed = [tuple(told) for told in self._told[:, Note.BLAMED : Note.BITS + 1].tolist() if told[0] >= 0]
        if not blamed:
            return None
        position, index, bits = min(blamed)
        return nonfinite(call.spec, position, index, np.uint32(bits).view(np.float32))

    # ------------------------------------------------------------ waiting

    def _count_up(self, word: Word, value: int, number: int) -> None:
        meeting.count_up(self._base, len(self._ranks), self._mine, _word[word], _word[word], value, number)

    def _step(self, word: Word, outcome: Outcome, deadline: float) -> None:
        """Wait until all ranks have done a step. Raises if one has died: what was read from it may be another's."""
        dead = self._alive.poll(0)
        if dead:
            raise self._gone(next(place for place, end in self._ends.items() if end == dead[0][0]), 0)
        self._count_up(word, self._done, self._done)
        self._await(word, self._done, outcome, deadline, "is not done with its part")

    def _await(
        self,
        word: Word,
        number: int,
        outcome: Outcome,
        deadline: float,
        what: str,
        *,
        elsewhere: bool = False,
    ) -> bool:
        """Wait until all ranks have counted as far. With ``elsewhere``, False if one has called something else, or at the deadline."""
        begun = time.monotonic()
        yields = YIELDS
        while True:
            left = deadline - time.monotonic()
            late = meeting.wait(
                self._base,
                len(self._ranks),
                _word[word],
                _word[word],
                number,
                0,
                yields,
                int(max(0.0, min(left, SLICE_SECONDS)) * 1e9),
                self._patience,
            )
            if late < 0:
                return True
            yields = 0
            rank = self._ranks[late]
            outcome.awaited_ranks = (rank,)
            outcome.awaited = f"rank {rank} of this host {what}"
            self._watch(outcome, begun)
            line = self._lines[late].tolist()
            if meeting.reached(int(self._lines[late, word]), number):
                continue
            over = time.monotonic() >= deadline
            if elsewhere:
                if over or line[Word.LEFT] or meeting.reached(line[Word.CALLED], outcome.seq):
                    return False
            elif line[Word.LEFT]:
                raise gone(rank)
            elif over:
                raise RoundTimeout(f"no result in time; {outcome.awaited}", round=outcome.seq, ranks=(rank,))

    def _gone(self, position: int, code: int) -> InaError:
        rank = self._ranks[position]
        why = f" (process_vm_readv: {os.strerror(code)})" if code else ""
        return WorkerLostError(
            f"rank {rank} is gone: it died while others read its memory{why}", ranks=(rank,)
        )

    def close(self) -> None:
        """Let go of the other processes."""
        for end in self._ends.values():
            os.close(end)
        self._ends.clear()
