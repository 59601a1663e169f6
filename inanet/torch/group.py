"""The process group "ina": all-reduce through the fabric, everything else by a private Gloo group."""

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from inanet.errors import InaError, WorkerLostError
from inanet.torch import verdict as rules
from inanet.torch.gloo import DEVICES, GlooGroup, check_writable
from inanet.torch.ledger import Ledger
from inanet.torch.options import Options
from inanet.torch.rendezvous import Exchange, Refusal, join, leave, through_store
from inanet.torch.transport import Reduction, Transport, obstacle
from inanet.torch.verdict import Verdict
from inanet.torch.work import FabricReduction, GroupWork, seconds_of

NAME = "ina"
#: what Gloo says when another rank has ended
_BROKEN = ("connection", "closed by peer", "pair closure", "broken pipe")
#: seconds that the agent has to say why the job is over after Gloo has noticed that something is
_EXPLAIN_SECONDS = 0.5
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}
#: collectives of the base class that are left to Gloo; one that a torch does not have is passed over
DELEGATED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
_OTHERS = "the fabric carries all-reduce, and Gloo everything else"
_log = logging.getLogger("inanet")


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks that are a job of the fabric, or would be if that helped.

    The first all-reduce of a group that is made later than the default one joins its job, so groups that
    never reduce cost nothing. ``verdict`` says what all-reduce uses, None until that is known.
    """

    def __init__(
        self, store: "dist.Store", rank: int, size: int, timeout: timedelta, options: Options, title: str
    ) -> None:
        super().__init__(rank, size)
        self._store: dist.Store | None = store
        self._timeout = timeout
        self.options = options
        self._title = title
        self._ledger = Ledger(title, rank)
        explain = weakref.WeakMethod(self._explain)

        def explained(error: RuntimeError) -> Exception:
            known = explain()
            return error if known is None else known(error)

        gloo = GlooGroup(dist.PrefixStore("gloo/", store), rank, size, timeout, self._ledger, explained)
        self._gloo = gloo
        # what torch asks a group for without calling it: its devices, and a backend for each
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in DEVICES:
            self._register_backend(torch.device(device), kind, gloo.backend)
        self._transport: Transport | None = None
        #: leaves the job, once: when asked, with the last reference, or at the end of the process
        self._leave: Callable[[], Any] = lambda: None
        self._said: set[str] = set()
        self._backward: tuple[int, list[Reduction]] = (-1, [])
        self.verdict: Verdict | None = None
        #: the store through which the ranks of the default group have met, if it listens
        self.server: dist.TCPStore | None = None

    # ------------------------------------------------------------ the choice

    def decide(self) -> Verdict:
        """Join the job, or find out why not; all ranks of the group at once.

        Raises an :class:`~inanet.errors.InaError` on all ranks if INA is required and unavailable.
        """
        if self.verdict is None:
            verdict = self._join()
            if self.rank() == 0:
                way = "through the fabric" if verdict.use_ina else "by Gloo, without INA"
                level = logging.INFO if verdict.use_ina else logging.WARNING
                _log.log(level, "%s: all-reduce goes %s: %s", self._title, way, verdict.reason)
                if verdict.small:
                    _log.info("%s: %s", self._title, verdict.small)
            self.verdict = verdict
        return self.verdict

    def _join(self) -> Verdict:
        if self.size() == 1 and not self.options.required:
            return Verdict(False, "there is one rank, and nothing to reduce with")
        if self._store is None:
            raise RuntimeError(f"{self._title} was destroyed")
        seconds = self.options.seconds(self._timeout)
        store = dist.PrefixStore("job/", self._store)
        exchange = through_store(store, self.rank(), self.size(), self._timeout.total_seconds())
        joined = join(exchange, self.rank(), self.size(), self.options, seconds)
        if isinstance(joined, Refusal):
            return rules.on_refusal(joined)
        self._transport = transport = Transport(joined.job, self.options, seconds, local=joined.local)
        self._leave = weakref.finalize(self, transport.close)
        if self.options.required or not self.options.measure:
            return Verdict(True, "INA is wanted")
        verdict = self._compare(transport, exchange)
        if not verdict.use_ina:
            self._depart()
        return verdict

    def _compare(self, transport: Transport, exchange: Exchange) -> Verdict:
        options = dist.AllreduceOptions()

        def ways(probe: torch.Tensor, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
            return (
                lambda: transport.reduce(probe, "sum", name).finish(),
                lambda: self._gloo.backend.allreduce([probe], options).wait(),
            )

        verdict = rules.compare(*ways(torch.zeros(rules.PROBE_ELEMENTS), "probe"), exchange)
        if not verdict.use_ina:
            return verdict
        return rules.compare_small(verdict, *ways(torch.zeros(1), "small probe"), exchange)

    # ------------------------------------------------------------ all-reduce

    @torch._disable_dynamo
    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """Through the fabric where it carries dtype and operation, else by Gloo; in place.

        Raises ``ValueError`` or ``TypeError`` for what neither can do.
        """
        options = _options(options, dist.AllreduceOptions)
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(given) != 1:
            raise ValueError(f"all-reduce takes one tensor per rank, not {len(given)}")
        return self._allreduce(given, options)

    @torch._disable_dynamo
    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Any:
        """As :meth:`allreduce` of each of the tensors."""
        options = _options(options, dist.AllreduceCoalescedOptions)
        return self._allreduce(list(tensors), options)

    def _allreduce(self, tensors: list[torch.Tensor], options: Any) -> GroupWork:
        op = next((name for one, name in _OPS.items() if options.reduceOp == one), "")
        verdict = self.decide()
        transport = self._transport
        if transport is None or not verdict.use_ina:
            return self._gloo.allreduce(tensors, op == "mean", options, verdict.reason)
        why = next(filter(None, (obstacle(tensor, op) for tensor in tensors)), "")
        if why:
            self._say_once(tensors, op or str(options.reduceOp), why)
        elif verdict.small and sum(tensor.nbytes for tensor in tensors) <= rules.SMALL_BYTES:
            why = verdict.small
        if why:
            return self._gloo.allreduce(tensors, op == "mean", options, why)
        for tensor in tensors:
            check_writable(tensor, "all_reduce")
        seconds = seconds_of(options.timeout)
        reductions = [transport.reduce(tensor, op, "", seconds) for tensor in tensors]
        self._gloo.unwaited.sweep()
        self._watch(reductions)
        entry = self._ledger.entry("allreduce", str(tensors[0].dtype), transport.way, verdict.reason)
        entry.count(tensors)
        operation = FabricReduction(reductions, tensors, transport.completer, entry)
        return GroupWork(operation, self._gloo.unwaited)

    def _watch(self, reductions: Sequence[Reduction]) -> None:
        """Within backward, look at the results at its end, just before DDP does: what goes through DDP's
        futures has lost its type, what a callback of the engine raises keeps it."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        known, running = self._backward
        if known != task:
            running = []
            self._backward = (task, running)

            def end() -> None:
                for reduction in running:
                    reduction.finish()

            Variable._execution_engine.queue_callback(end)
        running.extend(reductions)

    def _say_once(self, tensors: Sequence[torch.Tensor], op: str, why: str) -> None:
        if why in self._said:
            return
        self._said.add(why)
        if self.rank() == 0:
            first = tensors[0]
            _log.info(
                "%s: Gloo reduces %s of shape %s with %s: %s",
                self._title,
                first.dtype,
                list(first.shape),
                op,
                why,
            )

    # ------------------------------------------------------------ errors

    def _explain(self, error: RuntimeError) -> Exception:
        """Gloo notices that a rank is gone as a broken connection: what the agent knows of it, or failing
        that the same kind of error, so that all ranks raise the same whatever they were doing.

        Other hosts hear of a departure with their next round; asking for one here would be a round that
        ranks which are ahead do not expect.
        """
        self._gloo.broken()
        transport = self._transport
        if transport is None or not any(word in str(error).lower() for word in _BROKEN):
            return error
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                transport.job.stats(left)
            except InaError as known:
                if transport.job.over:
                    return known
                # an agent too busy to answer in time, which says nothing about the job
            time.sleep(min(left, 0.02))
        text = f"a rank of the group is gone, Gloo says: {error}"
        return WorkerLostError(text, job=transport.job.name, rank=self.rank())

    # ------------------------------------------------------------ administration

    def getBackendName(self) -> str:
        """What ``get_backend`` says."""
        return NAME

    def set_timeout(self, timeout: timedelta) -> None:
        """What collectives may take from now on."""
        self._timeout = timeout
        self._gloo.set_timeout(timeout)
        if self._transport is not None:
            self._transport.seconds = self.options.seconds(timeout)

    def stats(self) -> dict[str, int]:
        """Counters of the agent's node; empty without INA."""
        return self._transport.job.stats() if self._transport is not None else {}

    def shutdown(self) -> None:
        """Leave the job and let go of the store; what is on its way fails. Called by ``destroy_process_group``; twice is
        fine."""
        healthy = self._gloo.healthy and (self._transport is None or not self._transport.job.over)
        self._depart()
        self._gloo.close()
        store, self._store = self._store, None
        server, self.server = self.server, None
        if healthy and server is not None and store is not None:
            leave(store, server, self.rank(), self.size())

    def _depart(self) -> None:
        self._transport = None
        self._leave()

    def abort(self) -> None:
        self.shutdown()


def _options(given: Any, kind: Any) -> Any:
    """Options of a collective; torch also takes an operation in their place, or nothing."""
    if given is not None and hasattr(given, "reduceOp"):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = given
    return options


def _delegated(name: str) -> Any:
    def collective(self: ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        return self._gloo.call(name, arguments, keywords, _OTHERS)

    collective.__name__ = name
    collective.__doc__ = f"``{name}`` by the private Gloo group."
    # a compiler that traces into it finds what is not for it
    return torch._disable_dynamo(collective)


for _name in DELEGATED:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _delegated(_name))


def create(place: Any, options: Any) -> ProcessGroup:
    """What torch calls for ``init_process_group("ina")`` and ``new_group(backend="ina")``.

    Raises ``TypeError`` for ``pg_options`` that are not :class:`Options`, and what :meth:`decide` raises for
    the default group.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options of backend 'ina' are inanet.torch.Options, not {type(options).__name__}")
    # the default group's list of ranks is empty; others have its options unless they have their own
    default = not list(place.global_ranks_in_group)
    if options is None and not default and isinstance(dist.group.WORLD, ProcessGroup):
        options = dist.group.WORLD.options
    # torchrun of torch 2.13 keeps its store when it restarts ranks, and with it what dead ranks have said
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    group = ProcessGroup(
        dist.PrefixStore(f"ina/{life}/", place.store),
        place.group_rank,
        place.group_size,
        place.timeout,
        options or Options(),
        "default group" if default else f"group {place.group_id}",
    )
    server = _underlying(place.store)
    # files and memory do not listen
    if default and isinstance(server, dist.TCPStore):
        group.server = server
    if default:
        group.decide()
    return group


def _underlying(store: "dist.Store") -> "dist.Store":
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def register() -> None:
    """Tell torch of the backend; importing it twice is fine."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
