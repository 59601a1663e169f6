"""A rank of a sparse job, for whoever trains: push, pull, and what they raise."""

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import ArrayLike

from inanet.errors import FabricError, InaError, JoinRefused, RoundTimeout
from inanet.proto.zebra.job import F32
from inanet.proto.zebra.worker import IterationDone, Pulled, Refused, Stalled, ZebraWorker
from inanet.sparse.arguments import keys_of, values_of
from inanet.wire.batch import U64


class Carrier(Protocol):
    """Whoever carries a rank's packets."""

    def do(self, action: Callable[[float], Any]) -> Any:
        """Do something with a machine."""
        ...

    def wait_for(self, until: Callable[[], bool], job: "SparseJob", timeout: float | None) -> None:
        """Carry packets until a condition of a rank holds. Raises :class:`~inanet.errors.RoundTimeout`."""
        ...


class SparseJob:
    """One rank of a sparse job. Made by :func:`sparse_group`, or :func:`~inanet.sparse.job_file.join_sparse`."""

    def __init__(self, group: Carrier, rank: int, worker: ZebraWorker) -> None:
        self.rank = rank
        self.worker = worker
        self._group = group
        self._pushed = 0
        self._values: dict[int, F32] = {}
        self._given_up: set[int] = set()
        self._stalled: Stalled | None = None
        self._refused: Refused | None = None
        self._over: InaError | None = None

    def push(
        self, keys: ArrayLike, values: ArrayLike, *, wait: bool = True, timeout: float | None = None
    ) -> None:
        """Add gradients of distinct keys: ``keys`` integers[n] from 0 to 2^64 - 1, ``values`` real[n, width] (or [n] if the width is
        1), taken as float32.

        Returns when all ranks have pushed and every shard has finished the iteration; at once with ``wait=False``. After a
        ``RoundTimeout`` the push is still on its way: :meth:`wait` for it, since another one would be the next iteration's.
        Raises ``ValueError`` for arguments that make no sense, before anything is sent;
        :class:`~inanet.errors.RoundTimeout` saying who is waited for; :class:`~inanet.errors.FabricError` when
        a shard has lost a part of the model, and :class:`~inanet.errors.JoinRefused` when another process has had this
        rank's place: then the job is over.
        """
        self.check()
        pushed = self.checked(keys, values)
        self._group.do(lambda now: self.worker.push(*pushed, now))
        self._pushed += 1
        if wait:
            self.wait(timeout)

    def checked(self, keys: ArrayLike, values: ArrayLike) -> tuple[U64, F32]:
        """The arguments of a push as arrays. Raises ``ValueError`` as :meth:`push`, and changes nothing."""
        found = keys_of(keys)
        return self.worker.checked(found, values_of(values, len(found), self.worker.job.width))

    def wait(self, timeout: float | None = None) -> None:
        """Return when the last push is part of a finished iteration. Raises as :meth:`push`."""
        number = self._pushed
        self._wait(lambda: self.worker.done >= number, timeout)

    def pull(self, keys: ArrayLike, *, timeout: float | None = None) -> F32:
        """Values of keys (uint64[n], repetitions allowed) after all pushes of this rank: float32[n, width].

        Raises as :meth:`push`.
        """
        ticket = self.ask(keys)
        try:
            return self.take(ticket, timeout)
        except RoundTimeout:
            # nobody can ask for it any more when it comes
            self._given_up.add(ticket)
            raise

    def ask(self, keys: ArrayLike) -> int:
        """Begin a pull; :meth:`take` with this ticket has its values."""
        self.check()
        wanted = keys_of(keys)
        ticket: int = self._group.do(lambda now: self.worker.pull(wanted, now))
        return ticket

    def take(self, ticket: int, timeout: float | None = None) -> F32:
        """Values of a pull that was asked for. Raises as :meth:`pull`."""
        self._wait(lambda: ticket in self._values, timeout)
        return self._values.pop(ticket)

    def _wait(self, until: Callable[[], bool], timeout: float | None) -> None:
        self._group.wait_for(lambda: until() or self.over, self, timeout)
        if not until():
            self.check()

    @property
    def over(self) -> bool:
        """Whether the job has ended with an error."""
        return self._refused is not None or self._over is not None

    def end(self, error: InaError) -> None:
        """Whoever knows says that the job is over: every call raises the first such error from now on."""
        self._over = self._over or error

    def push_pull(
        self,
        keys: ArrayLike,
        values: ArrayLike,
        pull_keys: ArrayLike | None = None,
        *,
        timeout: float | None = None,
    ) -> F32:
        """:meth:`push`, then :meth:`pull` of the same keys or of ``pull_keys``. Needs a thread for every rank."""
        wanted = keys_of(keys if pull_keys is None else pull_keys)
        self.push(keys, values, wait=False)
        return self.pull(wanted, timeout=timeout)

    def check(self) -> None:
        """Raise the error that this rank's job has ended with, if it has."""
        if self._over is not None:
            raise self._over
        refused = self._refused
        if refused is not None:
            kind: type[InaError] = JoinRefused if refused.joining else FabricError
            raise kind(refused.reason, job=str(refused.job), rank=self.rank, round=refused.iteration)

    def heard(self, event: Any) -> None:
        """Take an event of the worker."""
        if isinstance(event, Pulled):
            if event.ticket in self._given_up:
                self._given_up.remove(event.ticket)
            else:
                self._values[event.ticket] = event.values
        elif isinstance(event, Stalled):
            self._stalled = event
        elif isinstance(event, Refused):
            self._refused = event
        elif isinstance(event, IterationDone):
            self._stalled = None

    def why(self) -> str:
        """Who is waited for, as far as it is known."""
        if self._stalled is not None or self.worker.knows_why:
            return "; ".join(self.worker.waiting_for())
        return "other ranks have not pushed yet"
