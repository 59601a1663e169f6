"""The worker agent's side of the conversation with the training processes of its host.

Every local rank has a session; the sessions of one job form a group. The k-th collective of every local rank is round
k: when all of them have issued it, and agree on what it is, the group hands it to the backend, and answers all of them
when it is done. Nothing here knows of the network.
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from inanet.control.errors import BY_CAUSE, InaError, JoinRefused, MismatchError, WorkerLostError
from inanet.control.session import PROTOCOL, Segment, SessionError, Unpacker, field as get, pack
from inanet.proto.plan import ExponentMode, TensorSpec

_MODES = {"carried": ExponentMode.CARRIED, "prologue": ExponentMode.PROLOGUE, "fixed": ExponentMode.FIXED}
_DTYPES: dict[str, tuple[str, int]] = {
    "f32": ("float32", 4),
    "f16": ("float16", 2),
    "bf16": ("uint16", 2),
    "i32": ("int32", 4),
    "i64": ("int64", 8),
}
#: what one training process may hold and how far it may run ahead
_MOST_SEGMENTS = 1024
_MOST_AHEAD = 1024
_OUT_LIMIT = 1 << 20
_log: Any = structlog.get_logger("inanet.local")


class Backend(Protocol):
    """What carries the collectives of a host."""

    async def join(
        self, job: str, ranks: tuple[int, ...], world: int, progress: Callable[[str], None]
    ) -> None:
        """Called once all local ranks are connected; returns when the job is complete. Raises ``InaError``."""
        ...

    def submit(
        self, job: str, round_: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]]
    ) -> "asyncio.Future[None]":
        """One round; ``arrays`` are 1-D, by rank, overwritten with the result. The future may raise ``InaError``."""
        ...

    def mismatch(self, job: str, round_: int, spec: TensorSpec, rank: int, text: str) -> None:
        """Local ranks disagree on a round: the other hosts must hear of it."""
        ...

    async def leave(self, job: str, reason: str) -> None:
        """The local ranks are gone."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters for whoever asks."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """One local rank's part in a round."""

    seq: int
    spec: TensorSpec
    array: NDArray[Any]


@dataclass(slots=True)
class _Group:
    """The local ranks of one job."""

    job: str
    world: int
    local_world: int
    sessions: dict[int, "_Session"] = field(default_factory=dict)
    #: calls by round and rank
    calls: dict[int, dict[int, _Call]] = field(default_factory=dict)
    joining: "asyncio.Task[None] | None" = None
    joined: bool = False
    over: InaError | None = None
    left: set[int] = field(default_factory=set)


def difference(first: TensorSpec, second: TensorSpec) -> str | None:
    """The first field in which two collectives differ, with both values; None if they agree."""
    for name in ("name", "dtype", "shape", "op", "mode", "factor", "propagate"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            show = [getattr(value, "name", value) for value in (one, other)]
            return f"{name} {show[0]!r} and {show[1]!r}"
    return None


class LocalServer:
    """Listens on a Unix socket. ``users`` are numeric ids that may connect besides this process's own and root."""

    def __init__(self, path: Path, backend: Backend, *, mode: int = 0o600, users: Collection[int] = ()) -> None:
        self.path = path
        self._backend = backend
        self._mode = mode
        self._users = {0, os.geteuid(), *users}
        self._anybody = not users and mode & 0o006 != 0
        self._groups: dict[str, _Group] = {}
        self._sessions: set[_Session] = set()
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Listen. Replaces the socket of a dead process; raises ``OSError`` if a live one has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
            except FileNotFoundError:
                pass
            else:
                raise OSError(f"{self.path}: a running process listens there; give every ina-worker its own socket")
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            server.bind(str(self.path))
            self.path.chmod(self._mode)
            server.listen(64)
        except BaseException:
            server.close()
            raise
        self._socket = server
        asyncio.get_running_loop().add_reader(server.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            _log.warning("cannot accept a training process", reason=str(error))
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid not in self._users and not self._anybody:
            _log.warning("refused a training process", pid=pid, uid=uid)
            with contextlib.suppress(OSError):
                connection.send(pack("failed", cause="rejected", message=f"user id {uid} may not use this agent"))
            connection.close()
            return
        connection.setblocking(False)
        self._sessions.add(_Session(self, connection, pid))

    # ------------------------------------------------------------ groups

    def hello(self, session: "_Session", message: dict[str, Any]) -> None:
        """A training process introduces itself; the last one of a group makes the host join the job."""
        protocol = get(message, "protocol", int)
        if protocol != PROTOCOL:
            raise JoinRefused(f"this process speaks protocol {protocol}, the agent {PROTOCOL}: install the same version")
        name = get(message, "job", str)
        world = get(message, "world", int, low=1, high=1 << 16)
        rank = get(message, "rank", int, low=0, high=world - 1)
        local = get(message, "local_world", int, low=1, high=world)
        group = self._groups.get(name)
        if group is None or group.over is not None:
            group = _Group(name, world, local)
            self._groups[name] = group
        if (group.world, group.local_world) != (world, local):
            raise JoinRefused(
                f"rank {rank} says {world} ranks, {local} on this host; others here said {group.world} and "
                f"{group.local_world}"
            )
        if rank in group.sessions:
            raise JoinRefused(f"rank {rank} of job {name!r} is connected already on this host")
        if len(group.sessions) == local:
            raise JoinRefused(f"all {local} local ranks of job {name!r} are connected already")
        group.sessions[rank] = session
        session.group, session.rank = group, rank
        if len(group.sessions) == local:
            group.joining = self._spawn(self._join(group))

    def _spawn(self, work: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _join(self, group: _Group) -> None:
        def progress(text: str) -> None:
            for session in group.sessions.values():
                session.send(pack("waiting", text=text))

        try:
            await self._backend.join(group.job, tuple(sorted(group.sessions)), group.world, progress)
        except InaError as error:
            self._end(group, error)
            return
        group.joined = True
        for session in list(group.sessions.values()):
            session.send(pack("welcome"))

    def reduce(self, session: "_Session", message: dict[str, Any]) -> None:
        """One local rank's call. The group's round starts with the last one."""
        group = session.group
        if group is None or not group.joined:
            raise SessionError("reduce before welcome")
        spec = _spec_of(message)
        call = _Call(get(message, "seq", int, low=1), spec, session.array_of(message, spec))
        if call.seq != session.rounds + 1:
            raise SessionError(f"collective {call.seq} does not follow {session.rounds}")
        session.rounds += 1
        if group.over is not None or group.left:
            error = group.over or WorkerLostError(
                f"rank {min(group.left)} has left the job", ranks=tuple(sorted(group.left))
            )
            session.result(call.seq, error)
            return
        if session.rounds - min(s.rounds for s in group.sessions.values()) > _MOST_AHEAD:
            raise SessionError(f"more than {_MOST_AHEAD} collectives ahead of another local rank")
        calls = group.calls.setdefault(session.rounds, {})
        calls[session.rank] = call
        if len(calls) == group.local_world:
            self._start(group, session.rounds)

    def _start(self, group: _Group, round_: int) -> None:
        calls = group.calls[round_]
        ranks = sorted(calls)
        first = calls[ranks[0]]
        for rank in ranks[1:]:
            differs = difference(first.spec, calls[rank].spec)
            if differs is not None:
                text = f"ranks {ranks[0]} and {rank} called different collectives: {differs}"
                self._backend.mismatch(group.job, round_, first.spec, rank, text)
                self._answer(group, round_, MismatchError(text, round=round_, ranks=(ranks[0], rank)))
                return
        future = self._backend.submit(group.job, round_, first.spec, [calls[rank].array for rank in ranks])
        future.add_done_callback(lambda done: self._done(group, round_, done))

    def _done(self, group: _Group, round_: int, future: "asyncio.Future[None]") -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            error = WorkerLostError("the agent gave the round up", round=round_)
        elif error is not None and not isinstance(error, InaError):
            raise error
        self._answer(group, round_, error)

    def _answer(self, group: _Group, round_: int, error: InaError | None) -> None:
        for rank, call in group.calls.pop(round_, {}).items():
            session = group.sessions.get(rank)
            if session is not None:
                session.result(call.seq, error)

    def _end(self, group: _Group, error: InaError) -> None:
        """The job is over for all local ranks, with this error."""
        group.over = error
        for round_ in list(group.calls):
            self._answer(group, round_, error)
        for session in list(group.sessions.values()):
            session.fail(error)

    def gone(self, session: "_Session", why: str) -> None:
        """A training process has left or died; the last one to leave takes the host out of the job."""
        self._sessions.discard(session)
        group = session.group
        if group is None or group.sessions.get(session.rank) is not session:
            return
        del group.sessions[session.rank]
        group.left.add(session.rank)
        alone = not group.sessions
        if alone and self._groups.get(group.job) is group:
            del self._groups[group.job]
        if group.over is not None:
            return
        if why or (group.calls and not alone):
            text = f"rank {session.rank} is gone ({why or 'it left while others were in a collective'})"
            self._end(group, WorkerLostError(text, ranks=(session.rank,)))
            self._leave(group, text)
        elif alone:
            self._leave(group, "all ranks of the host have left")

    def _leave(self, group: _Group, reason: str) -> None:
        if group.joining is not None and not group.joined:
            group.joining.cancel()
        if group.joining is not None:
            self._spawn(self._backend.leave(group.job, reason))

    def lost(self, job: str, error: InaError) -> None:
        """The backend has lost a job as a whole."""
        group = self._groups.get(job)
        if group is not None and group.over is None:
            self._end(group, error)

    def figures(self) -> dict[str, int]:
        """The backend's counters."""
        return self._backend.stats()

    @property
    def busy(self) -> bool:
        """Whether some collective is on its way."""
        return any(group.calls for group in self._groups.values())

    async def close(self) -> None:
        """Stop listening, end all sessions, remove the socket. Closing twice is fine."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self.path.unlink(missing_ok=True)
        for group in list(self._groups.values()):
            if group.over is None:
                self._end(group, WorkerLostError("the worker agent of this host was stopped"))
                self._leave(group, "the worker agent was stopped")
        for session in list(self._sessions):
            session.close("")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)


def _spec_of(message: dict[str, Any]) -> TensorSpec:
    dtype = get(message, "dtype", str)
    mode = get(message, "mode", str)
    shape = get(message, "shape", list)
    if dtype not in _DTYPES or mode not in _MODES:
        raise SessionError(f"unknown dtype {dtype!r} or mode {mode!r}")
    if len(shape) > 64 or any(type(extent) is not int or not 0 <= extent < 1 << 48 for extent in shape):
        raise SessionError(f"impossible shape {shape}")
    op = get(message, "op", str)
    exact = dtype in ("i32", "i64") or op in ("max", "min")
    return TensorSpec(
        name=get(message, "name", str),
        dtype=dtype,
        shape=tuple(shape),
        op=op,
        mode=ExponentMode.NONE if exact else _MODES[mode],
        factor=0.0 if exact else get(message, "factor", float),
        propagate=get(message, "propagate", bool),
    )


class _Session:
    """One training process."""

    def __init__(self, server: LocalServer, connection: socket.socket, pid: int) -> None:
        self._server = server
        self._socket = connection
        self._pid = pid
        self._unpacker = Unpacker()
        self._fds: list[int] = []
        self._segments: dict[int, Segment] = {}
        self._out = bytearray()
        self._open = True
        self._loop = asyncio.get_running_loop()
        self.group: _Group | None = None
        self.rank = -1
        self.rounds = 0
        self._loop.add_reader(connection.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(16 * 4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds += fds
        if not data:
            self.close(f"process {self._pid} ended")
            return
        try:
            if flags & socket.MSG_CTRUNC:
                raise SessionError("the agent has no file descriptors left; raise its limit")
            for message in self._unpacker.feed(data):
                self._act(message)
                if not self._open:
                    return
        except InaError as error:
            self.fail(error)
            self.close("refused")
        except SessionError as error:
            _log.warning("training process talks nonsense", pid=self._pid, rank=self.rank, reason=str(error))
            self.fail(JoinRefused(str(error)))
            self.close(f"process {self._pid} broke the protocol: {error}")

    def _act(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "hello" and self.group is None:
            self._server.hello(self, message)
        elif kind == "memory":
            self._adopt(message)
        elif kind == "release":
            segment = self._segments.pop(get(message, "id", int), None)
            if segment is not None:
                segment.close()
        elif kind == "reduce":
            self._server.reduce(self, message)
        elif kind == "stats":
            self.send(pack("stats", figures=self._server.figures()))
        elif kind == "bye":
            self.close("")
        else:
            raise SessionError(f"unexpected {kind}")

    def _adopt(self, message: dict[str, Any]) -> None:
        if not self._fds:
            raise SessionError("memory without a file descriptor")
        fd = self._fds.pop(0)
        number, size = message.get("id"), message.get("size")
        if type(number) is not int or type(size) is not int or number in self._segments:
            os.close(fd)
            raise SessionError(f"memory {number!r} of {size!r} B cannot be taken")
        if len(self._segments) >= _MOST_SEGMENTS:
            os.close(fd)
            raise SessionError(f"more than {_MOST_SEGMENTS} pieces of shared memory")
        self._segments[number] = Segment.adopt(fd, size)
        # the mapping stays; the descriptor is not needed any more
        self._segments[number].close()

    def array_of(self, message: dict[str, Any], spec: TensorSpec) -> NDArray[Any]:
        """The 1-D view of shared memory that a reduce message speaks of."""
        segment = self._segments.get(get(message, "memory", int))
        offset = get(message, "offset", int, low=0)
        dtype, width = _DTYPES[spec.dtype]
        if segment is None or offset % width or offset + spec.elements * width > segment.size:
            raise SessionError(f"{spec.elements} elements at {offset} are not inside shared memory")
        return np.frombuffer(segment.memory, dtype, spec.elements, offset)

    def result(self, seq: int, error: InaError | None) -> None:
        """Answer one collective."""
        if error is None:
            self.send(pack("result", seq=seq))
        else:
            self.send(pack("result", seq=seq, **_fields(error)))

    def fail(self, error: InaError) -> None:
        """Tell the process that its job is over."""
        self.send(pack("failed", **_fields(error)))

    def send(self, frame: bytes) -> None:
        """Send without waiting; what the process does not read in time costs it its session."""
        if not self._open:
            return
        if not self._out:
            try:
                frame = frame[self._socket.send(frame) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._loop.call_soon(self.close, error.strerror or str(error))
                return
        if frame:
            if not self._out:
                self._loop.add_writer(self._socket.fileno(), self._writable)
            self._out += frame
            if len(self._out) > _OUT_LIMIT:
                self._loop.call_soon(self.close, "it does not read its answers")

    def _writable(self) -> None:
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if not self._out:
            self._loop.remove_writer(self._socket.fileno())

    def close(self, why: str) -> None:
        """End the session; ``why`` is empty if the process left in good order."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket.fileno())
        if self._out:
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._segments.clear()
        self._server.gone(self, why)


def _fields(error: InaError) -> dict[str, Any]:
    cause = next((cause for cause, kind in BY_CAUSE.items() if type(error) is kind), "fabric")
    return {"cause": cause, "message": error.reason, "round": error.round, "ranks": list(error.ranks)}
