"""Whether the program can be used here, and putting it on interfaces.

Everything that is in the way is :class:`Unavailable` with one line that names it: a daemon says the line and carries on
in user space. A link takes the program off when its descriptor is closed, at the latest when the process dies; nothing
is pinned, and a program that is already on an interface is never replaced.
"""

import errno
import os
import platform
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from inanet.phy.interfaces import examine
from inanet.proto.tree.slots import ROW_BYTES
from inanet.xdp.inbox import Inbox
from inanet.xdp.libbpf import BpfError, NoLibrary, Program, attached_program, library
from inanet.xdp.memory import MAX_CPUS, MAX_VALUE, Geometry, Mode, SharedMemory, processors

Loaded = TypeVar("Loaded")

#: XDP_FLAGS_SKB_MODE and XDP_FLAGS_DRV_MODE
_FLAGS: dict[Mode, int] = {"generic": 1 << 1, "native": 1 << 2}
#: bytes of a page that are not the packet's: headroom, Ethernet header with two tags, and what the kernel keeps at the end
NATIVE_OVERHEAD = 598
#: bpf_loop came with 5.17, bpf_link for XDP with 5.9, atomic operations that return with 5.12
OLDEST_KERNEL = (5, 17)
#: for a worker's program: bpf_xdp_load_bytes and packets in several buffers came with 5.18
OLDEST_FOR_WORKERS = (5, 18)
#: CAP_NET_ADMIN and CAP_BPF; CAP_SYS_ADMIN stands for both
_NET_ADMIN, _BPF, _PERFMON, _SYS_ADMIN = 12, 39, 38, 21
_VMLINUX = Path("/sys/kernel/btf/vmlinux")


class Unavailable(Exception):
    """XDP cannot be used; the message is one line that says why."""


def _capabilities() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


def require(
    *,
    release: str | None = None,
    capabilities: int | None = None,
    btf: Path = _VMLINUX,
    oldest: tuple[int, int] = OLDEST_KERNEL,
    cpus: int | None = None,
) -> None:
    """Raise :class:`Unavailable` for what can be seen without trying; ``oldest`` is the first release of Linux that will do.
    Other arguments replace what this machine has.
    """
    release = platform.release() if release is None else release
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) < oldest:
        raise Unavailable(f"kernel: Linux {release} is older than {'.'.join(map(str, oldest))}")
    try:
        library()
    except NoLibrary as error:
        raise Unavailable(f"no libbpf: {error} (apt-get install libbpf1)") from None
    if not btf.exists():
        raise Unavailable(f"no BTF: {btf} is missing (a kernel with CONFIG_DEBUG_INFO_BTF has it)")
    if (found_cpus := processors() if cpus is None else cpus) > MAX_CPUS:
        # two would be taken for one, and nobody would know when the program is in the tables
        raise Unavailable(
            f"kernel: processors are numbered up to {found_cpus - 1}, the program knows {MAX_CPUS}"
        )
    has = _capabilities() if capabilities is None else capabilities
    if not has >> _SYS_ADMIN & 1:
        names = {_BPF: "CAP_BPF", _NET_ADMIN: "CAP_NET_ADMIN", _PERFMON: "CAP_PERFMON"}
        missing = [name for bit, name in names.items() if not has >> bit & 1]
        if missing:
            raise Unavailable(f"permission: without {', '.join(missing)} no XDP program can be loaded")


def load(capacity: int, endpoint: int, *modes: Mode, ports: int = 1) -> SharedMemory:
    """:class:`~inanet.xdp.memory.SharedMemory`, or :class:`Unavailable`."""
    require()
    if Geometry.of(capacity).slots_bytes > MAX_VALUE:
        raise Unavailable(
            f"memory: {capacity} slots ({capacity * ROW_BYTES >> 30} GiB) are more than a program can address: lower "
            "[node] memory"
        )
    return _loaded(
        lambda: SharedMemory(capacity, endpoint, *modes, ports=ports),
        f"{capacity} slots are more than the kernel can set aside: lower [node] memory",
    )


def load_inbox(rows: int, endpoint: int) -> Inbox:
    """:class:`~inanet.xdp.inbox.Inbox`, or :class:`Unavailable`."""
    require(oldest=OLDEST_FOR_WORKERS)
    return _loaded(
        lambda: Inbox(rows, endpoint),
        f"{rows} results are more than the kernel can set aside: lower [node] receive_buffer",
    )


def _loaded(load_it: Callable[[], Loaded], too_much: str) -> Loaded:
    """What a program's loader makes, or :class:`Unavailable`."""
    try:
        return load_it()
    except NoLibrary as error:
        raise Unavailable(f"no libbpf: {error}") from None
    except BpfError as error:
        if error.errno in (errno.EPERM, errno.EACCES) and "R" not in (error.strerror or ""):
            raise Unavailable(f"permission: the kernel refused to load the program ({error})") from None
        if error.errno == errno.ENOMEM:
            raise Unavailable(f"memory: {too_much}") from None
        raise Unavailable(f"kernel: the program was refused ({error})") from None


class Attachable(Protocol):
    """What has a program for a mode."""

    def program(self, mode: Mode) -> Program:
        """The program for a mode."""
        ...


class Attachment:
    """The program on one interface of this thread's network namespace, until :meth:`close`. ``mode`` is what it is in.

    Raises :class:`Unavailable` if it cannot be put there.
    """

    def __init__(self, memory: Attachable, interface: str, mode: Mode) -> None:
        self.interface = interface
        self.mode = mode
        try:
            self.ifindex = socket.if_nametoindex(interface)
        except OSError:
            raise Unavailable(f"driver: there is no interface {interface}") from None
        try:
            self._fd = memory.program(mode).attach(self.ifindex, _FLAGS[mode])
        except BpfError as error:
            raise Unavailable(self._reason(error)) from None

    def _reason(self, error: BpfError) -> str:
        interface = self.interface
        if error.errno in (errno.EBUSY, errno.EEXIST):
            try:
                which = f" ({attached_program(self.ifindex)} in 'bpftool prog')"
            except BpfError:
                which = ""
            return f"driver: {interface} has an XDP program already{which}; it is left alone"
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL) and self.mode == "native":
            return f"driver: that of {interface} has no native XDP"
        if self.mode == "native" and error.errno == errno.ERANGE:
            largest = os.sysconf("SC_PAGE_SIZE") - NATIVE_OVERHEAD
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                size = examine(sock, interface).mtu
            whose = "" if size > largest else "; of a veth, the other end's counts"
            return (
                f"driver: {interface} has an MTU of {size}, and a packet of native XDP must fit into one page: {largest} at "
                f"most{whose}: ip link set {interface} mtu {largest}, or xdp = 'generic'"
            )
        if error.errno in (errno.ERANGE, errno.EOPNOTSUPP, errno.ENOSPC, errno.EINVAL):
            return f"driver: {interface} refuses XDP as it is set up (MTU, queues or offloads): {os.strerror(error.errno)}"
        if error.errno in (errno.EPERM, errno.EACCES):
            return f"permission: no XDP program may be put on {interface}"
        return f"driver: {interface}: {os.strerror(error.errno or 0)}"

    @property
    def attached(self) -> bool:
        """Whether the program is still there."""
        return self._fd >= 0

    def close(self) -> None:
        """Take the program off. Closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def why_not() -> str | None:
    """One line that says why aggregators cannot use XDP on this machine, ``None`` if they can: loads a program of a few slots."""
    return _reason_of(lambda: load(2, 1, "generic"))


def why_not_workers() -> str | None:
    """As :func:`why_not`, for a worker's results."""
    return _reason_of(lambda: load_inbox(1, 1))


def _reason_of(load_it: Callable[[], SharedMemory | Inbox]) -> str | None:
    try:
        load_it().close()
    except Unavailable as reason:
        return str(reason)
    return None
