"""Kernels are taken up when they are needed, from whatever cache has them, and compiled where none does."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inanet.kernels.jit import KERNELS, Kernel
from inanet.service import kernels

SOURCE = """
from inanet.kernels.jit import njit


@njit("int64(int64)", nogil=True, inline="always")
def once(x):
    return x + 1


@njit("int64(int64[::1])", nogil=True)
def inner(values):
    return once(values[0])


@njit("int64(int64[::1], int64)", nogil=True)
def outer(values, more):
    return inner(values) + more
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with kernels of its own, cached beside it."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"toy_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    before = len(KERNELS)
    yield importlib.import_module(name)
    del KERNELS[before:]
    del sys.modules[name]


def again(module: Any) -> Any:
    """The same module as a process sees it that has just started."""
    del sys.modules[module.__name__]
    return importlib.import_module(module.__name__)


def files(module: Any, ending: str) -> list[Path]:
    return sorted((Path(module.__file__).parent / "__pycache__").glob(f"*.{ending}"))


def test_nothing_is_compiled_before_it_is_called(module: Any) -> None:
    assert not module.outer.overloads
    assert files(module, "nbi") == []
    import numpy as np

    assert module.outer(np.array([3]), 4) == 8
    assert [path.name.split("-")[0].rpartition(".")[2] for path in files(module, "nbi")] == ["inner", "outer"]
    assert not module.once.overloads, "what callers take in is not compiled by itself"


def test_what_is_cached_is_loaded_without_a_compile(module: Any) -> None:
    module.outer.load()
    fresh = again(module)
    assert fresh.outer.cache.is_filled()
    fresh.outer.load()
    assert sum(fresh.outer._cache_hits.values()) == 1
    assert not fresh.inner.overloads, "its code is in that of the caller"


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["cut", "empty", "foreign"])
def test_a_damaged_file_is_compiled_again(module: Any, ending: str, damage: str) -> None:
    module.outer.load()
    for path in files(module, ending):
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "foreign": b"not a cache"}[damage])
    fresh = again(module)
    import numpy as np

    assert fresh.outer(np.array([3]), 4) == 8
    last = again(fresh)
    assert last.outer.cache.is_filled()


def test_arguments_that_do_not_fit_are_refused_at_the_first_call_too(module: Any) -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        module.inner("text")


def test_callees_come_before_callers(module: Any) -> None:
    assert module.outer.calls() == {module.inner}
    assert module.inner.calls() == set()
    told: list[tuple[int, int]] = []
    assert kernels.compile_missing([module.inner, module.outer], 2, lambda *how: told.append(how)) == 2
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert kernels.compile_missing([module.inner, module.outer], 2, lambda *how: told.append(how)) == 0
    fresh = again(module)
    assert fresh.outer.cache.is_filled()


def test_a_cache_beside_the_sources_serves_who_cannot_write_there(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.outer.load()
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "own"))
    fresh = again(module)
    assert fresh.outer.cache.cache_path.startswith(str(tmp_path / "own"))
    fresh.outer.load()
    assert sum(fresh.outer._cache_hits.values()) == 1


def test_names_in_the_sets_exist() -> None:
    for system in kernels.DEMO:
        assert all(isinstance(one, Kernel) for one in kernels.kernels([f"demo:{system}"]))


def test_a_set_that_is_marked_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.kernel_cache, "places", lambda: [tmp_path])
    assert not kernels.is_prepared(["agg"])
    (tmp_path / kernels._marker("agg")).touch()
    assert kernels.is_prepared(["agg"])
    assert not kernels.is_prepared(["agg", "worker"])
    (tmp_path / kernels._marker("all")).touch()
    assert kernels.is_prepared(["agg", "worker"])
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: pytest.fail("started"))
    kernels.prepare(["agg"])
