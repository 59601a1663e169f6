"""Tensors on CUDA devices: through pinned memory that the agent shares, on streams of their own.

What happens to a tensor, in this order: a side stream waits for the caller's stream and copies the tensor
into pinned memory; a thread waits for that copy and hands the memory to the agent; when the result is there,
whoever asks first starts the copy back on a second side stream. Nothing blocks the caller's stream; it waits
for the copy back only where somebody synchronises with the result. The memory that the agent reads is the
pinned memory itself, registered with CUDA, so there is no further copy on the host.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

#: pinned memory serves tensors down to its size divided by this
_WASTE = 4


class _Pinned:
    """Shared memory (uint8[n]) that CUDA may copy to and from without the processor."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        #: the copy that last used it
        self.used: torch.cuda.Event | None = None
        _check(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of the same dtype and shape at its beginning."""
        size = like.numel() * like.element_size()
        return torch.from_numpy(self.memory[:size]).view(like.dtype).view(like.shape)

    def release(self) -> None:
        """Nobody may be copying any more."""
        if self.used is not None:
            self.used.synchronize()
        _check(torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data))


def _check(code: Any) -> None:
    """Raise ``RuntimeError`` for an error code of the CUDA runtime."""
    torch.cuda.check_error(int(code))


class CudaCopy:
    """A tensor's way to the host, where it is ``host``, and back."""

    def __init__(self, device: "CudaDevice", tensor: torch.Tensor) -> None:
        self._device = device
        self._tensor = tensor.detach()
        self._lock = threading.Lock()
        self._back: torch.cuda.Event | None = None
        self._pinned: _Pinned | None = device.take(tensor)
        self.host = self._pinned.tensor(tensor)
        self._copied = self._copy_out(self._pinned)

    def _copy_out(self, pinned: _Pinned) -> torch.cuda.Event:
        """Start the copy to the host behind everything that the caller's stream has to do."""
        down = self._device.down
        down.wait_stream(torch.cuda.current_stream(self._tensor.device))
        if pinned.used is not None:
            down.wait_event(pinned.used)
        with torch.cuda.stream(down):
            self.host.copy_(self._tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(down)
        # the caching allocator must not give the memory away while the side stream reads it
        self._tensor.record_stream(down)
        pinned.used = copied
        return copied

    def wait_out(self) -> None:
        """Block until ``host`` holds the tensor. Raises ``RuntimeError`` if the copy failed."""
        self._copied.synchronize()

    def start_back(self) -> None:
        """Start the copy of ``host`` to the tensor, once."""
        with self._lock:
            if self._back is not None:
                return
            pinned, self._pinned = self._pinned, None
            assert pinned is not None
            up = self._device.up
            with torch.cuda.device(self._tensor.device), torch.cuda.stream(up):
                self._tensor.copy_(self.host, non_blocking=True)
                self._back = pinned.used = torch.cuda.Event()
                self._back.record(up)
            self._tensor.record_stream(up)
            self._device.give(pinned)

    def synchronize(self) -> None:
        """The current stream of the device waits for the copy back, if it was started."""
        if self._back is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._back)


class CudaDevice:
    """Streams and pinned memory of one device, for one job; ``allocate(bytes)`` is memory that the agent shares.

    Memory of reductions that failed or ran out of time is not used again: the agent may still write to it.
    """

    def __init__(self, device: torch.device, allocate: Callable[[int], NDArray[np.uint8]]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: list[_Pinned] = []
        self._all: list[_Pinned] = []
        self.down = torch.cuda.Stream(device)
        self.up = torch.cuda.Stream(device)

    def copy_out(self, tensor: torch.Tensor) -> CudaCopy:
        """Start copying a tensor of this device to the host."""
        with torch.cuda.device(tensor.device):
            return CudaCopy(self, tensor)

    def take(self, tensor: torch.Tensor) -> _Pinned:
        """Pinned memory that is large enough."""
        size = max(1, tensor.numel() * tensor.element_size())
        with self._lock:
            fitting = [one for one in self._free if size <= one.memory.nbytes <= size * _WASTE]
            if fitting:
                best = min(fitting, key=lambda one: one.memory.nbytes)
                self._free.remove(best)
                return best
        pinned = _Pinned(self._allocate(size))
        with self._lock:
            self._all.append(pinned)
        return pinned

    def give(self, pinned: _Pinned) -> None:
        """Keep the memory for another tensor."""
        with self._lock:
            self._free.append(pinned)

    def close(self) -> None:
        """Unregister all memory; the job must be closed."""
        with self._lock:
            every, self._all, self._free = self._all, [], []
        for pinned in every:
            pinned.release()
