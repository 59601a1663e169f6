"""A job as a training process sees it: :func:`connect`, and collectives on arrays."""

import os
import time
from collections.abc import Sequence
from math import isfinite
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from inanet.client.arrays import as_array
from inanet.client.connection import Connection
from inanet.client.conversation import Call, Conversation, Outcome
from inanet.client.environment import chosen_system, number, socket_path
from inanet.client.handle import Handle
from inanet.client.memory import Memory, Piece
from inanet.errors import AgentUnavailable, FabricError, InaError, JoinTimeout
from inanet.messages.session import MOST_SEGMENTS, PROTOCOL
from inanet.service.limits import reason_of

if TYPE_CHECKING:
    from inanet.client.exchange import Exchange, KnownCall
    from inanet.client.peer_memory import PeerMemory

OPS = ("sum", "mean", "max", "min")
MODES = ("prologue", "carried", "fixed")
NAN = ("refuse", "propagate")
OVERFLOW = ("refuse", "wrap")
_FLOATS = ("f32", "f16", "bf16")
#: seconds in which the agent must accept a connection
_ACCEPT_SECONDS = 10.0


def connect(
    job: str = "default",
    *,
    rank: int | None = None,
    world: int | None = None,
    local_world: int | None = None,
    socket: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
    system: str | None = None,
) -> "Job":
    """Join a job through the worker agent of this host; returns when all ranks have joined.

    ``rank``, ``world`` and ``local_world`` (ranks on this host) default to RANK, WORLD_SIZE and
    LOCAL_WORLD_SIZE, as torchrun sets them, and ``local_world`` then to 1; ``socket`` to INA_SOCKET, then to
    the usual places (:func:`~inanet.client.environment.socket_path`). ``timeout`` (seconds) is for joining,
    and the default for rounds. ``system`` is who sums: "xagg", or "switchml", "atp", "esa", "a2tp", "netreduce", "goat" or
    "goat-async" where there is a switch for it, the same on all ranks; by default what INA_SYSTEM says, or else the agent's configuration. While ranks are missing, the logger ``inanet`` says so every 5 seconds.

    Raises :class:`~inanet.errors.AgentUnavailable`, :class:`~inanet.errors.JoinTimeout`
    naming who is missing, :class:`~inanet.errors.JoinRefused`, or ``ValueError`` for numbers that
    make no sense.
    """
    mine = number("rank", rank, "RANK")
    total = number("world", world, "WORLD_SIZE")
    local = number("local_world", local_world, "LOCAL_WORLD_SIZE", default=1)
    if not 0 <= mine < total or not 1 <= local <= total:
        raise ValueError(
            f"rank {mine} of {total} with {local} ranks on this host makes no sense: ranks (RANK) count from 0 to world - 1 "
            "(WORLD_SIZE), and a host has 1 to world of them (LOCAL_WORLD_SIZE)"
        )
    try:
        path = socket_path(socket)
    except AgentUnavailable as error:
        raise error.at(job=job, rank=mine) from None
    return Job(job, mine, total, local, path, timeout, chosen_system(system))


class Job:
    """One rank's membership in a job. Use as a context manager, or :meth:`close` it.

    Threads may share it. Collectives are numbered in the order of the calls, and all ranks must make the same
    calls in the same order, so threads that call collectives must agree on the order among themselves.
    Methods must not be called from signal handlers. A forked child has no job: every call raises there, and
    it may connect on its own; arrays of :meth:`empty` remain shared between parent and child.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        local_world: int,
        path: os.PathLike[str],
        timeout: float,
        system: str = "",
    ) -> None:
        self.name = name
        self.rank = rank
        self.world = world
        #: seconds that joining and, by default, every round may take
        self.timeout = timeout
        self._memory = Memory()
        #: small tensors, and large private ones, of ranks that are all on this host
        self._exchange: Exchange | None = None
        self._peers: PeerMemory | None = None
        self._conversation = Conversation(_open(path, name, rank, timeout), name, rank)
        try:
            self._conversation.say(
                "hello",
                protocol=PROTOCOL,
                job=name,
                rank=rank,
                world=world,
                local_world=local_world,
                system=system,
            )
            self._join()
            self._make_exchange()
        except BaseException:
            self._conversation.close()
            raise

    def _join(self) -> None:
        talk = self._conversation
        if talk.wait_for(lambda: talk.joined, self.timeout):
            return
        talk.check()
        raise JoinTimeout(
            f"not joined after {self.timeout:g} s: {talk.awaited or 'the agent has said nothing'}",
            job=self.name,
            rank=self.rank,
            ranks=talk.awaited_ranks,
        )

    def _make_exchange(self) -> None:
        """What reduces without the agent if all ranks are on this host."""
        talk = self._conversation
        if talk.shared is None:
            return
        # number formats: of no use to processes whose agent does all sums
        from inanet.client.exchange import ORDERED, Exchange
        from inanet.client.peer_memory import PeerMemory

        if ORDERED:
            memory, ranks = talk.shared
            self._exchange = Exchange(memory, ranks, self.rank, talk.watch)
            self._peers = PeerMemory(memory, ranks, self.rank, talk.watch)

    # ------------------------------------------------------------ collectives

    def all_reduce(
        self,
        array: Any,
        op: str = "sum",
        name: str = "",
        *,
        mode: str = "prologue",
        factor: float = 1e8,
        nan: str = "refuse",
        overflow: str = "refuse",
        timeout: float | None = None,
    ) -> Any:
        """Reduce ``array`` over all ranks, in place, and return it: :meth:`all_reduce_async` and wait."""
        exchange = self._exchange
        if exchange is not None:
            view, dtype = as_array(array)
            call = exchange.checked.get((dtype, view.shape, op, name, mode, factor, nan, overflow))
            if call is not None and exchange.fits(view):
                handle = self._post(exchange, call, array, view, in_place=True)
                try:
                    return handle.wait(timeout)
                except BaseException:
                    handle.let_go()
                    raise
            if call is not None and self._is_private(view):
                seconds = self.timeout if timeout is None else timeout
                deadline = time.monotonic() + seconds
                outcome = Outcome(call.title, view)
                with self._conversation.numbered(outcome):
                    if self._reduce_among_peers(call, view, outcome, deadline):
                        return array
                    handle = self.all_reduce_async(
                        array, op, name, mode=mode, factor=factor, nan=nan, overflow=overflow
                    )
                return handle.wait(max(0.0, deadline - time.monotonic()))
        handle = self.all_reduce_async(array, op, name, mode=mode, factor=factor, nan=nan, overflow=overflow)
        return handle.wait(timeout)

    def all_reduce_async(
        self,
        array: Any,
        op: str = "sum",
        name: str = "",
        *,
        mode: str = "prologue",
        factor: float = 1e8,
        nan: str = "refuse",
        overflow: str = "refuse",
    ) -> Handle:
        """Start reducing ``array`` over all ranks; it must not be touched until the handle's wait returns.

        ``array`` is a numpy array, a torch tensor on the CPU, or anything writable with DLPack or the buffer
        protocol; float32, float16, bfloat16, int32 or int64, of any shape and strides, 0 elements included.
        Contiguous arrays made by :meth:`empty`, and contiguous parts of them, are reduced where they are,
        others are copied to shared memory and back. ``op`` is sum, mean (floats only), max or min. ``name``
        keeps the exponents of one tensor from serving another of the same shape. ``mode`` (floats, sum and
        mean) is how exponents are agreed: carried, prologue, or fixed with ``factor``. ``nan="propagate"``
        lets NaN and infinity through as float32 addition would; finite neighbours in their block (8 elements, or 256 with
        carried and fixed exponents) come as 0. By default they are refused on all ranks. ``overflow="wrap"`` lets integer
        sums wrap round, modulo 2**32 or 2**64; by default a sum that does not fit is
        :class:`~inanet.errors.OverflowRefused` on all ranks.

        Under the system "goat-async", asynchronous training, every call is a step of this rank's own: it needs op mean and
        mode fixed, returns when the gradient has counted, and leaves in ``array`` the sum of the mean gradients of all epochs
        since this rank's last step. :attr:`Handle.participation` says which epoch that was, and who took part in it.

        Raises ``TypeError`` or ``ValueError`` for arguments that cannot be reduced, before anything is sent,
        and :class:`~inanet.errors.InaError` if the job is over.
        """
        for option, value, allowed in (
            ("op", op, OPS),
            ("mode", mode, MODES),
            ("nan", nan, NAN),
            ("overflow", overflow, OVERFLOW),
        ):
            if value not in allowed:
                raise ValueError(f"{option} {value!r} is none of {', '.join(allowed)}")
        if len(name) > 256 or not name.isprintable():
            raise ValueError("name must have at most 256 printable characters")
        if not (isfinite(factor) and factor > 0):
            raise ValueError(f"factor must be a positive number, not {factor!r}")
        view, dtype = as_array(array)
        if op == "mean" and dtype not in _FLOATS:
            raise ValueError(f"the mean of {view.dtype} is no {view.dtype}; reduce with op='sum' and divide")
        given, factor = factor, float(factor) if mode == "fixed" else 0.0
        propagate = nan == "propagate" if dtype in _FLOATS else overflow == "wrap"
        described = (name, dtype, view.shape, op, mode, factor, propagate)
        talk = self._conversation
        talk.check()
        exchange = self._exchange
        if exchange is not None and exchange.fits(view):
            call = exchange.call(described)
            exchange.checked[dtype, view.shape, op, name, mode, given, nan, overflow] = call
            return self._post(exchange, call, array, view)
        peers = self._peers
        if exchange is not None and peers is not None and peers.fits(view, dtype, op, mode):
            exchange.checked[dtype, view.shape, op, name, mode, given, nan, overflow] = exchange.call(
                described
            )
        title = name or f"{dtype}{list(view.shape)}"
        self._release_dead()
        place, offset, staged = self._place(view)
        outcome = Outcome(title, staged or view)
        talk.reduce(outcome, self.timeout, Call(*described, place, offset), self._called)
        kept = (self._memory, staged) if staged is not None else None
        return Handle(talk, outcome, array, view, kept, self.timeout)

    def _post(
        self,
        exchange: "Exchange",
        call: "KnownCall",
        array: Any,
        view: NDArray[Any],
        *,
        in_place: bool = False,
    ) -> Handle:
        talk = self._conversation
        outcome = Outcome(call.title, view)
        try:
            talk.exchange(
                outcome,
                lambda: exchange.post(call, view, outcome, in_place=in_place),
                lambda: exchange.make_room(outcome, self.timeout),
            )
        except TimeoutError:
            talk.check()
            # the collective was not called, so nobody could ever hear that it is finished
            raise talk.timed_out(outcome, self.timeout) from None
        except InaError as error:
            # as in Handle.wait: the others must hear of it
            talk.fail(error)
            talk.check()
        return Handle(talk, outcome, array, view, None, self.timeout, exchange)

    def _called(self, seq: int) -> None:
        """Tell the other ranks of this host that a collective goes through the agent."""
        if self._exchange is not None and self._peers is not None:
            self._peers.called(seq)
            self._exchange.called(seq)

    def _is_private(self, view: NDArray[Any]) -> bool:
        """Whether a tensor, which lies nowhere where the agent could reduce it, is large enough for peers to read it."""
        return self._peers is not None and self._peers.able and self._memory.find(view) is None

    def _reduce_among_peers(
        self, call: "KnownCall", view: NDArray[Any], outcome: Outcome, deadline: float
    ) -> bool:
        """Reduce a large tensor without the agent; False if that is not to be."""
        talk, exchange, peers = self._conversation, self._exchange, self._peers
        assert exchange is not None
        assert peers is not None
        try:
            if not peers.agree(call, view, outcome, deadline, exchange.called):
                return False
            talk.count(outcome)
            peers.reduce(call, view, outcome, deadline)
        except InaError as error:
            talk.settle(error)
        except BaseException:
            talk.fail(
                FabricError(f"the call of {call.title!r} was interrupted", job=self.name, rank=self.rank)
            )
            raise
        if outcome.error is not None:
            raise outcome.error.at(job=self.name, rank=self.rank, round=outcome.seq)
        return True

    def barrier(self, timeout: float | None = None) -> None:
        """Return when all ranks have called it. It counts as a collective."""
        # a sum, because switches have nothing else
        self.all_reduce(np.zeros(1, np.int32), "sum", "barrier", timeout=timeout)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """A new array in memory shared with the agent: reducing it, or a contiguous part, copies nothing.

        It is a plain array, zeroed at first, and may outlive the job.
        """
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        wanted = np.dtype(dtype)
        size = wanted.itemsize
        for extent in extents:
            size *= extent
        return self._share(size, findable=True).view(wanted, extents)

    def _place(self, view: NDArray[Any]) -> tuple[int, int, Piece | None]:
        """Number of the shared memory with the data, offset there in bytes, and the piece if it is a copy."""
        if view.flags.c_contiguous and view.size:
            found = self._memory.find(view)
            if found is not None:
                return *found, None
        piece = self._memory.take(view.nbytes) or self._share(view.nbytes, findable=False)
        np.copyto(piece.view(view.dtype, view.shape), view)
        return piece.number, 0, piece

    def described(self, size: int) -> tuple[NDArray[np.uint8], int]:
        """As :meth:`empty`, uint8[size], with a descriptor of the memory, which the caller closes.

        The system sets the memory aside now. Raises :class:`~inanet.errors.FabricError` if it has none: with
        vm.overcommit_memory=2 it would otherwise say so by SIGBUS, where the memory is first written to.
        """
        piece, fd = self._create(size, findable=True)
        try:
            os.posix_fallocate(fd, 0, max(1, size))
        except OSError as error:
            os.close(fd)
            raise FabricError(
                f"{size} B of memory to share with the agent are unavailable: {error.strerror}; this process needs more memory, "
                "or smaller buckets",
                job=self.name,
                rank=self.rank,
            ) from None
        return piece.view(np.dtype(np.uint8), (size,)), fd

    def _share(self, size: int, *, findable: bool) -> Piece:
        """New shared memory that the agent knows."""
        piece, fd = self._create(size, findable=findable)
        os.close(fd)
        return piece

    def _create(self, size: int, *, findable: bool) -> tuple[Piece, int]:
        self._release_dead()
        if self._memory.alive >= MOST_SEGMENTS:
            raise FabricError(
                f"{MOST_SEGMENTS} arrays share memory with the agent already; drop some, or use larger ones",
                job=self.name,
                rank=self.rank,
            )
        try:
            piece, fd = self._memory.create(size, findable=findable)
        except OSError as error:
            raise FabricError(
                f"{size} B of memory to share with the agent are unavailable: {reason_of(error)}",
                job=self.name,
                rank=self.rank,
            ) from None
        try:
            self._conversation.say("memory", fd, id=piece.number, size=piece.size)
        except BaseException:
            os.close(fd)
            raise
        return piece, fd

    def _release_dead(self) -> None:
        for piece in self._memory.dead():
            self._conversation.release(piece)

    # ------------------------------------------------------------ everything else

    def stats(self, timeout: float = 5.0) -> dict[str, int]:
        """Counters of the agent's node: retransmissions, dropped packets as ``drop_<reason>``, and so on."""
        talk = self._conversation
        before = talk.answers
        talk.say("stats")
        if not talk.wait_for(lambda: talk.answers > before, timeout):
            talk.check()
            raise AgentUnavailable(
                f"the worker agent has not answered for {timeout:g} s", job=self.name, rank=self.rank
            )
        return talk.figures

    @property
    def over(self) -> bool:
        """Whether the job is over for this process, as far as it has heard: every call raises the same error then."""
        return self._conversation.broken is not None

    def close(self) -> None:
        """Leave the job; collectives that are on their way end with an error. Closing twice is fine."""
        if self._exchange is not None and self._conversation.broken is None:
            self._exchange.close()
        self._conversation.close()
        if self._peers is not None:
            self._peers.close()

    def __repr__(self) -> str:
        return f"<inanet.Job {self.name!r}, rank {self.rank} of {self.world}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: os.PathLike[str], job: str, rank: int, timeout: float) -> Connection:
    try:
        return Connection(path, min(timeout, _ACCEPT_SECONDS))
    except OSError as error:
        advice = "start ina-worker on this host, or set INA_SOCKET to where it listens"
        if isinstance(error, PermissionError):
            advice = (
                "this user may not connect: see local.mode and local.allow_users in the agent's configuration"
            )
        text = f"no worker agent at {os.fspath(path)} ({error.strerror or error}); {advice}"
        raise AgentUnavailable(text, job=job, rank=rank, searched=(os.fspath(path),)) from None
