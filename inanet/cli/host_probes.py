"""Probes of the machine itself: kernel, Python, packages, privileges, memory, processors, kernel cache."""

import ctypes
import errno
import importlib.util
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from inanet.cli.findings import Finding
from inanet.service import kernel_cache as cache
from inanet.service.exits import EXTRAS, extra, pip_install

#: UDP_GRO came with it (UDP_SEGMENT with 4.18).
OLDEST_KERNEL = (5, 0)
OLDEST_PYTHON = (3, 11)
REQUIRED = (
    "numpy",
    "numba",
    "msgpack",
    "pydantic",
    "structlog",
    "uvloop",
    "click",
    "prometheus-client",
    "psutil",
)
CAP_NET_RAW = 13
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def kernel() -> Iterator[Finding]:
    """Linux, and new enough for UDP super-frames."""
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    if sys.platform != "linux" or found is None:
        yield Finding(
            "kernel", "FAIL", f"{platform.system()} {release}; inanet needs Linux", "use a Linux machine"
        )
    elif (int(found[1]), int(found[2])) < OLDEST_KERNEL:
        yield Finding(
            "kernel", "WARN", f"Linux {release} has no UDP_GRO: slow but correct", "upgrade to Linux 5.0"
        )
    else:
        yield Finding("kernel", "OK", f"Linux {release}")


def python() -> Iterator[Finding]:
    """The interpreter's version."""
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Finding("python", "FAIL", f"Python {version}; 3.11 is required", "install Python 3.11 or later")
    else:
        yield Finding("python", "OK", f"Python {version}, {sys.executable}")


def packages() -> Iterator[Finding]:
    """Required packages with their versions, and which extras are there."""
    versions, missing = [], []
    for name in REQUIRED:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding(
            "packages", "FAIL", f"not installed: {', '.join(missing)}", pip_install(" ".join(missing))
        )
    else:
        yield Finding("packages", "OK", ", ".join(versions))
    absent = sorted({name for module, name in EXTRAS.items() if importlib.util.find_spec(module) is None})
    detail = f"without {', '.join(absent)} ({extra(','.join(absent))} adds them)" if absent else "all there"
    yield Finding("extras", "OK", detail)


def capabilities() -> Iterator[Finding]:
    """What this user may do. Nothing is needed for ``transport = "udp"``."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    raw = found is not None and int(found[1], 16) >> CAP_NET_RAW & 1
    who = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    detail = (
        "with CAP_NET_RAW: udp and rawip work"
        if raw
        else 'without CAP_NET_RAW: udp works, transport = "rawip" does not'
    )
    yield Finding("capabilities", "OK", f"{who} {detail}")


def memfd() -> Iterator[Finding]:
    """Shared memory between a training process and its worker daemon."""
    try:
        handle = os.memfd_create("inanet-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        yield Finding(
            "memfd", "FAIL", f"memfd_create: {error.strerror}", "allow memfd_create in the sandbox's filter"
        )
        return
    with os.fdopen(handle, "r+b") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            memory[:1] = b"x"
        intact = file.read(1) == b"x"
    if intact:
        yield Finding("memfd", "OK", "shared memory can be created and passed on")
    else:
        yield Finding(
            "memfd", "FAIL", "shared memory does not keep what is written", "use another kernel or sandbox"
        )


def process_memory() -> Iterator[Finding]:
    """Whether processes of one user may read each other, as ranks of one host do with large private tensors."""
    name, token = "process memory", ctypes.create_string_buffer(os.urandom(16), 16)
    parent, reader = os.getpid(), os.fork()
    if reader == 0:
        os._exit(_read(parent, token))
    code = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    if code == 0:
        yield Finding(name, "OK", "ranks of one host can read each other's private tensors")
        return
    why = os.strerror(code) if code > 0 else f"signal {-code}"
    fix = "allow process_vm_readv in the container (docker run --cap-add SYS_PTRACE, or a seccomp profile that has it)"
    if code == errno.EPERM and _YAMA.exists() and _YAMA.read_text().strip() != "0":
        fix = "set kernel.yama.ptrace_scope (sysctl) to 0"
    yield Finding(
        name,
        "WARN",
        f"process_vm_readv: {why}; private tensors of ranks on one host are copied, which takes about twice as long",
        fix,
    )


def _read(process: int, token: Any) -> int:
    """Read a copy of ``token`` from another process: 0, or errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, room = len(token), ctypes.create_string_buffer(len(token))
    local = (ctypes.c_size_t * 2)(ctypes.addressof(room), size)
    remote = (ctypes.c_size_t * 2)(ctypes.addressof(token), size)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if libc.process_vm_readv(process, local, one, remote, one, none) == size and room.raw == token.raw:
        return 0
    return ctypes.get_errno() or errno.EIO


def processors() -> Iterator[Finding]:
    """How many processors this process may use."""
    count = len(os.sched_getaffinity(0))
    if count < 2:
        detail = "1 processor: the training process and ina-worker take turns"
        yield Finding("processors", "WARN", detail, "give this machine or container a second processor")
    else:
        yield Finding("processors", "OK", f"{count} usable")


def kernel_cache() -> Iterator[Finding]:
    """Where compiled kernels are kept."""
    fix = cache.FIX
    wanted = os.environ.get(cache.VARIABLE, "")
    places = cache.places()
    usable = next((place for place in places if cache.writable(place)), None)
    if usable is None:
        tried = ", ".join(map(str, places))
        yield Finding(
            "kernel cache", "FAIL", f"no directory is writable ({tried}): kernels cannot be compiled", fix
        )
    elif wanted and usable != places[0]:
        yield Finding(
            "kernel cache", "WARN", f"NUMBA_CACHE_DIR={wanted} is not writable, using {usable}", fix
        )
    elif cache.is_temporary(usable):
        detail = f"only {usable} is writable: kernels are compiled again once it is cleared"
        yield Finding("kernel cache", "WARN", detail, fix)
    else:
        yield Finding("kernel cache", "OK", f"{usable} is writable")
