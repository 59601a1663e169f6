"""Kernels over the link table: windows, what leaves next, credit. docs/datapath.md has the columns.

A link bounds what is in flight between two neighbours by what the receiver's buffer holds (``WINDOW``) and by what the
path bears (``CONGESTION``): where more than 1 % is lost, a link takes less than it was granted, by the share that was lost
(the paper's rule for rates, XAgg section IV-C), and feels its way up again all the time. Acknowledgements are cumulative,
so all it needs is how many packets were sent, credited and reported lost.

The same kernels serve a node that is driven batch by batch and the compiled turn of :mod:`inanet.aio.turn`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.header import newer8
from inanet.kernels.jit import njit
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.engine import DOWN_LOGGED, FOLD, MAX8, TABLES, UP_LOGGED, Event, Tables, report
from inanet.proto.tree.slots import (
    BURSTS,
    GROUP_LINK,
    LINKS,
    UP_LINK,
    LinkColumn,
    LinkTime,
    ShardColumn,
    SlotMemory,
    TreeColumn,
)
from inanet.proto.tree.xagg.slotwork import logged_rows
from inanet.wire.drops import Drop
from inanet.wire.xagg import ROW_BYTES, Kind

#: A link begins with four super-frames and doubles its window each time it was used up, until more than this share is
#: lost.
FIRST_WINDOW = 248
TOLERATED_LOSS = 0.01
#: From then on a window grows by this share of itself each time, less the share that was lost: it settles where queues
#: overflow a little, and not at nothing where packets are lost for other reasons. It never shrinks below half a
#: super-frame.
GROWTH = 1 / 16
LEAST_WINDOW = 32
#: Round trips that are believed while none is known, over those that always are.
AT_FIRST = 10
#: largest number of packets in one transmission: eight super-frames
BURST = 496

_F = TypeVar("_F", bound=Callable[..., Any])


class Flow(NamedTuple):
    """The arrays of a :class:`~inanet.proto.tree.slots.SlotMemory` that say what leaves, in the order kernels expect."""

    links: NDArray[np.int64]
    link_times: NDArray[np.float64]
    burst_times: NDArray[np.float64]
    bursts: NDArray[np.int64]
    cursors: NDArray[np.int64]
    first_row: NDArray[np.int32]
    next_row: NDArray[np.int32]
    tree_ids: NDArray[np.int64]


def flow_of(memory: SlotMemory) -> Flow:
    """The kernels' view of a node's links."""
    return Flow(*(getattr(memory, name) for name in Flow._fields))


_N, _X = types.int64[:, ::1], types.float64[:, ::1]
FLOW: Any = types.NamedTuple(
    (_N, _X, _X, types.int64[:, :, ::1], _N, types.int32[::1], types.int32[::1], types.int64[::1]), Flow
)
_i64, _f64, _I = types.int64, types.float64, types.int64[::1]


def kernel(signature: Any, *, inline: bool = False) -> Callable[[_F], _F]:
    """A compiled function that keeps its Python type."""
    how = {"inline": "always"} if inline else {}
    compiled = njit(signature, cache=True, nogil=True, _nrt=False, **how)
    return cast(Callable[[_F], _F], compiled)


_WINDOW, _IN_FLIGHT, _TAKEN, _LAST = (
    int(LinkColumn.WINDOW),
    int(LinkColumn.IN_FLIGHT),
    int(LinkColumn.TAKEN),
    int(LinkColumn.LAST),
)
_LIVE, _ENDPOINT, _BIT, _SINCE = (
    int(LinkColumn.LIVE),
    int(LinkColumn.ENDPOINT),
    int(LinkColumn.BIT),
    int(LinkColumn.SINCE),
)
_REPORTED, _QUOTA, _GROUPED, _QUEUED = (
    int(LinkColumn.REPORTED),
    int(LinkColumn.QUOTA),
    int(LinkColumn.GROUPED),
    int(LinkColumn.QUEUED),
)
_SENT, _LOST, _SETTLED, _MARK, _HAS_LOST = (
    int(LinkColumn.SENT),
    int(LinkColumn.LOST),
    int(LinkColumn.SETTLED),
    int(LinkColumn.MARK),
    int(LinkColumn.HAS_LOST),
)
_PACKETS, _BURSTS = int(LinkColumn.PACKETS), int(LinkColumn.BURSTS)
_CONGESTION, _PLAUSIBLE, _ROUND_TRIP, _MARKED_AT = (
    int(LinkTime.CONGESTION),
    int(LinkTime.PLAUSIBLE),
    int(LinkTime.ROUND_TRIP),
    int(LinkTime.MARKED_AT),
)
_WAITING_SINCE, _CREDIT_DUE = int(LinkTime.WAITING_SINCE), int(LinkTime.CREDIT_DUE)
_UP, _GROUP, _LINKS, _RING = UP_LINK, GROUP_LINK, LINKS, BURSTS
_COUNT, _SHARD_TREE, _TREE_JOB = int(ShardColumn.COUNT), int(ShardColumn.TREE), int(TreeColumn.JOB)
_ROW_BYTES, _MOST = ROW_BYTES, BURST
#: the longest timeout over the shortest (``Timing``)
_LONGEST = Timing().retransmit_max / Timing().retransmit
_E_CONTROL, _E_LEFT = int(Event.CONTROL), int(Event.LEFT)
_K_CREDIT = int(Kind.CREDIT)
_OK, _FOREIGN_HOST, _STALE_PLAN, _DUPLICATE = (
    int(Drop.OK),
    int(Drop.FOREIGN_HOST),
    int(Drop.STALE_PLAN),
    int(Drop.DUPLICATE),
)


@kernel(_i64(_N, _X, _i64), inline=True)
def room(n: Any, x: Any, link: int) -> int:
    """Packets that may leave now by a link."""
    free = min(np.float64(n[link, _WINDOW]), x[link, _CONGESTION]) - n[link, _IN_FLIGHT]
    return np.int64(free) if free > 0 else np.int64(0)  # type: ignore[return-value]


@kernel(types.void(_N, _X, _i64, _i64, _i64, _f64))
def count_sent(n: Any, x: Any, link: int, packets: int, in_flight: int, now: float) -> None:
    """``packets`` have left, with which ``in_flight`` are on their way: one of them is timed, unless another one is."""
    n[link, _SENT] += packets
    if n[link, _MARK] < 0:
        n[link, _MARK] = n[link, _SETTLED] + in_flight
        x[link, _MARKED_AT] = now


@kernel(types.void(_N, _X, _i64, _i64, _f64))
def sent(n: Any, x: Any, link: int, packets: int, now: float) -> None:
    """These have left. What was in flight before may date from long ago: only a link that is full waits."""
    n[link, _IN_FLIGHT] += packets
    n[link, _PACKETS] += packets
    count_sent(n, x, link, packets, n[link, _IN_FLIGHT], now)
    if room(n, x, link) == 0:
        x[link, _WAITING_SINCE] = now


@kernel(types.void(_N, _X, _i64, _i64, _i64, _i64, _f64))
def settle(n: Any, x: Any, link: int, credited: int, lost: int, granted: int, now: float) -> None:
    """The receiver has credited some packets, or reported some lost. ``granted`` is the receiver's own window."""
    n[link, _SETTLED] += credited + lost
    n[link, _LOST] += lost
    if lost:
        # how long it takes to miss something says nothing about the path
        n[link, _MARK] = -1
    if 0 <= n[link, _MARK] <= n[link, _SETTLED]:
        # whoever waits for lost packets, or for a neighbour that has no processor, measures anything
        known, plausible = x[link, _ROUND_TRIP], x[link, _PLAUSIBLE]
        most = max(2 * known, plausible) if known != 0 else AT_FIRST * plausible
        sample = min(now - x[link, _MARKED_AT], most)
        x[link, _ROUND_TRIP] = max(sample, known + (sample - known) / 8)
        n[link, _MARK] = -1
    window = min(np.float64(granted), x[link, _CONGESTION])
    if n[link, _SENT] < window:
        return
    share = n[link, _LOST] / n[link, _SENT]
    if share > TOLERATED_LOSS:
        n[link, _HAS_LOST] = 1
    growth = GROWTH if n[link, _HAS_LOST] else 1.0
    x[link, _CONGESTION] = min(max(window * (1 + growth - min(share, 0.5)), LEAST_WINDOW), 2.0 * granted)
    n[link, _SENT] = 0
    n[link, _LOST] = 0


@kernel(types.boolean(_N, _X, _i64, _i64, _f64))
def credit(n: Any, x: Any, link: Any, taken: Any, now: float) -> bool:
    """The receiver has taken ``taken`` packets so far (modulo 2^32); False if that is no news."""
    gained = (taken - n[link, _TAKEN]) & np.int64(0xFFFFFFFF)
    if gained == 0 or gained >= np.int64(1) << 31:
        return False
    n[link, _TAKEN] = taken
    n[link, _IN_FLIGHT] = max(0, n[link, _IN_FLIGHT] - gained)
    x[link, _WAITING_SINCE] = now
    settle(n, x, link, gained, 0, n[link, _WINDOW], now)
    return True


@kernel(types.void(_X, types.int64[:, :, ::1], _N, _i64, _i64, _i64, _f64), inline=True)
def note_burst(times: Any, bursts: Any, n: Any, link: int, row: int, start: int, now: float) -> None:
    """A log is sent from ``start`` on by a link, or for row -1 something once more; packets are counted after this."""
    at = n[link, _BURSTS] % _RING
    times[link, at] = now
    bursts[link, at, 0] = row
    bursts[link, at, 1] = start
    bursts[link, at, 2] = n[link, _PACKETS]
    n[link, _BURSTS] += 1


@kernel(_i64(_X, types.int64[:, :, ::1], _N, _i64, _i64, _i64, _f64))
def sent_before(times: Any, bursts: Any, n: Any, link: int, row: int, cursor: int, when: float) -> int:
    """How far a log had been sent by a link at a time, as far back as bursts are remembered."""
    position = cursor
    used = n[link, _BURSTS]
    for k in range(min(used, _RING)):
        at = (used - 1 - k) % _RING
        if times[link, at] <= when:
            break
        if bursts[link, at, 0] == row and bursts[link, at, 1] < position:
            position = bursts[link, at, 1]
    return position


@kernel(_f64(_X, types.int64[:, :, ::1], _N, _i64, _i64, _i64))
def sent_at(times: Any, bursts: Any, n: Any, link: int, row: int, position: int) -> float:
    """When an entry of a log left by a link; minus infinity if that was before what is remembered of bursts."""
    used = n[link, _BURSTS]
    for k in range(min(used, _RING)):
        at = (used - 1 - k) % _RING
        if bursts[link, at, 0] == row and bursts[link, at, 1] <= position:
            return float(times[link, at])
    return -np.inf


@kernel(_f64(_X, types.int64[:, :, ::1], _N, _i64))
def overtaken_since(times: Any, bursts: Any, n: Any, link: int) -> float:
    """What left by a link up to this time has come or is lost, if links keep order; minus infinity if nothing is known.

    Of the packets sent, those that are neither credited nor written off are the last.
    """
    settled = n[link, _PACKETS] - n[link, _IN_FLIGHT]
    used, end, unsettled = n[link, _BURSTS], n[link, _PACKETS], np.inf
    for k in range(min(used, _RING)):
        at = (used - 1 - k) % _RING
        if end <= settled and times[link, at] < unsettled:
            return float(times[link, at])
        if end > settled:
            unsettled = times[link, at]
        end = bursts[link, at, 2]
    return -np.inf


@kernel(types.void(TABLES, FLOW, _i64, _i64, types.int64[:, ::1], _I), inline=True)
def _note_end(t: Tables, f: Flow, row: int, index: int, events: Any, used: Any) -> None:
    """Python starts the SENT handshake where all of a round has left, or exponents have."""
    if f.cursors[row, index] == t.shards[row, _COUNT] or t.shards[row, FOLD] == MAX8:
        report(events, used, _E_LEFT, row, index, 0)


@kernel(_i64(TABLES, FLOW, _i64, _i64, _i64, _f64, _I, types.int64[:, ::1], _I))
def next_rows(
    t: Tables, f: Flow, tree: int, index: int, most: int, now: float, out: Any, events: Any, used: Any
) -> int:
    """What leaves next by a link to one neighbour: up to ``most`` entries of the emission logs, oldest round first, as byte
    offsets of their rows in ``out``. Returns how many; they are on the link's account then.
    """
    link = tree * _LINKS + index
    up = index == _UP
    row: Any = np.int64(f.first_row[tree])
    while row >= 0:
        cursor = f.cursors[row, index]
        if cursor >= 0:
            logged = t.shards[row, UP_LOGGED] if up else t.shards[row, DOWN_LOGGED]
            if f.links[link, _GROUPED]:
                # the rest comes with the group
                logged = min(logged, f.cursors[row, _GROUP])
            while cursor < logged:
                stop = min(cursor + most, logged)
                found = logged_rows(t, row, cursor, stop, up, out)
                note_burst(f.burst_times, f.bursts, f.links, link, row, cursor, now)
                f.cursors[row, index] = cursor = stop
                _note_end(t, f, row, index, events, used)
                if found:
                    sent(f.links, f.link_times, link, found, now)
                    f.links[link, _LAST] = out[found - 1] // _ROW_BYTES
                    return found  # type: ignore[no-any-return]
        row = np.int64(f.next_row[row])
    return 0


@kernel(_i64(FLOW, _i64))
def group_room(f: Flow, tree: int) -> int:
    """Packets that may leave for a group now: what the slowest of its members takes, less what that one alone lacks; -1 if
    there is no group.
    """
    most, members = _MOST, 0
    for index in range(32):
        link = tree * _LINKS + index
        if f.links[link, _LIVE] and f.links[link, _GROUPED]:
            members += 1
            most = min(most, room(f.links, f.link_times, link) - f.links[link, _QUEUED])
    return max(0, most) if members else -1


@kernel(_f64(FLOW, _i64, _f64))
def wait_ends(f: Flow, link: int, retransmit: float) -> Any:
    """When something has to be done about a full link, or before: nothing can be overdue sooner (as ``Link.prod_due``)."""
    round_trip, most = f.link_times[link, _ROUND_TRIP], _LONGEST * retransmit
    ends = f.link_times[link, _WAITING_SINCE] + max(retransmit, min(round_trip, most))
    if f.links[link, _MARK] >= 0:
        ends = min(ends, f.link_times[link, _MARKED_AT] + max(retransmit, min(2 * round_trip, most)))
    return ends


@kernel(_f64(FLOW, _i64, _f64, _f64))
def group_wait_ends(f: Flow, tree: int, retransmit: float, now: float) -> Any:
    """As :func:`wait_ends`, of a group that has no room; ``now`` if no member is full, but repairs go first."""
    ends = np.inf
    for index in range(32):
        link = tree * _LINKS + index
        if f.links[link, _LIVE] and f.links[link, _GROUPED] and room(f.links, f.link_times, link) == 0:
            ends = min(ends, wait_ends(f, link, retransmit))
    return now if ends == np.inf else ends


@kernel(types.boolean(TABLES, FLOW, _i64, _i64))
def align_group(t: Tables, f: Flow, tree: int, row: int) -> bool:
    """Set a group's cursor in one shard to where it can go on: never behind its slowest member. Whether there is more."""
    slowest, members = np.int64(0), 0
    for index in range(32):
        link = tree * _LINKS + index
        if f.cursors[row, index] >= 0 and f.links[link, _LIVE] and f.links[link, _GROUPED]:
            slowest = f.cursors[row, index] if members == 0 else min(slowest, f.cursors[row, index])
            members += 1
    f.cursors[row, _GROUP] = max(f.cursors[row, _GROUP], slowest)
    return members > 0 and f.cursors[row, _GROUP] < t.shards[row, DOWN_LOGGED]


@kernel(types.void(FLOW, _i64, _i64, _i64, types.boolean, _f64))
def sent_to_group(f: Flow, tree: int, packets: int, last: int, again: bool, now: float) -> None:
    """Rows have left for everybody in a group, at everybody's expense; ``last`` is the slot of the last one. ``again``: not
    for the first time.
    """
    for index in range(32):
        link = tree * _LINKS + index
        if f.links[link, _LIVE] and f.links[link, _GROUPED]:
            if again:
                note_burst(f.burst_times, f.bursts, f.links, link, -1, 0, now)
            sent(f.links, f.link_times, link, packets, now)
            f.links[link, _LAST] = last
    f.links[tree * _LINKS + _GROUP, _PACKETS] += packets


@kernel(_i64(TABLES, FLOW, _i64, _i64, _f64, _I, types.int64[:, ::1], _I))
def next_for_group(
    t: Tables, f: Flow, tree: int, most: int, now: float, out: Any, events: Any, used: Any
) -> int:
    """As :func:`next_rows`, for a multicast group: its cursor moves, and with it those of the members that are not behind."""
    row: Any = np.int64(f.first_row[tree])
    while row >= 0:
        more = align_group(t, f, tree, row)
        logged = t.shards[row, DOWN_LOGGED]
        while more and f.cursors[row, _GROUP] < logged:
            start = f.cursors[row, _GROUP]
            stop = min(start + most, logged)
            found = logged_rows(t, row, start, stop, False, out)
            f.cursors[row, _GROUP] = stop
            for index in range(32):
                link = tree * _LINKS + index
                at = f.cursors[row, index]
                if f.links[link, _LIVE] and f.links[link, _GROUPED] and start <= at < stop:
                    note_burst(f.burst_times, f.bursts, f.links, link, row, at, now)
                    f.cursors[row, index] = stop
                    _note_end(t, f, row, index, events, used)
            if found:
                sent_to_group(f, tree, found, out[found - 1] // _ROW_BYTES, False, now)
                return found  # type: ignore[no-any-return]
        row = np.int64(f.next_row[row])
    return 0


@kernel(_i64(TABLES, FLOW, _i64, _i64))
def lacking(t: Tables, f: Flow, tree: int, least: int) -> Any:
    """Results that the round of a tree nearest to its end still lacks here, if they are less than ``least``; else that."""
    row: Any = np.int64(f.first_row[tree])
    while row >= 0:
        if t.shards[row, FOLD] != MAX8:
            least = min(least, t.shards[row, _COUNT] - t.shards[row, DOWN_LOGGED])
        row = np.int64(f.next_row[row])
    return least


@kernel(types.boolean(FLOW, _i64, _i64))
def is_behind(f: Flow, tree: int, index: int) -> bool:
    """Whether a member of the group lacks what the group was sent before it listened; all else comes with the group."""
    row: Any = np.int64(f.first_row[tree])
    while row >= 0:
        if 0 <= f.cursors[row, index] < f.cursors[row, _GROUP]:
            return True
        row = np.int64(f.next_row[row])
    return False


@kernel(_i64(TABLES, FLOW, types.int32[::1], _i64, _i64, _f64), inline=True)
def take_credit(t: Tables, f: Flow, arena: Any, o: int, source: Any, now: float) -> int:
    """A CREDIT packet whose header begins at word ``o``, sound and of a known job: its drop reason, 0 if it was news."""
    job = np.int64(t.job_row[np.int64(np.uint32(arena[o]) >> np.uint32(16))])
    wanted = np.int64(np.uint32(arena[o + 6]))
    tree = -1
    for row in range(len(f.tree_ids)):
        if f.tree_ids[row] == wanted and t.trees[row, _TREE_JOB] == job:
            tree = row
    if tree < 0:
        return _FOREIGN_HOST
    index = np.int64(_UP)
    host = np.uint32(arena[o + 1])
    if np.uint32(arena[o]) & np.uint32(0x2000):
        index = np.int64(-1)
        for k in range(32):
            if host == np.uint32(1) << np.uint32(k):
                index = np.int64(k)
        if index < 0:
            return _FOREIGN_HOST
    link = tree * _LINKS + index
    if (
        not f.links[link, _LIVE]
        or f.links[link, _ENDPOINT] != source
        or f.links[link, _BIT] != np.int64(host)
    ):
        return _FOREIGN_HOST
    plan = np.uint8(np.uint32(arena[o + 4]) >> np.uint32(16) & np.uint32(0xFF))
    if newer8(np.uint8(f.links[link, _SINCE] & 0xFF), plan):
        return _STALE_PLAN
    news = credit(f.links, f.link_times, link, np.int64(np.uint32(arena[o + 2])), now)
    return _OK if news else _DUPLICATE


@kernel(types.void(TABLES, FLOW, types.int32[::1], _I, types.uint64[::1], types.int64[:, ::1], _I, _I, _f64))
def take_credits(
    t: Tables, f: Flow, arena: Any, offsets: Any, sources: Any, events: Any, used: Any, drops: Any, now: float
) -> None:
    """Take the CREDIT packets among what a batch has reported, and leave the other reports as they are."""
    kept = 0
    for k in range(used[0]):
        if events[k, 0] == _E_CONTROL:
            packet = events[k, 2]
            o = offsets[packet] >> 2
            if np.int64(np.uint32(arena[o]) >> np.uint32(8)) & 0xF == _K_CREDIT:
                verdict = take_credit(t, f, arena, o, np.int64(sources[packet]), now)
                if verdict != _OK:
                    drops[_OK] -= 1
                    drops[verdict] += 1
                continue
        for j in range(4):
            events[kept, j] = events[k, j]
        kept += 1
    used[0] = kept


@kernel(_i64(TABLES, FLOW, _i64, _I, _f64, _f64, _f64, types.int64[:, ::1], types.float64[::1]))
def credits_due(
    t: Tables,
    f: Flow,
    tree: int,
    withheld: Any,
    delay: float,
    long_delay: float,
    now: float,
    out: Any,
    soonest: Any,
) -> int:
    """Links of a tree whose neighbour is to be told what was taken, as soon as that is worth a packet or has waited for
    ``delay``: rows (index, packets taken, those among them that are news) of ``out``; returns how many. ``soonest[0]`` becomes when the next one falls due, if
    that is earlier.

    ``withheld`` packets of a link are told of after ``long_delay`` only: the neighbour may have less in flight than that, and
    nothing would ever follow.
    """
    count = 0
    for index in range(33):
        link = tree * _LINKS + index
        if not f.links[link, _LIVE]:
            continue
        owed = t.taken[tree, index] - f.links[link, _REPORTED]
        if owed == 0:
            continue
        if withheld[index] > 0:
            if 0 < owed <= withheld[index]:
                if f.link_times[link, _CREDIT_DUE] == np.inf:
                    f.link_times[link, _CREDIT_DUE] = now + long_delay
                if now < f.link_times[link, _CREDIT_DUE]:
                    soonest[0] = min(soonest[0], f.link_times[link, _CREDIT_DUE])
                    continue
            else:
                owed -= withheld[index]
        if owed < f.links[link, _QUOTA]:
            if owed <= 0:
                continue
            # one whose window losses have shrunk below the quota would wait for ever without delay
            if f.link_times[link, _CREDIT_DUE] == np.inf:
                f.link_times[link, _CREDIT_DUE] = now + delay
            if f.link_times[link, _CREDIT_DUE] > now:
                soonest[0] = min(soonest[0], f.link_times[link, _CREDIT_DUE])
                continue
        f.link_times[link, _CREDIT_DUE] = np.inf
        f.links[link, _REPORTED] += owed
        out[count, 0] = index
        out[count, 1] = f.links[link, _REPORTED]
        out[count, 2] = owed
        count += 1
    return count
