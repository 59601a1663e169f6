"""What another life of a PS shard finds in the journal of the one before."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from inanet.proto.zebra.membership import EMPTY, F32, HotSet
from inanet.proto.zebra.state import BadState, Entry, Record
from inanet.proto.zebra.store import Store
from inanet.wire.batch import U64


@dataclass(frozen=True, slots=True)
class Last:
    """The last iteration that is finished: ``keys`` uint64[n] that it has changed, its hot set, and the next one's."""

    keys: U64
    version: int
    following: int


@dataclass(slots=True)
class Recovered:
    """``life`` is the number of the one before, if there was one, ``origin`` that of the job that began the model; ``lives`` are those of workers' processes, by rank; ``hot`` the
    sets that are known, in the order in which they were prepared, ``following`` the one that was announced last. ``values``
    float32[n, width] are those that the ``last`` iteration has left.
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

    Raises :class:`~inanet.proto.zebra.state.BadState` for the journal of another shard than the one that ``whose`` describes, and
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
