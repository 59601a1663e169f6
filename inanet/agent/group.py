"""The local ranks of one job: the k-th collective of each is round k, which starts with the last of them."""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from inanet.agent.session import Session
from inanet.errors import FabricError, InaError, JoinRefused, MismatchError, RoundTimeout, WorkerLostError
from inanet.messages import segments
from inanet.messages.segments import Word
from inanet.proto.common.events import Participation
from inanet.proto.common.plan import TensorSpec, difference
from inanet.proto.slots.systems import TREES
from inanet.service.metrics import Durations

_log: Any = structlog.get_logger("inanet.local")


class Backend(Protocol):
    """What carries a host's collectives. Each ``join`` is followed by one ``leave``, only then by another."""

    async def join(
        self, job: str, ranks: tuple[int, ...], world: int, system: str, progress: Callable[[str], None]
    ) -> None:
        """Called once all local ranks are connected; returns when the job is complete. Raises ``InaError``.

        ``system`` is one of :func:`inanet.proto.slots.systems.tensor_systems`, or trees. ``progress(text)`` tells the processes who is missing. Cancelled if the local ranks give up.
        """
        ...

    def submit(
        self, job: str, round_: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]]
    ) -> "asyncio.Future[Participation | None]":
        """One round: 1, 2, ... without gaps but those of :meth:`mismatch`.

        ``arrays`` are 1-D views of shared memory, one per local rank, ordered by rank, with float16 as
        float16 and bfloat16 as uint16; they are overwritten with the result. The future may raise
        ``InaError``, and completes within a deadline.
        """
        ...

    def mismatch(self, job: str, round_: int, spec: TensorSpec, rank: int, text: str) -> None:
        """Local ranks disagree on a round, which is not submitted: the other hosts must hear of it."""
        ...

    def awaited(self, job: str) -> str:
        """In words, whom joining waits for of which nothing is heard, and rounds that all local ranks have begun."""
        ...

    async def quieten(self, job: str, reason: str) -> None:
        """The job is over, and has rounds under way: returns when nothing writes into their arrays any more. ``leave`` follows."""
        ...

    async def leave(self, job: str, reason: str) -> None:
        """The local ranks are gone, or the job is over. Futures of its rounds need not complete any more."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters for whoever asks."""
        ...


class State(Enum):
    """Where a group is. It only goes forward."""

    #: local ranks are missing
    FORMING = auto()
    #: all are here, the backend joins
    JOINING = auto()
    JOINED = auto()
    #: every call gets the same error
    OVER = auto()


@dataclass(slots=True)
class _Round:
    """Who called a round, and since when somebody waits for it. ``submitted``: the backend may write into its arrays."""

    since: float
    calls: dict[int, tuple[TensorSpec, NDArray[Any]]] = field(default_factory=dict)
    submitted: bool = False


@dataclass(slots=True)
class Tally:
    """Rounds of all jobs of an agent, by how they ended."""

    done: int = 0
    failed: int = 0
    durations: Durations = field(default_factory=Durations)


class Group:
    """The sessions of one job on this host. ``over`` is called once if it ends after it began to join, and sees to it that
    :meth:`tell` is, unless :attr:`told` says that there is no need; ``refused()`` says who would have been of it and was
    turned away. ``shares``: all ranks of the job are here and get memory for small collectives (:mod:`inanet.client.exchange`).
    """

    def __init__(
        self,
        job: str,
        world: int,
        local_world: int,
        backend: Backend,
        over: "Callable[[Group, str], None]",
        system: str = TREES,
        refused: Callable[[], Collection[str]] = tuple,
        shares: bool = False,
        tally: Tally | None = None,
    ) -> None:
        self.job = job
        #: what carries its rounds
        self.system = system
        #: its ranks reduce small tensors in memory that they share
        self.shares = shares
        self.world = world
        self.local_world = local_world
        self.state = State.FORMING
        #: whether the backend was asked to join
        self.known = False
        self.sessions: dict[int, Session] = {}
        self._backend = backend
        self._over = over
        self._refused = refused
        self._error: InaError | None = None
        self._departed: set[int] = set()
        #: by rank: the last round that it has waited too long for
        self._timeouts: dict[int, RoundTimeout] = {}
        self._rounds: dict[int, _Round] = {}
        #: those under way when the job ended, whose arrays may still be written to
        self._given_up: dict[int, _Round] = {}
        #: whether everybody has heard that the job is over
        self.told = False
        #: lines of the ranks in memory that they share, and collectives of theirs that were done in the agent
        self._lines: NDArray[np.uint32] | None = None
        self._ended = 0
        self._progress = ""
        #: rounds that came to a sum here, and bytes of one rank's tensors in them
        self._sums = self._bytes = 0
        self._tally = Tally() if tally is None else tally

    @property
    def busy(self) -> bool:
        """Whether a collective is on its way."""
        return bool(self._rounds or self._given_up)

    def counts(self) -> dict[str, int]:
        """Collectives that have ended, of a job that has all its ranks here: in memory that they share, and in the agent."""
        shared = 0
        if self._lines is not None:
            shared = sum(int(self._lines[:, word].min()) for word in (Word.READ, Word.FETCHED))
        return {"rounds_shared_memory": shared, "rounds_agent": self._ended}

    # ------------------------------------------------------------ joining

    def enter(self, session: Session, rank: int, world: int, local_world: int) -> None:
        """A local rank arrives; the last one makes the group JOINING. Raises ``JoinRefused``."""
        if (self.world, self.local_world) != (world, local_world):
            raise JoinRefused(
                f"rank {rank} says that the job has {world} ranks, {local_world} of them on this host; "
                f"others on this host said {self.world} and {self.local_world}"
            )
        if rank in self.sessions:
            raise JoinRefused(f"rank {rank} is connected already: process {self.sessions[rank].pid}")
        if self.state is not State.FORMING:
            raise JoinRefused(
                f"all {self.local_world} ranks of this host are connected already; if it has more, give each of "
                "them LOCAL_WORLD_SIZE, their number"
            )
        self.sessions[rank] = session
        if len(self.sessions) == self.local_world:
            self.state = State.JOINING

    def progress(self, text: str) -> None:
        """Tell the local ranks who is missing elsewhere."""
        self._progress = text
        for session in self.sessions.values():
            session.waiting(0, f"{text}{self._aside}", ())

    def welcome(self) -> None:
        """All ranks of the job are there."""
        if self.state is State.JOINING:
            self.state = State.JOINED
            ranks = sorted(self.sessions)
            _log.info("job begun", job=self.job, ranks=ranks, world=self.world, system=self.system)
            size = segments.exchange_bytes(len(ranks))
            try:
                fd = -1
                if self.shares:
                    fd, memory = segments.create(size)
                    self._lines = segments.lines_of(memory, len(ranks))
            except OSError as error:
                _log.warning(
                    "no memory for ranks to share: all sums are made here", job=self.job, reason=str(error)
                )
                self.shares = False
            if not self.shares:
                for session in self.sessions.values():
                    session.welcome(None)
                return
            try:
                for session in self.sessions.values():
                    session.welcome((fd, size, ranks))
            finally:
                os.close(fd)

    # ------------------------------------------------------------ rounds

    def call(self, session: Session, spec: TensorSpec, view: NDArray[Any]) -> None:
        """One local rank's part in its next round."""
        if self.state is State.JOINED and self._departed:
            text = f"{_show(self._departed)} of this host left the job, rank {session.rank} goes on"
            self.end(WorkerLostError(text, ranks=tuple(sorted(self._departed))), text)
        if self.state is State.OVER and not self.told:
            # not before the others: whoever hears of the end takes all of its arrays for its own again
            self._enter(self._given_up, session, spec, view)
            return
        if self.state is not State.JOINED:
            error = self._error or FabricError("a collective was called before the job was joined")
            session.result(session.rounds, error)
            return
        round_ = self._enter(self._rounds, session, spec, view)
        if len(round_.calls) == self.local_world:
            self._start(session.rounds, round_)

    @staticmethod
    def _enter(rounds: dict[int, _Round], session: Session, spec: TensorSpec, view: NDArray[Any]) -> _Round:
        round_ = rounds.get(session.rounds)
        if round_ is None:
            round_ = rounds[session.rounds] = _Round(asyncio.get_running_loop().time())
        round_.calls[session.rank] = spec, view
        return round_

    def _start(self, number: int, round_: _Round) -> None:
        ranks = sorted(round_.calls)
        spec = round_.calls[ranks[0]][0]
        try:
            for rank in ranks[1:]:
                differs = difference(spec, round_.calls[rank][0])
                if differs is not None:
                    self._disagree(number, spec, (ranks[0], rank), differs)
                    return
            round_.submitted = True
            future = self._backend.submit(self.job, number, spec, [round_.calls[rank][1] for rank in ranks])
        except InaError as error:
            self._answer(number, error)
        except Exception as error:
            self._answer(number, _broken(error))
        else:
            if future.done():
                self._done(number, future)
            else:
                future.add_done_callback(lambda done: self._done(number, done))

    def _disagree(
        self, number: int, spec: TensorSpec, ranks: tuple[int, int], differs: tuple[str, str, str]
    ) -> None:
        name, one, other = differs
        text = f"{name} is {one} on rank {ranks[0]} but {other} on rank {ranks[1]}"
        error = MismatchError(
            f"ranks do not agree: {text}; all ranks must reduce the same tensors in the same order",
            field=name,
            values=(one, other),
            round=number,
            ranks=ranks,
        )
        try:
            self._backend.mismatch(self.job, number, spec, ranks[1], text)
        finally:
            self._answer(number, error)

    def _done(self, number: int, future: "asyncio.Future[Participation | None]") -> None:
        if future.cancelled():
            self._answer(number, FabricError("the agent gave the round up", round=number))
            return
        error = future.exception()
        if error is None:
            self._answer(number, None, future.result())
        else:
            self._answer(number, error if isinstance(error, InaError) else _broken(error))

    def _answer(self, number: int, error: InaError | None, part: Participation | None = None) -> None:
        round_ = self._rounds.pop(number, None)
        if round_ is None:
            # the group has ended in the meantime
            return
        self._ended += self.world == self.local_world
        self._tally.durations.add(asyncio.get_running_loop().time() - round_.since)
        if error is not None:
            self._tally.failed += 1
        else:
            self._tally.done += 1
            self._sums += 1
            self._bytes += next(iter(round_.calls.values()))[1].nbytes
        for rank in round_.calls:
            session = self.sessions.get(rank)
            if session is not None:
                session.result(number, error, part)

    def report(self, before: float) -> None:
        """Tell those who have waited since ``before`` (the loop's time) for whom."""
        self.tell_missing()
        for number, round_ in self._rounds.items():
            if round_.since <= before:
                text, late = self._awaited(round_)
                for rank in round_.calls:
                    self.sessions[rank].waiting(number, text, late)

    def late(self, session: "Session", number: int, text: str, ranks: tuple[int, ...]) -> None:
        """A local rank's time for a round is up; 0: it has the result after all. It hears for whom it waited, unless ``text`` says that it knows; if it leaves
        next, all others hear that, too: who was late is why the job ends, and not who left because of it.
        """
        if number == 0:
            self._timeouts.pop(session.rank, None)
            return
        round_ = self._rounds.get(number)
        if round_ is not None and not text:
            text, ranks = self._awaited(round_)
        self._timeouts[session.rank] = RoundTimeout(
            f"rank {session.rank} waited too long for round {number} and left: {text or 'it is not known for whom'}",
            round=number,
            ranks=ranks,
        )
        session.waiting(number, text, ranks)

    def _awaited(self, round_: _Round) -> tuple[str, tuple[int, ...]]:
        """In words, and the local ranks among them."""
        late = set(self.sessions) - set(round_.calls)
        if late:
            return f"{_show(late)} of this host did not call it yet", tuple(sorted(late))
        return self._backend.awaited(self.job), ()

    def tell_missing(self) -> None:
        """Tell the local ranks what joining waits for: how many are there and who is missing, which is known only if all ranks
        are local, or who is missing elsewhere; or that nobody has said so.
        """
        if self.state is State.JOINING:
            text = self._progress or self._backend.awaited(self.job)
            for session in self.sessions.values():
                session.waiting(0, f"{text}{self._aside}", ())
        if self.state is not State.FORMING:
            return
        missing = set(range(self.world)) - set(self.sessions) if self.world == self.local_world else set()
        text = f"joined {len(self.sessions)} of {self.local_world} ranks of this host"
        text += f", missing: {_show(missing)}" if missing else ""
        for session in self.sessions.values():
            session.waiting(0, f"{text}{self._aside}", tuple(sorted(missing)))

    @property
    def _aside(self) -> str:
        return "".join(f"; {who}" for who in self._refused())

    # ------------------------------------------------------------ the end

    def leave(self, session: Session, why: str) -> None:
        """A process has left in good order (``why`` is empty) or not. Nobody may wait for it in vain."""
        rank = session.rank
        if self.sessions.get(rank) is not session:
            return
        del self.sessions[rank]
        if self.state in (State.FORMING, State.OVER):
            # before joining, somebody else may take its place
            return
        self._departed.add(rank)
        timeout = self._timeouts.get(rank)
        if timeout is not None:
            self.end(timeout, timeout.reason)
        elif why or self._rounds or self.state is State.JOINING:
            text = f"rank {rank} is gone: {why or 'it left while others were in a collective with it'}"
            self.end(WorkerLostError(text, ranks=(rank,)), text)
        elif not self.sessions:
            self.end(WorkerLostError("all ranks of this host have left"), "all ranks of the host have left")

    def end(self, error: InaError, reason: str) -> None:
        """The job is over for all local ranks, with this error, which they hear once nothing is written into their arrays."""
        began, self.state = self.state is not State.FORMING, State.OVER
        if self._error is not None:
            return
        self._error = error
        self._given_up, self._rounds = self._rounds, {}
        if began:
            _log.info("job ended", job=self.job, rounds=self._sums, bytes=self._bytes, reason=reason)
        if not any(round_.submitted for round_ in self._given_up.values()):
            self.tell()
        if began:
            self._over(self, reason)

    def tell(self, note: str = "") -> None:
        """All local ranks hear that the job is over; with the error a ``note`` about their arrays, if there is one."""
        error = self._error
        assert error is not None
        if note:
            where: dict[str, Any] = {
                "job": error.job,
                "rank": error.rank,
                "round": error.round,
                "ranks": error.ranks,
            }
            error = type(error)(f"{error.reason}; {note}", **where, **error.details())
        self.told = True
        given_up, self._given_up = self._given_up, {}
        for number, round_ in given_up.items():
            for rank in round_.calls:
                if rank in self.sessions:
                    self.sessions[rank].result(number, error)
        for session in self.sessions.values():
            session.fail(error)


def _show(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _broken(error: BaseException) -> FabricError:
    _log.error("a round failed in the agent", exc_info=error)
    return FabricError(f"the worker agent failed: {type(error).__name__}: {error}; its log has the details")
