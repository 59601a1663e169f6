"""Tensors on a device that is only imagined: its streams run late, and only as far as somebody waits for them.

So a copy that does not wait for what it needs moves the wrong numbers here, as it would, now and then, on a GPU.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

import numpy as np
import torch
from numpy.typing import NDArray

from inanet.torch.options import Options
from inanet.torch.transport import Transport

#: only one thread at a time plays the device
_device = threading.RLock()
_here = threading.local()


class Stream:
    """What a device has been told to do, in order, and has not done yet."""

    def __init__(self, device: Any = None) -> None:
        self.todo: deque[Callable[[], None]] = deque()

    def wait_event(self, event: "Event") -> None:
        self.todo.append(lambda: event.synchronize())

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        with _device:
            while self.todo:
                self.todo.popleft()()


class Event:
    def __init__(self) -> None:
        self.happened = True

    def record(self, stream: Stream) -> None:
        self.happened, self._stream = False, stream
        stream.todo.append(self._happen)

    def _happen(self) -> None:
        self.happened = True

    def synchronize(self) -> None:
        with _device:
            while not self.happened:
                self._stream.todo.popleft()()


class OnDevice(torch.Tensor):
    """A tensor that is copied when its stream comes to it."""

    is_cuda = True

    def record_stream(self, stream: Any) -> None:
        """The caching allocator would take note."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def copy() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                args[0].copy_(args[1])

        if func is torch.Tensor.copy_:
            current().todo.append(copy)
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def current(device: Any = None) -> Stream:
    """The stream of this thread."""
    if not hasattr(_here, "stream"):
        _here.stream = Stream()
    return _here.stream  # type: ignore[no-any-return]


@contextmanager
def using(stream: Stream) -> Iterator[None]:
    before, _here.stream = current(), stream
    yield
    _here.stream = before


@contextmanager
def on(device: Any) -> Iterator[None]:
    yield


class Handle:
    """A round that the test finishes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.finished = threading.Event()

    def wait(self, seconds: float) -> None:
        assert self.finished.wait(min(seconds, 30.0))

    def done(self) -> bool:
        return self.finished.is_set()

    def finish(self) -> None:
        """Everybody else has the same numbers: the sum over two ranks."""
        self.tensor *= 2
        self.finished.set()


class Job:
    name, rank = "train", 0

    def __init__(self) -> None:
        self.handles: deque[Handle] = deque()
        self.called = threading.Semaphore(0)

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        return np.full(size, 255, dtype)

    def all_reduce_async(self, tensor: torch.Tensor, op: str, name: str, **options: Any) -> Handle:
        self.handles.append(Handle(tensor))
        self.called.release()
        return self.handles[-1]

    def call(self) -> Handle:
        """The next collective that was called."""
        assert self.called.acquire(timeout=30.0)
        return self.handles.popleft()

    def close(self) -> None:
        """Nothing is on its way."""


class Runtime:
    """Host memory that is registered with the device."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A job, its transport, and the runtime."""
    runtime = Runtime()
    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current,
        "stream": using,
        "device": on,
        "cudart": lambda: runtime,
        "check_error": lambda code: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(_here, "stream", Stream(), raising=False)
    job = Job()
    transport = Transport(job, Options(), 30.0)  # type: ignore[arg-type]
    yield SimpleNamespace(job=job, transport=transport, runtime=runtime)
    transport.close()


def launch(kernel: Callable[[], object]) -> None:
    """On the current stream."""
    current().todo.append(lambda: void(kernel()))


def void(result: object) -> None:
    """Kernels return nothing."""


def on_device(values: torch.Tensor) -> OnDevice:
    return values.as_subclass(OnDevice)


def values_of(tensor: torch.Tensor) -> list[float]:
    """What a kernel that comes next on the current stream reads."""
    current().synchronize()
    return tensor.as_subclass(torch.Tensor).flatten().tolist()  # type: ignore[no-any-return]


def test_copies_wait_for_what_they_copy(place: SimpleNamespace) -> None:
    plain = torch.zeros(3)
    tensor = on_device(plain)
    # a kernel that has been launched and has not run
    launch(lambda: plain.fill_(5.0))
    reduction = place.transport.reduce(tensor, "sum", "t")
    handle = place.job.call()
    assert handle.tensor.tolist() == [5.0] * 3
    handle.finish()
    reduction.finish()
    # started, and not waited for by anybody yet
    assert plain.tolist() == [5.0] * 3
    reduction.synchronize()
    assert values_of(tensor) == [10.0] * 3


def test_the_order_is_that_of_the_calls_also_with_tensors_of_the_host(place: SimpleNamespace) -> None:
    late = threading.Event()
    launch(lambda: late.wait(30.0))
    place.transport.reduce(on_device(torch.ones(2)), "sum", "first")
    on_host = torch.full((2,), 7.0)
    place.transport.reduce(on_host, "sum", "second")
    assert not place.job.handles
    late.set()
    assert place.job.call().tensor.tolist() == [1.0, 1.0]
    assert place.job.call().tensor.tolist() == [7.0, 7.0]


def test_pinned_memory_is_used_again_after_the_copy_out_of_it(place: SimpleNamespace) -> None:
    first = on_device(torch.ones(100))
    reduction = place.transport.reduce(first, "sum", "t")
    handle = place.job.call()
    memory = handle.tensor.data_ptr()
    handle.finish()
    reduction.finish()
    # the copy to ``first`` has not run when the memory is taken for the next tensor
    second = place.transport.reduce(on_device(torch.full((100,), 3.0)), "sum", "t")
    handle = place.job.call()
    assert handle.tensor.data_ptr() == memory
    assert handle.tensor.tolist() == [3.0] * 100
    reduction.synchronize()
    assert values_of(first) == [2.0] * 100
    # not given back yet, and much too large
    place.transport.reduce(on_device(torch.ones(100)), "sum", "t")
    assert place.job.call().tensor.data_ptr() != memory
    handle.finish()
    second.finish()
    place.transport.reduce(on_device(torch.ones(2)), "sum", "t")
    assert place.job.call().tensor.data_ptr() != memory
    assert len(place.runtime.registered) == 3
    place.transport.close()
    assert not place.runtime.registered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_any_shape_and_dtype(place: SimpleNamespace, dtype: torch.dtype) -> None:
    plain = torch.arange(24).view(4, 6).to(dtype)
    tensor = on_device(plain).t()
    reduction = place.transport.reduce(tensor, "sum", "t")
    handle = place.job.call()
    assert handle.tensor.dtype == dtype
    assert handle.tensor.tolist() == torch.arange(24).view(4, 6).t().tolist()
    handle.finish()
    reduction.finish()
    reduction.synchronize()
    assert values_of(plain) == [2.0 * k for k in range(24)]


def test_a_copy_that_fails_is_an_error_of_its_reduction_and_its_memory_is_not_used_again(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(event: Event) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", failing)
        reduction = place.transport.reduce(on_device(torch.ones(3)), "sum", "t")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            reduction.finish()
    [device] = place.transport._devices.values()
    assert (len(device._all), device._free) == (1, [])
