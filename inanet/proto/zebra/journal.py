"""What a PS shard writes down so that another process can go on where it ended: a journal of records.

A shard appends a record before it tells anybody that an iteration is finished. Whoever has been told may drop its gradients, and
whoever has not keeps them, so that a shard that ends at any moment and begins again from its records loses nothing and adds
nothing twice. A record of an iteration has the new values of what has changed, not the changes: reading one twice does no harm.

Records are **little-endian**: a header, then arrays. One that is cut off at the end was never told of, and counts for nothing.

====== ==== ========== ==============================================================================================
offset size field      meaning
====== ==== ========== ==============================================================================================
0      4    magic      "ZPS1"
4      4    crc        CRC-32 of everything behind it
8      2    kind       :class:`Record`
10     2    width      values of a key
12     2    states     arrays of the optimiser's state
14     2    version    of a hot set: STEP, WHOLE: the iteration's; HOT, NEXT: the one meant; JOINED: the rank
16     4    following  STEP, WHOLE: version for the next iteration; JOINED, BORN: number of the life
20     8    iteration  STEP, WHOLE: the last one that is in the values
28     8    count      keys; BORN: bytes of the text
36     ...  arrays     STEP, WHOLE: keys u8[count], values f4[count, width], states f4[states, count, width]; HOT: keys u8[count],
                       shifts i2[count]; BORN: whose state this is, UTF-8; on a second line, in hexadecimal, which job began the model
====== ==== ========== ==============================================================================================
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import ModelPart
from inanet.proto.zebra.job import EMPTY, F32, HotSet
from inanet.proto.zebra.store import Store
from inanet.wire.batch import U64

MAGIC = int.from_bytes(b"ZPS1", "little")
HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("crc", "<u4"),
        ("kind", "<u2"),
        ("width", "<u2"),
        ("states", "<u2"),
        ("version", "<u2"),
        ("following", "<u4"),
        ("iteration", "<u8"),
        ("count", "<u8"),
    ]
)
_CHECKED = 8
#: beyond, a number is no iteration
_MOST_ITERATIONS = 1 << 48


class Record(IntEnum):
    """What a record is of."""

    #: a life of the shard begins
    BORN = 1
    #: a worker's process has taken its rank's place
    JOINED = 2
    #: a hot set is known
    HOT = 3
    #: a hot set was announced
    NEXT = 4
    #: an iteration is finished: what has changed
    STEP = 5
    #: all keys
    WHOLE = 6


class Journal(Protocol):
    """Where a shard's records go."""

    def append(self, record: bytes) -> bool:
        """Keep a record; when this returns a process may be killed. Whether the journal has become long: then
        :meth:`rewrite` is called, before the next iteration is written down, with records that say the same.
        """
        ...

    def rewrite(self, records: bytes) -> None:
        """Keep these instead of all before; all or nothing."""
        ...


class Kept(Journal, Protocol):
    """A journal that can be read, and is somebody's until it is closed."""

    def entries(self) -> Iterator["Entry"]:
        """What is in it. Raises :class:`BadState` for damage."""
        ...

    def close(self) -> None:
        """Let others have it."""
        ...


class Models(Protocol):
    """Where a server keeps its parts of models, each under a name: ``MODEL.IofN``, shard I of N."""

    def open(self, part: str) -> Kept:
        """One part. Raises ``OSError``, and :class:`BadState` while somebody else has it."""
        ...

    def trained(self, model: str) -> list[str]:
        """Names of all parts of a model that have iterations. Raises ``OSError``, and :class:`BadState` for damage."""
        ...


class BadState(ValueError):
    """A state that cannot be used: damaged, or of another shard."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record, read. ``text`` and ``origin`` are BORN's, ``hot`` HOT's; the arrays are those of STEP and WHOLE."""

    kind: Record
    version: int
    following: int
    iteration: int
    text: str = ""
    origin: int = 0
    hot: HotSet | None = None
    keys: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    values: F32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    states: tuple[F32, ...] = ()


def _record(kind: Record, count: int, arrays: bytes, **fields: int) -> bytes:
    header = np.zeros((), HEADER)
    header["magic"], header["kind"], header["count"] = MAGIC, kind, count
    for name, value in fields.items():
        header[name] = value
    rest = header.tobytes()[_CHECKED:] + arrays
    return np.array([MAGIC, zlib.crc32(rest)], "<u4").tobytes() + rest


def born(whose: str, life: int, origin: int = 0) -> bytes:
    """A life of a shard begins; ``whose`` describes the shard, ``origin`` is a number of the job that began the model."""
    text = (f"{whose}\n{origin:x}" if origin else whose).encode()
    return _record(Record.BORN, len(text), text, following=life)


def joined(rank: int, life: int) -> bytes:
    """A worker's process has joined."""
    return _record(Record.JOINED, 0, b"", version=rank, following=life)


def prepared(hot: HotSet) -> bytes:
    """A hot set is known."""
    arrays = hot.keys.astype("<u8").tobytes() + hot.shifts.astype("<i2").tobytes()
    return _record(Record.HOT, len(hot), arrays, version=hot.version)


def announced(version: int) -> bytes:
    """A hot set is the next one."""
    return _record(Record.NEXT, 0, b"", version=version)


def parameters(
    kind: Record, iteration: int, version: int, following: int, keys: U64, values: F32, states: list[F32]
) -> bytes:
    """What has changed in an iteration, or all: ``values`` and each of ``states`` float32[n, width] of ``keys`` uint64[n]."""
    parts = [keys.astype("<u8").tobytes(), *(part.astype("<f4").tobytes() for part in (values, *states))]
    return _record(
        kind,
        len(keys),
        b"".join(parts),
        width=values.shape[1],
        states=len(states),
        version=version,
        following=following,
        iteration=iteration,
    )


def part_of(entries: Iterable[Entry]) -> ModelPart:
    """What a journal has of a model."""
    iteration = origin = 0
    for entry in entries:
        iteration, origin = max(iteration, entry.iteration), entry.origin or origin
    return ModelPart(iteration, origin)


def records(data: bytes | memoryview) -> Iterator[tuple[int, Entry]]:
    """Records and where each ends, as far as they are whole. Raises :class:`BadState` for damage that is not at the end."""
    at, view = 0, memoryview(data)
    while len(view) - at >= HEADER.itemsize:
        size = _whole(view, at)
        if size == 0 and not _any_whole(view, at + HEADER.itemsize):
            return
        if size <= 0:
            raise BadState(f"the record at byte {at} is damaged; {len(view) - at} B follow")
        head = np.frombuffer(view, HEADER, 1, at)[0]
        yield at + size, _read(head, view[at + HEADER.itemsize : at + size])
        at += size


def _whole(view: memoryview, at: int) -> int:
    """Bytes of the record at ``at``; 0 if it is cut off, or says so, and -1 if it is none."""
    head = np.frombuffer(view, HEADER, 1, at)[0]
    size = HEADER.itemsize + _array_bytes(head)
    if int(head["magic"]) != MAGIC:
        return -1
    if at + size > len(view):
        return 0
    return size if zlib.crc32(view[at + _CHECKED : at + size]) == int(head["crc"]) else -1


def _any_whole(view: memoryview, at: int) -> bool:
    """Whether there is a record somewhere: then one before it is not cut off, but its length is damaged."""
    data, magic = bytes(view[at:]), MAGIC.to_bytes(4, "little")
    place = data.find(magic)
    while 0 <= place <= len(data) - HEADER.itemsize:
        if _whole(memoryview(data), place) > 0:
            return True
        place = data.find(magic, place + 1)
    return False


def _array_bytes(head: NDArray[np.void]) -> int:
    count, kind = int(head["count"]), int(head["kind"])
    if kind in (Record.STEP, Record.WHOLE):
        return count * (8 + 4 * int(head["width"]) * (1 + int(head["states"])))
    return {int(Record.HOT): 10 * count, int(Record.BORN): count}.get(kind, 0)


def _read(head: NDArray[np.void], body: memoryview) -> Entry:
    count, width = int(head["count"]), int(head["width"])
    try:
        kind = Record(int(head["kind"]))
    except ValueError:
        raise BadState(f"a record of kind {int(head['kind'])}: the state is of a later version") from None
    basic = kind, int(head["version"]), int(head["following"]), int(head["iteration"])
    if basic[3] > _MOST_ITERATIONS:
        raise BadState(f"a record of iteration {basic[3]}: nobody has trained for so long")
    if kind == Record.BORN:
        text, _, origin = bytes(body).decode().partition("\n")
        return Entry(*basic, text=text, origin=int(origin or "0", 16))
    if kind == Record.HOT:
        keys = np.frombuffer(body, "<u8", count).astype(np.uint64)
        return Entry(
            *basic, hot=HotSet(basic[1], keys, np.frombuffer(body, "<i2", count, 8 * count).astype(np.int16))
        )
    if kind not in (Record.STEP, Record.WHOLE):
        return Entry(*basic)
    rows = np.frombuffer(body, "<f4", offset=8 * count).astype(np.float32)
    values, *states = rows.reshape(1 + int(head["states"]), count, width)
    return Entry(
        *basic, keys=np.frombuffer(body, "<u8", count).astype(np.uint64), values=values, states=tuple(states)
    )


@dataclass(frozen=True, slots=True)
class Last:
    """The last iteration that is finished: ``keys`` uint64[n] that it has changed, its hot set, and the next one's."""

    keys: U64
    version: int
    following: int


@dataclass(slots=True)
class Recovered:
    """What a journal has of a shard, for its next life. ``life`` is the number of the one before, if there was one, ``origin``
    that of the job that began the model; ``lives`` are those of workers' processes, by rank; ``hot`` the sets that are known, in
    the order in which they were prepared, ``following`` the one that was announced last. ``values`` float32[n, width] are those
    that the ``last`` iteration has left.
    """

    life: int | None = None
    origin: int = 0
    lives: dict[int, int] = field(default_factory=dict)
    hot: list[HotSet] = field(default_factory=list)
    following: int = EMPTY.version
    finished: int = 0
    last: Last = field(default_factory=lambda: Last(np.zeros(0, np.uint64), EMPTY.version, EMPTY.version))
    values: F32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))


def recovered(entries: Iterable[Entry], whose: str, store: Store, iteration: int | None) -> Recovered:
    """Read a journal; parameters go into ``store``. ``iteration``: leave out one that came after it.

    Raises :class:`~inanet.proto.zebra.journal.BadState` for the journal of another shard than the one that ``whose`` describes, and
    when ``iteration`` is neither its last nor the one before.
    """
    found, newest = Recovered(), 0
    for entry in entries:
        newest = max(newest, entry.iteration)
        if iteration is not None and entry.iteration > iteration:
            continue
        if entry.kind == Record.BORN:
            if entry.text != whose:
                raise BadState(f"it is of {entry.text}; this is {whose}")
            found.life, found.origin = entry.following, entry.origin
        elif entry.hot is not None:
            found.hot.append(entry.hot)
        elif entry.kind == Record.JOINED:
            found.lives[entry.version] = entry.following
        elif entry.kind == Record.NEXT:
            found.following = entry.version
        else:
            store.put(entry.keys, entry.values, entry.states)
            found.finished, found.values = entry.iteration, entry.values
            found.last = Last(entry.keys, entry.version, entry.following)
    if iteration is not None and (found.finished != iteration or newest > iteration + 1):
        raise BadState(f"it has no model of iteration {iteration}, but one of {newest}")
    return found
