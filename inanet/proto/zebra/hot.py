"""Which keys are hot: counting updates, how many keys to take (Principle 1), from a sample or while training runs.

Sources: Zebra, section III-C (Principle 1, sampling, iterations), section V-C (the stop rule, precision, Kendall tau).

While training runs, a machine takes a tally in the moment in which it finishes the last of so many iterations, when nothing of the
next is counted. Whoever sees all machines (a coordinator, or a group of one process) decides from their tallies. Shards report
theirs; the switch is asked then, since no shard finishes an iteration before it. Until the decision is there shard 0 keeps
the end of the next iteration to itself, because it names the hot set of the one after. So a decision is the same, and counts
from the same iteration on, whenever packets come and however long messages take.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from inanet.proto.common.events import Tally
from inanet.proto.zebra.job import EMPTY, HotSet, fixed, following
from inanet.proto.zebra.plan import Online
from inanet.wire.batch import I64, U64

#: Bytes of one value in a switch.
VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ranking:
    """Parameters by heat: ``keys`` uint64[n], hottest first, equals by key; ``counts`` int64[n], their updates. ``others`` are
    updates of parameters that are not in the list.
    """

    keys: U64
    counts: I64
    others: int = 0

    @property
    def total(self) -> int:
        """All updates (T_n)."""
        return int(self.counts.sum()) + self.others

    def share(self, k: int) -> float:
        """Part of all updates that the ``k`` hottest have (T_k / T_n); 0 without updates."""
        return float(self.counts[:k].sum() / self.total) if self.total else 0.0

    def top(self, k: int) -> "Ranking":
        """The ``k`` hottest."""
        return Ranking(self.keys[:k], self.counts[:k])


def ranking(keys: U64, counts: I64 | None = None) -> Ranking:
    """Rank keys (uint64[n], with repetitions) by how often they occur, or by the sum of their ``counts``."""
    if counts is None:
        unique, number = np.unique(keys, return_counts=True)
        number = number.astype(np.int64)
    else:
        unique, place = np.unique(keys, return_inverse=True)
        number = np.bincount(place, weights=counts, minlength=len(unique)).astype(np.int64)
    order = np.argsort(-number, kind="stable")
    return Ranking(unique[order].astype(np.uint64), number[order])


def of_updates(updates: Iterable[U64]) -> Ranking:
    """Rank by updates: each array holds the distinct keys that one worker pushed in one iteration."""
    return ranking(np.concatenate([np.zeros(0, np.uint64), *updates]))


def sample(count: int, rate: float, rng: np.random.Generator) -> I64:
    """Indices, ascending, of a random share of ``count`` samples: the smaller data set of the offline method.

    Raises ``ValueError`` for a rate outside (0, 1].
    """
    if not 0.0 < rate <= 1.0:
        raise ValueError(
            f"a sampling rate lies above 0 and at most at 1, not at {rate}; the paper uses 0.04 to 0.08"
        )
    size = max(1, round(count * rate)) if count else 0
    return np.sort(rng.choice(count, size, replace=False)).astype(np.int64)


def stop_rule(ranked: Ranking, step: int = 1000, gain: float = 0.01) -> int:
    """The paper's k: ``step`` parameters at a time, until that many more add less than ``gain`` of all updates (hot-set size)."""
    k = 0
    while k < len(ranked.keys):
        more = ranked.counts[k : k + step].sum()
        if more < gain * ranked.total:
            break
        k = min(k + step, len(ranked.keys))
    return k


@dataclass(frozen=True, slots=True)
class Choice:
    """What Principle 1 says. ``k`` parameters have ``share`` of all updates and take ``bytes`` of the switch.

    ``reached``: the share is the wanted one; else ``reason`` says what is in the way.
    """

    k: int
    share: float
    bytes: int
    limit: int
    reached: bool
    reason: str


def choose(
    ranked: Ranking,
    *,
    p: float | None = None,
    c: float = 0.05,
    memory: int = 20 << 20,
    width: int = 1,
    step: int = 1000,
    gain: float = 0.01,
) -> Choice:
    """Principle 1: the fewest hottest parameters with ``T_k / T_n >= p`` that need at most ``c`` of ``memory`` bytes.

    Without ``p`` k is where another ``step`` parameters add less than ``gain`` (:func:`stop_rule`), as the paper sets it,
    cut to what fits. A parameter takes ``width`` values of 4 B. Raises ``ValueError`` for p, c outside (0, 1) and a
    memory that is not positive.
    """
    for name, value in (("p", p), ("c", c)):
        if value is not None and not 0.0 < value < 1.0:
            raise ValueError(f"{name} is a share between 0 and 1, not {value}")
    if memory < 1 or width < 1:
        raise ValueError(f"a switch with {memory} B for parameters of {width} values holds none")
    limit = int(c * memory) // (VALUE_BYTES * width)
    if p is None:
        wanted = stop_rule(ranked, step, gain)
        if wanted <= limit:
            reason = f"{step} more parameters add less than {gain:.0%} of the updates"
        else:
            reason = f"the stop rule wants {wanted} parameters, {c:.3g} of {memory} B hold {limit}"
        reached = wanted <= limit
    else:
        sums = np.cumsum(ranked.counts)
        wanted = int(np.searchsorted(sums, p * ranked.total)) + 1 if ranked.total else 0
        wanted = min(wanted, len(ranked.keys))
        reached = wanted <= limit
        if reached:
            reason = f"{wanted} parameters have {ranked.share(wanted):.1%} of the updates"
        else:
            reason = (
                f"{p:.0%} of the updates need {wanted} parameters, {c:.3g} of {memory} B hold {limit}; those have "
                f"{ranked.share(limit):.1%}: give the job a larger c or ask for less"
            )
    k = min(wanted, limit)
    return Choice(k, ranked.share(k), k * VALUE_BYTES * width, limit, reached, reason)


def precision(truth: U64, found: U64) -> float:
    """Part of the truly hot parameters that were found (section V-C); 1 if there are none."""
    return float(np.isin(truth, found).mean()) if len(truth) else 1.0


def inversions(order: I64) -> int:
    """Pairs of a permutation of 0..n-1 (int64[n]) that stand the wrong way round, in O(n log n)."""
    total = 0
    for bit in range(max(len(order) - 1, 0).bit_length()):
        # pairs that differ first, from the top, in this bit: within a group, every 0 counts the 1s before it
        group = order >> (bit + 1)
        by_group = np.argsort(group, kind="stable")
        one = (order[by_group] >> bit) & 1
        ones = np.cumsum(one)
        first = np.searchsorted(group[by_group], group[by_group])
        before = ones - (ones[first] - one[first])
        total += int(before[one == 0].sum())
    return total


def kendall_tau(one: U64, other: U64) -> float:
    """Kendall's tau of the order of the keys that both lists have: 1 the same, -1 reversed; 1 if they share less than two.

    The paper prints "Kendall tau distance" where higher is better; this is the coefficient that its numbers fit.
    """
    common, at_one, at_other = np.intersect1d(one, other, return_indices=True)
    n = len(common)
    if n < 2:
        return 1.0
    order = np.argsort(np.argsort(at_other[np.argsort(at_one)])).astype(np.int64)
    return 1.0 - 4.0 * inversions(order) / (n * (n - 1))


def list_distance(one: U64, other: U64) -> float:
    """Kendall tau distance of two top-k lists, 0 (the same) to 1: over all pairs of their union, how many they order
    differently, a key that a list lacks standing behind all that it has.

    Of two keys that one list lacks both, it has no opinion: half a difference (Fagin, Kumar and Sivakumar, p = 1/2).
    """
    union = np.union1d(one, other)
    n = len(union)
    if n < 2:
        return 0.0
    in_one, in_other = np.isin(one, other), np.isin(other, one)
    both = int(in_one.sum())
    only_one, only_other = len(one) - both, len(other) - both
    differ = (1.0 - kendall_tau(one, other)) / 2 * both * (both - 1) / 2
    for has in (in_one, in_other):
        # a key of this list alone before a common one, which the other list ranks first
        differ += float(np.cumsum(~has)[has].sum())
    differ += only_one * only_other
    differ += 0.5 * (only_one * (only_one - 1) / 2 + only_other * (only_other - 1) / 2)
    return differ / (n * (n - 1) / 2)


class OnlineIdentifier:
    """The iteration-based method: every so many iterations decides from the updates seen whether to redistribute.

    It does when the new list's :func:`list_distance` from the one in use exceeds ``threshold``. The options of
    :func:`choose` decide how many are hot. Counts of earlier decisions have ``fading`` of their weight at each later one: with
    0 only the last iterations count, and what is at the edge of the list changes every time; towards 1 it is slow to notice
    that other parameters have become hot.
    """

    def __init__(self, threshold: float = 0.1, *, fading: float = 0.0, **options: float) -> None:
        if not 0.0 <= threshold < 1.0 or not 0.0 <= fading < 1.0:
            raise ValueError("threshold and fading lie from 0 to below 1")
        self.threshold = threshold
        self.fading = fading
        self._before = Ranking(np.zeros(0, np.uint64), np.zeros(0, np.int64))
        self._options = options
        #: distance at the last decision
        self.distance = 0.0

    def decide(self, current: U64, keys: U64, counts: I64, others: int = 0) -> U64 | None:
        """The new hot keys, hottest first, or ``None`` if those in use will do. ``keys`` and ``counts`` (int64) are what
        switch and PS have counted, in any order, keys possibly several times; ``others`` updates are of keys that are not hot.
        """
        faded = (self._before.counts * self.fading).astype(np.int64)
        keys, counts = np.concatenate([keys, self._before.keys]), np.concatenate([counts, faded])
        seen, others = counts > 0, others + int(self._before.others * self.fading)
        ranked = self._before = replace(ranking(keys[seen], counts[seen]), others=others)
        found = ranked.top(choose(ranked, **self._options).k).keys  # type: ignore[arg-type]
        self.distance = list_distance(current, found)
        return found if self.distance > self.threshold else None


#: Tallies that may be asked for. A switch can be one ahead of a decision, if there is one after every iteration.
_KEPT = 2

#: Keys, and their updates since the last call.
Fetch = Callable[[], tuple[U64, I64]]


class UpdateCounts:
    """Of one machine, for one job, every ``every`` iterations (0: never). A tally lists the ``most`` hottest keys."""

    def __init__(self, every: int, most: int) -> None:
        self._every = every
        self._most = most
        self._first = 1
        self._past: list[tuple[U64, I64]] = []
        self._tallies: dict[int, Tally] = {}

    def begin(self, iteration: int) -> None:
        """Count from this iteration on: those before had another life of the machine."""
        self._first = iteration
        self._past.clear()

    def keep(self, fetch: Fetch) -> None:
        """Take counts over that the machine is about to lose."""
        if self._every:
            self._past.append(fetch())

    def finished(self, iteration: int, fetch: Fetch) -> Tally | None:
        """The machine has finished an iteration: the tally, if it is time for one."""
        if not self._every or iteration % self._every:
            return None
        parts = [*self._past, fetch()]
        keys = np.concatenate([part for part, _ in parts])
        counts = np.concatenate([part for _, part in parts])
        ranked = ranking(keys[counts > 0], counts[counts > 0])
        most = self._most
        tally = Tally(
            iteration,
            self._first,
            tuple(ranked.keys[:most].tolist()),
            tuple(ranked.counts[:most].tolist()),
            int(ranked.counts[most:].sum()),
        )
        self.begin(iteration + 1)
        self._tallies[iteration] = tally
        for old in list(self._tallies)[:-_KEPT]:
            del self._tallies[old]
        return tally

    def of(self, iteration: int) -> Tally:
        """The tally of an iteration that is finished; an empty one if it was taken by another life of the machine."""
        return self._tallies.get(iteration, Tally(iteration, iteration + 1))


class Identification:
    """Of a job with so many ``shards``, whose keys have ``width`` values. Gradients are in steps of 2^-``shift``.

    ``hot`` is the set that is to be used, ``decided`` the last iteration that was decided on. ``changes`` counts other sets.
    """

    def __init__(self, online: Online, shards: int, width: int, shift: int, hot: HotSet = EMPTY) -> None:
        self.hot = hot
        self.decided = 0
        self.changes = 0
        self._every = online.after
        self._shards = shards
        self._shift = shift
        self._identifier = OnlineIdentifier(
            online.threshold,
            fading=online.fading,
            c=online.c,
            memory=online.memory,
            width=width,
            step=online.step,
        )
        #: by iteration, then by place: shards, and behind them the switch
        self._tallies: dict[int, dict[int, Tally]] = {}

    @property
    def distance(self) -> float:
        """Kendall tau distance of the two lists at the last decision."""
        return self._identifier.distance

    @property
    def due(self) -> int:
        """The iteration that is decided on next."""
        return self.decided + self._every

    def take(self, place: int, tally: Tally) -> None:
        """Enter the tally of a shard, by its number, or of the switch, behind the shards. One that comes again is the same."""
        # a shard may be one iteration further than the decision
        if tally.iteration in (self.due, self.due + self._every) and 0 <= place <= self._shards:
            self._tallies.setdefault(tally.iteration, {})[place] = tally

    @property
    def asking(self) -> int:
        """The iteration whose tally the switch is to give now; 0: none."""
        taken = self._tallies.get(self.due, {})
        return self.due if len(taken) == self._shards and self._shards not in taken else 0

    def decide(self) -> bool | None:
        """Decide, if all tallies are in; whether other keys are hot from now on, ``None`` if some are missing."""
        taken = self._tallies.get(self.due, {})
        if len(taken) <= self._shards:
            return None
        del self._tallies[self.due]
        self.decided = self.due
        if max(tally.first for tally in taken.values()) > self.decided - self._every + 1:
            # a machine was restarted and has counts of a part of the iterations: they would say that its keys are cold
            return False
        found = self._identifier.decide(
            self.hot.keys,
            np.concatenate([np.array(tally.keys, np.uint64) for tally in taken.values()]),
            np.concatenate([np.array(tally.counts, np.int64) for tally in taken.values()]),
            sum(tally.others for tally in taken.values()),
        )
        if found is None:
            return False
        self.hot = fixed(following(self.hot.version), found, self._shift)
        self.changes += 1
        return True
