"""The hook for DistributedDataParallel: gradients through the fabric, everything else where it was."""

import gc
import logging
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from inanet.errors import RoundTimeout
from inanet.torch import verdict as rules
from inanet.torch.buckets import BucketMemory
from inanet.torch.completion import promise
from inanet.torch.ledger import Entry, Ledger
from inanet.torch.options import Options
from inanet.torch.record import Recorder, now
from inanet.torch.rendezvous import Exchange, Refusal, join, through_group
from inanet.torch.transport import Reduction, Transport, obstacle
from inanet.torch.verdict import MEASURED, CommunicationShare, Verdict

#: seconds a round may take unless the options say otherwise
ROUND_SECONDS = 300.0
_log = logging.getLogger("inanet")


def hook(process_group: "dist.ProcessGroup | None" = None, **options: Any) -> "tuple[GradientHook, Any]":
    """What ``register_comm_hook`` wants: ``ddp.register_comm_hook(*inanet.torch.hook())``.

    All ranks of ``process_group`` (default: the default group; give the one DDP has) must call it, once for
    every model and after ``init_process_group``. They join a job through their agents; where that fails, or
    does not pay, gradients go through the process group as they would without a hook, and one line in the
    log of rank 0 (logger ``inanet``) says why. ``options`` are those of :class:`Options`.

    Raises an :class:`~inanet.errors.InaError` on all ranks if ``require_ina`` is set and the job
    cannot be had, ``ValueError`` for options that make no sense. Errors of rounds are raised by ``backward``
    with their own type, on every rank.
    """
    return GradientHook(process_group, Options(**options)), GradientHook.reduce


class GradientHook:
    """The state of one model's hook. :meth:`close` leaves the job; the end of the process does, too."""

    def __init__(self, process_group: "dist.ProcessGroup | None", options: Options) -> None:
        self._clear(options)
        self._open(process_group)

    def _clear(self, options: Options) -> None:
        """A hook of no job."""
        self._options = options
        self._opened = False
        self._transport: Transport | None = None
        #: leaves the job, once: when asked, with the last reference, or at the end of the process
        self._leave: Callable[[], Any] = lambda: None
        self._share: CommunicationShare | None = None
        self._recorder: Recorder | None = None
        self._memory: dict[int, BucketMemory] = {}
        self._parameters: set[int] = set()
        self._whole = False
        #: the model, looked for once: torch tells a hook nothing of it
        self._model: Callable[[], DistributedDataParallel | None] | None = None
        self._step = 0
        self._first_ready = 0
        self._running: list[Reduction] = []
        self._said: set[str] = set()
        self.verdict = Verdict(False, "no rank has joined a job yet")

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model, or a file, has of the hook. Jobs and shared memory belong to one process."""
        return {"options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A hook that joins a job of the default group with its first bucket, as torch's own take that group."""
        self._clear(state["options"])

    def _open(self, process_group: "dist.ProcessGroup | None") -> None:
        self._opened = True
        self._group = process_group
        self._rank = dist.get_rank(process_group)
        self._size = dist.get_world_size(process_group)
        self._ledger = Ledger("DDP hook", self._rank)
        self.verdict = self._begin()
        if self.verdict.use_ina and self._options.trace_directory is not None:
            self._recorder = Recorder(self._options.trace_directory, self._rank, f"ddp-{os.getpid()}")
            weakref.finalize(self, _write, self._recorder)

    # ------------------------------------------------------------ the choice

    def _begin(self) -> Verdict:
        seconds = self._options.seconds(timedelta(seconds=ROUND_SECONDS))
        exchange = through_group(self._group)
        if self._size == 1 and not self._options.required:
            return self._decide(Verdict(False, "there is one rank, and nothing to reduce with"))
        joined = join(exchange, self._rank, self._size, self._options, seconds)
        if isinstance(joined, Refusal):
            return self._decide(rules.on_refusal(joined))
        self._transport = transport = Transport(joined.job, self._options, seconds, local=joined.local)
        self._leave = weakref.finalize(self, transport.close)
        if self._options.required or not self._options.measure:
            return self._decide(Verdict(True, "INA is wanted"))
        self._share = CommunicationShare()
        return self._decide(self._compare(transport, exchange))

    def _compare(self, transport: Transport, exchange: Exchange) -> Verdict:
        device = "cpu" if dist.get_backend(self._group) != "nccl" else f"cuda:{torch.cuda.current_device()}"
        probe = torch.zeros(rules.PROBE_ELEMENTS, device=device)

        def through_fabric() -> None:
            reduction = transport.reduce(probe, "mean", "probe")
            reduction.finish()
            reduction.synchronize()
            if probe.is_cuda:
                torch.cuda.synchronize()

        def through_ring() -> None:
            dist.all_reduce(probe, group=self._group)
            if probe.is_cuda:
                torch.cuda.synchronize()

        return rules.compare(through_fabric, through_ring, exchange)

    def _decide(self, verdict: Verdict) -> Verdict:
        """Say it once for the job, and leave the job if it is of no use."""
        if self._rank == 0:
            way = "through the fabric" if verdict.use_ina else "through the process group, without INA"
            level = logging.INFO if verdict.use_ina else logging.WARNING
            _log.log(level, "gradients travel %s: %s", way, verdict.reason)
        if not verdict.use_ina:
            self._share = None
            self._let_go()
        self.verdict = verdict
        return verdict

    def _reconsider(self) -> None:
        """After the first steps: what share of them was communication?"""
        share, self._share = self._share, None
        assert share is not None
        assert self._transport is not None
        judged = rules.on_share(share.agreed(self._transport.job), MEASURED)
        if not judged.use_ina:
            self._decide(judged)

    # ------------------------------------------------------------ buckets

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Called by DDP for every bucket as soon as backward has filled it; returns at once with the mean to
        come, which will be in the bucket itself."""
        ready = now()
        if not self._opened:
            self._open(None)
        if bucket.index() == 0:
            self._begin_step(ready)
        self._check_model(bucket)
        transport = self._transport
        buffer = bucket.buffer()
        if transport is None:
            return self._through_group(buffer, self.verdict.reason)
        # sums of real and imaginary parts are sums of complex numbers
        paired = buffer.is_complex() and buffer.layout is torch.strided
        values = torch.view_as_real(buffer).flatten() if paired else buffer
        why = obstacle(values, "mean")
        if why:
            self._say_once(buffer, why)
            return self._through_group(buffer, why)
        entry = self._ledger.entry("gradients", str(buffer.dtype), transport.way, self.verdict.reason)
        entry.count([buffer])
        name = f"bucket {bucket.index()}"
        memory = None if values.is_cuda else self._memory_of(bucket.index(), values)
        if memory is not None:
            memory.take(values)
        reduction = transport.reduce(values if memory is None else memory.tensor, "mean", name)

        def value() -> torch.Tensor:
            reduction.synchronize()
            if memory is not None:
                memory.give(values)
            return buffer

        if memory is not None:
            memory.reduction = reduction
        self._running.append(reduction)
        times = (self._step, ready, now())
        future = self._promise(transport, reduction, buffer, value, bucket.index(), times)
        if bucket.is_last():
            self._queue_end(entry)
        return future

    def _promise(
        self,
        transport: Transport,
        reduction: Reduction,
        buffer: torch.Tensor,
        value: Callable[[], torch.Tensor],
        index: int,
        times: tuple[int, int, int],
    ) -> torch.futures.Future[torch.Tensor]:
        step, ready, sent = times

        def wait() -> None:
            reduction.finish()
            back = now()
            if self._share is not None:
                self._share.add(sent, back)
            if self._recorder is not None:
                self._recorder.bucket(index, buffer.nbytes, step, ready, sent, back)

        devices = [buffer.device] if buffer.is_cuda else None
        return promise(transport.completer, wait, value, devices=devices)

    def _begin_step(self, ready: int) -> None:
        self._step += 1
        self._first_ready = ready
        self._running = []
        self._check_join()
        if self._share is not None and self._share.begin(ready):
            self._reconsider()

    def _check_join(self) -> None:
        """DDP's join leaves the division to hooks, and does not tell them by what."""
        if self._model is None:
            self._model = _model_of(self)
        model = self._model()
        if model is None or not model._join_config.enable:
            return
        if not getattr(model, "_divide_by_initial_world_size", True):
            self._say(
                "join(divide_by_initial_world_size=False) is of no effect with a hook, torch's as well as this one: gradients "
                f"are divided by all {self._size} ranks; leave the hook out and use the process group 'ina'"
            )

    def _check_model(self, bucket: dist.GradBucket) -> None:
        """Two models with one hook would write into the same memory while backward is at work on both."""
        parameters = {id(parameter) for parameter in bucket.parameters()}
        if self._whole and not parameters <= self._parameters:
            raise ValueError("this hook belongs to another model: call inanet.torch.hook() once for each")
        if not self._whole:
            self._parameters |= parameters
            self._whole = bucket.is_last()

    def _memory_of(self, index: int, values: torch.Tensor) -> BucketMemory:
        """Memory for a bucket. DDP builds its buckets anew after the first step, and then other sizes replace the
        first ones.

        Raises :class:`~inanet.errors.RoundTimeout` if the bucket itself is memory that the agent still
        writes to.
        """
        assert self._transport is not None
        job = self._transport.job
        memory = self._memory.get(index)
        if memory is not None and not memory.idle() and memory.holds(values):
            text = f"bucket {index} is still being reduced in a round that timed out; start again from a checkpoint"
            raise RoundTimeout(text, job=job.name, rank=job.rank)
        if memory is None or not memory.idle() or not memory.fits(values):
            memory = self._memory[index] = BucketMemory(job, values)
        return memory

    def _queue_end(self, entry: Entry) -> None:
        """Look at the results at the end of backward, just before DDP does.

        Futures lose the type of an error on their way through C++; callbacks of the engine keep it. Outside
        of backward, where DDP makes up for ranks that have no more inputs, the futures must do.
        """
        running, step, began = self._running, self._step, self._first_ready

        def end() -> None:
            if self._recorder is not None:
                self._recorder.backward(began, now(), step)
            with entry.waiting():
                for reduction in running:
                    reduction.finish()

        if torch._C._current_graph_task_id() != -1:
            Variable._execution_engine.queue_callback(end)

    # ------------------------------------------------------------ the other way

    def _through_group(self, buffer: torch.Tensor, why: str) -> torch.futures.Future[torch.Tensor]:
        """What DDP does without a hook."""
        backend = dist.get_backend(self._group)
        self._ledger.entry("gradients", str(buffer.dtype), backend, why).count([buffer])
        buffer = buffer.div_(self._size)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    def _say_once(self, buffer: torch.Tensor, why: str) -> None:
        what = f"gradients of {buffer.dtype} and shape {list(buffer.shape)}"
        self._say(f"{what} travel through the process group: {why}", why)

    def _say(self, text: str, key: str = "") -> None:
        """One line in the log of rank 0 for each ``key`` (default: the text)."""
        if self._rank == 0 and (key or text) not in self._said:
            self._said.add(key or text)
            _log.warning("%s", text)

    # ------------------------------------------------------------ the end

    def stats(self) -> dict[str, int]:
        """Counters of the agent's node; empty without INA."""
        return self._transport.job.stats() if self._transport is not None else {}

    def close(self) -> None:
        """Leave the job and write the trace. Closing twice is fine. Raises ``OSError`` for a trace that cannot
        be written."""
        self._let_go()
        if self._recorder is not None:
            self._recorder.close()

    def _let_go(self) -> None:
        """Leave the job. Copies of buckets go, with their descriptors; buckets that were moved stay where they are."""
        self._transport = None
        self._leave()
        self._memory.clear()


def _write(recorder: Recorder) -> None:
    """At the end of the process there is nobody to raise to."""
    try:
        recorder.close()
    except OSError as error:
        _log.warning("the trace could not be written: %s", error)


def _model_of(state: GradientHook) -> Callable[[], DistributedDataParallel | None]:
    """The model that has this hook."""
    for one in gc.get_objects():
        # proxies have opinions of their own about their class
        if issubclass(type(one), DistributedDataParallel) and any(its is state for _, its in one._comm_hooks):
            return weakref.ref(one)
    return lambda: None
