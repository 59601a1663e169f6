"""Memory of other processes, as the kernel counts it. Bytes."""

import re
from pathlib import Path


def resident(pid: int) -> int:
    """What a process has in memory now, shared pages included. Raises ``OSError`` if it has ended."""
    return _field(pid, "VmRSS")


def peak(pid: int) -> int:
    """The most it had since its start, or since :func:`forget_peak`."""
    return _field(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Let the peak begin anew from what is in memory now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def available() -> int:
    """What the machine can give without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _field(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    # a process that has ended but was not waited for has no memory
    return int(found[1]) << 10 if found else 0
