"""Tensors through a job: in, over the fabric, and back, with errors that arrive where they are waited for."""

import threading
import time

import numpy as np
import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from inanet.client.handle import Handle
from inanet.client.job import Job
from inanet.errors import InaError, RoundTimeout
from inanet.torch.completion import Completer, SerialThread
from inanet.torch.cuda import CudaCopy, CudaDevice
from inanet.torch.options import Options

#: dtypes that the fabric adds up; float sums and means within its bound, integers exactly
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int32, torch.int64})


def obstacle(tensor: torch.Tensor, op: str) -> str:
    """Why the fabric does not reduce this tensor with ``op`` (sum, mean, max, min; empty: another); empty if it does."""
    if tensor.layout is not torch.strided:
        return f"the fabric sums dense tensors, and this one is {tensor.layout}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"the fabric reaches memory of the CPU and of CUDA devices, and this is on {tensor.device}"
    if not op:
        return "the fabric has sum, mean, max and min"
    if tensor.dtype in FLOATS or (tensor.dtype in INTEGERS and op != "mean"):
        return ""
    if tensor.dtype in INTEGERS:
        return "the mean of integers is no integer"
    return f"the fabric has float32, float16, bfloat16, int32 and int64, and no {tensor.dtype}"


class ProfiledSpan:
    """An all-reduce as torch's profilers see it, from the call to the result: name, shapes and bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ended = threading.Event()
        size = tensor.numel() * tensor.element_size()
        self._record = _RecordFunctionFast("ina:all_reduce", [tensor.detach()], {"bytes": size})
        self._record.__enter__()

    def end(self) -> None:
        """The result is here; to be called in another thread than the call, which makes it asynchronous to torch."""
        self._record.__exit__(None, None, None)
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Until it has ended: a profiler that is stopped now has the event."""
        self._ended.wait(seconds)


class Reduction:
    """One tensor on its way; all methods may be called from any thread and more than once.

    The result of a tensor outside of memory shared with the agent is in it once :meth:`finish` has returned,
    and only then.
    """

    def __init__(self, transport: "Transport", what: str, seconds: float, copy: CudaCopy | None) -> None:
        self._transport = transport
        self._what = what
        self._seconds = seconds
        self._copy = copy
        self._deadline = time.monotonic() + seconds
        self._sent = threading.Event()
        self._handle: Handle | None = None
        self._failure: Exception | None = None
        self.span: ProfiledSpan | None = None

    def send(self, tensor: torch.Tensor, op: str, name: str) -> None:
        """Hand the tensor, or its copy on the host, to the agent; errors are kept for :meth:`finish`."""
        options = self._transport.options
        try:
            if self._copy is not None:
                self._copy.wait_out()
                tensor = self._copy.host
            self._handle = self._transport.job.all_reduce_async(
                tensor, op, name, mode=options.mode, factor=options.factor, nan=options.nan, overflow="wrap"
            )
        except Exception as error:
            self._failure = error
        self._sent.set()

    def done(self) -> bool:
        """Whether :meth:`finish` would return or raise at once."""
        return time.monotonic() >= self._deadline or self.answered()

    def answered(self) -> bool:
        """Whether the agent is done with the tensor's memory, whatever the result."""
        if self._failure is not None:
            return True
        return self._handle is not None and self._handle.done()

    def finish(self, seconds: float | None = None) -> None:
        """Wait until the tensor holds the result; the copy back to a device has been started then.

        Raises the collective's :class:`~inanet.errors.InaError`,
        :class:`~inanet.errors.RoundTimeout` after ``seconds`` or when the reduction's time is up, or what
        was wrong with the tensor.
        """
        self._finish(seconds)
        if self._copy is not None:
            self._copy.start_back()
        if self.span is not None:
            self.span.wait(max(0.0, self._deadline - time.monotonic()))

    def _finish(self, seconds: float | None) -> None:
        left = self._deadline - time.monotonic()
        allowed = max(0.0, left if seconds is None else min(seconds, left))
        stop = time.monotonic() + allowed
        # the client knows only what was left of the time when it was asked
        patience = self._seconds if seconds is None else seconds
        if not self._sent.wait(allowed):
            raise self._late(patience)
        if isinstance(self._failure, InaError):
            raise self._failure.at(job=self._transport.job.name, rank=self._transport.job.rank)
        if self._failure is not None:
            raise self._failure
        assert self._handle is not None
        try:
            self._handle.wait(max(0.0, stop - time.monotonic()))
        except RoundTimeout as error:
            if self._handle.done():
                # the fabric's own verdict on the round, or a result that has come in the meantime
                self._handle.wait(0.0)
                return
            raise self._late(patience, error) from None

    def _late(self, seconds: float, known: RoundTimeout | None = None) -> RoundTimeout:
        job = self._transport.job
        about = known.reason.partition("; ")[2] if known is not None else "it is still being copied or sent"
        return RoundTimeout(
            f"{self._what} has no result after {seconds:g} s" + (f"; {about}" if about else ""),
            job=job.name,
            rank=job.rank,
            round=known.round if known is not None else 0,
            ranks=known.ranks if known is not None else (),
        )

    def synchronize(self) -> None:
        """Make what the current stream does next see the result; of no effect for tensors on the CPU."""
        if self._copy is not None:
            self._copy.synchronize()

    def profile(self, span: ProfiledSpan) -> None:
        """End the span with the reduction, whoever waits for it."""
        self.span = span

        def wait() -> None:
            try:
                self._finish(None)
            except Exception:
                # whoever waits hears of it
                return

        self._transport.completer.put(span.end, wait)


class Transport:
    """The way of a group's tensors through its job.

    Collectives have the order of the calls, so callers in several threads must agree on it. ``local``: all ranks
    share one agent, which sums in memory.
    """

    def __init__(self, job: Job, options: Options, seconds: float, *, local: bool = False) -> None:
        self.job = job
        self.options = options
        self.seconds = seconds
        self.local = local
        self.completer = Completer("inanet-completer")
        #: sends what must first arrive from a device, and then everything, for the order's sake
        self._sending = SerialThread("inanet-sending")
        self._devices: dict[torch.device, CudaDevice] = {}
        self._closed = False

    @property
    def way(self) -> str:
        """What carries the tensors, in words."""
        return "shared memory" if self.local else "fabric"

    def reduce(self, tensor: torch.Tensor, op: str, name: str, seconds: float | None = None) -> Reduction:
        """Start reducing ``tensor`` in place; ``seconds`` (default: the transport's) until it has failed.

        What is wrong with the job is raised by waiting, except that it can keep a tensor on a device from
        being copied in the first place.
        """
        allowed = self.seconds if seconds is None else seconds
        what = f"the {op} of {name or 'a tensor'} {list(tensor.shape)}"
        copy = self._device(tensor.device).copy_out(tensor) if tensor.is_cuda else None
        reduction = Reduction(self, what, allowed, copy)
        plain = tensor.detach()
        span = ProfiledSpan(plain) if profiler._is_profiler_enabled else None
        if copy is not None or self._sending.used:
            self._sending.put(lambda: reduction.send(plain, op, name))
        else:
            reduction.send(plain, op, name)
        if span is not None:
            reduction.profile(span)
        return reduction

    def _device(self, device: torch.device) -> CudaDevice:
        """The streams and the pinned memory of a CUDA device."""
        known = self._devices.get(device)
        if known is None:
            known = self._devices[device] = CudaDevice(device, lambda size: self.job.empty(size, np.uint8))
        return known

    def close(self) -> None:
        """Leave the job; what is on its way fails. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.job.close()
        self._sending.close()
        self.completer.close()
        for device in self._devices.values():
            device.close()
