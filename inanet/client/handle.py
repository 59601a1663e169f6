"""A collective that is on its way."""

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inanet.client.conversation import Conversation, Outcome
from inanet.client.memory import Memory, Piece

if TYPE_CHECKING:
    from inanet.proto.events import Participation


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
    ) -> None:
        self._conversation = conversation
        self._outcome = outcome
        self._returned = returned
        self._view = view
        self._staged = staged
        self._timeout = timeout
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
        return self._outcome.finished

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result and return the array that was passed in, which now holds it.

        Raises the error of the collective; its array's contents are undefined then. Raises
        :class:`~inanet.control.errors.RoundTimeout` after ``timeout`` seconds (default: the job's), with the
        ranks that were waited for; the collective goes on, and waiting again is fine.
        """
        seconds = self._timeout if timeout is None else timeout
        outcome = self._outcome
        if not outcome.finished and not self._conversation.wait_for(lambda: outcome.finished, seconds):
            self._conversation.check()
            raise self._conversation.late(outcome, seconds)
        with self._lock:
            staged, self._staged = self._staged, None
            if staged is not None:
                memory, piece = staged
                if outcome.error is None:
                    np.copyto(self._view, piece.view(self._view.dtype, self._view.shape))
                memory.give(piece)
        if outcome.error is not None:
            raise outcome.error.at(
                job=self._conversation.job, rank=self._conversation.rank, round=outcome.seq
            )
        return self._returned
