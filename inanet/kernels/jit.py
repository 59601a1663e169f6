"""Compiled functions: each is loaded from the cache, or compiled, when it is first called.

What :func:`njit` makes is numba's own dispatcher with two differences. Its signatures are taken up at the first call, or when
another function that calls it is compiled, not when it is defined: a process pays for what it uses. And what lies in the cache is
loaded without numba's type inference and lowering, which alone take most of a second and 30 MB. A file of the cache that cannot be
read is compiled again.

numba's own cache looks at nothing but the file that a function lies in. Here a compiled function is fresh while its bytecode, the
values of the constants that it uses, and those of all functions that become part of it are what they were: see :attr:`Kernel.stamp`.
"""

import contextlib
import hashlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import EnumType
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from numba.core import sigutils, typeinfer
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.extending import _Intrinsic
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.types import ExternalFunction

#: all kernels of this process, in the order in which they were defined
KERNELS: list["Kernel"] = []
#: packages whose version numba's cache looks at, or that do not change
_FOREIGN = frozenset({"llvmlite", "numba", "numpy", *sys.stdlib_module_names})


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    """Names files by the function alone, not by its line: what is written above it changes nothing."""

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        version = f"py{sys.version_info[0]}{sys.version_info[1]}{abiflags}"
        return f"{fullname.replace('<', '').replace('>', '')}.{version}"


class KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, read beside the sources as well, whoever may write there: what was compiled when the program was
    installed serves all users and daemons of the host, and whoever could put something else there could change the sources too.
    A file that cannot be read counts as missing, one that cannot be written is left out.
    """

    _impl_class = _Files

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        """Raises ``RuntimeError`` if numba finds no directory that it can write to."""
        super().__init__(function)
        own = self._cache_file
        own._source_stamp = stamp
        beside = str(Path(self._impl.locator._py_file).parent / "__pycache__")
        self.files = [own]
        if beside != self.cache_path:
            self.files.append(IndexDataCacheFile(beside, self._impl.filename_base, own._source_stamp))

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
        for file in self.files:
            try:
                data = file.load(key)
                if data is not None:
                    return self._impl.rebuild(target_context, data)
            except Exception:
                # cut off, or of another program
                self._remove(file)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, if there is room for it."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)

    def is_filled(self) -> bool:
        """Whether a file has the function for this program, its source as it is, and this processor. Compiles nothing."""
        machine = (llvm.get_process_triple(), llvm.get_host_cpu_name())
        for file in self.files:
            with contextlib.suppress(OSError, EOFError, pickle.PickleError, ValueError, AttributeError):
                for key, name in file._load_index().items():
                    if key[1][:2] == machine and Path(file._data_path(name)).stat().st_size:
                        return True
        return False

    @staticmethod
    def _remove(file: Any) -> None:
        stem = Path(file._index_path).name.removesuffix(".nbi")
        for path in Path(file._cache_path).glob(f"{stem}.*"):
            with contextlib.suppress(OSError):
                path.unlink()


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A function with a fixed set of signatures."""

    def __init__(
        self, py_func: Callable[..., Any], locals: Any = None, targetoptions: Any = None, **more: Any
    ):
        super().__init__(py_func, locals, targetoptions, **more)
        self.signatures_wanted: Sequence[Any] = ()
        self._taking_up = False
        self._stamp: str | None = None
        self._cache: Any

    def load(self) -> None:
        """Take the signatures up: from the cache, or by compiling them. Does nothing if that is done."""
        if not self._can_compile:
            return
        with global_compiler_lock:
            # a function that calls itself asks again while it is compiled
            if not self._can_compile or self._taking_up:
                return
            self._taking_up = True
            try:
                with typeinfer.register_dispatcher(self):
                    for signature in self.signatures_wanted:
                        if not self._from_cache(signature):
                            self.compile(signature)
            finally:
                self._taking_up = False
            self.disable_compile()

    def _from_cache(self, signature: Any) -> bool:
        args, _ = sigutils.normalize_signature(signature)
        if tuple(args) in self.overloads:
            return True
        rtsys.initialize(self.targetctx)
        # not load_overload, which begins with all that compiling needs
        result = self.cache._load_overload(signature, self.targetctx)
        if result is None:
            return False
        self._cache_hits[signature] += 1
        self.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
        self.add_overload(result)
        return True

    @property
    def cache(self) -> KernelCache:
        """Where this function is kept."""
        if not isinstance(self._cache, KernelCache):
            self._cache = KernelCache(self.py_func, self.stamp)
        return self._cache

    @property
    def stamp(self) -> str:
        """A digest of all that the compiled code is made from: this function's own code and options, the constants that it uses,
        and the same of all that it calls.
        """
        if self._stamp is None:
            # for a function that calls itself
            self._stamp = ""
            digest = hashlib.sha256()
            options = sorted(self.targetoptions.items())
            for part in (str(self.signatures_wanted), str(options), *_parts_of_function(self.py_func)):
                digest.update(f"{len(part)} {part}".encode())
            self._stamp = digest.hexdigest()
        return self._stamp

    def calls(self) -> set["Kernel"]:
        """The kernels that this one calls, without those that become part of it."""
        found: set[Kernel] = set()
        code = [self.py_func.__code__]
        for one in code:
            code += [its for its in one.co_consts if isinstance(its, CodeType)]
            for name in one.co_names:
                other = self.py_func.__globals__.get(name)
                if isinstance(other, Kernel) and other is not self:
                    found |= other.calls() if other.is_inlined else {other}
        return found

    @property
    def bytecode(self) -> int:
        """Bytes that are compiled: its own and those of what becomes part of it."""
        size, codes = 0, [self.py_func.__code__]
        for code in codes:
            size += len(code.co_code)
            codes += [its for its in code.co_consts if isinstance(its, CodeType)]
            for name in code.co_names:
                other = self.py_func.__globals__.get(name)
                if isinstance(other, Kernel) and other is not self and other.is_inlined:
                    size += other.bytecode
        return size

    @property
    def is_inlined(self) -> bool:
        """Whether callers take it in, so that it is compiled by itself only where Python calls it."""
        return bool(self.targetoptions.get("inline") == "always")

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        self.load()
        given = tuple(self.typeof_pyval(value) for value in args)
        found = self.overloads.get(given)
        if found is None:
            # as the dispatcher itself chooses from now on: the first whose arguments these can be converted to
            for wanted, result in self.overloads.items():
                pairs = zip(given, wanted, strict=False)
                if len(given) == len(wanted) and all(
                    self.typingctx.can_convert(one, other) is not None for one, other in pairs
                ):
                    found = result
                    break
        if found is None:
            known = "\n".join(f" * {signature}" for signature in self.signatures)
            raise TypeError(f"No matching definition for argument type(s) {given}; there are\n{known}")
        return found.entry_point

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """For the compilation of a caller."""
        self.load()
        return super().get_call_template(args, kws)

    def get_compile_result(self, sig: Any) -> Any:
        """For the compilation of a caller."""
        self.load()
        return super().get_compile_result(sig)


def _parts_of_function(function: FunctionType) -> Iterator[str]:
    """What a function's compiled code is made from."""
    codes = [function.__code__]
    for code in codes:
        yield code.co_code.hex()
        yield " ".join(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif constant is not function.__doc__:
                yield from _parts(constant)
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType):
                if _is_ours(value.__name__):
                    for attribute in code.co_names:
                        yield from _parts(getattr(value, attribute, None))
            elif name in function.__globals__:
                yield from _parts(value)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents)
    yield from _parts(function.__defaults__)


def _parts(value: Any) -> Iterator[str]:
    """What of a value may become part of compiled code."""
    if isinstance(value, Kernel):
        yield value.stamp
    elif isinstance(value, tuple):
        for one in value:
            yield from _parts(one)
    elif isinstance(value, frozenset):
        yield from sorted(map(repr, value))
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype!r} {value.shape}"
        yield hashlib.sha256(value.tobytes()).hexdigest()
    elif isinstance(value, EnumType):
        yield " ".join(f"{member.name}={member.value!r}" for member in value)  # type: ignore[var-annotated]
    elif isinstance(value, ExternalFunction):
        yield f"{value.symbol}{value.sig}"
    elif isinstance(value, FunctionType | type | _Intrinsic):
        # what numba is told of it may lie anywhere in its file
        module = sys.modules[value.__module__]
        yield f"{value.__module__}.{value.__name__}"
        if _is_ours(value.__module__) and module.__file__ is not None:
            yield hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    else:
        yield repr(value)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] not in _FOREIGN


def njit(signatures: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` with the signature, or several, that a function has, and numba's options; see the module. Kernels are always
    cached.
    """

    def wrap(function: Callable[..., Any]) -> Any:
        options.pop("cache", None)
        kernel = Kernel(function, targetoptions={"nopython": True, "boundscheck": None, **options})
        kernel.signatures_wanted = signatures if isinstance(signatures, list) else [signatures]
        KERNELS.append(kernel)
        return kernel

    return wrap
