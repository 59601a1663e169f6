"""The rounds of one job: all hosts must want the same, somebody must have room for it, and it must end in
time.

What cannot be is told to every node with one text (one outcome): mismatches with both values, refusals with rank,
tensor and index, timeouts with the ranks that were waited for.
"""

from typing import NoReturn

from inanet.coordinator.job_plan import JobPlan
from inanet.coordinator.round_ledger import Host, Round, RoundLedger
from inanet.coordinator.settings import FormatOf, Settings
from inanet.coordinator.tensors import Guard, Send, Tensors
from inanet.messages.control import (
    Begin,
    Finished,
    LayoutReady,
    Refuse,
    RoundFailed,
)
from inanet.messages.fields import Cause
from inanet.messages.text import clip, differences, listing, show_ranks, show_spec
from inanet.proto.common.plan import TensorSpec

#: Failures that are remembered in case a host turns out to have the result.
_MOST_RECENT = 256
#: Failures after which a job on a switch goes on: all hosts send a round's fragments, or none does. With a worker lost it
#: ends anyway, once results that are there have been fetched.
_BY_ALL: tuple[Cause, ...] = ("nonfinite", "unsupported", "worker_lost")


class JobLost(Exception):
    """The job cannot go on; ``text`` says why, to be shown to every rank."""

    def __init__(
        self, error: Cause, text: str, round_: int | None = None, ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(text)
        self.error = error
        self.text = text
        self.round = round_
        self.ranks = ranks


class CoordinatorRounds:
    """Rounds and tensors of the job called ``name``; ``hosts`` are the worker hosts that are in it now."""

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
        """``guard`` as in :class:`~inanet.coordinator.tensors.Tensors`."""
        self.name = name
        self.hosts = hosts
        self.ledger = RoundLedger(hosts)
        #: sums are made in a switch: its framing numbers what all hosts send, failed rounds included
        self._switched = plan.switched is not None
        self.tensors = Tensors(hosts, self.ledger, plan, settings, format_of, send, guard, self.cannot)
        #: why no further round can be had, once a worker is gone
        self.farewell = ""
        self.departed: tuple[int, ...] = ()
        #: rounds fail because the job's switches change, and it goes on with others
        self.replanned = False
        self._plan = plan
        self._settings = settings
        self._send = send
        #: the latest failures: a result may cross one on its way
        self._recent: dict[int, RoundFailed] = {}
        #: rounds that failed since they were last asked for
        self._failed: list[RoundFailed] = []

    # ---------- what hosts say

    def begin(self, host: str, message: Begin, now: float) -> None:
        """A host starts a collective. Raises :class:`JobLost` if it skips rounds or is too far ahead."""
        number = message.round
        ranks = show_ranks(self.hosts[host].ranks)
        if number > self.hosts[host].next_round:
            text = (
                f"host {host} ({ranks}) began round {number}, its next one is {self.hosts[host].next_round}"
            )
            raise JobLost("protocol", f"{self._job}: {text}", number, self.hosts[host].ranks)
        if number - self.ledger.oldest_open >= self._settings.most_ahead:
            behind = show_ranks(
                self.ledger.ranks([h.name for h in self.hosts.values() if h.next_round < number])
            )
            text = f"{ranks} began round {number}, {self._settings.most_ahead} ahead of {behind}"
            raise JobLost("protocol", f"{self._job}: {text}", number, self.hosts[host].ranks)
        round_ = self.ledger.enter(host, number, now, self._settings.round)
        if round_ is None:
            return
        if round_.failure is not None:
            self._send(host, round_.failure)
            self.ledger.tidy(round_)
            return
        wanted = round_.spec
        round_.specs[host] = message.spec
        if self.replanned:
            self.fail(round_, "aggregator_lost", self.farewell)
        elif self.farewell:
            self.fail(round_, "worker_lost", self.farewell, missing=self.departed)
        elif wanted is not None and wanted != message.spec:
            self._mismatch(round_, host, wanted, message.spec)
        elif wanted is None:
            self.tensors.provide(round_, message.spec)

    def refuse(self, host: str, message: Refuse, now: float) -> None:
        """A rank cannot contribute; the round fails for everybody."""
        round_ = self.ledger.get(message.round)
        if message.round == self.hosts[host].next_round:
            round_ = self.ledger.enter(host, message.round, now, self._settings.round)
            if round_ is not None and round_.failure is not None:
                # it has not heard of that, or it would not have come to it
                self._send(host, round_.failure)
                self.ledger.tidy(round_)
        if round_ is None or round_.failure is not None or message.rank not in self.hosts[host].ranks:
            return
        at = "" if message.index is None else f" at element {message.index}"
        if message.reason == "mismatch":
            self.fail(round_, "mismatch", f"on host {host}, {message.detail}", rank=message.rank)
            return
        if message.reason == "nonfinite":
            what = f"has {message.detail or 'NaN or infinity'}{at} of tensor {message.tensor!r}"
            advice = "pass nan='propagate' to let it through"
        else:
            what = f"holds values of tensor {message.tensor!r}{at} whose sum may not fit ({message.detail})"
            advice = "use a wider dtype"
        text = f"rank {message.rank} (host {host}) {what}; {advice}"
        self.fail(round_, message.reason, text, rank=message.rank, tensor=message.tensor, index=message.index)

    def finished(self, name: str, message: Finished) -> None:
        """A host has the result, or a parameter server has seen everybody confirm it.

        Raises :class:`JobLost` if the others have been told that the round failed: the ranks differ now.
        """
        if name not in self.hosts:
            self.ledger.confirm(name, message.round)
            return
        failure = self._recent.get(message.round)
        if failure is not None:
            self._diverged(failure, self.hosts[name].ranks)
        self.ledger.finish(name, message.round)

    # ---------- failures

    @property
    def _job(self) -> str:
        return f"job {self.name!r}"

    def fail(
        self,
        round_: Round,
        error: Cause,
        text: str,
        rank: int | None = None,
        missing: tuple[int, ...] = (),
        tensor: str = "",
        index: int | None = None,
    ) -> None:
        """End a round without a result, on every node. Raises :class:`JobLost` if a host has the result."""
        about = f" ({show_spec(round_.spec)})" if round_.spec and error != "mismatch" else ""
        tensors = [self.tensors.book.find(spec) for spec in dict.fromkeys(round_.specs.values())]
        failure = RoundFailed(
            job=self._plan.job,
            round=round_.number,
            error=error,
            message=clip(f"{self._job}, round {round_.number}{about}: {text}"),
            tensors=tuple(sorted(tensor.layout.tensor for tensor in tensors if tensor)),
            rank=rank,
            missing=missing,
            tensor=tensor,
            index=index,
        )
        if round_.committed:
            self._diverged(
                failure, self.ledger.ranks([name for name in round_.finished if name in self.hosts])
            )
        round_.failure = failure
        self._failed.append(failure)
        self._recent[round_.number] = failure
        if len(self._recent) > _MOST_RECENT:
            del self._recent[next(iter(self._recent))]
        for name in (*self._plan.holders(), *self.hosts):
            self._send(name, failure)
        self.ledger.tidy(round_)
        if self._switched and error not in _BY_ALL and not self.replanned:
            raise JobLost(
                error, f"{failure.message}; on a switch the job is over with that", round_.number, missing
            )

    @staticmethod
    def _diverged(failure: RoundFailed, ranks: tuple[int, ...]) -> NoReturn:
        """Some ranks have a result that the others cannot have any more."""
        text = f"{failure.message}; but {show_ranks(ranks)} had the result already, so the ranks differ now"
        raise JobLost(failure.error, text, failure.round, ranks)

    def failures(self) -> list[RoundFailed]:
        """Rounds that failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def _mismatch(self, round_: Round, host: str, wanted: TensorSpec, spec: TensorSpec) -> None:
        others = self.ledger.ranks([name for name, theirs in round_.specs.items() if theirs == wanted])
        mine = self.hosts[host].ranks
        values = listing(
            f"{field} is {a} on {show_ranks(others)} but {b} on {show_ranks(mine)}"
            for field, a, b in differences(wanted, spec)
        )
        text = f"ranks do not agree: {values}; all ranks must reduce the same tensors in the same order"
        self.fail(round_, "mismatch", text, rank=mine[0])

    def lose(self, host: str, text: str) -> None:
        """A worker host is gone for good. Rounds fail with ``text``, but those a survivor has the result
        of.
        """
        gone = self.hosts.pop(host)
        self.farewell = text
        self.departed = tuple(sorted((*self.departed, *gone.ranks)))
        for round_ in list(self.ledger):
            # one that the lost host alone had the result of can be completed too: the root has it
            if round_.failure is None and not round_.committed:
                self.fail(round_, "worker_lost", text, missing=self.departed)
            else:
                self.ledger.tidy(round_)

    def part(self, host: str, text: str) -> list[Round]:
        """A worker host is gone, and the job will go on without it (elastic rounds). Returns rounds that have no result
        anywhere yet, as far as is known here: whether they get one is for their roots to say.
        """
        gone = self.hosts.pop(host)
        self.farewell = text
        self.departed = tuple(sorted((*self.departed, *gone.ranks)))
        open_ = []
        for round_ in list(self.ledger):
            if round_.failure is not None or round_.committed:
                self.ledger.tidy(round_)
            elif not round_.roots:
                self.fail(round_, "worker_lost", text, missing=self.departed)
            else:
                open_.append(round_)
        return open_

    def give_up(self, text: str) -> None:
        """Sums cannot be made as planned, and will be made otherwise: rounds fail until :meth:`renew`. Raises
        :class:`JobLost` if a host has the result of one.
        """
        self.farewell, self.replanned = text, True
        for round_ in list(self.ledger):
            if round_.failure is None:
                self.fail(round_, "aggregator_lost", text)

    def renew(self, plan: JobPlan) -> None:
        """A new epoch: nodes have forgotten all tensors, and ranks are those of ``plan``. Rounds that failed and that
        some host has not come to yet are still told to it.
        """
        self._plan = plan
        self.farewell, self.departed, self.replanned = "", (), False
        self.tensors.renew(plan)
        self.ledger.renew()

    def leave(self, host: str, text: str) -> None:
        """A worker host has gone with all its results; rounds it has not begun cannot be had."""
        gone = self.hosts.pop(host)
        self.farewell = text
        self.departed = tuple(sorted((*self.departed, *gone.ranks)))
        for round_ in list(self.ledger):
            if round_.failure is None and not {host} & (round_.specs.keys() | round_.finished):
                self.fail(round_, "worker_lost", text, missing=self.departed)
            else:
                self.ledger.tidy(round_)

    @property
    def completing(self) -> bool:
        """Whether an open round has a result that some host still fetches."""
        return any(round_.failure is None for round_ in self.ledger)

    def timer(self) -> float | None:
        """When the next round is late."""
        return min((round_.deadline for round_ in self.ledger if round_.failure is None), default=None)

    def on_timer(self, now: float) -> None:
        """Fail what is late. Raises :class:`JobLost` if some ranks have a result that others cannot get."""
        for round_ in list(self.ledger):
            if round_.failure is not None or now < round_.deadline:
                continue
            waited = self._settings.round
            text, missing = self._waited_for(round_)
            if not round_.committed:
                self.fail(round_, "timeout", f"not complete after {waited:g} s: {text}", missing=missing)
            elif round_.deadline < round_.since + 2 * waited:
                round_.deadline = round_.since + 2 * waited
            else:
                text = f"{self._job}, round {round_.number}: not complete after {2 * waited:g} s: {text}"
                raise JobLost("timeout", text, round_.number, missing)

    def _waited_for(self, round_: Round) -> tuple[str, tuple[int, ...]]:
        """The sentence and the ranks."""
        ranks = self.ledger.not_begun(round_)
        if ranks:
            return f"{show_ranks(ranks)} did not begin it; do all ranks call the same collectives?", ranks
        tensor = self.tensors.book.find(round_.spec) if round_.spec else None
        if tensor is not None and tensor.waiting:
            names = listing(repr(name) for name in sorted(tensor.waiting))
            return f"no answer from {names}, asked to make slots", ()
        ranks = self.ledger.not_finished(round_)
        return f"all ranks have begun, but {show_ranks(ranks)} did not get the whole result", ranks

    # ---------- tensors

    def cannot(self, spec: TensorSpec, error: Cause, text: str) -> None:
        """There is no such tensor: rounds that wait for it fail."""
        for round_ in list(self.ledger):
            if round_.failure is None and round_.spec == spec:
                self.fail(round_, error, text)

    def resume(self) -> None:
        """Look at the rounds taken over from an earlier coordinator as if they had just been begun."""
        for round_ in list(self.ledger):
            wanted = round_.spec
            differing = next((host for host, spec in round_.specs.items() if spec != wanted), None)
            if wanted is not None and differing is not None:
                self._mismatch(round_, differing, wanted, round_.specs[differing])
            elif wanted is not None:
                self.tensors.provide(round_, wanted)

    def layout_ready(self, name: str, message: LayoutReady) -> None:
        """A node has slots for a tensor, or none to spare."""
        self.tensors.layout_ready(name, message)
