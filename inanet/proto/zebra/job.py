"""What all machines of a sparse job agree on: who takes part, who keeps which key, which keys are hot and how they travel."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.plan import ZebraJob
from inanet.wire.batch import I64, U64
from inanet.wire.zebra import MAX_WIDTH, Kind, capacity

F32 = NDArray[np.float32]
Sharding = Literal["hash", "range"]
#: 192 B on the wire in the paper; a datagram that fits into an Ethernet frame here
PACKET_BYTES = 1472
#: fixed scale of gradients in switches, as a shift: about the 1e6 of the released program
DEFAULT_SHIFT = 20
MAX_WORKERS = 0xFFFF
#: passes of a packet through a switch
MOST_PASSES = 255
#: bytes of registers that the control plane reckons with at a time
UNIT = 16
#: bytes of a switch that a hot parameter takes beside its values: its position, its counter, whether it was touched
_RANK_STATE = 9


def mixed(keys: U64) -> U64:
    """Keys whose bits are mixed: the finaliser of splitmix64."""
    h = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Job:
    """A sparse job. Addresses are :mod:`inanet.wire.endpoint` integers.

    ``workers`` by rank; ``shards`` are the PSs; ``switch`` is 0 without one: then nothing is hot. ``key`` authenticates
    headers. A key has ``width`` float32 values. Packets have up to ``packet_bytes``. ``registers`` are what the switch
    lays hot parameters out in and workers package for; a packet to it has at most ``hot_pairs``. With ``floats`` hot gradients
    travel as float32 and the switch sums them by tables (:mod:`~inanet.proto.zebra.logsum`); without, as integers, and no
    result depends on the order of arrival. After every ``counted`` iterations (0: never) switch and shards report how often
    keys were updated, the ``listed`` hottest of them by name.
    """

    number: int
    workers: tuple[int, ...]
    shards: tuple[int, ...]
    switch: int = 0
    key: int = 0
    width: int = 1
    packet_bytes: int = PACKET_BYTES
    registers: int = 32
    hot_pairs: int = 20
    sharding: Sharding = "hash"
    floats: bool = False
    counted: int = 0
    listed: int = 0

    def __post_init__(self) -> None:
        if not self.workers or not self.shards or len(self.workers) > MAX_WORKERS:
            raise ValueError(f"job {self.number}: needs 1 to {MAX_WORKERS} workers and a PS shard at least")
        if len({*self.workers, *self.shards, self.switch}) != len(self.workers) + len(self.shards) + 1:
            raise ValueError(f"job {self.number}: every worker, shard and switch needs an address of its own")
        if not 1 <= self.width <= MAX_WIDTH:
            raise ValueError(
                f"job {self.number}: {self.width} values per key; the format has room for 1 to {MAX_WIDTH}"
            )
        if self.registers < 1 or self.hot_pairs < 1:
            raise ValueError(f"job {self.number}: a switch needs a register, a packet to it one pair")
        for kind in (Kind.HOT, Kind.COLD, Kind.VALUES, Kind.PULL):
            capacity(kind, self.width, self.packet_bytes)

    @property
    def limit(self) -> int:
        """Largest magnitude of a worker's integer with which no sum of all workers' can wrap (number format)."""
        return (2**31 - 1) // len(self.workers)

    def capacity(self, kind: Kind) -> int:
        """Entries of a packet; those of a PULL are no more than those of its answer."""
        most = capacity(kind, self.width, self.packet_bytes)
        if kind == Kind.HOT:
            # all of a packet may be of one register, and a switch counts passes in a byte
            return min(most, self.hot_pairs, MOST_PASSES)
        return min(most, capacity(Kind.VALUES, self.width, self.packet_bytes)) if kind == Kind.PULL else most

    def called(self, place: int) -> str:
        """The name of a place, in messages: a shard by its number, the switch behind them."""
        return "the switch" if place == len(self.shards) else f"shard {place}"

    def shard_of(self, keys: U64) -> I64:
        """int64[n]: the shard that keeps each key, by equal parts of the key space or by a hash of the key."""
        count = len(self.shards)
        if self.sharding == "range":
            # floor(key * count / 2^64) without 128 bits: the lower half only carries
            high, low = keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)
            carry = (low * np.uint64(count)) >> np.uint64(32)
            return ((high * np.uint64(count) + carry) >> np.uint64(32)).astype(np.int64)
        return (mixed(keys) % np.uint64(count)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class HotSet:
    """The hot parameters of one version: ``keys`` uint64[k], hottest first, and ``shifts`` int16[k].

    A gradient x of key i is rint(x * 2^shifts[i]) in the switch. Version 0 is the empty set that every job begins with.
    """

    version: int
    keys: U64
    shifts: NDArray[np.int16] = field(default_factory=lambda: np.zeros(0, np.int16))

    def __post_init__(self) -> None:
        if not 0 <= self.version <= 0xFFFF:
            raise ValueError(f"version {self.version} does not fit into 16 bits")
        if len(self.keys) != len(self.shifts):
            raise ValueError(f"{len(self.keys)} hot keys need as many shifts, not {len(self.shifts)}")
        if len(np.unique(self.keys)) != len(self.keys):
            raise ValueError("a key is in the hot set more than once")

    def __len__(self) -> int:
        return len(self.keys)

    def same(self, other: "HotSet") -> bool:
        """Whether another set has the same keys in the same order, with the same shifts."""
        return np.array_equal(self.keys, other.keys) and np.array_equal(self.shifts, other.shifts)

    @property
    def scale(self) -> NDArray[np.float64]:
        """float64[k]: 2^shifts."""
        return np.ldexp(1.0, self.shifts.astype(np.int32))


EMPTY = HotSet(0, np.zeros(0, np.uint64))


def following(version: int) -> int:
    """The version after one; 0 stays the empty set's."""
    return version % 0xFFFF + 1


def forget(known: dict[int, Any], version: int) -> None:
    """Drop what belongs to hot sets that were prepared before the one of ``version``, which is in use: nobody goes back to them.
    The empty set stays.
    """
    for old in list(known):
        if old == version:
            break
        if old != EMPTY.version:
            del known[old]


def fixed(version: int, keys: U64, shift: int = DEFAULT_SHIFT) -> HotSet:
    """A hot set with one scale for all (fixed exponents)."""
    return HotSet(version, np.asarray(keys, np.uint64), np.full(len(keys), shift, np.int16))


def with_exponents(version: int, keys: U64, magnitudes: F32, workers: int, headroom: int = 1) -> HotSet:
    """A hot set with a scale per key: gradients of up to ``magnitudes`` (float32[k]) times 2^headroom fit (number format)."""
    exponents = np.frexp(np.maximum(magnitudes.astype(np.float64), 2.0**-100))[1] + headroom
    shifts = 31 - math.ceil(math.log2(workers)) - exponents
    return HotSet(version, np.asarray(keys, np.uint64), shifts.astype(np.int16))


def hot_of(facts: ZebraJob) -> HotSet:
    """The hot keys of a plan. Raises ``ValueError`` for a key that is there twice."""
    return fixed(facts.hot_version, np.array(facts.sparse.hot, np.uint64), facts.sparse.shift)


def job_of(facts: ZebraJob, key: int) -> Job:
    """The job of a plan with this ``key``. Raises ``ValueError`` for one that cannot be."""
    sparse = facts.sparse
    return Job(
        facts.number,
        facts.workers,
        facts.servers,
        facts.switch,
        key=key,
        width=sparse.width,
        registers=sparse.registers,
        hot_pairs=sparse.hot_pairs,
        sharding="range" if sparse.sharding == "range" else "hash",
        counted=0 if sparse.online is None else sparse.online.after,
        listed=0 if sparse.online is None else sparse.online.most(sparse.width),
    )


def most_packets(count: int) -> int:
    """Packets that a worker can have for the switch in an iteration: one per hot parameter at worst, and the END."""
    return count + 1


def register_bytes(workers: int, width: int, count: int, slots: int) -> int:
    """Bytes of a switch that a job of ``workers`` takes for ``count`` hot parameters in so many ``slots`` of its registers: values
    of ``width`` words, what is known of each parameter, and the ledger of packets.
    """
    ledger = workers * (most_packets(count) + 7) // 8
    return 4 * width * slots * (count > 0) + _RANK_STATE * count + ledger
