"""The rounds of asynchronous training: every host has its own, and nobody waits for another's.

What the coordinator does for a job in which all hosts begin the same rounds is to compare them, and to end those that are not
complete in time. Here a host's k-th step is its own affair: the PS says which epoch it takes part in. What is left is the one
tensor, which is scheduled when the first host begins a step, and refusals, which concern the host alone.
"""

from inanet.coordinator.job_plan import JobPlan
from inanet.coordinator.round_ledger import Host
from inanet.coordinator.rounds import CoordinatorRounds, JobLost
from inanet.coordinator.settings import FormatOf, Settings
from inanet.coordinator.tensors import Guard, Send
from inanet.messages.control import Begin, Finished, LayoutReady, Refuse, RoundFailed
from inanet.messages.fields import Cause
from inanet.messages.text import clip, show_ranks
from inanet.proto.common.plan import TensorSpec
from inanet.proto.slots.goat_async.tensors import suits


class AsynchronousRounds(CoordinatorRounds):
    """See :class:`~inanet.coordinator.rounds.CoordinatorRounds`; the ledger stays empty."""

    def __init__(
        self,
        name: str,
        hosts: dict[str, Host],
        plan: JobPlan,
        settings: Settings,
        format_of: FormatOf,
        send: Send,
        guard: Guard,
    ) -> None:
        super().__init__(name, hosts, plan, settings, format_of, send, guard)
        #: steps of every host that have been begun and are not over
        self._open: dict[str, set[int]] = {host: set() for host in hosts}

    def begin(self, host: str, message: Begin, now: float) -> None:
        """A host begins a step. Raises :class:`JobLost` if it skips one."""
        record = self.hosts[host]
        if message.round > record.next_round:
            ranks = show_ranks(record.ranks)
            text = f"host {host} ({ranks}) began step {message.round}, its next one is {record.next_round}"
            raise JobLost("protocol", f"{self._job}: {text}", message.round, record.ranks)
        if message.round < record.next_round:
            return
        record.next_round += 1
        self._open[host].add(message.round)
        if self.tensors.book.find(message.spec) is not None:
            return
        if len(self.tensors.book) or self.tensors.scheduling - {message.spec}:
            self._alone(host, message.round, "mismatch", _ONE)
            return
        try:
            suits(message.spec)
        except ValueError as error:
            self._alone(host, message.round, "unsupported", str(error))
        else:
            self.tensors.have(message.spec, 0)

    def refuse(self, host: str, message: Refuse, now: float) -> None:
        """A rank cannot contribute: its host's step fails, nobody else's."""
        record = self.hosts[host]
        if message.rank not in record.ranks:
            return
        if message.round == record.next_round:
            # ranks of one host disagree: its step is refused before it has begun
            record.next_round += 1
        at = "" if message.index is None else f" at element {message.index}"
        text = f"rank {message.rank} (host {host}): {message.detail or message.reason}{at} of tensor {message.tensor!r}"
        self._alone(host, message.round, message.reason, text, message.rank, message.tensor, message.index)

    def finished(self, name: str, message: Finished) -> None:
        """A host's step is over. Nobody else waits for that."""
        if name in self._open:
            self._open[name].discard(message.round)

    def layout_ready(self, name: str, message: LayoutReady) -> None:
        """A switch or the PS has room, or has not: then every host's step fails."""
        if message.refused and self.tensors.book.get(message.tensor) is not None:
            self._all("memory", f"{name!r} has no room for it: {message.refused}")
        super().layout_ready(name, message)

    def cannot(self, spec: TensorSpec, error: Cause, text: str) -> None:
        """There is no such tensor: the steps that wait for it fail."""
        self._all(error, text)

    def _all(self, error: Cause, text: str) -> None:
        """End all steps that are under way: a host may have begun several."""
        for host in self.hosts:
            for number in sorted(self._open[host]):
                self._alone(host, number, error, text)

    def _alone(
        self,
        host: str,
        number: int,
        error: Cause,
        text: str,
        rank: int | None = None,
        tensor: str = "",
        index: int | None = None,
    ) -> None:
        """End one host's step."""
        self._open[host].discard(number)
        failure = RoundFailed(
            job=self._plan.job,
            round=number,
            error=error,
            message=clip(f"{self._job}, step {number} of host {host}: {text}"),
            rank=rank,
            tensor=tensor,
            index=index,
        )
        self._failed.append(failure)
        self._send(host, failure)


_ONE = "a job in asynchronous training has one tensor; hand the whole gradient over as one array, without barriers"
