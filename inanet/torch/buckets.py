"""Where a bucket is while the fabric reduces it: in memory that the agent maps, too.

DDP allocates its buckets itself, in memory of the process alone. What is reduced there has to be copied to shared
memory and back, which on one host takes as long as the sum. So the memory of a bucket is replaced while DDP goes on
using it: ``share_memory_`` moves the storage of a tensor, and with it all views that DDP and the optimizer have, to a
mapping of its own. The file behind that mapping can be cut short by whoever has it, which would be the end of an agent
that reads it; therefore the mapping and its descriptor are then replaced by those of a sealed memfd that the agent
knows. Torch unmaps the range and closes the descriptor with the last tensor on it, whatever they are by then.

A process that is forked later must not write into gradients of its parent: there, the mapping becomes a private one of the
same pages. What the child writes is its own; pages that it has not written to follow the parent.
"""

import logging
import mmap
import os
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from inanet.client.job import Job
from inanet.messages import segments
from inanet.torch.transport import Reduction

#: bytes of a bucket below which a copy costs less than anything else
LEAST_BYTES = 64 << 10
#: where ``share_memory_`` makes its files, for the moment until their pages are replaced
_SHM = "/dev/shm"
#: buckets that were moved, dead ones among them: the storage, its descriptor, address and bytes
_moved: list[tuple[StorageWeakRef, int, int, int]] = []
_log = logging.getLogger("inanet")


class BucketMemory:
    """Shared memory for one bucket, and the reduction that last used it.

    ``values`` of all methods is the bucket, 1-D and contiguous on the CPU. The second time that a bucket is seen in the
    same place it is moved here (the first buckets of a model are replaced after one step), and copied until then, or
    for good where it cannot be moved.
    """

    def __init__(self, job: Job, values: torch.Tensor) -> None:
        self._job = job
        self._memory, self._fd = job.described(values.nbytes)
        self._close = weakref.finalize(self, os.close, self._fd)
        if values.nbytes < LEAST_BYTES:
            self._close()
        #: what is to be reduced, for the job knows its memory, but not the addresses that a bucket keeps
        self.tensor = torch.from_numpy(self._memory).view(values.dtype)
        self.reduction: Reduction | None = None
        self._seen_at = 0
        self._moved_to = 0
        #: what was moved; as long as this is here nothing else can have its identity, as it can its address
        self._moved: StorageWeakRef | None = None

    def fits(self, values: torch.Tensor) -> bool:
        """Whether it has the dtype and the size of the bucket."""
        return bool(self.tensor.dtype == values.dtype and self.tensor.numel() == values.numel())

    def idle(self) -> bool:
        """Whether the agent is done with it; it still writes to one whose reduction timed out."""
        return self.reduction is None or self.reduction.answered()

    def holds(self, values: torch.Tensor) -> bool:
        """Whether the bucket lies here, so that nothing needs to be copied."""
        storage = values.untyped_storage()
        return (
            self._moved is not None
            and storage._cdata == self._moved.cdata
            and values.data_ptr() == self._moved_to
            and storage.is_shared()
        )

    def take(self, values: torch.Tensor) -> None:
        """The bucket is in this memory after this, because it is there, or is moved or copied. It must be :meth:`idle`.

        Of no effect when the job is over, where the collective will say so: in a forked process the memory is the parent's.
        """
        if self._job.over or self.holds(values):
            return
        at = values.data_ptr()
        if at == self._seen_at and self._move(values):
            return
        self._seen_at = at
        self.tensor.copy_(values)

    def give(self, values: torch.Tensor) -> None:
        """The result is in the bucket after this."""
        if not self.holds(values):
            values.copy_(self.tensor)

    def _move(self, values: torch.Tensor) -> bool:
        storage = values.untyped_storage()
        size = storage.nbytes()
        if size != values.nbytes or not self._close.alive or not _can_share(storage):
            return False
        try:
            storage.share_memory_()
            address = storage.data_ptr()
            if address % mmap.PAGESIZE:
                return False
            self.tensor.copy_(values)
            segments.mirror(self._memory.ctypes.data, address, size)
        except (RuntimeError, OSError) as error:
            _log.debug("a bucket of %d B stays where it is: %s", size, error)
            return False
        # what torch has made goes, and whoever is sent this storage gets the memory that is now behind it
        fd = storage._share_fd_cpu_()[0]
        os.dup2(self._fd, fd, inheritable=False)
        self._close()
        self._moved_to = address
        self._moved = StorageWeakRef(storage)
        _moved[:] = [entry for entry in _moved if not entry[0].expired()]
        _moved.append((self._moved, fd, address, size))
        return True


def _can_share(storage: torch.UntypedStorage) -> bool:
    """Whether ``share_memory_`` makes a mapping for this storage alone, and has room for it."""
    if storage.is_shared() or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return False
    try:
        room = os.statvfs(_SHM)
    except OSError:
        return False
    # the other ranks do the same at the same time, and data loaders live there
    return bool(storage.nbytes() <= room.f_bavail * room.f_frsize // 8)


def _after_fork() -> None:
    """In a forked child: what it writes into its parent's buckets is its own."""
    for reference, fd, address, size in _moved:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        # one that is alive has its descriptor, unless it was moved again
        if storage is not None and storage.data_ptr() == address:
            segments.privatize(fd, address, size)


os.register_at_fork(after_in_child=_after_fork)
