"""A node's side of the control plane: what the coordinator says is done to the node, what the node finds is reported.

Sans-IO like the coordinator: messages in, messages out, ``now`` passed in. One member per connection: an aggregator or
a parameter server has one for all jobs, a worker host one for each job.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from inanet.control.evaluating import Evaluation
from inanet.control.identity import Failed, Identity, Paced
from inanet.control.messages import (
    PROTOCOL,
    Begin,
    Finished,
    Follows,
    Gather,
    Gathered,
    Held,
    Hello,
    Hold,
    JobEnded,
    JobFailed,
    Judge,
    Judged,
    Kept,
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
    Refuse,
    Reject,
    Resume,
    RoundFailed,
    Stop,
    Waiting,
    Welcome,
)
from inanet.control.negotiation import Asking, granted
from inanet.proto import events
from inanet.proto.machine import Counting, Follower, Keeping
from inanet.proto.plan import NodePlan, Part, TensorLayout, TensorSpec


@dataclass(slots=True)
class _Opened:
    """A round this host has begun: its tensor, its arrays, and whether the node has it already.

    ``refusal``: why this host cannot take part. It is kept until the round has failed, because a coordinator that
    starts again has not heard of it.
    """

    spec: TensorSpec
    arrays: Sequence[NDArray[Any]]
    tensor: int | None = None
    refusal: Refuse | None = None


@dataclass(slots=True)
class _JobView:
    """What this node holds of one job."""

    plan: NodePlan
    layouts: dict[int, TensorLayout] = field(default_factory=dict)
    #: what this node has said of a sparse job, and no plan has been made of yet as far as it knows
    unheard: list[Gathered | Kept] = field(default_factory=list)


class Member:
    """See the module's documentation. ``finished(round, error)`` is called once for every round begun here, with None
    for success; ``progress(text)`` with what is still missing while the job forms.
    """

    def __init__(
        self,
        node: Follower,
        identity: Identity,
        *,
        finished: Callable[[int, Failed | None], None] = lambda _round, _error: None,
        progress: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.node = node
        self.identity = identity
        self._finished = finished
        self._progress = progress
        self._paced: Paced | None = None
        #: set by whoever negotiates rates for this worker
        self.asking: Asking | None = None
        #: set by whoever watches this worker's first step, if the coordinator has asked for it
        self.evaluation: Evaluation | None = None
        self.evaluate = False
        self._out: list[Message] = []
        self._jobs: dict[int, _JobView] = {}
        self._early: list[Layout] = []
        #: jobs this node has no room for, and the sentence that says so
        self._no_room: dict[int, str] = {}
        self._opened: dict[int, _Opened] = {}
        self._held: dict[int, _Opened] = {}
        self._hold_before: int | None = None
        self._next_round = 1
        #: the worker's job: its number once welcomed
        self.job: int | None = None
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

    # ------------------------------------------------------------ connection

    def connected(self) -> None:
        """A (new) connection stands: introduce this node and say what it still holds (R4)."""
        self._out.clear()
        self.welcomed = False
        self.rejected = None
        for job in self._jobs:
            # a coordinator that starts again counts anew
            self._release(job)
        if self.asking is not None:
            self.asking.again()
        resume = tuple(
            Resume(
                job=job,
                key=view.plan.key,
                plan=view.plan,
                next_round=self._next_round,
                layouts=len(view.layouts),
                open=len(self._opened) if job == self.job else 0,
            )
            for job, view in self._jobs.items()
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
        for job, view in self._jobs.items():
            self._out += [Known(job=job, layout=layout) for layout in view.layouts.values()]
            if job == self.job:
                self._out += [Begin(job=job, round=number, spec=o.spec) for number, o in self._opened.items()]
                self._out += [o.refusal for o in self._opened.values() if o.refusal is not None]

    def disconnected(self) -> bool:
        """The connection is gone. Whether it helps to come back: a job on a switch is over for a worker, because its
        coordinator gives up on whoever is gone. Switches forget such jobs, whose slots others can use.
        """
        over = [job for job, view in self._jobs.items() if view.plan.switched is not None]
        if self.identity.role == "worker":
            return not over
        for job in over:
            self._forget(job)
        return True

    def outgoing(self) -> list[Message]:
        """Messages to send since the last call, in order."""
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------ rounds of a worker

    def begin(self, round_: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]], now: float) -> None:
        """This host's part in a round; rounds count up by one. Needs :attr:`joined`."""
        if self.evaluation is not None:
            performed = self.evaluation.begun(spec, now)
            if performed is not None:
                self._out.append(performed)
                self.evaluation = None
        if self._enter(round_, _Opened(spec, arrays)):
            self._start(round_, self._opened[round_], now)

    def _enter(self, round_: int, opened: _Opened) -> bool:
        """Note a round; False if it has to wait for the end of a :class:`~inanet.control.messages.Hold`."""
        if round_ != self._next_round:
            raise ValueError(f"round {round_} does not follow round {self._next_round - 1}")
        self._next_round += 1
        self._opened[round_] = opened
        if self._hold_before is not None and round_ >= self._hold_before:
            self._held[round_] = opened
            return False
        return True

    def _start(self, round_: int, opened: _Opened, now: float) -> None:
        # also one that has failed while it was held: the coordinator waits for all to come past it
        assert self.job is not None
        if opened.refusal is not None:
            self._out.append(opened.refusal)
            return
        self._out.append(Begin(job=self.job, round=round_, spec=opened.spec))
        if round_ in self._opened:
            self._give(round_, opened, now)

    def _give(self, round_: int, opened: _Opened, now: float) -> None:
        """Hand a round to the node once its tensor has a layout."""
        assert self.job is not None
        layout = self._layout_of(opened.spec)
        if layout is not None and opened.tensor is None and opened.refusal is None:
            opened.tensor = layout.tensor
            self.node.begin(self.job, layout.tensor, round_, opened.arrays, now)

    def _layout_of(self, spec: TensorSpec) -> TensorLayout | None:
        assert self.job is not None
        view = self._jobs.get(self.job)
        if view is None:
            return None
        return next((layout for layout in view.layouts.values() if layout.spec == spec), None)

    @property
    def busy(self) -> bool:
        """Whether this host has begun rounds that are not over."""
        return bool(self._opened)

    @property
    def watched(self) -> bool:
        """Whether :meth:`negotiate` is to be called while this host has rounds."""
        return self.asking is not None or self.evaluation is not None

    @property
    def next_round(self) -> int:
        """Number of the round that :meth:`begin` expects next."""
        return self._next_round

    def _close(self, round_: int, error: Failed | None) -> None:
        if self._opened.pop(round_, None) is not None:
            self._finished(round_, error)

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
            self._close(event.round, error)
        elif isinstance(event, events.Refused):
            opened = self._opened.get(event.round)
            if opened is not None:
                self._refuse(event, opened)
        elif isinstance(event, events.RoundCommitted):
            view = self._jobs.get(event.job)
            layout = view.layouts.get(event.tensor) if view is not None else None
            if layout is not None and any(
                s.shard == event.shard and s.part is Part.DATA for s in layout.shards
            ):
                self._out.append(Finished(job=event.job, round=event.round))
        elif isinstance(event, events.Counted):
            counted = Gathered(job=event.job, tally=event.tally)
            self._jobs[event.job].unheard.append(counted)
            self._out.append(counted)
        elif isinstance(event, events.Broken):
            text = f"{self.identity.name}: {event.reason}"
            self._out.append(LayoutReady(job=event.job, tensor=0, refused=text))
        else:
            self._out.append(PeerSilent(job=event.job, name=event.name, seconds=event.seconds))

    def _refuse(self, event: events.Refused, opened: _Opened) -> None:
        value = opened.arrays[event.local_rank][event.index]
        opened.refusal = Refuse(
            job=event.job,
            round=event.round,
            rank=self.identity.ranks[event.local_rank],
            tensor=_name(opened.spec),
            index=event.index,
            reason="nonfinite",
            detail=str(value),
        )
        self._out.append(opened.refusal)

    def refuse_mismatch(self, round_: int, spec: TensorSpec, rank: int, text: str) -> None:
        """Ranks of this host called different collectives in a round, which therefore gets no part of this host."""
        assert self.job is not None
        refusal = Refuse(
            job=self.job,
            round=round_,
            rank=rank,
            tensor=_name(spec),
            index=None,
            reason="mismatch",
            detail=text,
        )
        if self._enter(round_, _Opened(spec, (), refusal=refusal)):
            self._out.append(refusal)

    def negotiate(self, now: float) -> None:
        """Say what there is to say about rates; call it every :data:`inanet.control.negotiation.PERIOD`."""
        if self.evaluation is not None:
            self.evaluation.look(now)
        if self.asking is not None and self.welcomed:
            self._out += self.asking.look(now)

    def leave(self, reason: str) -> None:
        """Go in good order."""
        self._out.append(Leave(reason=reason))

    def serves(self, job: int) -> bool:
        """Whether events of this job belong to this member."""
        return job in self._jobs

    # ------------------------------------------------------------ the coordinator's messages

    def receive(self, message: Message, now: float) -> None:
        """Act on one message of the coordinator; unknown kinds cannot get here."""
        if isinstance(message, Ping):
            followed = [view.plan for view in self._jobs.values()]
            for view in self._jobs.values():
                self._out += view.unheard
            plans = tuple(Follows(job=p.job, key=p.key, version=p.version) for p in followed)
            self._out.append(Pong(nonce=message.nonce, plans=plans))
        elif isinstance(message, Welcome):
            self.welcomed = True
            self.silence = message.silence
            self.evaluate = message.evaluate
            if message.job is not None:
                self.job = message.job
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
        known = self._jobs.get(plan.job)
        if known is not None and known.plan.key != plan.key:
            self._begin_epoch(plan.job)
        try:
            self.node.apply(plan, now, attach=message.attach)
        except MemoryError as error:
            self._cannot_hold(plan, f"{self.identity.name}: {error}")
            return
        self._no_room.pop(plan.job, None)
        view = self._jobs.get(plan.job)
        if view is None:
            view = self._jobs[plan.job] = _JobView(plan)
            self._say_what_is_kept(plan, view)
        else:
            view.plan = plan
            view.unheard = [one for one in view.unheard if not _heard(one, plan)]
        early, self._early = self._early, []
        for layout in early:
            self._on_layout(layout, now)
        if plan.job == self.job:
            self.joined = True
            self._hold_before = None
            held, self._held = self._held, {}
            for round_, opened in held.items():
                self._start(round_, opened, now)

    def _say_what_is_kept(self, plan: NodePlan, view: _JobView) -> None:
        try:
            iteration = self.node.kept(plan.job) if isinstance(self.node, Keeping) else None
        except MemoryError as error:
            self._cannot_hold(plan, f"{self.identity.name}: {error}")
            return
        if iteration is not None:
            kept = Kept(job=plan.job, iteration=iteration)
            view.unheard.append(kept)
            self._out.append(kept)

    def _begin_epoch(self, job: int) -> None:
        """The job goes on without somebody, under another key: nothing that was sent before counts (R13)."""
        self._forget(job)
        if self.asking is not None:
            self.asking.again()
        for opened in self._opened.values():
            opened.tensor = None

    def _cannot_hold(self, plan: NodePlan, text: str) -> None:
        """There is no room for a job. An aggregator serves others and refuses the tensors of this one, or, if it has none, the
        plan.
        """
        if self.identity.role == "worker":
            self.failed = Failed("memory", text)
            return
        self._no_room[plan.job] = text
        if plan.switched is not None and plan.switched.sparse is not None:
            self._out.append(LayoutReady(job=plan.job, tensor=0, refused=text))

    def _on_layout(self, message: Layout, now: float) -> None:
        if message.job in self._no_room:
            refused = self._no_room[message.job]
            self._out.append(LayoutReady(job=message.job, tensor=message.layout.tensor, refused=refused))
            return
        view = self._jobs.get(message.job)
        if view is None:
            # after a restart the tensors may come before the plan that tells where their slots belong
            self._early.append(message)
            return
        refused = ""
        try:
            self.node.add_layout(message.job, message.layout, message.last_round & 0xFFFFFFFF)
            view.layouts[message.layout.tensor] = message.layout
        except MemoryError as error:
            refused = f"{self.identity.name}: {error}"
        if self.identity.role != "worker" or refused:
            # a worker's word is not waited for, but if it has no room, then the round fails
            self._out.append(LayoutReady(job=message.job, tensor=message.layout.tensor, refused=refused))
            return
        for round_, opened in list(self._opened.items()):
            if opened.spec == message.layout.spec and round_ not in self._held:
                self._give(round_, opened, now)

    def _on_job_message(self, message: Message, now: float) -> None:
        if isinstance(message, RoundFailed):
            self.node.fail_round(message.job, message.round, message.tensors, now)
            self._close(
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
            view = self._jobs.get(message.job)
            if view is not None and view.layouts.pop(message.tensor, None) is not None:
                self.node.drop_layout(message.job, message.tensor)
            for opened in self._opened.values():
                if opened.tensor == message.tensor:
                    # begun meanwhile: it goes to the node again with the layout that follows
                    opened.tensor = None
        elif isinstance(message, Judge):
            complete = self.node.holds_all(message.job, message.round, message.tensors)
            if not complete:
                self.node.fail_round(message.job, message.round, message.tensors, now)
            self._out.append(Judged(job=message.job, round=message.round, complete=complete))
        elif isinstance(message, Gather):
            tally = (
                self.node.tally(message.job, message.iteration) if isinstance(self.node, Counting) else None
            )
            if tally is not None:
                self._out.append(Gathered(job=message.job, tally=tally))
        elif isinstance(message, Hold):
            self._hold_before = message.before
            self._out.append(Held(job=message.job, nonce=message.nonce))

    def _forget(self, job: int) -> None:
        self._no_room.pop(job, None)
        self._early = [layout for layout in self._early if layout.job != job]
        self._release(job)
        if self._jobs.pop(job, None) is not None:
            self.node.drop_job(job)

    def paced_by(self, paced: Paced) -> None:
        """Have this node's sending follow what the root grants."""
        self._paced = paced

    def _release(self, job: int) -> None:
        if self._paced is not None:
            self._paced.released(job)

    def abandon(self, error: Failed) -> None:
        """The connection, or the job, is lost for good: every open round ends with ``error``."""
        self.failed = self.failed or error
        for round_ in list(self._opened):
            self._close(round_, self.failed)
        for job in list(self._jobs):
            self._forget(job)


def _heard(said: Gathered | Kept, plan: NodePlan) -> bool:
    """Whether a plan was made of what this node has said."""
    facts = plan.switched
    if facts is None:
        return True
    return facts.begin >= 0 if isinstance(said, Kept) else said.tally.iteration <= facts.decided


def _name(spec: TensorSpec) -> str:
    """What a tensor is called in messages for people."""
    return spec.name or f"{spec.dtype}{list(spec.shape)}"
