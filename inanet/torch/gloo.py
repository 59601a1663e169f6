"""The private Gloo group: what the fabric does not carry, on tensors that Gloo gets right."""

import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from inanet.torch.completion import Completer
from inanet.torch.ledger import Ledger
from inanet.torch.work import Explain, GlooOperation, GroupWork, Unwaited, Work

DEVICES = ("cpu", "cuda")
#: seconds in which Gloo's threads let go of operations that are over
_QUIET_SECONDS = 0.02
#: collectives that write into none of their tensors
_READERS = frozenset({"send", "barrier"})
_STORE_CALLS = (
    "add",
    "append",
    "check",
    "compare_set",
    "delete_key",
    "get",
    "has_extended_api",
    "multi_get",
    "multi_set",
    "num_keys",
    "set",
    "set_timeout",
    "wait",
)

After = Callable[[], object]


class _Store(dist.Store):
    """A store that can be let go of while Gloo, which only meets through it, goes on using this object.

    A TCPStore listens as long as anybody refers to it: the next ``init_process_group`` would find the old one.
    """

    def __init__(self, store: "dist.Store") -> None:
        super().__init__()
        self.inner: dist.Store | None = store


def _forwarded(name: str) -> Any:
    def call(self: _Store, *arguments: Any) -> Any:
        if self.inner is None:
            raise RuntimeError("the process group was destroyed")
        return getattr(self.inner, name)(*arguments)

    return call


for _name in _STORE_CALLS:
    if hasattr(dist.Store, _name):
        setattr(_Store, _name, _forwarded(_name))


class GlooGroup:
    """Gloo for the ranks of one process group. ``explain`` says what a failure of Gloo's comes from."""

    def __init__(
        self,
        store: "dist.Store",
        rank: int,
        size: int,
        timeout: timedelta,
        ledger: Ledger,
        explain: Explain,
    ) -> None:
        self._store = _Store(store)
        self._size = size
        self._ledger = ledger
        self._explain = explain
        #: Gloo itself, and a group around it as ``init_process_group("gloo")`` makes it
        self.backend = dist.ProcessGroupGloo(self._store, rank, size, timeout)
        if torch.__version__ < (2, 14):
            # later ones begin at 0 by themselves, and complain
            self.backend._set_sequence_number_for_group()
        self._group = dist.ProcessGroup(self._store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._group._set_default_backend(kind)
        for device in DEVICES:
            self._group._register_backend(torch.device(device), kind, self.backend)
        self.unwaited = Unwaited()
        self._completer = Completer("inanet-gloo-completer")
        #: works that may still be running
        self._running: list[Any] = []
        #: whether no operation has failed
        self.healthy = True
        self._closed = False

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], why: str) -> Any:
        """The collective ``name`` of torch's process group; ``why`` it goes this way.

        Gloo reads and writes memory from a tensor's first element on, whatever its strides: it gets dense copies of
        others. Raises ``ValueError`` for an output whose elements share memory.
        """
        after: list[After] = []
        tensors: list[torch.Tensor] = []

        def dense(value: Any, written: bool) -> Any:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                return _dense(value, name, after if written else None)
            if isinstance(value, list | tuple):
                return [dense(each, written) for each in value]
            return value

        writes = name not in _READERS
        arguments = tuple(dense(value, writes and index == 0) for index, value in enumerate(arguments))
        keywords = {key: dense(value, key.startswith("output")) for key, value in keywords.items()}
        work = getattr(self._group, name)(*arguments, **keywords)
        return self._follow(name, work, tensors, after, why) if isinstance(work, Work) else work

    def allreduce(self, tensors: list[torch.Tensor], mean: bool, options: Any, why: str) -> GroupWork:
        """All-reduce in place; the mean of floats, which Gloo has not, as a sum that is divided.

        Raises ``TypeError`` for the mean of integers, and as :meth:`call`.
        """
        after: list[After] = []
        if mean:
            if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
                kinds = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
                raise TypeError(f"the mean of {kinds} is no {kinds}; reduce with ReduceOp.SUM and divide")
            sums = type(options)()
            sums.reduceOp, sums.timeout, sums.asyncOp = dist.ReduceOp.SUM, options.timeout, options.asyncOp
            options = sums
            after = [partial(_divide, tensor, self._size) for tensor in tensors]
        # copied back before they are divided
        copies: list[After] = []
        given = [_dense(tensor, "allreduce", copies) for tensor in tensors]
        coalesced = isinstance(options, dist.AllreduceCoalescedOptions)
        reduce = self._group.allreduce_coalesced if coalesced else self._group.allreduce
        return self._follow("allreduce", reduce(given, options), tensors, [*copies, *after], why, tensors)

    def _follow(
        self,
        name: str,
        work: Any,
        tensors: list[torch.Tensor],
        after: list[After],
        why: str,
        outputs: list[torch.Tensor] | None = None,
    ) -> GroupWork:
        self.unwaited.sweep()
        self._running = [one for one in self._running if not one.is_completed()]
        self._running.append(work)
        dtypes = {tensor.dtype for tensor in tensors}
        kinds = str(dtypes.pop()) if len(dtypes) == 1 else "/".join(sorted(map(_short, dtypes)))
        entry = self._ledger.entry(name, kinds, "Gloo", why)
        entry.count(tensors)

        def finish() -> None:
            for step in after:
                step()

        last = finish if after else None
        operation = GlooOperation(work, self._explain, self._completer, entry, tensors, last, outputs)
        return GroupWork(operation, self.unwaited)

    def set_timeout(self, timeout: timedelta) -> None:
        """What collectives may take from now on."""
        self.backend._set_default_timeout(timeout)

    def broken(self) -> None:
        """An operation has failed; others may wait for ever in Gloo's threads."""
        self.healthy = False

    def close(self) -> None:
        """Let go of the store and of works; closing twice is fine.

        Gloo's destructor waits for Gloo's threads, with torch 2.13 now and then while it holds the interpreter's lock, and a
        thread that lets go of a tensor waits for that lock. So the threads get time, in which the caller goes on; where an
        operation has failed or may still be running, Gloo lives as long as the process, with a few threads and sockets.
        """
        if self._closed:
            return
        self._closed = True
        self._store.inner = None
        self.unwaited.clear()
        self._completer.close()
        running, self._running = self._running, []
        kept = [self.backend, self._group]
        if not self.healthy or not all(work.is_completed() for work in running):
            for one in kept:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            return
        del running
        try:
            threading.Thread(target=_let_go, args=(kept,), name="inanet-gloo").start()
        except RuntimeError:
            # the interpreter ends, and from 3.12 on starts no thread then
            _let_go(kept)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _let_go(kept: list[Any]) -> None:
    time.sleep(_QUIET_SECONDS)
    kept.clear()


def _dense(tensor: torch.Tensor, name: str, after: list[After] | None) -> torch.Tensor:
    """The tensor, or a dense copy that ``after`` copies back (None: it is only read)."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    if after is not None:
        check_writable(tensor, name)
    copy = tensor.detach().contiguous()
    if after is not None:
        after.append(lambda: _write(tensor, copy))
    return copy


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    # parameters and tensors of inference mode may be written to as by Gloo, which knows nothing of either
    with torch.inference_mode():
        tensor.copy_(values)


def _divide(tensor: torch.Tensor, by: int) -> None:
    with torch.inference_mode():
        tensor.div_(by)


def check_writable(tensor: torch.Tensor, name: str) -> None:
    """Raise ``ValueError`` for a tensor with elements that share memory, which cannot hold a result."""
    if tensor.is_contiguous() or not _overlaps(tensor):
        return
    raise ValueError(
        f"{name} cannot write into a tensor of shape {list(tensor.shape)} and stride {list(tensor.stride())}: some of its "
        "elements share memory; pass tensor.contiguous()"
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride < extent:
                break
            extent = stride * (size - 1) + extent
    else:
        return False
    offsets = np.zeros(1, np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride).ravel()
    return np.unique(offsets).size < offsets.size
