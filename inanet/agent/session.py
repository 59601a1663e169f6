"""One training process, as the agent sees it: its messages, its shared memory, its answers."""

import array
import asyncio
import os
import socket
from collections import deque
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from inanet.errors import FabricError, InaError, cause_of, error_of
from inanet.messages import segments
from inanet.messages.fields import check_spec
from inanet.messages.session import MOST_AHEAD, MOST_IDS, MOST_SEGMENTS, SessionError, Unpacker, pack
from inanet.messages.session import field as get
from inanet.proto.common.events import Participation
from inanet.proto.common.plan import TensorSpec, tensor_spec

#: dtype of the views handed to the backend
_DTYPES = {name: np.dtype(kind) for name, kind in [
    ("f32", np.float32), ("f16", np.float16), ("bf16", np.uint16), ("i32", np.int32), ("i64", np.int64)
]}  # fmt: skip
#: seconds in which a process must say who it is
_HELLO_SECONDS = 10.0
#: descriptors taken with one message; a process sends one
_MOST_FDS = 4
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MOST_FDS * 4)
# as plain numbers: operations on enumerations take longer than the system call
_CLOEXEC, _CTRUNC = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
#: messages of one process that are acted on in a turn of the event loop, and those among them that any number of may be sent, each
#: with an answer: one of these ends the turn, and waits until the answers before it were taken
_MOST_IN_TURN = 64
_ASKS = frozenset({"stats", "late"})
#: seconds that a process that asks more may leave answers unread
_UNREAD_SECONDS = 5.0
#: bytes of answers that a process may leave unread
_OUT_LIMIT = 1 << 20
#: what of a sentence and of a list of ranks goes into a frame
_TEXT_LIMIT = 8192
_RANKS_LIMIT = 1024
_log: Any = structlog.get_logger("inanet.local")


class Server(Protocol):
    """Whom sessions report to."""

    def hello(self, session: "Session", message: dict[str, Any]) -> None:
        """A process introduces itself: call :meth:`Session.enter`, or raise ``JoinRefused``."""
        ...

    def gone(self, session: "Session", why: str) -> None:
        """A session has ended, in good order if ``why`` is empty."""
        ...

    def figures(self) -> dict[str, int]:
        """Counters for whoever asks."""
        ...


class LocalRanks(Protocol):
    """The ranks of a job on this host."""

    @property
    def shares(self) -> bool:
        """Whether they reduce small tensors in memory that they share."""
        ...

    def call(self, session: "Session", spec: TensorSpec, view: NDArray[Any]) -> None:
        """One rank's part in its next round."""
        ...

    def late(self, session: "Session", number: int, text: str, ranks: tuple[int, ...]) -> None:
        """One rank has waited too long for a round; see :class:`~inanet.agent.group.Group`."""
        ...

    def end(self, error: InaError, reason: str) -> None:
        """The job is over for all of them."""
        ...


class Session:
    """Reads and answers one process."""

    def __init__(self, server: Server, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._ranks: LocalRanks | None = None
        self.rank = -1
        #: collectives called so far
        self.rounds = 0
        self._unanswered = 0
        self._server = server
        self._socket = connection
        self._unpacker = Unpacker()
        self._fds: list[int] = []
        self._segments: dict[int, Any] = {}
        #: collectives that may be called again, by id: what, where, and in which memory
        self._known: dict[int, tuple[TensorSpec, NDArray[Any], int]] = {}
        self._out = bytearray()
        #: messages that came and were not acted on yet; the turn in which they are; and whether more is read
        self._queue: deque[dict[str, Any]] = deque()
        self._next: asyncio.Handle | None = None
        self._reads = True
        #: the end of one that asks and does not read
        self._unread: asyncio.TimerHandle | None = None
        self._open = True
        #: the process takes nothing any more; what it said before that is still acted on
        self._hung_up = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._readable)
        self._silent = self._loop.call_later(_HELLO_SECONDS, self.close, "it did not say who it is")

    def enter(self, ranks: LocalRanks, rank: int) -> None:
        """The process is rank ``rank`` among ``ranks``."""
        self._ranks, self.rank = ranks, rank

    # ------------------------------------------------------------ messages in

    def _readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(1 << 16, _ANCILLARY_BYTES, _CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if ancillary:
            self._fds += _descriptors(ancillary)
        if not data:
            self.close(f"process {self.pid} ended")
            return
        try:
            if flags & _CTRUNC:
                raise FabricError(
                    "the worker agent of this host cannot take shared memory: it has no file descriptors "
                    "left; raise its limit (LimitNOFILE)"
                )
            self._queue.extend(self._unpacker.feed(data))
        except InaError as error:
            self._refuse(error)
        except SessionError as error:
            self._break(error)
        else:
            self._act_on_queue()

    def _act_on_queue(self) -> None:
        """Some of what has come; the rest in later turns, and until then nothing more is read."""
        self._next = None
        try:
            for _ in range(_MOST_IN_TURN):
                if not self._queue or self._waits:
                    break
                message = self._queue.popleft()
                self._act(message)
                if not self._open:
                    return
                if message["t"] in _ASKS:
                    break
            if not self._queue and len(self._fds) > _MOST_FDS:
                raise SessionError("file descriptors without a message that needs them")
        except InaError as error:
            self._refuse(error)
            return
        except SessionError as error:
            self._break(error)
            return
        if self._reads and self._queue:
            self._loop.remove_reader(self._socket.fileno())
        elif not self._reads and not self._queue:
            self._loop.add_reader(self._socket.fileno(), self._readable)
        self._reads = not self._queue
        if self._queue and not self._waits:
            self._next = self._loop.call_soon(self._act_on_queue)
        elif self._queue and self._unread is None:
            why = f"process {self.pid} does not read its answers"
            self._unread = self._loop.call_later(_UNREAD_SECONDS, self.close, why)

    @property
    def _waits(self) -> bool:
        """Whether the process has to take answers before the next of its messages is acted on."""
        return bool(self._out) and self._queue[0]["t"] in _ASKS

    def _refuse(self, error: InaError) -> None:
        who = {"job": error.job, "rank": self.rank if self.rank >= 0 else error.rank}
        _log.warning("refused a training process", pid=self.pid, **who, reason=error.reason)
        self.fail(error)
        self.close(f"process {self.pid} was refused: {error.reason}")

    def _break(self, error: SessionError) -> None:
        _log.warning("training process breaks the protocol", pid=self.pid, rank=self.rank, reason=str(error))
        self.fail(FabricError(f"this process broke the agent's protocol: {error}"))
        self.close(f"process {self.pid} broke the protocol: {error}")

    def _act(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if self._ranks is None and kind != "hello":
            raise SessionError(f"{kind} before hello")
        if kind == "again":
            self._again(message)
        elif kind == "reduce":
            self._reduce(message)
        elif kind == "memory":
            self._adopt(message)
        elif kind == "late":
            self._wait_too_long(message)
        elif kind == "release":
            self._release(get(message, "id", int))
        elif kind == "fail":
            self._give_up(message)
        elif kind == "stats":
            self.send(pack("stats", figures=self._server.figures()))
        elif kind == "hello" and self._ranks is None:
            self._silent.cancel()
            self._server.hello(self, message)
        elif kind == "bye":
            self.close("")
        else:
            raise SessionError(f"unexpected {kind}")

    def _adopt(self, message: dict[str, Any]) -> None:
        if not self._fds:
            raise SessionError("memory without a file descriptor")
        fd = self._fds.pop(0)
        try:
            number = get(message, "id", int, low=1)
            size = get(message, "size", int, low=1, high=1 << 47)
            if number in self._segments:
                raise SessionError(f"memory {number} exists")
            if len(self._segments) >= MOST_SEGMENTS:
                raise SessionError(f"more than {MOST_SEGMENTS} pieces of shared memory")
            self._segments[number] = segments.adopt(fd, size)
        finally:
            os.close(fd)

    def _release(self, memory: int) -> None:
        if self._segments.pop(memory, None) is not None:
            self._known = {number: known for number, known in self._known.items() if known[2] != memory}

    def _reduce(self, message: dict[str, Any]) -> None:
        spec = _spec_of(message)
        view = self._view(message, spec)
        if "id" in message:
            number = get(message, "id", int, low=0, high=MOST_IDS - 1)
            self._known[number] = spec, view, get(message, "memory", int)
        self._call(message, spec, view)

    def _again(self, message: dict[str, Any]) -> None:
        known = self._known.get(get(message, "id", int))
        if known is None:
            raise SessionError(f"collective {message['id']} cannot be called again: it is not known")
        self._call(message, known[0], known[1])

    def _call(self, message: dict[str, Any], spec: TensorSpec, view: NDArray[Any]) -> None:
        assert self._ranks is not None
        seq = get(message, "seq", int)
        # numbers between are of collectives in the memory that the ranks share
        if seq != self.rounds + 1 and not (self._ranks.shares and seq > self.rounds):
            raise SessionError(f"collective {seq} does not follow {self.rounds}")
        if self._unanswered >= MOST_AHEAD:
            raise SessionError(f"more than {MOST_AHEAD} collectives on their way")
        self.rounds = seq
        self._unanswered += 1
        self._ranks.call(self, spec, view)

    def _give_up(self, message: dict[str, Any]) -> None:
        """Ranks that share memory have lost each other there: the job is over."""
        assert self._ranks is not None
        if not self._ranks.shares:
            raise SessionError("fail of ranks that share no memory")
        error = error_of(
            get(message, "cause", str),
            get(message, "message", str)[:_TEXT_LIMIT],
            job="",
            rank=-1,
            round=get(message, "round", int, low=0),
            ranks=_ranks_of(message),
        )
        self._ranks.end(error, error.reason)

    def _wait_too_long(self, message: dict[str, Any]) -> None:
        assert self._ranks is not None
        text = get(message, "text", str)[:_TEXT_LIMIT]
        self._ranks.late(self, get(message, "seq", int, low=0), text, _ranks_of(message))

    def _view(self, message: dict[str, Any], spec: TensorSpec) -> NDArray[Any]:
        """The 1-D view of shared memory that a reduce message speaks of."""
        number = get(message, "memory", int)
        offset = get(message, "offset", int, low=0)
        memory = self._segments.get(number)
        dtype = _DTYPES[spec.dtype]
        if memory is None or offset % dtype.itemsize or offset + spec.elements * dtype.itemsize > len(memory):
            raise SessionError(f"{spec.elements} {spec.dtype} at {offset} do not lie inside memory {number}")
        return np.frombuffer(memory, dtype, spec.elements, offset)

    # ------------------------------------------------------------ answers out

    def result(self, seq: int, error: InaError | None, part: Participation | None = None) -> None:
        """Answer one collective; ``part`` is the epoch that it took part in (asynchronous training)."""
        self._unanswered -= 1
        fields = {} if error is None else _fields(error)
        if part is not None:
            fields = {
                "epoch": part.epoch,
                "workers": list(part.workers),
                "awaited": part.awaited,
                "staleness": part.staleness,
            }
        self.send(pack("result", seq=seq, **fields))

    def welcome(self, shared: tuple[int, int, list[int]] | None) -> None:
        """The job is complete. ``shared``: descriptor and size of the memory that its ranks share, and the ranks."""
        if shared is None:
            self.send(pack("welcome"))
            return
        fd, size, ranks = shared
        frame = pack("welcome", shared=size, ranks=ranks)
        try:
            # behind half a frame it would be no frame
            if self._out or socket.send_fds(self._socket, [frame], [fd], socket.MSG_NOSIGNAL) != len(frame):
                raise BlockingIOError
        except OSError as error:
            # a process that joins reads; not at once: the caller is in the middle of the group
            why = (
                f"process {self.pid} did not take the memory that its ranks share: {error.strerror or error}"
            )
            self._loop.call_soon(self.close, why)

    def waiting(self, seq: int, text: str, ranks: tuple[int, ...]) -> None:
        """Tell who is waited for in a collective, or to join (``seq`` 0)."""
        self.send(pack("waiting", seq=seq, text=text[:_TEXT_LIMIT], ranks=list(ranks[:_RANKS_LIMIT])))

    def fail(self, error: InaError) -> None:
        """Tell the process that its job is over."""
        self.send(failed_frame(error))

    def send(self, frame: bytes) -> None:
        """Send without waiting; what the process does not read in time costs it its session."""
        if not self._open or self._hung_up:
            return
        if not self._out:
            try:
                frame = frame[self._socket.send(frame) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self._hang_up()
                return
            except OSError as error:
                # not at once: the caller may be in the middle of something with this session
                self._loop.call_soon(self.close, error.strerror or str(error))
                return
        if frame:
            if not self._out:
                self._loop.add_writer(self._socket.fileno(), self._writable)
            self._out += frame
            if len(self._out) > _OUT_LIMIT:
                self._loop.call_soon(self.close, f"process {self.pid} does not read its answers")

    def _hang_up(self) -> None:
        """The process has gone, but what it said before that counts: reading comes to the end of it, soon."""
        self._hung_up = True
        if self._unread is None:
            self._unread = self._loop.call_later(_UNREAD_SECONDS, self.close, f"process {self.pid} ended")

    def _writable(self) -> None:
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._hang_up()
            self._out.clear()
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if not self._out:
            self._loop.remove_writer(self._socket.fileno())
            if self._unread is not None and not self._hung_up:
                self._unread.cancel()
                self._unread = None
            if self._queue and self._next is None:
                self._act_on_queue()

    def close(self, why: str) -> None:
        """End the session; ``why`` is empty if the process left in good order. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._silent.cancel()
        for handle in (self._next, self._unread):
            if handle is not None:
                handle.cancel()
        self._queue.clear()
        self._loop.remove_reader(self._socket.fileno())
        if self._out:
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._known.clear()
        self._segments.clear()
        self._server.gone(self, why)


def failed_frame(error: InaError) -> bytes:
    """What tells a process that its job is over."""
    return pack("failed", **_fields(error))


def _fields(error: InaError) -> dict[str, Any]:
    return {
        "cause": cause_of(error),
        "message": error.reason[:_TEXT_LIMIT],
        "round": error.round,
        "ranks": list(error.ranks[:_RANKS_LIMIT]),
        "details": error.details(),
    }


def _ranks_of(message: dict[str, Any]) -> tuple[int, ...]:
    ranks = get(message, "ranks", list)
    if len(ranks) > _RANKS_LIMIT or any(type(rank) is not int for rank in ranks):
        raise SessionError(f"{message['t']}.ranks are not at most {_RANKS_LIMIT} numbers")
    return tuple(ranks)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return list(fds)


def _spec_of(message: dict[str, Any]) -> TensorSpec:
    mode, shape = get(message, "mode", str), get(message, "shape", list)
    if any(type(extent) is not int for extent in shape):
        raise SessionError(f"impossible shape {shape}")
    name, dtype, op = (get(message, field, str) for field in ("name", "dtype", "op"))
    factor, propagate = get(message, "factor", float), get(message, "propagate", bool)
    try:
        return _checked_spec(name, dtype, tuple(shape), op, mode, factor, propagate)
    except ValueError as error:
        raise SessionError(str(error)) from None


@lru_cache(1024)
def _checked_spec(*what: Any) -> TensorSpec:
    """Checked once: a training process asks for the same few tensors in every step, all ranks for the same ones."""
    return check_spec(tensor_spec(*what))
