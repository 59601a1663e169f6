"""A collective that is on its way."""

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inanet.client.conversation import Conversation, Outcome
from inanet.client.memory import Memory, Piece
from inanet.errors import InaError

if TYPE_CHECKING:
    from inanet.client.exchange import Exchange
    from inanet.proto.common.events import Participation


class Handle:
    """What ``all_reduce_async`` returns. All methods may be called from any thread, and more than once.

    A handle that is dropped without :meth:`wait` does not cancel its collective. The result of an array
    outside of shared memory is copied back by :meth:`wait`, and only there.
    """

    def __init__(
        self,
        conversation: Conversation,
        outcome: Outcome,
        returned: Any,
        view: NDArray[Any],
        staged: tuple[Memory, Piece] | None,
        timeout: float,
        exchange: "Exchange | None" = None,
    ) -> None:
        self._conversation = conversation
        self._outcome = outcome
        self._returned = returned
        self._view = view
        self._staged = staged
        self._timeout = timeout
        #: where the collective is reduced, if not by the agent
        self._exchange = exchange
        self._lock = threading.Lock()

    @property
    def round(self) -> int:
        """Number of the collective in its job, counted from 1."""
        return self._outcome.seq

    @property
    def participation(self) -> "Participation | None":
        """Once :meth:`wait` has returned, the epoch that a step of asynchronous training took part in; None elsewhere.

        ``workers`` are hosts by index, in the order of their names; ``awaited`` is how many of them were waited for (K_t),
        ``staleness`` how many epochs there were since this host's last one.
        """
        return self._outcome.part

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once. Does not wait."""
        if not self._outcome.finished:
            self._conversation.poll()
            # once the job is over, memory that others share is left alone: a forked child has it, too
            if self._exchange is not None and self._conversation.broken is None:
                try:
                    self._exchange.poll(self._outcome)
                except InaError as error:
                    self._conversation.fail(error)
        return self._outcome.finished or (
            self._exchange is not None and self._conversation.broken is not None
        )

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result and return the array that was passed in, which now holds it.

        Raises the error of the collective; its array's contents are undefined then. Raises
        :class:`~inanet.errors.RoundTimeout` after ``timeout`` seconds (default: the job's), with the
        ranks that were waited for; the collective goes on, and waiting again is fine.
        """
        seconds = self._timeout if timeout is None else timeout
        outcome = self._outcome
        if not outcome.finished and not self._settle(seconds):
            self._conversation.check()
            raise self._conversation.late(outcome, seconds)
        if outcome.late:
            self._conversation.forget_late(outcome)
        with self._lock:
            if outcome.result is not None:
                np.copyto(self._view, outcome.result.reshape(self._view.shape))
                outcome.result = None
            if self._staged is not None:
                memory, piece = self._staged
                if outcome.error is None:
                    np.copyto(self._view, piece.view(self._view.dtype, self._view.shape))
                # not before: whoever is interrupted may wait again
                self._staged = None
                memory.give(piece)
        if outcome.error is not None:
            raise outcome.error.at(
                job=self._conversation.job, rank=self._conversation.rank, round=outcome.seq
            )
        return self._returned

    def let_go(self) -> None:
        """Nothing is written into the array any more; its collective goes on."""
        if self._exchange is not None:
            self._exchange.let_go(self._outcome)

    def _settle(self, seconds: float) -> bool:
        """Wait until the collective is finished; False if it is not after ``seconds`` or when the job is over."""
        if self._exchange is None:
            return self._conversation.wait_for(lambda: self._outcome.finished, seconds)
        if self._conversation.broken is not None:
            return False
        try:
            self._exchange.finish(self._outcome, time.monotonic() + seconds)
        except TimeoutError:
            return False
        except InaError as error:
            self._conversation.settle(error)
        return True
