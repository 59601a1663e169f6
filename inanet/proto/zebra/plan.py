"""What the plan of a sparse job says: what its ranks have chosen, its shards, and how far its hot keys are decided."""

import re
from dataclasses import dataclass

from inanet.proto.common.checks import are_endpoints, in_range, need
from inanet.proto.common.plan import SwitchedJob

#: PSs of a job, hot keys (an array of the codec holds no more), ways to keep keys and to change them
MAX_SHARDS = 16
MAX_HOT = 1 << 16
SHARDINGS = ("hash", "range")
OPTIMISERS = ("sum", "sgd", "adagrad", "ftrl")
#: name of a model: servers call files so
MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Online:
    """How a sparse job finds hot keys while it trains; see :class:`inanet.proto.zebra.hot.Identification`.

    After every ``after`` iterations keys are ranked by their updates. The hottest take over when their list is further than
    ``threshold`` from the one in use, from the iteration after the next one on. Earlier counts keep ``fading`` of their weight.
    Values of hot keys take ``c`` of ``memory`` bytes of the switch at most; how many are hot is decided ``step`` at a time.
    """

    after: int = 10
    threshold: float = 0.1
    fading: float = 0.0
    c: float = 0.25
    memory: int = 1 << 20
    step: int = 1000

    def __post_init__(self) -> None:
        in_range("after", self.after, 1, 1 << 20)
        need(0 <= self.threshold < 1, "threshold: from 0 to below 1")
        need(0 <= self.fading < 1, "fading: from 0 to below 1")
        need(0 < self.c < 1, "c: between 0 and 1")
        in_range("memory", self.memory, 1, 1 << 30)
        in_range("step", self.step, 1, MAX_HOT)

    def most(self, width: int) -> int:
        """Most keys, of ``width`` values of 4 B, that can be hot."""
        return int(self.c * self.memory) // (4 * width)


@dataclass(frozen=True, slots=True)
class Sparse:
    """What the ranks of a sparse job (Zebra) have chosen; see :class:`inanet.proto.zebra.job.Job`.

    ``shards`` PSs keep the keys. ``hot`` keys, hottest first, are summed in the switch in steps of ``2**-shift``. ``optimiser`` is
    a name of :data:`inanet.proto.zebra.store.OPTIMISERS`, ``rate`` its rate, ``beta`` FTRL's; first values are within
    ``initial`` of zero. ``online``: other keys become hot while it trains. ``model``: PSs keep the values under this name, and
    the job begins with those that they have; without one they are gone with the job.
    """

    width: int = 1
    shards: int = 1
    sharding: str = "hash"
    optimiser: str = "sum"
    rate: float = 0.1
    beta: float = 1.0
    initial: float = 0.0
    registers: int = 32
    hot_pairs: int = 20
    shift: int = 20
    hot: tuple[int, ...] = ()
    online: Online | None = None
    model: str = ""

    def __post_init__(self) -> None:
        in_range("width", self.width, 1, 255)
        in_range("shards", self.shards, 1, MAX_SHARDS)
        need(self.sharding in SHARDINGS, f"sharding {self.sharding!r} is not one of {', '.join(SHARDINGS)}")
        need(
            self.optimiser in OPTIMISERS,
            f"optimiser {self.optimiser!r} is not one of {', '.join(OPTIMISERS)}",
        )
        need(0 < self.rate < 1e30, "rate: above 0, and finite")
        need(0 <= self.beta < 1e30, "beta: from 0, and finite")
        need(0 <= self.initial < 1e30, "initial: from 0, and finite")
        in_range("registers", self.registers, 1, 1 << 16)
        in_range("hot_pairs", self.hot_pairs, 1, 255)
        in_range("shift", self.shift, -64, 64)
        in_range("hot keys", len(self.hot), 0, MAX_HOT)
        need(len(set(self.hot)) == len(self.hot), "a key is hot twice")
        need(not self.hot or 0 <= min(self.hot) <= max(self.hot) < 1 << 64, "keys have 64 bits")
        need(not self.model or MODEL.fullmatch(self.model) is not None, "model: a name, for files")
        if self.online is not None:
            # they go into a plan
            count = self.online.most(self.width)
            in_range(f"hot keys in {self.online.c:g} of {self.online.memory} B", count, 1, MAX_HOT)


@dataclass(frozen=True, slots=True)
class ZebraJob(SwitchedJob):
    """``servers`` are its PSs by shard; it takes ``pieces`` of the switch's registers."""

    sparse: Sparse
    servers: tuple[int, ...]
    pieces: int = 1
    #: the number of its hot set (0: nothing is hot), and the last iteration whose counts have been decided on
    hot_version: int = 0
    decided: int = 0
    #: the iteration of its model that a job with one begins after; -1: shards have to say first which they have
    begin: int = -1

    def __post_init__(self) -> None:
        SwitchedJob.__post_init__(self)
        are_endpoints(self.servers)
        in_range("servers", len(set(self.servers)), self.sparse.shards, self.sparse.shards)
        in_range("pieces", self.pieces, 1, 1 << 20)
        in_range("hot_version", self.hot_version, 0, 0xFFFF)
        in_range("decided", self.decided, 0, (1 << 63) - 1)
        in_range("begin", self.begin, -1, (1 << 63) - 1)
