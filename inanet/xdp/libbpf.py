"""What is used of libbpf.so.1, through ctypes: open, load, maps, test runs, links, ring buffers.

libbpf comes with iproute2 on every distribution. Errors are :class:`BpfError` with the kernel's errno and, where the
verifier refused, its last line. Not thread-safe: one thread opens and loads at a time.
"""

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from typing import Any

LIBRARY = "libbpf.so.1"
#: ``enum bpf_attach_type``: BPF_XDP
_BPF_XDP = 37
_PRINT = ctypes.CFUNCTYPE(c_int, c_int, c_char_p, c_void_p)
_SAMPLE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "libbpf_set_print": (c_void_p, (c_void_p,)),
    "bpf_object__open_mem": (c_void_p, (c_char_p, c_size_t, c_void_p)),
    "bpf_object__load": (c_int, (c_void_p,)),
    "bpf_object__close": (None, (c_void_p,)),
    "bpf_object__find_map_by_name": (c_void_p, (c_void_p, c_char_p)),
    "bpf_object__find_program_by_name": (c_void_p, (c_void_p, c_char_p)),
    "bpf_object__next_program": (c_void_p, (c_void_p, c_void_p)),
    "bpf_program__name": (c_char_p, (c_void_p,)),
    "bpf_xdp_query_id": (c_int, (c_int, c_int, POINTER(c_uint32))),
    "bpf_program__fd": (c_int, (c_void_p,)),
    "bpf_program__set_autoload": (c_int, (c_void_p, ctypes.c_bool)),
    "bpf_map__fd": (c_int, (c_void_p,)),
    "bpf_map__value_size": (c_uint32, (c_void_p,)),
    "bpf_map__max_entries": (c_uint32, (c_void_p,)),
    "bpf_map__set_value_size": (c_int, (c_void_p, c_uint32)),
    "bpf_map__set_max_entries": (c_int, (c_void_p, c_uint32)),
    "bpf_map__initial_value": (c_void_p, (c_void_p, POINTER(c_size_t))),
    "bpf_map_update_elem": (c_int, (c_int, c_void_p, c_void_p, ctypes.c_uint64)),
    "bpf_map_lookup_elem": (c_int, (c_int, c_void_p, c_void_p)),
    "bpf_map_delete_elem": (c_int, (c_int, c_void_p)),
    "bpf_link_create": (c_int, (c_int, c_int, c_int, c_void_p)),
    "bpf_prog_test_run_opts": (c_int, (c_int, c_void_p)),
    "ring_buffer__new": (c_void_p, (c_int, _SAMPLE, c_void_p, c_void_p)),
    "ring_buffer__consume": (c_int, (c_void_p,)),
    "ring_buffer__epoll_fd": (c_int, (c_void_p,)),
    "ring_buffer__free": (None, (c_void_p,)),
}


class BpfError(OSError):
    """A call of libbpf failed."""


class NoLibrary(Exception):
    """libbpf cannot be loaded."""


@functools.cache
def library() -> Any:
    """libbpf with its signatures declared. Raises :class:`NoLibrary`."""
    try:
        lib = ctypes.CDLL(LIBRARY, use_errno=True)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NoLibrary(f"{LIBRARY}: {error}") from None
    lib.libbpf_set_print(ctypes.cast(_printer, c_void_p))
    return lib


_said: list[str] = []


@_PRINT  # type: ignore[untyped-decorator]
def _printer(level: int, form: bytes, arguments: int | None) -> int:
    """Keep what libbpf says instead of printing it; ``arguments`` is a va_list, which libc can read."""
    if level > 1:
        return 0
    buffer = ctypes.create_string_buffer(1 << 16)
    ctypes.CDLL(None).vsnprintf(buffer, c_size_t(len(buffer)), c_char_p(form), c_void_p(arguments))
    _said.append(buffer.value.decode(errors="replace"))
    del _said[:-200]
    return 0


def said() -> str:
    """What libbpf has said since this was last asked: the verifier's log above all."""
    text = "".join(_said)
    _said.clear()
    return text


def _checked(value: int, what: str) -> int:
    """``value``, or the error it stands for: libbpf 1.x returns ``-errno``, or -1 or NULL with errno set."""
    if value is None or value < 0:
        number = -value if value is not None and value < -1 else ctypes.get_errno()
        raise BpfError(number, f"{what}: {os.strerror(number)}")
    return value


class _TestRun(ctypes.Structure):
    """``struct bpf_test_run_opts``."""

    _fields_ = (
        ("sz", c_size_t),
        ("data_in", c_void_p),
        ("data_out", c_void_p),
        ("data_size_in", c_uint32),
        ("data_size_out", c_uint32),
        ("ctx_in", c_void_p),
        ("ctx_out", c_void_p),
        ("ctx_size_in", c_uint32),
        ("ctx_size_out", c_uint32),
        ("retval", c_uint32),
        ("repeat", c_int),
        ("duration", c_uint32),
        ("flags", c_uint32),
        ("cpu", c_uint32),
        ("batch_size", c_uint32),
    )


class _LinkOptions(ctypes.Structure):
    """The beginning of ``struct bpf_link_create_opts``, and zeros where it goes on."""

    _fields_ = (("sz", c_size_t), ("flags", c_uint32), ("rest", c_uint32 * 13))


class Map:
    """A map of an object; sizes can be set until the object is loaded."""

    def __init__(self, handle: int, name: str) -> None:
        self._handle = handle
        self.name = name

    @property
    def fd(self) -> int:
        """Its descriptor, once the object is loaded."""
        return _checked(library().bpf_map__fd(self._handle), f"map {self.name}")

    def resize(self, *, value_size: int | None = None, entries: int | None = None) -> None:
        """Set the bytes of a value, or how many there are."""
        if value_size is not None:
            _checked(library().bpf_map__set_value_size(self._handle, value_size), f"map {self.name}")
        if entries is not None:
            _checked(library().bpf_map__set_max_entries(self._handle, entries), f"map {self.name}")

    def initial(self) -> memoryview:
        """The value that a data section will have, writable until the object is loaded."""
        size = c_size_t()
        address = library().bpf_map__initial_value(self._handle, ctypes.byref(size))
        if not address:
            raise BpfError(errno.EINVAL, f"map {self.name} has no initial value")
        return memoryview((ctypes.c_ubyte * size.value).from_address(address)).cast("B")

    def map_memory(self) -> mmap.mmap:
        """All values of an array, shared with the kernel. Each value begins at a multiple of 8 bytes."""
        stride = -(-library().bpf_map__value_size(self._handle) // 8) * 8
        size = stride * library().bpf_map__max_entries(self._handle)
        try:
            return mmap.mmap(self.fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        except OSError as error:
            raise BpfError(error.errno, f"mapping {self.name} ({size} B): {error.strerror}") from None

    def put(self, key: bytes, value: bytes) -> None:
        """Set one element."""
        _checked(library().bpf_map_update_elem(self.fd, key, value, 0), f"map {self.name}")

    def drop(self, key: bytes) -> None:
        """Take one element out; it is fine if there is none."""
        library().bpf_map_delete_elem(self.fd, key)

    def get(self, key: bytes, size: int) -> bytes | None:
        """One element of ``size`` bytes, ``None`` if there is none."""
        buffer = ctypes.create_string_buffer(size)
        if library().bpf_map_lookup_elem(self.fd, key, buffer) < 0:
            return None
        return buffer.raw


class Program:
    """A program of an object that is loaded."""

    def __init__(self, handle: int, name: str) -> None:
        self._handle = handle
        self.name = name

    @property
    def fd(self) -> int:
        """Its descriptor."""
        return _checked(library().bpf_program__fd(self._handle), f"program {self.name}")

    def autoload(self, wanted: bool) -> None:
        """Whether the program is loaded with its object."""
        _checked(library().bpf_program__set_autoload(self._handle, wanted), f"program {self.name}")

    def test_run(self, frame: bytes, repeat: int = 1) -> tuple[int, bytes, int]:
        """Run it on a frame that never was on a network: verdict, frame as it left, nanoseconds per run.

        Repetitions see what the program has made of the frame before. Raises :class:`BpfError`.
        """
        out = ctypes.create_string_buffer(len(frame) + 512)
        run = _TestRun(sz=ctypes.sizeof(_TestRun), repeat=repeat)
        run.data_in, run.data_size_in = ctypes.cast(c_char_p(frame), c_void_p), len(frame)
        run.data_out, run.data_size_out = ctypes.cast(out, c_void_p), len(out)
        _checked(library().bpf_prog_test_run_opts(self.fd, ctypes.byref(run)), f"test run of {self.name}")
        return run.retval, out.raw[: run.data_size_out], run.duration

    def attach(self, ifindex: int, flags: int) -> int:
        """Attach it to an interface of this thread's namespace; returns the link's descriptor.

        The kernel takes the program off when the descriptor is closed, and so when its process dies.
        """
        options = _LinkOptions(sz=ctypes.sizeof(_LinkOptions), flags=flags)
        link = library().bpf_link_create(self.fd, ifindex, _BPF_XDP, ctypes.byref(options))
        return _checked(link, f"attaching {self.name}")


def attached_program(ifindex: int) -> int:
    """Identity of the XDP program on an interface of this thread's namespace; 0 if there is none.

    Raises :class:`BpfError`.
    """
    identity = c_uint32()
    _checked(library().bpf_xdp_query_id(ifindex, 0, ctypes.byref(identity)), f"interface {ifindex}")
    return identity.value


class Object:
    """An object file, opened; load it, and close it in the end."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        said()
        self._handle = library().bpf_object__open_mem(image, len(image), None)
        if not self._handle:
            number = ctypes.get_errno()
            raise BpfError(number, f"not a BPF object: {os.strerror(number)} {said()}".strip())

    def map(self, name: str) -> Map:
        """A map by name. Raises ``KeyError``."""
        handle = library().bpf_object__find_map_by_name(self._handle, name.encode())
        if not handle:
            raise KeyError(name)
        return Map(handle, name)

    def program(self, name: str) -> Program:
        """A program by name. Raises ``KeyError``."""
        handle = library().bpf_object__find_program_by_name(self._handle, name.encode())
        if not handle:
            raise KeyError(name)
        return Program(handle, name)

    def programs(self) -> Iterator[Program]:
        """All programs of the object."""
        handle = library().bpf_object__next_program(self._handle, None)
        while handle:
            yield Program(handle, library().bpf_program__name(handle).decode())
            handle = library().bpf_object__next_program(self._handle, handle)

    def load(self) -> None:
        """Have the kernel make the maps and check the programs. Raises :class:`BpfError`, ``detail`` in its text."""
        said()
        result = library().bpf_object__load(self._handle)
        if result:
            number = -result if result < -1 else ctypes.get_errno()
            about = ("libbpf: ", "processed ", "-- ")
            lines = [line for line in said().splitlines() if line and not line.startswith(about)]
            verdict = lines[-1] if lines else ""
            raise BpfError(number, f"{os.strerror(number)}{': ' + verdict if verdict else ''}")

    def close(self) -> None:
        """Free it; maps and programs live on while something else holds them. Closing twice is fine."""
        if self._handle:
            library().bpf_object__close(self._handle)
            self._handle = None


class RingBuffer:
    """Reads a ring buffer map. ``take`` is called with the bytes of each record, inside :meth:`consume`."""

    def __init__(self, source: Map, take: Callable[[bytes], None]) -> None:
        def sample(_: int | None, data: int, size: int) -> int:
            take(ctypes.string_at(data, size))
            return 0

        self._sample = _SAMPLE(sample)
        self._handle = library().ring_buffer__new(source.fd, self._sample, None, None)
        if not self._handle:
            raise BpfError(ctypes.get_errno(), f"reading {source.name}")

    def fileno(self) -> int:
        """Readable when there are records."""
        return int(library().ring_buffer__epoll_fd(self._handle))

    def consume(self) -> None:
        """Hand on all records that are there."""
        library().ring_buffer__consume(self._handle)

    def close(self) -> None:
        """Closing twice is fine."""
        if self._handle:
            library().ring_buffer__free(self._handle)
            self._handle = None
