"""What all tests share: one hypothesis profile under which every run draws the same examples."""

import compileall
import ctypes
import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from inanet.service.kernels import prepare

# No example database, no deadline: a run depends on nothing but the code, and time is not what tests judge.
settings.register_profile("deterministic", derandomize=True, database=None, deadline=None)
settings.load_profile("deterministic")

# Nodes have megabytes of zeroed memory, most of which a test never touches. glibc would keep what earlier nodes have freed and clear
# all of it again; by a fixed threshold, 1 MiB, large arrays are mapped afresh, and their pages are made when they are touched.
_M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Before several processes begin ('-n 2'), compile what the cache lacks once, in parallel: within tests it would count
    against their time, in every process anew."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        return
    prepare(["all"], lambda done, total: print(f"\rcompiling kernels: {done} of {total}", end="", flush=True))
    # some hundred daemons are started, each of which would compile its modules anew where the environment forbids to write bytecode
    for package in ("inanet", "daemons"):
        compileall.compile_dir(ROOT / package, quiet=2, workers=0)


#: bytes by which a test process may grow before what tests have left is freed
GROWTH = 256 << 20
_resident = 0


def _pages() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_collection_finish() -> None:
    """What has been collected stays: no collection of garbage need look at it again, test for test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Nodes and their parts know each other: the collector frees them, and does not see how much memory arrays have."""
    global _resident
    if _pages() > _resident + GROWTH:
        gc.collect()
        _resident = _pages()
