"""What a node follows: the plans of its jobs and their tensors, and for which of them it has no room."""

from dataclasses import dataclass, field

from inanet.member.identity import Identity
from inanet.messages.control import Follows, Gathered, Kept, Layout, LayoutReady, Message, Plan
from inanet.proto.common.machine import Follower, ModelKeeper
from inanet.proto.common.plan import NodePlan, Part, TensorLayout, TensorSpec
from inanet.proto.common.refusal import NoRoom, Refusal
from inanet.proto.slots.systems import SYSTEMS
from inanet.proto.zebra.plan import ZebraJob


@dataclass(slots=True)
class JobView:
    """What this node holds of one job."""

    plan: NodePlan
    layouts: dict[int, TensorLayout] = field(default_factory=dict)
    #: what this node has said of a sparse job, and no plan has been made of yet as far as it knows
    unheard: list[Gathered | Kept] = field(default_factory=list)


class JobViews:
    """Passes plans and tensors on to ``node``; what there is to say of them goes to ``out``."""

    def __init__(self, node: Follower, identity: Identity, out: list[Message]) -> None:
        self._node = node
        self._identity = identity
        self._out = out
        #: by the job's number
        self.views: dict[int, JobView] = {}
        self._early: list[Layout] = []
        #: jobs this node does not serve, and what it says of them
        self._refused: dict[int, LayoutReady] = {}

    def plans(self) -> tuple[Follows, ...]:
        """The versions that this node follows."""
        followed = [view.plan for view in self.views.values()]
        return tuple(Follows(job=p.job, key=p.key, version=p.version) for p in followed)

    def layout_of(self, job: int, spec: TensorSpec) -> TensorLayout | None:
        """A tensor of a job, if this node has it."""
        view = self.views.get(job)
        if view is None:
            return None
        return next((layout for layout in view.layouts.values() if layout.spec == spec), None)

    def holds_data(self, job: int, tensor: int, shard: int) -> bool:
        """Whether a shard is one of the data of a tensor that this node has."""
        view = self.views.get(job)
        layout = view.layouts.get(tensor) if view is not None else None
        return layout is not None and any(s.shard == shard and s.part is Part.DATA for s in layout.shards)

    # ------------------------------------------------------------ plans

    def changes_key(self, plan: NodePlan) -> bool:
        """Whether the job goes on under another key than the one this node knows."""
        known = self.views.get(plan.job)
        return known is not None and known.plan.key != plan.key

    def follow(self, message: Plan, now: float) -> bool:
        """Follow a plan; False if there is no room for it. A worker, whose job fails with that, raises :class:`~inanet.proto.common.refusal.Refusal`."""
        plan = message.plan
        try:
            self._node.apply(plan, now, attach=message.attach)
        except (Refusal, MemoryError) as error:
            self._cannot_hold(plan, _refusal(error))
            return False
        self._refused.pop(plan.job, None)
        view = self.views.get(plan.job)
        if view is None:
            view = self.views[plan.job] = JobView(plan)
            self._say_what_is_kept(plan, view)
        else:
            view.plan = plan
            view.unheard = [one for one in view.unheard if not _heard(one, plan)]
        return True

    def _say_what_is_kept(self, plan: NodePlan, view: JobView) -> None:
        try:
            part = self._node.kept(plan.job) if isinstance(self._node, ModelKeeper) else None
        except (Refusal, MemoryError) as error:
            self._cannot_hold(plan, _refusal(error))
            return
        if part is not None:
            self.say(view, Kept(job=plan.job, iteration=part.iteration, origin=part.origin))

    def say(self, view: JobView, what: Gathered | Kept) -> None:
        """Say something of a sparse job, again and again until a plan was made of it."""
        view.unheard.append(what)
        self._out.append(what)

    def _cannot_hold(self, plan: NodePlan, error: Refusal) -> None:
        """There is no room for a job. An aggregator serves others and refuses the tensors of this one, or, if it has none, the
        plan.
        """
        text = f"{self._identity.name}: {error}"
        if self._identity.role == "worker":
            raise type(error)(text) from error
        self._refused[plan.job] = LayoutReady(job=plan.job, tensor=0, refused=text, cause=error.cause)
        if plan.switched is not None and not SYSTEMS[plan.switched.system].has_tensors:
            self._out.append(self._refused[plan.job])

    # ------------------------------------------------------------ tensors

    def take_early(self) -> list[Layout]:
        """Tensors that came before the plan of their job; they are to be laid out again."""
        early, self._early = self._early, []
        return early

    def lay_out(self, message: Layout) -> bool:
        """Be ready for a tensor, or refuse it. Whether rounds of a worker may begin with it."""
        if message.job in self._refused:
            refused = self._refused[message.job]
            self._out.append(refused.model_copy(update={"tensor": message.layout.tensor}))
            return False
        view = self.views.get(message.job)
        if view is None:
            # after a restart the tensors may come before the plan that tells where their slots belong
            self._early.append(message)
            return False
        answer = LayoutReady(job=message.job, tensor=message.layout.tensor)
        try:
            self._node.add_layout(message.job, message.layout, message.last_round & 0xFFFFFFFF)
            view.layouts[message.layout.tensor] = message.layout
        except (Refusal, MemoryError) as error:
            text = f"{self._identity.name}: {error}"
            answer = answer.model_copy(update={"refused": text, "cause": _refusal(error).cause})
        if self._identity.role != "worker" or answer.refused:
            # a worker's word is not waited for, but if it has no room, then the round fails
            self._out.append(answer)
            return False
        return True

    def drop(self, job: int, tensor: int) -> None:
        view = self.views.get(job)
        if view is not None and view.layouts.pop(tensor, None) is not None:
            self._node.drop_layout(job, tensor)

    def forget(self, job: int) -> None:
        self._refused.pop(job, None)
        self._early = [layout for layout in self._early if layout.job != job]
        if self.views.pop(job, None) is not None:
            self._node.drop_job(job)


def _refusal(error: Refusal | MemoryError) -> Refusal:
    """The error as an answer: a process without memory for a job refuses it, too."""
    return error if isinstance(error, Refusal) else NoRoom(str(error))


def _heard(said: Gathered | Kept, plan: NodePlan) -> bool:
    """Whether a plan was made of what this node has said."""
    facts = plan.switched
    if not isinstance(facts, ZebraJob):
        return True
    return facts.begin >= 0 if isinstance(said, Kept) else said.tally.iteration <= facts.decided
