"""How a worker fares in a job's first step, for the planner (XAgg, section V).

The paper takes the first round, in which everybody sends the whole gradient to the PS: t1 until the gradient was there,
t2 until it was sent. A framework hands over its gradient in several tensors, so the first step ends here when a tensor
comes for the second time; t2 is the time in which something was being sent, and t1 the rest of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from inanet.messages.control import Performed
from inanet.proto.common.plan import TensorSpec


@dataclass(slots=True)
class Evaluation:
    """Of one job, from ``started`` on, in seconds. ``sends()``: whether something is left that parents lack."""

    job: int
    sends: Callable[[], bool]
    started: float
    _seen: set[TensorSpec] = field(default_factory=set)
    _since: float | None = None
    _transmission: float = 0.0
    _ended: float = 0.0

    def look(self, now: float) -> None:
        """Note whether something is being sent; call it every few milliseconds while rounds run."""
        sends = self.sends()
        if sends and self._since is None:
            self._since = now
        elif not sends and self._since is not None:
            self._transmission += now - self._since
            self._since, self._ended = None, now

    def begun(self, spec: TensorSpec, now: float) -> Performed | None:
        """A round on this tensor begins: what to report, if that ends the first step."""
        self.look(now)
        if spec not in self._seen:
            self._seen.add(spec)
            return None
        if self._since is not None:
            # the last round is still being sent: this is as much of it as there is to see
            self._transmission += now - self._since
            self._ended = now
        training = max(0.0, (self._ended or now) - self.started - self._transmission)
        return Performed(job=self.job, training=training, transmission=self._transmission)
