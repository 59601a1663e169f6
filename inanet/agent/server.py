"""The worker agent's side of the conversation with the training processes of its host.

Every local rank has a :class:`~inanet.agent.session.Session`; the sessions of one job form a
:class:`~inanet.agent.group.Group`, which hands its rounds to the backend. Here, processes are let in and
jobs joined and left. Nothing knows of the network. :mod:`inanet.messages.session` has the messages.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from inanet.agent.group import Backend, Group, State, Tally
from inanet.agent.listener import Listener
from inanet.agent.session import Session
from inanet.errors import FabricError, InaError, JoinRefused, WorkerLostError
from inanet.messages.session import PROTOCOL
from inanet.messages.session import field as get
from inanet.messages.text import clip
from inanet.proto.slots.systems import TREES, tensor_systems
from inanet.service.metrics import Sample
from inanet.service.refusals import Refusals, Sought

#: seconds after which waiting is reported to those who wait, and between two such reports
REPORT_SECONDS = 1.0
#: seconds that leaving the jobs may take when the server closes
_CLOSE_SECONDS = 5.0
#: seconds in which the backend must be done with arrays of a job that is over, before its processes hear that it is
_QUIET_SECONDS = 4.0
_MOST_RANKS = 1 << 16
_log: Any = structlog.get_logger("inanet.local")


class LocalServer:
    """Serves training processes on a Unix socket at ``path`` with the file mode ``mode``.

    Processes of this process's own user may connect, and those of ``users`` and ``groups`` (numeric ids). ``report`` is the
    pace, in seconds, of reports to those who wait; ``system`` what jobs use that do not choose one; ``shares``: the ranks of a
    job that has no others reduce small tensors in memory of their own, where the agent is not asked.
    """

    def __init__(
        self,
        path: Path,
        backend: Backend,
        *,
        mode: int = 0o600,
        users: Collection[int] = (),
        groups: Collection[int] | None = None,
        report: float = REPORT_SECONDS,
        system: str = TREES,
        shares: bool = True,
    ) -> None:
        self.path = path
        self._system = system
        self._shares = shares
        self._backend = backend
        self._listener = Listener(path, mode, users, self._accepted, groups)
        self._report = report
        self._reporter: asyncio.TimerHandle | None = None
        self._groups: dict[str, Group] = {}
        self._tally = Tally()
        self._refusals = Refusals()
        #: each with the group it has entered
        self._sessions: dict[Session, Group | None] = {}
        self._joining: dict[Group, asyncio.Task[None]] = {}
        #: by job: the next membership in it must wait until the last one is over
        self._leaving: dict[str, asyncio.Task[None]] = {}
        #: rounds of groups that are over
        self._counted: Counter[str] = Counter()

    async def start(self) -> None:
        """Listen. Replaces the socket of a dead process.

        Raises ``OSError`` if a live process has it, if the path is something else than a socket, and as
        ``bind`` does.
        """
        self._listener.open()

    def _accepted(self, connection: socket.socket, pid: int) -> None:
        self._sessions[Session(self, connection, pid)] = None
        if self._reporter is None:
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        for group in self._groups.values():
            group.report(loop.time() - self._report)
        self._reporter = loop.call_later(self._report, self._tell_waiting) if self._sessions else None

    # ------------------------------------------------------------ what sessions report

    def hello(self, session: Session, message: dict[str, Any]) -> None:
        """A training process introduces itself; the last one of a group makes the host join the job.

        Raises ``JoinRefused``, of which those hear who wait for it.
        """
        try:
            self._admit(session, message)
        except JoinRefused as refusal:
            job, rank = message.get("job"), message.get("rank")
            if type(job) is str and type(rank) is int:
                text = clip(f"rank {rank} was turned away: {refusal.reason}")
                self._refusals.add(text, asyncio.get_running_loop().time(), Sought(str(rank), job))
                if job in self._groups:
                    self._groups[job].tell_missing()
                raise refusal.at(job=job, rank=rank) from None
            raise

    def _refused(self, job: str) -> Collection[str]:
        """Who would have been of a job on this host, in sentences."""
        return self._refusals.of(job, asyncio.get_running_loop().time()).values()

    def _admit(self, session: Session, message: dict[str, Any]) -> None:
        protocol = get(message, "protocol", int)
        if protocol != PROTOCOL:
            raise JoinRefused(
                f"this process speaks protocol {protocol}, the agent {PROTOCOL}: install one version of both"
            )
        name = get(message, "job", str)
        world = get(message, "world", int, low=1, high=_MOST_RANKS)
        rank = get(message, "rank", int, low=0, high=world - 1)
        local_world = get(message, "local_world", int, low=1, high=world)
        if not 1 <= len(name) <= 128 or not name.isprintable():
            raise JoinRefused("the name of a job must have 1 to 128 printable characters")
        system = get({"system": "", **message}, "system", str) or self._system
        if system not in (TREES, *tensor_systems()):
            hint = "; a sparse job begins with inanet.join_sparse()" if system == "zebra" else ""
            raise JoinRefused(
                f"there is no system {system[:64]!r}; there are {', '.join((TREES, *tensor_systems()))}{hint}"
            )
        group = self._groups.get(name)
        if group is None or group.state is State.OVER:
            refused = partial(self._refused, name)
            shares = self._shares and 1 < world == local_world
            group = Group(
                name, world, local_world, self._backend, self._over, system, refused, shares, self._tally
            )
        if group.system != system:
            raise JoinRefused(
                f"rank {rank} chooses system {system}, others on this host {group.system}; choose the same on all"
            )
        group.enter(session, rank, world, local_world)
        self._refusals.came(Sought(str(rank), name))
        self._groups[name] = group
        self._sessions[session] = group
        session.enter(group, rank)
        if group.state is State.FORMING:
            group.tell_missing()
        else:
            task = asyncio.get_running_loop().create_task(self._join(group))
            self._joining[group] = task
            task.add_done_callback(lambda _: self._joining.pop(group, None))

    def gone(self, session: Session, why: str) -> None:
        """A session has ended, in good order if ``why`` is empty."""
        group = self._sessions.pop(session, None)
        if group is None:
            return
        group.leave(session, why)
        if not group.sessions and self._groups.get(group.job) is group:
            del self._groups[group.job]
            if group.state is State.FORMING:
                self._refusals.forget(group.job)

    def samples(self) -> Iterator[Sample]:
        """Metrics, read at every scrape."""
        yield Sample("inanet_rounds", self._tally.done, ("done",))
        yield Sample("inanet_rounds", self._tally.failed, ("failed",))
        yield Sample("inanet_round_duration_seconds", self._tally.durations)
        for name, count in self.counts().items():
            yield Sample("inanet_local_rounds", count, (name.removeprefix("rounds_"),))

    def figures(self) -> dict[str, int]:
        """The backend's counters, and those of jobs that have all their ranks here."""
        return {**self._backend.stats(), **self.counts()}

    def counts(self) -> dict[str, int]:
        """Collectives of jobs that have all their ranks here, by where they were done: ``rounds_shared_memory``, ``rounds_agent``."""
        counted = Counter({"rounds_shared_memory": 0, "rounds_agent": 0, **self._counted})
        for group in tuple(self._groups.values()):
            if group.state is not State.OVER:
                counted.update(group.counts())
        return dict(counted)

    # ------------------------------------------------------------ joining and leaving jobs

    async def _join(self, group: Group) -> None:
        previous = self._leaving.get(group.job)
        if previous is not None:
            await asyncio.wait({previous})
        group.known = True
        try:
            ranks = tuple(sorted(group.sessions))
            await self._backend.join(group.job, ranks, group.world, group.system, group.progress)
        except InaError as error:
            group.end(error, "joining failed")
        except Exception as error:
            _log.exception("joining failed in the agent", job=group.job)
            text = f"the worker agent failed: {type(error).__name__}: {error}; its log has the details"
            group.end(FabricError(text), "joining failed")
        else:
            group.welcome()

    def _over(self, group: Group, reason: str) -> None:
        self._refusals.forget(group.job)
        self._counted.update(group.counts())
        task = asyncio.get_running_loop().create_task(self._leave(group, reason))
        self._leaving[group.job] = task
        task.add_done_callback(lambda _: self._left(group.job, task))

    def _left(self, job: str, task: "asyncio.Task[None]") -> None:
        if self._leaving.get(job) is task:
            del self._leaving[job]

    async def _leave(self, group: Group, reason: str) -> None:
        joining = self._joining.get(group)
        if joining is not None:
            joining.cancel()
            await asyncio.wait({joining})
        if not group.known:
            return
        if not group.told:
            group.tell(await self._quieten(group, reason))
        try:
            await self._backend.leave(group.job, reason)
        except Exception:
            _log.exception("leaving failed in the agent", job=group.job)

    async def _quieten(self, group: Group, reason: str) -> str:
        """Wait until a group's arrays are its processes' own again; what they must know if that takes too long, else nothing."""
        try:
            async with asyncio.timeout(_QUIET_SECONDS):
                await self._backend.quieten(group.job, reason)
        except TimeoutError:
            _log.error(
                "still writing into the arrays of a job that has ended", job=group.job, seconds=_QUIET_SECONDS
            )
            return (
                f"after {_QUIET_SECONDS:g} s the worker agent still writes into the arrays: do not use them"
            )
        except Exception:
            _log.exception("giving rounds up failed in the agent", job=group.job)
        return ""

    def lost(self, job: str, error: InaError) -> None:
        """The backend has lost a job as a whole."""
        group = self._groups.get(job)
        # one that forms meanwhile is another job of the same name
        if group is not None and group.known:
            group.end(error, error.reason)

    # ------------------------------------------------------------ the daemon's view

    @property
    def busy(self) -> bool:
        """Whether some collective is on its way."""
        return any(group.busy for group in self._groups.values())

    async def close(self) -> None:
        """Stop listening, end all sessions, leave all jobs, remove the socket. Closing twice is fine."""
        self._listener.close()
        for group in list(self._groups.values()):
            group.end(
                WorkerLostError("the worker agent of this host was stopped"), "the worker agent was stopped"
            )
        for session, entered in list(self._sessions.items()):
            # the others are told when nothing is written into their arrays any more
            if entered is None or entered.told:
                session.close("")
        if self._reporter is not None:
            self._reporter.cancel()
            self._reporter = None
        tasks = {*self._joining.values(), *self._leaving.values()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            for task in late:
                task.cancel()
        for session in list(self._sessions):
            session.close("")
