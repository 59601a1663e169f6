"""A PS shard's parameters by key, their first values, and what an optimiser makes of a sum of gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.proto.zebra.job import F32, mixed
from inanet.wire.batch import I64, U64

#: A table is enlarged when more than this share of it is taken.
_LOAD = 0.5
_LEAST = 64


@njit(
    "int64(uint64[::1], int64[::1], uint64[::1], int64[::1], int64, boolean)",
    cache=True,
    nogil=True,
    _nrt=False,
)
def _locate(names: Any, places: Any, keys: Any, rows: Any, next_row: int, insert: bool) -> Any:
    """Rows of ``keys`` in the table ``names`` and ``places`` (-1: free; a power of two entries), -1 for unknown ones.

    With ``insert`` an unknown key takes ``next_row``, which is counted up; returned is the next one.
    """
    mask = np.uint64(names.size - 1)
    for i in range(keys.size):
        key = keys[i]
        # finaliser of splitmix64: neighbours in the key space must not crowd in the table
        h = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = (h ^ (h >> np.uint64(31))) & mask
        while places[h] >= 0 and names[h] != key:
            h = (h + np.uint64(1)) & mask
        if places[h] < 0 and insert:
            names[h] = key
            places[h] = next_row
            next_row += 1
        rows[i] = places[h]
    return next_row


class KeyIndex:
    """Numbers keys from 0 on, in the order in which they were first added."""

    def __init__(self, keys: U64 | None = None) -> None:
        self._size = 0
        self._names: U64 = np.zeros(_LEAST, np.uint64)
        self._places: I64 = np.full(_LEAST, -1, np.int64)
        if keys is not None:
            self.add(keys)

    def __len__(self) -> int:
        return self._size

    def find(self, keys: U64) -> I64:
        """int64[n]: rows of ``keys`` (uint64[n]), -1 for those that were never added."""
        rows: I64 = np.empty(len(keys), np.int64)
        _locate(self._names, self._places, np.ascontiguousarray(keys, np.uint64), rows, 0, False)
        return rows

    def add(self, keys: U64) -> I64:
        """Rows of ``keys``, new ones numbered on."""
        self._reserve(self._size + len(keys))
        rows: I64 = np.empty(len(keys), np.int64)
        self._size = int(
            _locate(self._names, self._places, np.ascontiguousarray(keys, np.uint64), rows, self._size, True)
        )
        return rows

    def keys(self) -> U64:
        """uint64[n]: all keys by row."""
        taken = self._places >= 0
        out: U64 = np.empty(self._size, np.uint64)
        out[self._places[taken]] = self._names[taken]
        return out

    def _reserve(self, count: int) -> None:
        size = len(self._names)
        if count <= size * _LOAD:
            return
        while count > size * _LOAD:
            size *= 2
        known = self.keys()
        self._names, self._places = np.zeros(size, np.uint64), np.full(size, -1, np.int64)
        rows: I64 = np.empty(len(known), np.int64)
        _locate(self._names, self._places, known, rows, 0, True)


class Optimiser(Protocol):
    """Changes values in place, given the sum of all workers' gradients; all arrays float32[n, width]."""

    @property
    def states(self) -> int:
        """Arrays of state per parameter, which begin at zero."""
        ...

    def apply(self, values: F32, gradients: F32, states: list[F32]) -> None:
        """One step for ``n`` parameters."""
        ...


@dataclass(frozen=True, slots=True)
class Sum:
    """No optimiser: a parameter is the sum of everything pushed to it."""

    states: int = 0

    def apply(self, values: F32, gradients: F32, states: list[F32]) -> None:
        """Add."""
        values += gradients


@dataclass(frozen=True, slots=True)
class Sgd:
    """Stochastic gradient descent."""

    rate: float = 0.01
    states: int = 0

    def apply(self, values: F32, gradients: F32, states: list[F32]) -> None:
        """w -= rate * g."""
        values -= np.float32(self.rate) * gradients


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Duchi, Hazan and Singer (2011), diagonal."""

    rate: float = 0.1
    epsilon: float = 1e-8
    states: int = 1

    def apply(self, values: F32, gradients: F32, states: list[F32]) -> None:
        """s += g^2; w -= rate * g / (sqrt(s) + epsilon)."""
        states[0] += gradients * gradients
        values -= np.float32(self.rate) * gradients / (np.sqrt(states[0]) + np.float32(self.epsilon))


@dataclass(frozen=True, slots=True)
class Ftrl:
    """FTRL-Proximal per coordinate (McMahan et al., "Ad click prediction", 2013, Algorithm 1)."""

    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    states: int = 2

    def apply(self, values: F32, gradients: F32, states: list[F32]) -> None:
        """Advance z and n, then w = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / alpha + l2)."""
        z, n = states
        alpha, l1 = np.float32(self.alpha), np.float32(self.l1)
        more = n + gradients * gradients
        z += gradients - (np.sqrt(more) - np.sqrt(n)) / alpha * values
        n[:] = more
        below = (np.float32(self.beta) + np.sqrt(n)) / alpha + np.float32(self.l2)
        values[:] = np.where(np.abs(z) <= l1, np.float32(0), -(z - np.sign(z) * l1) / below)


#: by name; made with a rate, and beta, which is FTRL's
OPTIMISERS: Mapping[str, Callable[[float, float], Optimiser]] = {
    "sum": lambda _rate, _beta: Sum(),
    "sgd": lambda rate, _beta: Sgd(rate),
    "adagrad": lambda rate, _beta: Adagrad(rate),
    "ftrl": Ftrl,
}


class Initial(Protocol):
    """First values of keys (uint64[n]) that nobody has asked for before: float32[n, width], the same for the same key."""

    def __call__(self, keys: U64, width: int) -> F32:
        """The values."""
        ...


def zeros(keys: U64, width: int) -> F32:
    """Every parameter begins at zero."""
    return np.zeros((len(keys), width), np.float32)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Values in [-bound, bound), a hash of ``seed``, key and place: embeddings must not all begin alike."""

    bound: float = 0.01
    seed: int = 0

    def __call__(self, keys: U64, width: int) -> F32:
        """The values."""
        salt = np.uint64(self.seed * 0xD1B54A32D192ED03 & 0xFFFFFFFFFFFFFFFF)
        places = np.arange(1, width + 1, dtype=np.uint64) + salt
        top = mixed(np.add.outer(keys * np.uint64(0x9E3779B97F4A7C15), places)) >> np.uint64(40)
        out: F32 = ((top / 2.0**23 - 1.0) * self.bound).astype(np.float32)
        return out


class Store:
    """Parameters of ``width`` values by key. Memory grows with the keys that were ever pushed or pulled."""

    def __init__(self, width: int, optimiser: Optimiser, initial: Initial = zeros) -> None:
        self.width = width
        self._optimiser = optimiser
        self._initial = initial
        self._index = KeyIndex()
        self._values: F32 = np.zeros((0, width), np.float32)
        self._states: list[F32] = [np.zeros((0, width), np.float32) for _ in range(optimiser.states)]
        #: contributions per row since counts were last fetched
        self._updates: I64 = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def read(self, keys: U64) -> F32:
        """float32[n, width], of unknown keys their first values. Reading keeps nothing."""
        rows = self._index.find(keys)
        known = rows >= 0
        out: F32 = np.empty((len(keys), self.width), np.float32)
        out[known] = self._values[rows[known]]
        if not known.all():
            out[~known] = self._initial(keys[~known], self.width)
        return out

    def apply(self, keys: U64, gradients: F32, updates: I64) -> F32:
        """One step for distinct ``keys``; ``updates`` int64[n] are the contributions in each sum, counted. Gives the new
        values, float32[n, width].
        """
        rows = self._rows(keys)
        values = self._values[rows]
        states = [state[rows] for state in self._states]
        # a sum or a value beyond float32 is infinite, as it would be anywhere
        with np.errstate(over="ignore", invalid="ignore"):
            self._optimiser.apply(values, gradients, states)
        self._values[rows] = values
        for state, changed in zip(self._states, states, strict=True):
            state[rows] = changed
        self._updates[rows] += updates
        return values

    @property
    def kind(self) -> str:
        """The optimiser's name: what the states belong to."""
        return type(self._optimiser).__name__

    def put(self, keys: U64, values: F32, states: Sequence[F32]) -> None:
        """Set distinct keys: ``values`` and each of ``states`` float32[n, width]."""
        rows = self._rows(keys)
        self._values[rows] = values
        for state, found in zip(self._states, states, strict=True):
            state[rows] = found

    def whole(self, keys: U64 | None = None) -> tuple[U64, F32, list[F32]]:
        """Known keys, all of them by default, with their values and states, as :meth:`put` takes them."""
        keys = self._index.keys() if keys is None else keys
        rows = self._index.find(keys)
        return keys, self._values[rows], [state[rows] for state in self._states]

    def updates(self) -> tuple[U64, I64]:
        """All keys and their contributions since this was last asked."""
        counts = self._updates[: len(self)].copy()
        self._updates[:] = 0
        return self._index.keys(), counts

    def items(self) -> tuple[U64, F32]:
        """All keys, ascending, and their values: the shard's part of the model."""
        keys = self._index.keys()
        order: NDArray[np.int64] = np.argsort(keys)
        return keys[order], self._values[: len(self)][order]

    def _rows(self, keys: U64) -> I64:
        before = len(self)
        rows = self._index.add(keys)
        if len(self) > len(self._values):
            room = max(2 * len(self._values), len(self), 1024)
            self._values = _grown(self._values, room)
            self._states = [_grown(state, room) for state in self._states]
            self._updates = np.concatenate([self._updates, np.zeros(room - len(self._updates), np.int64)])
        new = rows >= before
        if new.any():
            self._values[rows[new]] = self._initial(keys[new], self.width)
        return rows


def _grown(array: F32, room: int) -> F32:
    out: F32 = np.zeros((room, array.shape[1]), np.float32)
    out[: len(array)] = array
    return out
