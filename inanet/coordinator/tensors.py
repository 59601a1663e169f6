"""A job's tensors on its nodes: made when a round wants one, perhaps after its schedule was computed, told to whoever has to make
slots, dropped when there is no room for others.
"""

from collections.abc import Callable, Mapping

from inanet.coordinator.job_plan import JobPlan
from inanet.coordinator.layouts import LayoutBook, LayoutError, Tensor
from inanet.coordinator.round_ledger import Host, Round, RoundLedger
from inanet.coordinator.settings import FormatOf, Settings
from inanet.coordinator.switches import MOST_TENSORS
from inanet.messages.control import Layout, LayoutDrop, LayoutReady, Message
from inanet.messages.fields import Cause
from inanet.proto.common.plan import Scheduled, TensorSpec

Send = Callable[[str, Message], None]
Guard = Callable[[float, Callable[[], None]], None]


class Tensors:
    """Those of a job with worker ``hosts``, for the rounds of its ``ledger``. ``guard`` runs what was computed elsewhere meanwhile;
    ``cannot(spec, cause, text)`` is told that there is no such tensor.
    """

    def __init__(
        self,
        hosts: Mapping[str, Host],
        ledger: RoundLedger,
        plan: JobPlan,
        settings: Settings,
        format_of: FormatOf,
        send: Send,
        guard: Guard,
        cannot: Callable[[TensorSpec, Cause, str], None],
    ) -> None:
        self._switched = plan.switched is not None
        self.book = LayoutBook(MOST_TENSORS if self._switched else settings.most_tensors)
        #: tensors whose schedule is being computed
        self.scheduling: set[TensorSpec] = set()
        self._hosts = hosts
        self._ledger = ledger
        self._plan = plan
        self._format_of = format_of
        self._send = send
        self._guard = guard
        self._cannot = cannot

    def renew(self, plan: JobPlan) -> None:
        """A new epoch: nodes have forgotten all tensors."""
        self._plan = plan
        self.scheduling.clear()
        for tensor in self.book:
            self.book.drop(tensor)

    def provide(self, round_: Round, spec: TensorSpec) -> None:
        """Find or make the tensor of a round's spec; it may have to be scheduled first."""
        if self.book.find(spec) is None:
            self.have(spec, round_.number - 1)
        tensor = self.book.find(spec)
        if tensor is not None:
            self._rooted(round_, tensor)

    def _rooted(self, round_: Round, tensor: Tensor) -> None:
        used = {shard.tree for shard in tensor.layout.shards}
        round_.roots = frozenset(tree.root for tree in self._plan.trees if tree.tree in used)

    def have(self, spec: TensorSpec, last_round: int) -> None:
        """Make a tensor, or have it scheduled and made after that."""
        publish = self._plan.publish
        if publish is None:
            self._try(spec, last_round, lambda: ())
            return
        if spec in self.scheduling:
            return
        plan, ranks = self._plan, self._plan.ranks
        try:
            self._format_of(spec, ranks)
            draft = publish.draft(spec, ranks)
        except ValueError as error:
            self._cannot(spec, "unsupported", str(error))
            return
        self.scheduling.add(spec)

        def finish() -> None:
            if self._plan is plan:
                self.scheduling.discard(spec)
                self._try(spec, last_round, lambda: draft.take()[0])

        publish.works.add(draft, finish, self._guard)

    def _try(self, spec: TensorSpec, last_round: int, scheduled: Callable[[], tuple[Scheduled, ...]]) -> None:
        try:
            tensor = self._make(spec, last_round, scheduled)
        except LayoutError as error:
            self._cannot(spec, "memory", str(error))
        except ValueError as error:
            self._cannot(spec, "unsupported", str(error))
        else:
            for round_ in self._ledger:
                if round_.spec == spec:
                    self._rooted(round_, tensor)

    def _make(
        self, spec: TensorSpec, last_round: int, scheduled: Callable[[], tuple[Scheduled, ...]]
    ) -> Tensor:
        facts = self._format_of(spec, self._plan.ranks)
        busy = {spec for round_ in self._ledger for spec in round_.specs.values()}
        while not self._switched and (spare := self.book.spare(busy)) is not None:
            self.drop(spare)
        tensor = self.book.create(spec, facts, len(self._plan.trees), last_round, scheduled())
        tensor.waiting = set(self._plan.holders())
        for name in self._plan.holders():
            self.tell(name, tensor)
        return tensor

    def tell(self, name: str, tensor: Tensor) -> None:
        """Send a tensor's layout to one node."""
        self._send(
            name, Layout(job=self._plan.job, layout=tensor.layout, last_round=max(0, tensor.last_round))
        )

    def drop(self, tensor: Tensor) -> None:
        """Free a tensor on every node."""
        self.book.drop(tensor)
        for name in (*self._hosts, *self._plan.holders()):
            self._send(name, LayoutDrop(job=self._plan.job, tensor=tensor.layout.tensor))

    def layout_ready(self, name: str, message: LayoutReady) -> None:
        """An aggregator or parameter server has slots, or a node, a worker host included, has none to spare."""
        tensor = self.book.get(message.tensor)
        if tensor is None or name not in {*tensor.waiting, *self._hosts}:
            return
        if message.refused:
            text = f"{name!r} has no room for it: {message.refused}"
            self._cannot(tensor.layout.spec, message.cause, text)
            self.drop(tensor)
        else:
            self._no_longer_wait(tensor, name)

    def holder_lost(self, name: str) -> None:
        """An aggregator is gone; do not wait for its slots."""
        for tensor in self.book:
            if name in tensor.waiting:
                self._no_longer_wait(tensor, name)

    def _no_longer_wait(self, tensor: Tensor, name: str) -> None:
        tensor.waiting.discard(name)
        if tensor.ready:
            for host in self._hosts:
                self.tell(host, tensor)
