"""A node's side of the control plane: what the coordinator says is done to the node, what the node finds is reported.

Sans-IO like the coordinator: messages in, messages out, ``now`` passed in. One member per connection: an aggregator or
a parameter server has one for all jobs, a worker host one for each job.
"""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from inanet.member.evaluation import Evaluation
from inanet.member.identity import Failed, Identity, Paced
from inanet.member.job_views import JobViews
from inanet.member.rounds import Done, HostRounds
from inanet.messages.control import (
    PROTOCOL,
    Finished,
    Gather,
    Gathered,
    Held,
    Hello,
    Hold,
    JobEnded,
    JobFailed,
    Judge,
    Judged,
    Known,
    Layout,
    LayoutDrop,
    LayoutReady,
    Leave,
    Message,
    PeerSilent,
    Ping,
    Plan,
    Pong,
    RateGrant,
    Reject,
    Resume,
    RoundFailed,
    Stop,
    Waiting,
    Welcome,
)
from inanet.planning.negotiation import RateRequests, granted
from inanet.proto.common import events
from inanet.proto.common.machine import Follower, TallySource
from inanet.proto.common.plan import TensorSpec
from inanet.proto.common.refusal import Refusal


class Member:
    """See the module's documentation. ``progress(text)`` is called with what is still missing while the job forms."""

    def __init__(
        self,
        node: Follower,
        identity: Identity,
        *,
        progress: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.node = node
        self.identity = identity
        self._progress = progress
        self._paced: Paced | None = None
        #: set by whoever negotiates rates for this worker
        self.rate_requests: RateRequests | None = None
        #: set by whoever watches this worker's first step, if the coordinator has asked for it
        self.evaluation: Evaluation | None = None
        self.evaluate = False
        self._out: list[Message] = []
        self._jobs = JobViews(node, identity, self._out)
        self._rounds = HostRounds(node, identity, self._jobs, self._out)
        #: the epoch that the last step took part in (asynchronous training)
        self.participation: events.Participation | None = None
        #: the first plan has come: rounds may begin
        self.joined = False
        self.welcomed = False
        #: the coordinator gave up on this member, or on its job: nothing more will come
        self.failed: Failed | None = None
        self.rejected: Reject | None = None
        self.stopped: str | None = None
        #: how long the coordinator may stay silent
        self.silence: float | None = None

    @property
    def job(self) -> int | None:
        """The worker's job: its number once welcomed."""
        return self._rounds.job

    # ------------------------------------------------------------ connection

    def connected(self) -> None:
        """A (new) connection stands: introduce this node and say what it still holds (coordinator restart)."""
        self._out.clear()
        self.welcomed = False
        self.rejected = None
        for job in self._jobs.views:
            # a coordinator that starts again counts anew
            self._release(job)
        if self.rate_requests is not None:
            self.rate_requests.again()
        resume = tuple(
            Resume(
                job=job,
                key=view.plan.key,
                plan=view.plan,
                next_round=self._rounds.next,
                layouts=len(view.layouts),
                open=len(self._rounds) if job == self.job else 0,
            )
            for job, view in self._jobs.views.items()
        )
        who = self.identity
        self._out.append(
            Hello(
                protocol=PROTOCOL,
                name=who.name,
                role=who.role,  # type: ignore[arg-type]
                token=who.token,
                endpoint=who.endpoint,
                rx_window=who.rx_window,
                job=who.job,
                ranks=who.ranks,
                world=who.world,
                groups=who.groups,
                send_bps=who.send_bps,
                receive_bps=who.receive_bps,
                system=who.system,
                sparse=who.sparse,
                services=dict(who.services),
                resume=resume,
            )
        )
        for job, view in self._jobs.views.items():
            self._out += [Known(job=job, layout=layout) for layout in view.layouts.values()]
            if job == self.job:
                self._rounds.repeat()

    @property
    def needs_coordinator(self) -> bool:
        """Whether this is a worker of a job on a switch: only the coordinator that has admitted it can have it go on."""
        if self.identity.role != "worker":
            return False
        return any(view.plan.switched is not None for view in self._jobs.views.values())

    def disconnected(self) -> bool:
        """The connection is gone for good. Whether it helps to come back: a job on a switch is over for a worker, because its
        coordinator gives up on whoever is gone. Switches forget such jobs, whose slots others can use.
        """
        over = [job for job, view in self._jobs.views.items() if view.plan.switched is not None]
        if self.identity.role == "worker":
            return not self.needs_coordinator
        for job in over:
            self._forget(job)
        return True

    def outgoing(self) -> list[Message]:
        """Messages to send since the last call, in order."""
        out = self._out.copy()
        self._out.clear()
        return out

    # ------------------------------------------------------------ rounds of a worker

    def begin(
        self,
        round_: int,
        spec: TensorSpec,
        arrays: Sequence[NDArray[Any]],
        now: float,
        done: Done = lambda _error: None,
    ) -> None:
        """This host's part in a round; rounds count up by one. Needs :attr:`joined`. ``done(error)`` is called once, with None
        for success.
        """
        if self.evaluation is not None:
            performed = self.evaluation.begun(spec, now)
            if performed is not None:
                self._out.append(performed)
                self.evaluation = None
        self._rounds.begin(round_, spec, arrays, now, done)

    def refuse_mismatch(
        self,
        round_: int,
        spec: TensorSpec,
        rank: int,
        text: str,
        done: Done = lambda _error: None,
    ) -> None:
        """Ranks of this host called different collectives in a round, which therefore gets no part of this host."""
        self._rounds.refuse_mismatch(round_, spec, rank, text, done)

    @property
    def busy(self) -> bool:
        """Whether this host has begun rounds that are not over."""
        return bool(self._rounds)

    @property
    def watched(self) -> bool:
        """Whether :meth:`negotiate` is to be called while this host has rounds."""
        return self.rate_requests is not None or self.evaluation is not None

    @property
    def next_round(self) -> int:
        """Number of the round that :meth:`begin` expects next."""
        return self._rounds.next

    # ------------------------------------------------------------ the node's events

    def on_event(self, event: events.NodeEvent, now: float) -> None:
        """One event of the node that concerns a job of this member."""
        if isinstance(event, events.RoundDone):
            self._out.append(Finished(job=event.job, round=event.round))
            error = None
            if event.overflow >= 0:
                error = Failed(
                    "overflow",
                    f"round {event.round}: the exact sum of element {event.overflow} does not fit its dtype",
                    event.round,
                )
            self.participation = event.part
            self._rounds.close(event.round, error)
        elif isinstance(event, events.Refused):
            self._rounds.refuse(event)
        elif isinstance(event, events.RoundCommitted):
            if self._jobs.holds_data(event.job, event.tensor, event.shard):
                self._out.append(Finished(job=event.job, round=event.round))
        elif isinstance(event, events.Counted):
            self._jobs.say(self._jobs.views[event.job], Gathered(job=event.job, tally=event.tally))
        elif isinstance(event, events.Broken):
            text = f"{self.identity.name}: {event.reason}"
            self._out.append(LayoutReady(job=event.job, tensor=0, refused=text))
        else:
            self._out.append(PeerSilent(job=event.job, name=event.name, seconds=event.seconds))

    def negotiate(self, now: float) -> None:
        """Say what there is to say about rates; call it every :data:`inanet.planning.negotiation.PERIOD`."""
        if self.evaluation is not None:
            self.evaluation.look(now)
        if self.rate_requests is not None and self.welcomed:
            self._out += self.rate_requests.look(now)

    def leave(self, reason: str) -> None:
        """Go in good order."""
        self._out.append(Leave(reason=reason))

    def serves(self, job: int) -> bool:
        """Whether events of this job belong to this member."""
        return job in self._jobs.views

    # ------------------------------------------------------------ the coordinator's messages

    def receive(self, message: Message, now: float) -> None:
        """Act on one message of the coordinator; unknown kinds cannot get here."""
        if isinstance(message, Ping):
            for view in self._jobs.views.values():
                self._out += view.unheard
            self._out.append(Pong(nonce=message.nonce, plans=self._jobs.plans()))
        elif isinstance(message, Welcome):
            self.welcomed = True
            self.silence = message.silence
            self.evaluate = message.evaluate
            if message.job is not None:
                self._rounds.job = message.job
        elif isinstance(message, Waiting):
            missing = ", ".join(message.missing)
            self._progress(f"joined {message.joined} of {message.expected}, missing: {missing}")
        elif isinstance(message, Reject):
            self.rejected = message
            if message.retry_after is not None:
                self._progress(message.reason)
        elif isinstance(message, Stop):
            self.stopped = message.reason
        elif isinstance(message, Plan):
            self._on_plan(message, now)
        elif isinstance(message, Layout):
            self._on_layout(message, now)
        else:
            self._on_job_message(message, now)

    def _on_plan(self, message: Plan, now: float) -> None:
        plan = message.plan
        if self._jobs.changes_key(plan):
            self._begin_epoch(plan.job)
        try:
            if not self._jobs.follow(message, now):
                return
        except Refusal as error:
            self.failed = Failed(error.cause, str(error))
            return
        for layout in self._jobs.take_early():
            self._on_layout(layout, now)
        if plan.job == self.job:
            self.joined = True
            self._rounds.release(now)

    def _begin_epoch(self, job: int) -> None:
        """The job goes on without somebody, under another key: nothing that was sent before counts (elastic rounds)."""
        self._forget(job)
        if self.rate_requests is not None:
            self.rate_requests.again()
        self._rounds.taken_back()

    def _on_layout(self, message: Layout, now: float) -> None:
        if self._jobs.lay_out(message):
            self._rounds.laid_out(message.layout.spec, now)

    def _on_job_message(self, message: Message, now: float) -> None:
        if isinstance(message, RoundFailed):
            self.node.fail_round(message.job, message.round, message.tensors, now)
            self._rounds.close(
                message.round,
                Failed(
                    message.error,
                    message.message,
                    message.round,
                    message.rank,
                    message.missing,
                    message.tensor,
                    message.index,
                ),
            )
        elif isinstance(message, JobFailed):
            self.failed = Failed(message.error, message.message, message.round or 0, None, message.ranks)
            if message.job is not None:
                self._forget(message.job)
        elif isinstance(message, JobEnded):
            self._forget(message.job)
        elif isinstance(message, RateGrant):
            if self._paced is not None:
                self._paced.granted(granted(message))
        elif isinstance(message, LayoutDrop):
            self._jobs.drop(message.job, message.tensor)
            # begun meanwhile: it goes to the node again with the layout that follows
            self._rounds.taken_back(message.tensor)
        elif isinstance(message, Judge):
            complete = self.node.holds_all(message.job, message.round, message.tensors)
            if not complete:
                self.node.fail_round(message.job, message.round, message.tensors, now)
            self._out.append(Judged(job=message.job, round=message.round, complete=complete))
        elif isinstance(message, Gather):
            tally = (
                self.node.tally(message.job, message.iteration)
                if isinstance(self.node, TallySource)
                else None
            )
            if tally is not None:
                self._out.append(Gathered(job=message.job, tally=tally))
        elif isinstance(message, Hold):
            self._rounds.hold(message.before)
            self._out.append(Held(job=message.job, nonce=message.nonce))

    def _forget(self, job: int) -> None:
        self._release(job)
        self._jobs.forget(job)

    def paced_by(self, paced: Paced) -> None:
        """Have this node's sending follow what the root grants."""
        self._paced = paced

    def _release(self, job: int) -> None:
        if self._paced is not None:
            self._paced.released(job)

    def abandon(self, error: Failed) -> None:
        """The connection, or the job, is lost for good: every open round ends with ``error``."""
        self.failed = self.failed or error
        self._rounds.close_all(self.failed)
        for job in list(self._jobs.views):
            self._forget(job)
