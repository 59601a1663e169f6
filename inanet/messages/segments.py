"""Shared memory between a training process and its agent: sealed memfds, mapped without keeping a descriptor.

``mmap.mmap`` of Python 3.11 keeps a duplicate of the descriptor as long as the mapping lives, so a process
with many arrays, and the agent of many processes, would run out of descriptors. Here a mapping costs none.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.messages.session import SessionError

#: collectives that a rank may have on their way in the memory that the ranks of a job on one host share
DEPTH = 16
#: largest tensor that is reduced there, in bytes; larger ones are faster through the agent, whose threads share the work
MOST_BYTES = 32 << 10
#: where the tensor begins in an entry, behind the description of the call
DATA_OFFSET = 4096
ENTRY_BYTES = DATA_OFFSET + MOST_BYTES
#: what a rank tells the others of a large tensor
NOTES_BYTES = 4096
#: a rank's counters, and before them those of the whole exchange
LINE_BYTES = 64


class Word(IntEnum):
    """Words of a rank's line, uint32 each, modulo 2^32."""

    #: collectives that the rank has put into this memory
    ARRIVED = 0
    #: collectives of this memory whose copies it has read
    READ = 1
    #: number of the last collective that it has called, here or at the agent
    CALLED = 2
    #: 1 once the rank has left the job
    LEFT = 3
    #: of :mod:`inanet.client.peer_memory`: the last collective that it has called there or at the agent
    ANNOUNCED = 4
    #: whether it can read the other ranks
    ABLE = 5
    #: collectives of which it has summed its share, and those of which it has read all others
    SUMMED = 6
    FETCHED = 7
    #: of all ranks: the last collective of which it is known who does it
    DECIDED = 8


_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK = 1, 2
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def exchange_bytes(ranks: int) -> int:
    """Size of the memory that ``ranks`` ranks share, see :mod:`inanet.client.exchange`; untouched pages cost nothing."""
    return notes_offset(ranks, ranks)


def lines_of(memory: Any, ranks: int) -> NDArray[np.uint32]:
    """The ranks' lines in it; columns are of :class:`Word`."""
    root = np.frombuffer(memory, np.uint32, (1 + ranks) * LINE_BYTES // 4)
    return root[LINE_BYTES // 4 :].reshape(ranks, -1)


def notes_offset(ranks: int, position: int) -> int:
    """Where the notes of a rank lie in it."""
    return LINE_BYTES + ranks * (LINE_BYTES + DEPTH * ENTRY_BYTES) + position * NOTES_BYTES


def create(size: int) -> tuple[int, Any]:
    """New zeroed memory that can never shrink: its descriptor, which the caller closes, and its mapping.

    The mapping is an object with the buffer protocol; it goes with the last array that looks into it. Pages
    that are never touched cost nothing. Raises ``OSError`` when the system has no memory or descriptors left.
    """
    fd = os.memfd_create("inanet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_SEAL)
        return fd, _map(fd, size)
    except BaseException:
        os.close(fd)
        raise


def adopt(fd: int, size: int) -> Any:
    """Map memory that another process made. The descriptor is left to the caller.

    Raises :class:`~inanet.messages.session.SessionError` if touching the mapping could raise SIGBUS: the
    memory is no memfd sealed against shrinking, is smaller than ``size`` bytes, or consists of huge pages,
    which may be used up.
    """
    try:
        if fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK == 0:
            raise SessionError("shared memory is not sealed against shrinking")
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            raise SessionError("shared memory must not consist of huge pages")
        actual = os.fstat(fd).st_size
        if not 0 < size <= actual:
            raise SessionError(f"shared memory has {actual} B, not the {size} B announced")
        return _map(fd, size)
    except OSError as error:
        raise SessionError(f"cannot map shared memory: {error.strerror}") from None


def mirror(source: int, target: int, size: int) -> None:
    """Map the first ``size`` bytes of a shared mapping at the address ``source`` at ``target`` as well.

    Both addresses are those of pages; what was mapped at ``target`` is gone. Raises ``OSError`` if the system refuses.
    """
    # of a shared mapping, and with an old size of 0, the kernel makes a second one and leaves the first alone
    if _libc.mremap(source, 0, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, target) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def privatize(fd: int, target: int, size: int) -> None:
    """Map the first ``size`` bytes of a descriptor's memory at ``target``, so that what is written there is seen by nobody else.

    ``target`` is the address of a page; what was mapped there is gone. Raises ``OSError`` if the system refuses.
    """
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    if _libc.mmap(target, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _map(fd: int, size: int) -> Any:
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # arrays may outlive everything when the interpreter exits: the kernel unmaps then
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory
