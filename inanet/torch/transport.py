"""Tensors through a job: in, over the fabric, and back, with errors that arrive where they are waited for."""

import threading
import time
from typing import Any

import torch

from inanet.client.handle import Handle
from inanet.client.job import Job
from inanet.errors import InaError, RoundTimeout
from inanet.torch.lane import Lane
from inanet.torch.options import Options

#: dtypes that the fabric adds up; float sums and means within its bound, integers exactly
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int32, torch.int64})


def carries(tensor: torch.Tensor, op: str) -> bool:
    """Whether the fabric reduces this tensor with ``op`` (sum, mean, max, min)."""
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return False
    return tensor.dtype in FLOATS or (tensor.dtype in INTEGERS and op != "mean")


class Reduction:
    """One tensor on its way; all methods may be called from any thread and more than once.

    The result of a tensor outside of memory shared with the agent is in it once :meth:`finish` has returned,
    and only then.
    """

    def __init__(self, transport: "Transport", what: str, seconds: float) -> None:
        self._transport = transport
        self._what = what
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._sent = threading.Event()
        self._handle: Handle | None = None
        self._failure: Exception | None = None

    def send(self, tensor: torch.Tensor, op: str, name: str) -> None:
        """Hand the tensor to the agent; errors are kept for :meth:`finish`."""
        options = self._transport.options
        try:
            self._handle = self._transport.job.all_reduce_async(
                tensor, op, name, mode=options.mode, factor=options.factor, nan=options.nan
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
        """Wait until the tensor holds the result. Raises the collective's
        :class:`~inanet.errors.InaError`, :class:`~inanet.errors.RoundTimeout` after
        ``seconds`` or when the reduction's time is up, or what was wrong with the tensor."""
        left = self._deadline - time.monotonic()
        allowed = max(0.0, left if seconds is None else min(seconds, left))
        stop = time.monotonic() + allowed
        if not self._sent.wait(allowed):
            raise self._late(allowed)
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
            # the client knows only what was left of the time when it was asked
            raise self._late(self._seconds if seconds is None else seconds, error) from None

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


class Transport:
    """The way of a group's tensors through its job.

    Collectives have the order of the calls, so callers in several threads must agree on it. ``delivery`` is
    the thread that completes futures.
    """

    def __init__(self, job: Job, options: Options, seconds: float) -> None:
        self.job = job
        self.options = options
        self.seconds = seconds
        self.delivery = Lane("inanet-delivery")
        #: sends what must first arrive from a device, and then everything, for the order's sake
        self.sending = Lane("inanet-sending")
        self._devices: dict[Any, Any] = {}
        self._closed = False

    def reduce(self, tensor: torch.Tensor, op: str, name: str, seconds: float | None = None) -> Reduction:
        """Start reducing ``tensor`` in place; ``seconds`` (default: the transport's) until it has failed.

        What is wrong with the job is raised by waiting, except that it can keep a tensor on a device from
        being copied in the first place.
        """
        allowed = self.seconds if seconds is None else seconds
        what = f"the {op} of {name or 'a tensor'} {list(tensor.shape)}"
        if tensor.is_cuda:
            return self._lanes_of(tensor.device).reduce(tensor, op, name, what, allowed)
        reduction = Reduction(self, what, allowed)
        plain = tensor.detach()
        if self.sending.used:
            self.sending.put(lambda: reduction.send(plain, op, name))
        else:
            reduction.send(plain, op, name)
        return reduction

    def _lanes_of(self, device: torch.device) -> Any:
        """The streams and the pinned memory of a CUDA device."""
        lanes = self._devices.get(device)
        if lanes is None:
            from inanet.torch.cuda import CudaLanes

            lanes = self._devices[device] = CudaLanes(self, device)
        return lanes

    def close(self) -> None:
        """Leave the job; what is on its way fails. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.job.close()
        self.sending.close()
        self.delivery.close()
        for lanes in self._devices.values():
            lanes.close()
