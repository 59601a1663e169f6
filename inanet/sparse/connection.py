"""A rank's connection to the coordinator of its fabric, in a thread of its own beside the one that trains."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from numpy.typing import NDArray

from inanet.aio.uplink import Uplink
from inanet.errors import InaError, JoinTimeout, error_of
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.common.refusal import Refusal
from inanet.proto.zebra.plan import ZebraJob
from inanet.trust.certificates import Keys

#: seconds beyond the coordinator's own deadline, after which it says who is missing
_GRACE = 5.0
#: seconds to say good-bye
_FAREWELL = 5.0


class PlanFollower:
    """A :class:`~inanet.proto.common.machine.Follower` that only wants to know its place: the first plan has it for good. Later ones may have
    other hot keys, of which ``changed(facts)`` is told.
    """

    def __init__(self, changed: Callable[[ZebraJob], None] = lambda _facts: None) -> None:
        self.plan: NodePlan | None = None
        self._changed = changed
        self._decided = 0

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Remember the first; tell of other hot keys."""
        self.plan = self.plan or plan
        facts = plan.switched
        if isinstance(facts, ZebraJob) and facts.decided > self._decided:
            self._decided = facts.decided
            self._changed(facts)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Sparse jobs have no tensors."""
        raise Refusal("a rank of a sparse job has no tensors")

    def drop_layout(self, job_id: int, tensor: int) -> None:
        """There is none."""

    def drop_job(self, job_id: int) -> None:
        """Whoever trains hears of the end by its error."""

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """There are no rounds."""

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """There are no rounds."""

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        """A rank is no root."""
        return False


class CoordinatorConnection:
    """Joins as ``identity`` at ``address`` and stays. In the line's thread ``over(error)`` is called when the job has ended with an
    error, and ``changed(facts)`` when others of its keys are hot.
    """

    def __init__(
        self,
        identity: Identity,
        address: str,
        *,
        patience: float,
        keys: Keys | None,
        over: Callable[[InaError], None],
        changed: Callable[[ZebraJob], None],
    ) -> None:
        self._identity = identity
        self._address = address
        self._patience = patience
        self._keys = keys
        self._over = over
        self._place = PlanFollower(changed)
        self._missing = ""
        self._failed = False
        self._changed = threading.Condition()
        self._ended: InaError | None = None
        self._closing: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"inanet {identity.name}", daemon=True)
        self._thread.start()

    def plan(self) -> NodePlan:
        """The plan, once everybody is there. Raises what the coordinator says, as :func:`~inanet.errors.error_of` names
        it: :class:`~inanet.errors.JoinRefused`, :class:`~inanet.errors.JoinTimeout` with who is missing, ...
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._place.plan is not None or self._ended is not None, self._patience + _GRACE
            )
            if self._ended is not None:
                raise self._ended
            if self._place.plan is None:
                raise JoinTimeout(
                    f"no plan from {self._address} within {self._patience:g} s, nor in the {_GRACE:g} s after"
                    + (f": {self._missing}" if self._missing else ""),
                    job=self._identity.job,
                    rank=self._identity.ranks[0],
                )
            return self._place.plan

    def close(self, *, failed: bool = False) -> None:
        """Leave the job in good order or, ``failed``, as one whom the others need not wait for. Closing twice is fine."""
        with self._changed:
            self._failed = failed
            loop, closing = self._loop, self._closing
        if loop is not None and closing is not None and self._thread.is_alive():
            # it may have ended meanwhile
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(closing.set)
        self._thread.join(_FAREWELL)

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        asyncio.run(self._stay())

    async def _stay(self) -> None:
        closing = asyncio.Event()
        member = Member(self._place, self._identity, progress=self._progress)
        uplink = Uplink(
            member,
            self._address,
            join=self._patience,
            resume=self._patience,
            wake=lambda: self._look(member),
            keys=self._keys,
        )
        with self._changed:
            self._loop, self._closing = asyncio.get_running_loop(), closing
        running = asyncio.create_task(uplink.run())
        waiting = asyncio.create_task(closing.wait())
        try:
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
            if closing.is_set() and not self._failed:
                await uplink.leave("the rank is done")
            elif not closing.is_set():
                self._look(member)
        finally:
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)

    def _progress(self, text: str) -> None:
        self._missing = text

    def _look(self, member: Member) -> None:
        """Whether the plan is there, or an error."""
        failed = member.failed
        error: InaError | None = None
        with self._changed:
            if failed is not None and self._ended is None:
                joining = self._place.plan is None and failed.cause == "timeout"
                error = self._ended = error_of(
                    "join_timeout" if joining else failed.cause,
                    failed.message,
                    job=self._identity.job,
                    rank=self._identity.ranks[0],
                    ranks=failed.missing,
                )
            self._changed.notify_all()
        if error is not None:
            self._over(error)
