"""Kernels compiled ahead of their use: in parallel processes, each once for a host, with a count of what is done.

``python -m inanet.service.kernels SET...`` compiles what the cache lacks of some sets and prints ``DONE TOTAL`` lines.
:func:`prepare` runs that in a process of its own, so that whoever needs the kernels does not keep the compiler's memory. A marker in
the cache says that a set is whole: then nothing is started, and numba is not even imported.
"""

import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import TYPE_CHECKING

from inanet.service import kernel_cache
from inanet.service.exits import Failure

if TYPE_CHECKING:
    from concurrent.futures import Future

    from inanet.kernels.jit import Kernel

#: Modules whose import defines the kernels of a set: what a daemon of that role may use, whatever its jobs ask for. A set may also be
#: ``worker:SYSTEM``, ``program:SYSTEM`` or ``server:SYSTEM`` (the parts of a switch's system), ``servers``,
#: ``demo:SYSTEM``, a module, or ``all``.
MODULES: Mapping[str, Sequence[str]] = {
    # ranks use the last one
    "worker": ("inanet.agent.backend", "inanet.agent.server", "inanet.phy.udp", "inanet.client.meeting"),
    "agg": ("inanet.aio.station", "inanet.phy.udp"),
    "ps": ("inanet.aio.coordinator", "inanet.phy.udp"),
    "switch": ("inanet.aio.switch", "inanet.switch.udp"),
    "frames": ("inanet.switch.framed", "inanet.switch.splice", "inanet.phy.port", "inanet.phy.ring"),
}
#: What ``ina demo`` uses of a system: float32, one way of agreeing on exponents. Kernels that these call come with them.
DEMO: Mapping[str, Sequence[str]] = {
    "xagg": (
        "inanet.kernels.checksum:seal_rows",
        "inanet.kernels.dequantise:dequantise32",
        "inanet.kernels.exponents:block_exponents",
        "inanet.kernels.together:quantise_together",
        "inanet.phy.gather:copy_packets",
        "inanet.phy.mmsg:expand",
        "inanet.phy.mmsg:gather",
        "inanet.phy.mmsg:segment_sizes",
        "inanet.proto.tree.engine:open_round",
        "inanet.aio.turn:turn",
        "inanet.proto.tree.flow:credit",
        "inanet.proto.tree.flow:credits_due",
        "inanet.proto.tree.flow:next_rows",
        "inanet.proto.tree.flow:room",
        "inanet.proto.tree.flow:sent",
        "inanet.proto.tree.flow:sent_before",
        "inanet.proto.tree.flow:settle",
        "inanet.proto.tree.flow:take_credits",
        "inanet.proto.tree.leaf:produce",
        "inanet.proto.tree.leaf:sink_shard",
        "inanet.proto.tree.xagg.control:seal_control",
        "inanet.proto.tree.xagg.policy:ingest",
        "inanet.proto.tree.xagg.slotwork:contribute",
        "inanet.proto.tree.xagg.slotwork:logged_rows",
        "inanet.proto.tree.xagg.slotwork:mend",
        "inanet.proto.tree.xagg.slotwork:missing_from_child",
        "inanet.proto.tree.xagg.slotwork:missing_results",
    ),
}
#: A daemon compiles nothing ahead where this environment variable is set: who started it has, and what is rare may come later.
AHEAD_VARIABLE = "INA_KERNELS_AHEAD"
#: Folders with kernels, and with the constants that these use.
FOLDERS = ("aio", "client", "kernels", "phy", "proto", "switch", "wire", "xdp")
#: Processes at most: each takes some 400 MB while it compiles.
MOST = 8

#: Of markers' names.
_PREFIX = "inanet-kernels-"

#: Told how many kernels are there, and how many there will be.
Tell = Callable[[int, int], None]


def modules(name: str) -> Iterable[str]:
    """Modules that define the kernels of a set. Raises ``KeyError`` for a set that there is not."""
    if name == "all":
        root = Path(__file__).parents[1]
        files = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
        places = (
            path.relative_to(root.parent).with_suffix("")
            for path in files
            if "@njit(" in (text := path.read_text()) or "@kernel(" in text
        )
        return [".".join(place.parts) for place in places]
    if name.startswith("inanet."):
        return [name]
    role, _, system = name.partition(":")
    if not system and role != "servers":
        return MODULES[role]
    from inanet.proto.slots.systems import SYSTEMS

    if role == "servers":
        return dict.fromkeys(one for other in SYSTEMS for one in modules(f"server:{other}"))
    parts = SYSTEMS[system]
    where = {"worker": parts.worker, "program": parts.program, "server": parts.server}[role]
    return [where.partition(":")[0]] if where else []


def is_prepared(sets: Iterable[str]) -> bool:
    """Whether markers say so. Costs some file system calls."""
    there = {name.name for place in kernel_cache.places() for name in place.glob(_PREFIX + "*")}
    return _marker("all") in there or all(_marker(one) in there for one in sets)


def prepare(sets: Sequence[str], tell: Tell = lambda done, total: None) -> None:
    """Have the kernels of some sets in the cache; ``tell`` is called for each that is compiled, if any is.

    Waits while another process compiles into the same cache. Raises :class:`~inanet.service.exits.Failure` if they cannot be compiled.
    """
    if is_prepared(sets):
        return
    command = [sys.executable, "-P", "-m", __spec__.name if __spec__ else __name__, *sets]
    found = importlib.util.find_spec("inanet")
    assert found is not None
    assert found.origin is not None
    home = str(Path(found.origin).resolve().parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                done, total = map(int, line.split())
                tell(done, total)
            errors = process.stderr.read()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise Failure(f"the kernels could not be compiled (status {process.returncode}):\n{errors[-2000:]}")


def _marker(name: str) -> str:
    """Of the program, its sources as they are, the interpreter and the machine: other ones have other markers."""
    root = Path(__file__).parents[1]
    compiler = importlib.util.find_spec("numba")
    assert compiler is not None
    assert compiler.origin is not None
    text = [sys.version, os.uname().machine, _processor(), name]
    its = Path(compiler.origin).with_name("_version.py").stat()
    text.append(f"{its.st_mtime_ns} {its.st_size}")
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            found = path.stat()
            text.append(f"{path} {found.st_mtime_ns} {found.st_size}")
    digest = hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
    return f"{_PREFIX}{name.replace(':', '-')}-{digest}"


def _processor() -> str:
    """The processor's name as the kernel has it: compiled code is for one."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line
    return ""


def kernels(sets: Iterable[str]) -> list["Kernel"]:
    """The kernels of some sets with all that they call. Imports what defines them."""
    from inanet.kernels.jit import KERNELS

    chosen: dict[Kernel, None] = {}
    for one in sets:
        role, _, system = one.partition(":")
        if role == "demo":
            for name in DEMO[system]:
                module, _, function = name.partition(":")
                chosen[getattr(importlib.import_module(module), function)] = None
            continue
        for module in modules(one):
            importlib.import_module(module)
        chosen |= {kernel: None for kernel in KERNELS if not kernel.is_inlined}
    # those that are called before their callers
    ordered: dict[Kernel, None] = {}

    def add(kernel: "Kernel") -> None:
        for called in sorted(kernel.calls(), key=lambda one: one.py_func.__qualname__):
            add(called)
        ordered[kernel] = None

    for kernel in chosen:
        add(kernel)
    return list(ordered)


def compile_missing(wanted: Sequence["Kernel"], processes: int, tell: Tell) -> int:
    """Compile those that the cache lacks, callees before callers. Returns how many there were."""
    missing = [kernel for kernel in wanted if not kernel.cache.is_filled()]
    if not missing:
        return 0
    done = len(wanted) - len(missing)
    tell(done, len(wanted))
    waiting = {kernel: kernel.calls() & set(missing) for kernel in missing}
    urgency = _urgency(waiting)
    # only here: daemons, which compile nothing themselves, are to stay small
    from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
    from multiprocessing import get_context

    running: dict[Future[None], Kernel] = {}
    # forked: the functions are imported already, and nothing is compiled in this process
    with ProcessPoolExecutor(
        processes, get_context("fork"), initializer=_choose, initargs=(missing,)
    ) as pool:
        while waiting or running:
            ready = [kernel for kernel, calls in waiting.items() if not calls]
            for kernel in sorted(ready, key=urgency.__getitem__, reverse=True)[: processes - len(running)]:
                del waiting[kernel]
                running[pool.submit(_load, missing.index(kernel))] = kernel
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()
                kernel = running.pop(future)
                for calls in waiting.values():
                    calls.discard(kernel)
                done += 1
                tell(done, len(wanted))
    return len(missing)


def _urgency(calls: dict["Kernel", set["Kernel"]]) -> dict["Kernel", int]:
    """How much is to be compiled one after the other from each kernel on, callees being before callers in ``calls``, in bytes of
    bytecode: what takes longest begins first, so that it does not keep one processor busy at the end while the others wait.
    """
    left = dict.fromkeys(calls, 0)
    for kernel in reversed(calls):
        left[kernel] += kernel.bytecode
        for called in calls[kernel]:
            left[called] = max(left[called], left[kernel])
    return left


_chosen: Sequence["Kernel"] = ()


def _choose(wanted: Sequence["Kernel"]) -> None:
    global _chosen
    _chosen = wanted


def _load(index: int) -> None:
    _chosen[index].load()


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """While no other process compiles into the same directory."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "inanet-kernels.lock").open("w") as file:
        flock(file, LOCK_EX)
        yield


def main(sets: Sequence[str]) -> None:
    """Compile what is missing, printing ``DONE TOTAL`` lines, and leave markers."""
    kernel_cache.ensure()
    place = next(filter(kernel_cache.writable, kernel_cache.places()))
    with _alone(place):
        compile_missing(
            kernels(sets),
            min(MOST, len(os.sched_getaffinity(0))),
            lambda done, total: print(done, total, flush=True),
        )
        for one in sets:
            marker = place / _marker(one)
            for old in place.glob(marker.name.rpartition("-")[0] + "-????????????????"):
                old.unlink(missing_ok=True)
            marker.touch()


if __name__ == "__main__":
    main(sys.argv[1:])
