"""Kernels are taken up when they are needed, from whatever cache has them, and compiled where none does."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inanet.kernels.jit import KERNELS, Kernel
from inanet.service import kernels

#: what the module imports
CONSTANTS = """
import numpy as np
from inanet.kernels.jit import njit

MORE = 1
UNUSED = 5
TABLE = np.array([1, 2, 4])


@njit("int64(int64)", nogil=True)
def scaled(x):
    return 10 * x
"""

SOURCE = """
from inanet.kernels.jit import njit
from constants import MORE, TABLE, scaled


@njit("int64(int64)", nogil=True, inline="always")
def once(x):
    return x + MORE


@njit("int64(int64[::1])", nogil=True)
def inner(values):
    return once(values[0])


@njit("int64(int64[::1], int64)", nogil=True)
def outer(values, more):
    return inner(values) + more


@njit("int64(int64)", nogil=True)
def farther(x):
    \"\"\"Calls a kernel of another module.\"\"\"
    return scaled(x) + TABLE[x]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with kernels of its own, cached beside it."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"toy_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE.replace("constants", f"{name}_constants"))
    (tmp_path / f"{name}_constants.py").write_text(CONSTANTS)
    before = len(KERNELS)
    yield importlib.import_module(name)
    del KERNELS[before:]
    del sys.modules[name], sys.modules[f"{name}_constants"]


def again(module: Any) -> Any:
    """The same module as a process sees it that has just started."""
    del sys.modules[module.__name__]
    return importlib.import_module(module.__name__)


def edited(module: Any, part: str, old: str, new: str) -> Any:
    """The module in a new process, after an edit of itself or of what it imports."""
    path = Path(module.__file__).with_name(f"{module.__name__}{part}.py")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    importlib.invalidate_caches()
    # as Python itself writes files of a time of its own for the bytecode, which may be that of the old text here
    for compiled in path.parent.glob("__pycache__/*.pyc"):
        compiled.unlink()
    sys.modules.pop(f"{module.__name__}_constants")
    return again(module)


def files(module: Any, ending: str) -> list[Path]:
    return sorted((Path(module.__file__).parent / "__pycache__").glob(f"*.{ending}"))


def test_nothing_is_compiled_before_it_is_called(module: Any) -> None:
    assert not module.outer.overloads
    assert files(module, "nbi") == []
    import numpy as np

    assert module.outer(np.array([3]), 4) == 8
    assert [path.name.split(".")[1] for path in files(module, "nbi")] == ["inner", "outer"]
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


#: edits, each of the module ("") or of what it imports, and the kernels that they change
EDITS: list[tuple[str, str, str, set[str]]] = [
    ("_constants", "MORE = 1", "MORE = 2", {"inner", "outer"}),
    ("_constants", "1, 2, 4", "1, 2, 5", {"farther"}),
    ("_constants", "10 * x", "11 * x", {"farther"}),
    ("_constants", "int64(int64)", "int64(int32)", {"farther"}),
    ("", "x + MORE", "x - MORE", {"inner", "outer"}),
    ("", "+ more", "- more", {"outer"}),
    ("_constants", "UNUSED = 5", "UNUSED = 6", set()),
    ("_constants", "UNUSED = 5", "# nothing\n\n", set()),
    ("", "Calls a kernel of another module.", "Calls one.", set()),
    ("", "from inanet", "import os\nfrom inanet", set()),
]


def test_what_an_edit_changes_is_stale_and_nothing_else(module: Any) -> None:
    names = ("inner", "outer", "farther")
    for name in names:
        getattr(module, name).load()
    for part, old, new, stale in EDITS:
        after = edited(module, part, old, new)
        assert {name for name in names if not getattr(after, name).cache.is_filled()} == stale, (old, new)
        edited(module, part, new, old)


def test_a_changed_constant_of_another_module_reaches_compiled_callers(module: Any) -> None:
    import numpy as np

    assert module.outer(np.array([3]), 4) == 8
    assert edited(module, "_constants", "MORE = 1", "MORE = 2").outer(np.array([3]), 4) == 9


def test_stamps_of_all_kernels_are_the_same_in_another_process() -> None:
    script = (
        "from inanet.service.kernels import kernels\n"
        "for one in kernels(['all']): print(one.py_func.__module__, one.py_func.__qualname__, one.stamp)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    here = {
        f"{one.py_func.__module__} {one.py_func.__qualname__} {one.stamp}" for one in kernels.kernels(["all"])
    }
    assert set(shown.stdout.splitlines()) <= here


def test_no_two_kernels_share_a_file() -> None:
    kernels.kernels(["all"])
    names = [(one.py_func.__module__, one.py_func.__qualname__) for one in KERNELS]
    assert len(names) == len(set(names))


def test_markers_are_of_all_files_that_kernels_take_values_from() -> None:
    """A file of another folder could change without the marker noticing."""
    root = Path(kernels.__file__).parents[1]
    kernels.kernels(["all"])
    for module in kernels.modules("all"):
        assert module.split(".")[1] in kernels.FOLDERS
        kernel_names = {
            name
            for kernel in KERNELS
            if kernel.py_func.__module__ == module
            for name in kernel.py_func.__code__.co_names
        }
        path = root.parent / Path(*module.split(".")).with_suffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("inanet."):
                assert node.module is not None
                if kernel_names & {name.asname or name.name for name in node.names}:
                    assert node.module.split(".")[1] in kernels.FOLDERS, (module, node.module)


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


class _Sized:
    """A kernel of so many bytes."""

    def __init__(self, bytecode: int) -> None:
        self.bytecode = bytecode


def test_what_takes_longest_one_after_the_other_is_compiled_first() -> None:
    """The first is short, but what waits for it is long."""
    one, two, three, four = sizes = [_Sized(size) for size in (1, 100, 40, 60)]
    calls: Any = {one: set(), two: {one}, three: set(), four: {three}}
    urgency = kernels._urgency(calls)
    assert [urgency[kernel] for kernel in sizes] == [101, 100, 100, 60]


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
