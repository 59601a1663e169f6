"""A job as a training process sees it: :func:`connect`, and collectives on arrays."""

import logging
import os
import socket
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from inanet.client.arrays import as_array
from inanet.client.memory import Block, Pool, rounded
from inanet.control.errors import AgentUnavailable, InaError, JoinTimeout, RoundTimeout, error_of
from inanet.control.session import PROTOCOL, Segment, SessionError, Unpacker, pack

OPS = ("sum", "mean", "max", "min")
MODES = ("carried", "prologue", "fixed")
NAN = ("refuse", "propagate")
#: environment variable with the path of the agent's socket
SOCKET_VARIABLE = "INA_SOCKET"
_log = logging.getLogger("inanet")


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """The agent's socket: the argument, INA_SOCKET, or the first that exists of the places daemons use.

    Raises :class:`~inanet.control.errors.AgentUnavailable` with the places that were searched.
    """
    if given is not None:
        return Path(given)
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return Path(named)
    places = [Path("/run/inanet/worker.sock")]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        places.insert(0, Path(runtime) / "inanet" / "worker.sock")
    for place in places:
        if place.exists():
            return place
    raise AgentUnavailable(
        f"no worker agent: neither {SOCKET_VARIABLE} nor any of {', '.join(map(str, places))} leads to its socket; "
        "start ina-worker on this host"
    )


def _number(value: int | None, *variables: str) -> int:
    if value is not None:
        return value
    for variable in variables:
        text = os.environ.get(variable)
        if text:
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"environment variable {variable} is {text!r}, not a number") from None
    raise ValueError(f"{variables[0].lower()} is neither given nor in the environment ({', '.join(variables)})")


def connect(
    job: str = "default",
    *,
    rank: int | None = None,
    world: int | None = None,
    local_world: int | None = None,
    socket: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
) -> "Job":
    """Join a job through the worker agent of this host; returns when all ranks have joined.

    ``rank``, ``world`` and ``local_world`` (ranks on this host) default to RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, as
    torchrun sets them; ``socket`` to INA_SOCKET. ``timeout`` (seconds) is for joining, and the default for rounds.

    Raises :class:`~inanet.control.errors.AgentUnavailable`, :class:`~inanet.control.errors.JoinTimeout` naming who is
    missing, :class:`~inanet.control.errors.JoinRefused`, or ``ValueError`` for numbers that make no sense.
    """
    mine, total = _number(rank, "RANK"), _number(world, "WORLD_SIZE")
    local = 1 if local_world is None and "LOCAL_WORLD_SIZE" not in os.environ else _number(local_world, "LOCAL_WORLD_SIZE")
    if not 0 <= mine < total or not 1 <= local <= total:
        raise ValueError(f"rank {mine} of {total} with {local} ranks on this host makes no sense")
    return Job(job, mine, total, local, socket_path(socket), timeout)


class SharedArray(np.ndarray):
    """An array in memory shared with the agent; it, and every view of it, keeps its :class:`Block` alive."""

    block: Block | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.block = getattr(source, "block", None)


class Handle:
    """A collective that is on its way. ``wait`` may be called from any thread, more than once."""

    def __init__(self, job: "Job", seq: int, array: NDArray[Any], block: Block | None, result: Any) -> None:
        self._job = job
        self.seq = seq
        self._array = array
        self._block = block
        self._result = result
        self._finished = False
        self._error: InaError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the outcome is known. Does not wait."""
        if not self._finished:
            self._job._poll()
        return self._finished

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result and return the array that was passed in, which now holds it.

        Raises the collective's error, or :class:`~inanet.control.errors.RoundTimeout` after ``timeout`` seconds
        (default: the job's).
        """
        self._job._wait(self, self._job.timeout if timeout is None else timeout)
        with self._lock:
            block, self._block = self._block, None
            if block is not None:
                if self._error is None:
                    staged = block.bytes[: self._array.nbytes].view(self._array.dtype)
                    np.copyto(self._array, staged.reshape(self._array.shape))
                self._job._give_back(block)
        if self._error is not None:
            raise self._error
        return self._result

    def _finish(self, error: InaError | None) -> None:
        self._error = error
        self._finished = True


class Job:
    """One rank's membership in a job. Use as a context manager, or :meth:`close` it.

    Threads may share it: collectives are numbered in the order of the calls, and all ranks must make the same calls in
    the same order. Do not use it in a forked child.
    """

    def __init__(self, name: str, rank: int, world: int, local_world: int, path: Path, timeout: float) -> None:
        self.name = name
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self._path = path
        self._unpacker = Unpacker()
        self._pool = Pool()
        self._owned: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._handles: dict[int, Handle] = {}
        self._figures: dict[str, int] | None = None
        self._broken: InaError | None = None
        self._joined = False
        self._waiting_for = ""
        self._next_block = 1
        self._seq = 0
        # reentrant: a garbage collection may release a block in the middle of a send of the same thread
        self._send_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._socket = self._open()
        try:
            self._send(
                pack("hello", protocol=PROTOCOL, job=name, rank=rank, world=world, local_world=local_world)
            )
            self._join(timeout)
        except BaseException:
            self._socket.close()
            raise

    def _open(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.connect(str(self._path))
        except OSError as error:
            connection.close()
            raise AgentUnavailable(
                f"no worker agent at {self._path}: {error.strerror}; is ina-worker running, and may this user connect?",
                job=self.name,
                rank=self.rank,
            ) from None
        return connection

    def _join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        reported = time.monotonic()
        while not self._joined and self._broken is None:
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(min(left, 1.0)):
                if left <= 0:
                    raise JoinTimeout(
                        f"not joined within {timeout:g} s; {self._waiting_for or 'the agent has said nothing'}",
                        job=self.name,
                        rank=self.rank,
                    )
            if self._waiting_for and time.monotonic() - reported > 5.0:
                reported = time.monotonic()
                _log.warning("job %r, rank %d: %s", self.name, self.rank, self._waiting_for)
        if self._broken is not None:
            raise self._broken

    # ------------------------------------------------------------ collectives

    def all_reduce(
        self,
        array: Any,
        op: str = "sum",
        *,
        name: str = "",
        mode: str = "carried",
        factor: float = 1e8,
        nan: str = "refuse",
        timeout: float | None = None,
    ) -> Any:
        """Reduce ``array`` over all ranks, in place, and return it; :meth:`all_reduce_async` and wait."""
        return self.all_reduce_async(array, op, name=name, mode=mode, factor=factor, nan=nan).wait(timeout)

    def all_reduce_async(
        self,
        array: Any,
        op: str = "sum",
        *,
        name: str = "",
        mode: str = "carried",
        factor: float = 1e8,
        nan: str = "refuse",
    ) -> Handle:
        """Start reducing ``array`` (float32, float16, bfloat16, int32, int64; any shape and strides) over all ranks.

        ``op`` is sum, mean, max or min. ``name`` keeps exponents of one tensor from serving another of the same shape.
        ``mode`` (floats, sum and mean) is how exponents are agreed: carried, prologue, or fixed with ``factor``.
        ``nan="propagate"`` lets NaN and infinity through, spoiling their block of 256 elements; by default they are
        refused on all ranks. The array must not be touched until the handle's wait returns; after an error its
        contents are undefined.
        """
        for value, allowed, what in ((op, OPS, "op"), (mode, MODES, "mode"), (nan, NAN, "nan")):
            if value not in allowed:
                raise ValueError(f"{what} {value!r} is none of {', '.join(allowed)}")
        if self._broken is not None:
            raise self._broken
        view, dtype = as_array(array)
        block, offset, own = self._place(view)
        with self._send_lock:
            self._seq += 1
            handle = Handle(self, self._seq, view, block if own else None, array)
            self._handles[handle.seq] = handle
            frame = pack(
                "reduce",
                seq=handle.seq,
                name=name,
                dtype=dtype,
                shape=list(view.shape),
                op=op,
                mode=mode,
                factor=float(factor) if mode == "fixed" else 0.0,
                propagate=nan == "propagate",
                memory=block.number,
                offset=offset,
            )
            self._send(frame)
        return handle

    def barrier(self, timeout: float | None = None) -> None:
        """Return when all ranks have called it."""
        self.all_reduce(np.zeros(1, np.int32), "max", name="barrier", timeout=timeout)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An uninitialised array in memory shared with the agent: reducing it, or a contiguous part, copies nothing."""
        wanted = np.dtype(dtype)
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        size = wanted.itemsize
        for extent in extents:
            size *= extent
        block = self._new_block(rounded(size))
        self._owned[block.number] = block
        # the agent keeps its mapping as long as an array looks into the block
        weakref.finalize(block, self._release, block.number)
        array = block.bytes[:size].view(wanted).reshape(extents).view(SharedArray)
        array.block = block
        return array

    def _place(self, view: NDArray[Any]) -> tuple[Block, int, bool]:
        """Where the agent finds the data: the array's own shared memory, or a staging block it is copied into."""
        if view.flags.c_contiguous and view.size:
            for owned in list(self._owned.values()):
                offset = owned.offset_of(view)
                if offset is not None:
                    return owned, offset, False
        size = rounded(view.nbytes)
        block = self._pool.take(size) or self._new_block(size)
        staged = block.bytes[: view.nbytes].view(view.dtype).reshape(view.shape)
        np.copyto(staged, view)
        return block, 0, True

    def _new_block(self, size: int) -> Block:
        segment = Segment.create(size)
        with self._send_lock:
            number = self._next_block
            self._next_block += 1
            frame = pack("memory", id=number, size=size)
            socket.send_fds(self._socket, [frame], [segment.fd])
        # the mapping and the agent's copy of the descriptor are enough
        segment.close()
        return Block(number, segment)

    def _give_back(self, block: Block) -> None:
        old = self._pool.give(block)
        if old is not None:
            self._release(old.number)

    def _release(self, number: int) -> None:
        if self._broken is None:
            try:
                with self._send_lock:
                    self._send(pack("release", id=number))
            except InaError:
                # the connection is gone, and with it the agent's mapping
                return

    # ------------------------------------------------------------ conversation

    def stats(self, timeout: float = 5.0) -> dict[str, int]:
        """The agent's counters."""
        deadline = time.monotonic() + timeout
        self._figures = None
        self._send(pack("stats"))
        while self._figures is None and self._broken is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RoundTimeout(f"no statistics within {timeout:g} s", job=self.name, rank=self.rank)
            with self._read_lock:
                if self._figures is None:
                    self._read(left)
        if self._figures is None:
            assert self._broken is not None
            raise self._broken
        return self._figures

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.sendall(frame)
        except OSError as error:
            self._break(AgentUnavailable(f"the worker agent is gone: {error.strerror}", job=self.name, rank=self.rank))
            assert self._broken is not None
            raise self._broken from None

    def _wait(self, handle: Handle, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not handle._finished:
            left = deadline - time.monotonic()
            if left <= 0 or not self._read_lock.acquire(timeout=left):
                raise RoundTimeout(
                    f"collective {handle.seq} has no result after {timeout:g} s",
                    job=self.name,
                    rank=self.rank,
                    round=handle.seq,
                )
            try:
                if not handle._finished:
                    self._read(deadline - time.monotonic())
            finally:
                self._read_lock.release()

    def _poll(self) -> None:
        if self._read_lock.acquire(blocking=False):
            try:
                while self._broken is None and self._read(0.0):
                    pass
            finally:
                self._read_lock.release()

    def _read(self, seconds: float) -> bool:
        """Read and act on what arrives within ``seconds``; False if nothing did. The caller holds the read lock."""
        if self._broken is not None:
            return False
        self._socket.settimeout(max(seconds, 1e-6))
        try:
            data = self._socket.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError as error:
            self._break(AgentUnavailable(f"the worker agent is gone: {error.strerror}", job=self.name, rank=self.rank))
            return True
        finally:
            self._socket.settimeout(None)
        if not data:
            self._break(AgentUnavailable("the worker agent closed the connection", job=self.name, rank=self.rank))
            return True
        try:
            for message in self._unpacker.feed(data):
                self._act(message)
        except SessionError as error:
            self._break(AgentUnavailable(f"the worker agent talks nonsense: {error}", job=self.name, rank=self.rank))
        return True

    def _act(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "result":
            handle = self._handles.pop(message["seq"], None)
            if handle is not None:
                handle._finish(self._error(message) if "cause" in message else None)
        elif kind == "welcome":
            self._joined = True
        elif kind == "waiting":
            self._waiting_for = message["text"]
        elif kind == "stats":
            self._figures = message["figures"]
        elif kind == "failed":
            self._break(self._error(message))

    def _error(self, message: dict[str, Any]) -> InaError:
        return error_of(
            message["cause"],
            message["message"],
            job=self.name,
            rank=self.rank,
            round=message.get("round", 0),
            ranks=tuple(message.get("ranks", ())),
        )

    def _break(self, error: InaError) -> None:
        """The job is over for this process: everything that waits, and everything later, gets this error."""
        if self._broken is None:
            self._broken = error
        for handle in list(self._handles.values()):
            handle._finish(self._broken)
        self._handles.clear()

    def close(self) -> None:
        """Leave the job; collectives that are on their way are given up. Closing twice is fine."""
        if self._broken is None:
            try:
                self._send(pack("bye"))
            except InaError:
                # it is gone already: nobody to say good-bye to
                pass
            self._break(AgentUnavailable("the job was closed", job=self.name, rank=self.rank))
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
