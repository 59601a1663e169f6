"""What a process and its agent say to each other, for any number of threads.

There is no reader thread. Whoever waits reads: the first thread that waits reads for all and hands over when
it has what it waited for; the others sleep on a condition. So a process with one thread pays for no hand-over
between threads.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from numpy.typing import NDArray

from inanet.client.connection import Connection
from inanet.errors import (
    AgentUnavailable,
    FabricError,
    InaError,
    NonFiniteError,
    RoundTimeout,
    WorkerLostError,
    cause_of,
    error_of,
)
from inanet.messages import segments
from inanet.messages.session import MOST_AHEAD, MOST_IDS, SessionError, pack
from inanet.messages.session import field as get

if TYPE_CHECKING:
    from inanet.proto.common.events import Participation

#: seconds between two log messages about who is waited for
_LOG_SECONDS = 5.0
#: seconds after which a rank is late, where the agent does not say so
_LATE_SECONDS = 1.0
_BYE_SECONDS = 1.0
#: the longest that is waited at once
_STEP_SECONDS = 1.0
#: seconds in which the agent may say why a rank has left
_REASON_SECONDS = 0.5
#: seconds in which the agent may say for whom a late collective waits
_NAMES_SECONDS = 0.5
_log = logging.getLogger("inanet")


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of collective ``seq``. ``memory`` is kept alive until the agent has answered."""

    name: str
    memory: Any
    seq: int = 0
    finished: bool = False
    error: InaError | None = None
    #: who is waited for, as far as the agent has said
    awaited: str = ""
    awaited_ranks: tuple[int, ...] = ()
    #: how often it has said so
    reports: int = 0
    #: the agent was told that this rank has waited too long
    late: bool = False
    #: the epoch that it took part in (asynchronous training)
    part: "Participation | None" = None
    #: 1-D, until it is copied to where it belongs, if nobody has written it there
    result: NDArray[Any] | None = None
    #: its number in memory that ranks share
    place: int = 0

    def finish(self, error: InaError | None, part: "Participation | None" = None) -> None:
        """The answer is here."""
        self.part = part
        self.memory = None
        self.error = error
        self.finished = True


class Call(NamedTuple):
    """What a collective does with which memory: the fields of a ``reduce`` frame but for ``seq`` and ``id``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    mode: str
    factor: float
    propagate: bool
    memory: int
    offset: int


class Conversation:
    """One connection to the agent. Once it, or the job, is over, everything raises what ``broken`` says."""

    def __init__(self, connection: Connection, job: str, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.broken: InaError | None = None
        self.joined = False
        #: memory that the ranks of this job share, all of them on this host, and the ranks; None if there is none
        self.shared: tuple[Any, tuple[int, ...]] | None = None
        self.awaited = ""
        self.awaited_ranks: tuple[int, ...] = ()
        self.figures: dict[str, int] = {}
        #: answers to ``stats`` so far
        self.answers = 0
        self._connection = connection
        self._pending: dict[int, Outcome] = {}
        self._seq = 0
        #: calls that the agent remembers, and under which id; the oldest first
        self._known: dict[Call, int] = {}
        self._free_ids = list(range(MOST_IDS - 1, -1, -1))
        self._logged = time.monotonic()
        self._closed = False
        self._renew_locks()
        _open.add(self)

    def _renew_locks(self) -> None:
        self._sending = threading.RLock()
        #: guards everything that messages change; held while nobody reads, never while sending
        self._turn = threading.Condition(threading.Lock())
        self._reading = False

    # ------------------------------------------------------------ sending

    def say(self, kind: str, fd: int | None = None, **fields: Any) -> None:
        """Send one message, and a descriptor with it. Raises what :attr:`broken` says."""
        frame = pack(kind, **fields)
        with self._sending:
            self._send(frame, fd)

    def release(self, memory: int) -> None:
        """Tell the agent that a piece of memory is not used any more. Raises what :attr:`broken` says."""
        with self._sending:
            for call in [call for call in self._known if call.memory == memory]:
                self._free_ids.append(self._known.pop(call))
            self._send(pack("release", id=memory), None)

    def reduce(
        self, outcome: Outcome, seconds: float, call: Call, called: Callable[[int], None] = lambda _: None
    ) -> None:
        """Send a collective; its number is the number of calls so far, and ``called`` is told of it.

        Waits up to ``seconds`` while too many are on their way, then raises
        :class:`~inanet.errors.RoundTimeout`.
        """
        with self._sending:
            if len(self._pending) >= MOST_AHEAD:
                self._make_room(seconds)
            seq = self._seq + 1
            frame = self._frame(seq, call)
            self._seq = outcome.seq = seq
            with self._turn:
                self.check()
                self._pending[seq] = outcome
            self._send(frame, None)
            called(seq)

    def exchange(self, outcome: Outcome, post: Callable[[], bool], make_room: Callable[[], None]) -> None:
        """A collective that does not go through the agent: number it, and ``post`` it in the order of the calls, when there is
        room.
        """
        with self._sending:
            self.check()
            outcome.seq = self._seq + 1
            while not self._whole(outcome, post):
                make_room()

    def _whole(self, outcome: Outcome, post: Callable[[], bool]) -> bool:
        try:
            if not post():
                return False
            self._seq = outcome.seq
            return True
        except InaError:
            raise
        except BaseException:
            # interrupted: others may have seen it or not
            self.end(
                FabricError(f"the call of {outcome.name!r} was interrupted", job=self.job, rank=self.rank)
            )
            raise

    @contextmanager
    def numbered(self, outcome: Outcome) -> Iterator[None]:
        """Give a collective its number, for as long as it is not known whether it goes through the agent: no other one is called
        meanwhile. It has no number if it is called at the agent in the end, and after :meth:`count` it keeps it.
        """
        with self._sending:
            self.check()
            outcome.seq = self._seq + 1
            yield

    def count(self, outcome: Outcome) -> None:
        """A numbered collective does not go through the agent."""
        self._seq = outcome.seq

    def watch(self, outcome: Outcome, since: float) -> None:
        """For who waits for a collective that does not go through the agent: raise if the job is over, log who is late."""
        self.poll()
        self.check()
        if time.monotonic() - since >= _LATE_SECONDS:
            self._log_late(outcome.seq, outcome.awaited)

    def _frame(self, seq: int, call: Call) -> bytes:
        """The whole call the first time, then only its id; the agent has long checked the rest."""
        number = self._known.get(call)
        if number is not None:
            return pack("again", seq=seq, id=number)
        if not self._free_ids:
            self._free_ids.append(self._known.pop(next(iter(self._known))))
        frame = pack(
            "reduce", seq=seq, id=self._free_ids[-1], **{**call._asdict(), "shape": list(call.shape)}
        )
        self._known[call] = self._free_ids.pop()
        return frame

    def _make_room(self, seconds: float) -> None:
        with self._turn:
            oldest = next(iter(self._pending.values()), None)
        if oldest is not None and not self.wait_for(lambda: oldest.finished, seconds):
            raise self.timed_out(oldest, seconds)

    def _send(self, frame: bytes, fd: int | None) -> None:
        self.check()
        try:
            self._connection.send(frame, fd)
        except OSError as error:
            raise self._lose(error) from None
        except BaseException:
            # interrupted in the middle of a frame
            self.end(
                AgentUnavailable("sending to the worker agent was interrupted", job=self.job, rank=self.rank)
            )
            raise

    def check(self) -> None:
        """Raise if the conversation is over."""
        if self.broken is not None:
            raise self.broken.at(job=self.job, rank=self.rank)

    # ------------------------------------------------------------ waiting

    def wait_for(self, settled: Callable[[], bool], seconds: float) -> bool:
        """Read until ``settled``; False if it is not after ``seconds`` or when the conversation is over."""
        left = seconds
        with self._turn:
            while left > 0 and not settled() and self.broken is None:
                step, began = min(left, _STEP_SECONDS), time.monotonic()
                if self._reading:
                    self._turn.wait(step)
                else:
                    self._read(step)
                # a process that was stopped meanwhile has lost one step: what came is still to be read
                left -= min(step, time.monotonic() - began)
            if seconds > 0 and not settled() and self.broken is None and not self._reading:
                self._read(0.0)
            return settled()

    def poll(self) -> None:
        """Act on the messages that are here already, without waiting."""
        with self._turn:
            if not self._reading and self.broken is None:
                self._read(0.0)

    def _read(self, seconds: float) -> None:
        """Receive once and act on it. Called, and left, with the lock held; free in between."""
        self._reading = True
        self._turn.release()
        messages: list[dict[str, Any]] = []
        failure = None
        try:
            messages = self._connection.receive(seconds)
        except OSError as error:
            failure = error
        finally:
            self._turn.acquire()
            self._reading = False
            # also without messages: somebody else must read on if this thread does not
            self._turn.notify_all()
        try:
            for message in messages:
                self._act(message)
        except SessionError as error:
            failure = ConnectionError(f"it does not speak this version's language: {error}")
        if failure is not None:
            self._end(self._gone(failure))

    def late(self, outcome: Outcome, seconds: float) -> RoundTimeout:
        """The error for a collective that is not finished after ``seconds``. The agent is asked for whom it waits, and knows
        from then on why this rank leaves, if it does.
        """
        before = outcome.reports
        outcome.late = True
        # an error: the conversation is over, and whoever calls next hears why
        with suppress(InaError):
            self.say("late", seq=outcome.seq, text=outcome.awaited, ranks=list(outcome.awaited_ranks))
            if not outcome.awaited_ranks:
                self.wait_for(lambda: outcome.reports > before or outcome.finished, _NAMES_SECONDS)
        return self.timed_out(outcome, seconds)

    def forget_late(self, outcome: Outcome) -> None:
        """A collective that was late is finished all the same."""
        outcome.late = False
        with suppress(InaError):
            self.say("late", seq=0, text="", ranks=[])

    def timed_out(self, outcome: Outcome, seconds: float) -> RoundTimeout:
        """The error alone."""
        text = f"no result after {seconds:g} s"
        if outcome.awaited:
            text += f"; {outcome.awaited}"
        return RoundTimeout(
            text, job=self.job, rank=self.rank, round=outcome.seq, ranks=outcome.awaited_ranks
        )

    # ------------------------------------------------------------ messages

    def _act(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "result":
            outcome = self._pending.pop(get(message, "seq", int), None)
            if outcome is not None:
                failed = "cause" in message
                outcome.finish(self._error(message, outcome) if failed else None, _part(message))
        elif kind == "waiting":
            self._note(get(message, "seq", int), get(message, "text", str), _ranks(message))
        elif kind == "welcome":
            self._adopt(message)
            self.joined = True
        elif kind == "stats":
            self.figures = get(message, "figures", dict)
            self.answers += 1
        elif kind == "failed":
            self._end(self._error(message, None))
        else:
            raise SessionError(f"unknown message {kind!r}")

    def _adopt(self, message: dict[str, Any]) -> None:
        """The memory that comes with a welcome, if all ranks of the job are on this host."""
        if "shared" not in message:
            return
        fd = self._connection.take_fd()
        if fd is None:
            raise SessionError("shared memory without a file descriptor")
        try:
            self.shared = segments.adopt(fd, get(message, "shared", int, low=1)), _ranks(message)
        finally:
            os.close(fd)

    def _note(self, seq: int, text: str, ranks: tuple[int, ...]) -> None:
        outcome = self._pending.get(seq)
        if outcome is not None:
            outcome.awaited, outcome.awaited_ranks = text, ranks
            outcome.reports += 1
        elif seq == 0:
            self.awaited, self.awaited_ranks = text, ranks
        self._log_late(seq, text)

    def _log_late(self, seq: int, text: str) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            where = f", round {seq}" if seq else ""
            _log.warning("job %r, rank %d%s: %s", self.job, self.rank, where, text)

    def _error(self, message: dict[str, Any], outcome: Outcome | None) -> InaError:
        error = error_of(
            get(message, "cause", str),
            get(message, "message", str),
            job=self.job,
            rank=self.rank,
            round=get(message, "round", int) or (outcome.seq if outcome is not None else 0),
            ranks=_ranks(message),
            details=get(message, "details", dict),
        )
        if isinstance(error, NonFiniteError) and outcome is not None and not error.tensor:
            error.tensor = outcome.name
        return error

    # ------------------------------------------------------------ the end

    def _gone(self, error: OSError) -> AgentUnavailable:
        text = f"the worker agent is gone: {error.strerror or error}; the job is over for this process"
        return AgentUnavailable(
            text, job=self.job, rank=self.rank, searched=(os.fspath(self._connection.path),)
        )

    def _lose(self, error: OSError) -> InaError:
        """The connection broke; what the agent said last is still read, for it may tell why."""
        self.wait_for(lambda: False, _BYE_SECONDS)
        self.end(self._gone(error))
        assert self.broken is not None
        return self.broken.at(job=self.job, rank=self.rank)

    def fail(self, error: InaError) -> None:
        """As :meth:`end`, for all ranks of the job: the agent tells the others."""
        if self.broken is None:
            with suppress(InaError):
                self.say(
                    "fail",
                    cause=cause_of(error),
                    message=error.reason,
                    round=error.round,
                    ranks=[*error.ranks],
                )
        self.end(error)

    def settle(self, error: InaError) -> NoReturn:
        """Ranks that have lost each other in shared memory cannot find each other again: the job is over. Raises why."""
        if isinstance(error, WorkerLostError):
            # the agent may know why a rank has left
            self.wait_for(lambda: False, _REASON_SECONDS)
        self.fail(error)
        self.check()
        raise error

    def end(self, error: InaError) -> None:
        """The job is over for this process: everything that waits, and everything later, gets this error."""
        with self._turn:
            self._end(error)

    def _end(self, error: InaError) -> None:
        if self.broken is None:
            self.broken = error
        for outcome in self._pending.values():
            outcome.finish(self.broken.at(job=self.job, rank=self.rank, round=outcome.seq))
        self._pending.clear()
        self._turn.notify_all()

    def close(self) -> None:
        """Leave in good order; whoever waits gets an error. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        open_ = self.broken is None
        self.end(AgentUnavailable("the job was closed", job=self.job, rank=self.rank))
        # a thread that cannot get its frame out must not keep this one from closing
        if open_ and self._sending.acquire(timeout=_BYE_SECONDS):
            try:
                self._connection.send(pack("bye"), seconds=_BYE_SECONDS)
            except OSError:
                # it is gone already: nobody to say good-bye to
                pass
            finally:
                self._sending.release()
        self._connection.shut()
        with self._turn:
            self._turn.wait_for(lambda: not self._reading, _BYE_SECONDS)
        with self._sending:
            self._connection.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection, whose end would otherwise go unnoticed."""
        self._renew_locks()
        self._closed = True
        self._connection.close()
        self.end(
            AgentUnavailable(
                "this process was forked; connect again in the child", job=self.job, rank=self.rank
            )
        )


def _part(message: dict[str, Any]) -> "Participation | None":
    if "epoch" not in message:
        return None
    workers = get(message, "workers", list)
    if any(type(worker) is not int for worker in workers):
        raise SessionError("result.workers are not numbers")
    epoch, awaited, staleness = (get(message, name, int, low=0) for name in ("epoch", "awaited", "staleness"))
    # training processes import as little as they can; few of them train asynchronously
    from inanet.proto.common.events import Participation

    return Participation(epoch, tuple(workers), awaited, staleness)


def _ranks(message: dict[str, Any]) -> tuple[int, ...]:
    ranks = get(message, "ranks", list)
    if any(type(rank) is not int for rank in ranks):
        raise SessionError(f"{message['t']}.ranks are not numbers")
    return tuple(ranks)


_open: "weakref.WeakSet[Conversation]" = weakref.WeakSet()


def _after_fork() -> None:
    for conversation in list(_open):
        conversation.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
