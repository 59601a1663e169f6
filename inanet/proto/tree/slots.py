"""Slot memory and the tables that kernels read: what a node knows, as arrays.

A *slot* is one aggregator entry: a row of int32 words at the stride of the wire (header, 256 values, checksum), so that
whatever a slot holds leaves the node straight from slot memory. Beside the rows stand small per-slot arrays (bitmap,
round, state, ...) and tables with one row per shard, tree, job and link. Kernels index all of it; Python code changes
tables only between batches, which is what makes a plan change atomic.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.refusal import NoRoom

#: words of a row; the payload and its checksum are words ``HEAD`` to ``ROW - 1``
ROW = 263
HEAD = 6
CHECK = 262
ROW_BYTES = ROW * 4

#: fragments per reliability group (XAgg, section IV-D) and its shift
GROUP = 1024
GROUP_SHIFT = 10

MAX_JOBS = 64
MAX_SHARDS_PER_JOB = 4096
MAX_TREES = 256
MAX_SHARDS = 16384


class State(IntEnum):
    """Life of a slot (slot states)."""

    FREE = 0
    #: contributions are being folded
    COLLECT = 1
    #: the whole leaf set is in it and it was handed on
    SENT = 2
    #: it holds the result
    RESULT = 3


class ShardColumn(IntEnum):
    """Columns of the shard table."""

    SLOT0 = 0
    COUNT = 1
    FOLD = 2
    TREE = 3
    JOB = 4
    SHARD = 5
    #: round the slots belong to
    ACTIVE = 6
    #: 1 when ``ACTIVE`` is committed: a later round may take the slots over
    COMMITTED = 7
    #: entries in the emission log towards the parent, and towards the children
    UP_LOGGED = 8
    DOWN_LOGGED = 9
    #: first entry of this shard in the per-group arrays
    GROUP0 = 10


class TreeColumn(IntEnum):
    """Columns of the tree table: this node's place in one tree of one job."""

    JOB = 0
    #: one-hot ids of live children, OR-ed
    LIVE = 1
    #: one-hot ids that left the plan mid-round, OR-ed (re-parenting)
    RETIRED = 2
    #: this node's own one-hot id at its parent; 0 at a root
    BIT = 3
    PARENT_ENDPOINT = 4
    IS_ROOT = 5


#: links of a tree: 32 to children, by index; that to the parent; that to the multicast group
UP_LINK = 32
GROUP_LINK = 33
LINKS = 34
#: bursts of a link whose times are kept
BURSTS = 256


class LinkColumn(IntEnum):
    """Integer columns of the link table, row ``LINKS * tree + index``. Packets, unless something else is said."""

    #: 1 while there is such a link
    LIVE = 0
    ENDPOINT = 1
    #: one-hot id of the child on this hop; 0 for a group
    BIT = 2
    #: what the neighbour's receive buffer holds of this hop
    WINDOW = 3
    IN_FLIGHT = 4
    #: the neighbour's last CREDIT, modulo 2^32
    TAKEN = 5
    #: slot of the last row that was sent, -1: none
    LAST = 6
    #: packets taken from this neighbour that it has been told about, and how many more are worth telling
    REPORTED = 7
    QUOTA = 8
    #: 1: results reach this neighbour through the group
    GROUPED = 9
    #: fragments that wait to be sent again
    QUEUED = 10
    #: sent and lost since the window was last reconsidered
    SENT = 11
    LOST = 12
    #: whose fate is known; how many of them there will be when the one timed is among them, -1: none is timed
    SETTLED = 13
    MARK = 14
    #: 1: more was lost than is tolerated
    HAS_LOST = 15
    #: sent by this process since the link was made
    PACKETS = 16
    #: bursts sent, of which the last :data:`BURSTS` are kept
    BURSTS = 17
    #: plan version that made the link
    SINCE = 18


class LinkTime(IntEnum):
    """Floating-point columns of the link table: seconds on the node's clock, or of waiting."""

    #: what may be in flight as far as the path is concerned (packets)
    CONGESTION = 0
    #: a round trip that is always believed
    PLAUSIBLE = 1
    ROUND_TRIP = 2
    MARKED_AT = 3
    WAITING_SINCE = 4
    PRODDED = 5
    PROD_INTERVAL = 6
    #: when the neighbour is told what was taken in any case; infinity: nothing is owed
    CREDIT_DUE = 7


class Work(IntEnum):
    """Who does a host's own part in a round of a shard (:class:`LeafColumn`)."""

    #: this host has no part in it
    NONE = 0
    #: kernels: float32 values, or their exponents
    DATA = 1
    EXPONENTS = 2
    #: Python, by the tensor's format
    OTHER = 3


class LeafColumn(IntEnum):
    """Columns of the table of a host's own parts in rounds, a row per shard. Addresses are valid while there is a part."""

    WORK = 0
    #: fragments of the shard that have been encoded, and entries of its log of results that have been decoded
    ENCODED = 1
    DECODED = 2
    #: 1: Python was told that the log of results is full
    ENDED = 3
    #: the shard's first fragment in the tensor
    FIRST = 4
    #: address of the addresses of all local ranks' tensors; ranks; elements of the tensor
    BASES = 5
    RANKS = 6
    ELEMENTS = 7
    #: address and length of the table of exponents; address and length of what says which fragments of it are agreed on
    TABLE = 8
    TABLE_SIZE = 9
    AGREED = 10
    AGREED_SIZE = 11
    #: fragments of data whose exponents one fragment carries
    SHARE = 12
    #: 1: data waits for its exponents
    WAITS = 13
    #: 1: NaN and infinity are refused
    REFUSES = 14
    #: largest quantised magnitude of a rank; address of the addresses of the format's tables
    LIMIT = 15
    FORMAT = 16
    #: address of what the shards of a tensor count together
    SHARED = 17


class JobColumn(IntEnum):
    """Columns of the job table."""

    JOB = 0
    #: plan version, modulo 256
    VERSION = 1


#: ``logged`` bits of a slot: already in the emission log of this round
LOGGED_UP = 1
LOGGED_DOWN = 2
#: and already sent, by a data path that does not wait for this process
LEFT_UP = 4
LEFT_DOWN = 8

#: makes an array of zeros: name, shape, dtype
Place = Callable[[str, tuple[int, ...], Any], NDArray[Any]]


def _zeros(_: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    return np.zeros(shape, dtype)


class OutOfSlots(NoRoom):
    """The node's slot memory cannot hold a tensor; says how much it needs and how much there is."""


class SlotMemory:
    """All arrays of one node, sized once.

    ``rows`` is int32[capacity, 263] and lazily backed by the operating system: memory is used when a slot is.
    The emission logs hold fragment indices in completion order, per shard and direction. ``place`` makes the arrays, for
    memory that is shared with another data path.
    """

    def __init__(self, capacity: int, place: Place | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"slot memory of {capacity} slots: at least one is needed")
        self.capacity = capacity
        make = place or _zeros
        self.rows: NDArray[np.int32] = make("rows", (capacity, ROW), np.int32)
        self.bytes: NDArray[np.uint8] = self.rows.view(np.uint8).reshape(-1)
        self.bitmap: NDArray[np.uint32] = make("bitmap", (capacity,), np.uint32)
        self.round: NDArray[np.uint32] = make("round", (capacity,), np.uint32)
        self.state: NDArray[np.uint8] = make("state", (capacity,), np.uint8)
        self.attempt: NDArray[np.uint8] = make("attempt", (capacity,), np.uint8)
        #: exponent asked for by EXPONENT packets of this attempt, and whether there was one
        self.exponent: NDArray[np.uint8] = make("exponent", (capacity,), np.uint8)
        self.misfit: NDArray[np.uint8] = make("misfit", (capacity,), np.uint8)
        #: exponent that the RESTART of this attempt announced; 0 if it has that of the attempt before
        self.announced: NDArray[np.uint8] = make("announced", (capacity,), np.uint8)
        self.logged: NDArray[np.uint8] = make("logged", (capacity,), np.uint8)
        self.up_log: NDArray[np.uint32] = make("up_log", (capacity,), np.uint32)
        self.down_log: NDArray[np.uint32] = make("down_log", (capacity,), np.uint32)
        groups = capacity // GROUP + MAX_SHARDS + 1
        #: fragments of each index group that have not been logged yet
        self.up_left: NDArray[np.int32] = make("up_left", (groups,), np.int32)
        self.down_left: NDArray[np.int32] = make("down_left", (groups,), np.int32)
        self.shards: NDArray[np.int64] = make("shards", (MAX_SHARDS, len(ShardColumn)), np.int64)
        self.trees: NDArray[np.int64] = make("trees", (MAX_TREES, len(TreeColumn)), np.int64)
        #: per tree and child index: plan version of the id, address, replacement bits of a retired id
        self.since: NDArray[np.uint8] = make("since", (MAX_TREES, 32), np.uint8)
        self.child_endpoint: NDArray[np.int64] = make("child_endpoint", (MAX_TREES, 32), np.int64)
        self.mask: NDArray[np.uint32] = make("mask", (MAX_TREES, 32), np.uint32)
        self.jobs: NDArray[np.int64] = make("jobs", (MAX_JOBS, len(JobColumn)), np.int64)
        self.keys: NDArray[np.uint64] = make("keys", (MAX_JOBS,), np.uint64)
        self.job_row: NDArray[np.int32] = make("job_row", (1 << 16,), np.int32)
        self.job_row[:] = -1
        self.shard_row: NDArray[np.int32] = make("shard_row", (MAX_JOBS, MAX_SHARDS_PER_JOB), np.int32)
        self.shard_row[:] = -1
        #: data packets taken per tree and child, and per tree from the parent: what CREDIT reports
        self.taken: NDArray[np.int64] = make("taken", (MAX_TREES, 33), np.int64)
        # what this process alone sends by; a data path in the kernel knows nothing of it
        self.links: NDArray[np.int64] = np.zeros((MAX_TREES * LINKS, len(LinkColumn)), np.int64)
        self.link_times: NDArray[np.float64] = np.zeros((MAX_TREES * LINKS, len(LinkTime)), np.float64)
        #: when the last bursts of each link left; whose they were (shard row), and from which position of its log on
        self.burst_times: NDArray[np.float64] = np.zeros((MAX_TREES * LINKS, BURSTS), np.float64)
        self.bursts: NDArray[np.int64] = np.zeros((MAX_TREES * LINKS, BURSTS, 3), np.int64)
        #: how far each emission log has been sent on each link of its tree; -1: nothing is sent there
        self.cursors: NDArray[np.int64] = np.full((MAX_SHARDS, LINKS), -1, np.int64)
        #: shards with a round on its way, in the order in which they are sent: the first of a tree, the next of a shard
        self.first_row: NDArray[np.int32] = np.full(MAX_TREES, -1, np.int32)
        self.next_row: NDArray[np.int32] = np.full(MAX_SHARDS, -1, np.int32)
        #: this host's own parts in rounds
        self.leaves: NDArray[np.int64] = np.zeros((MAX_SHARDS, len(LeafColumn)), np.int64)
        #: ids of trees, -1 where there is none
        self.tree_ids: NDArray[np.int64] = np.full(MAX_TREES, -1, np.int64)
        self._free_slots = [(0, capacity)]
        self._free_groups = [(0, groups)]
        self._free_shard_rows = list(range(MAX_SHARDS - 1, -1, -1))
        self._free_tree_rows = list(range(MAX_TREES - 1, -1, -1))
        self._free_job_rows = list(range(MAX_JOBS - 1, -1, -1))

    def free_slots(self) -> int:
        """Slots not given to any shard."""
        return sum(size for _, size in self._free_slots)

    def add_job(self, job: int, version: int, key: int) -> int:
        """Row of a new job. Raises :class:`OutOfSlots` when 64 jobs are running."""
        if not self._free_job_rows:
            raise OutOfSlots(f"job {job}: this node already serves {MAX_JOBS} jobs; wait for one to end")
        row = self._free_job_rows.pop()
        self.jobs[row, JobColumn.JOB] = job
        self.jobs[row, JobColumn.VERSION] = version & 0xFF
        self.keys[row] = key
        self.job_row[job] = row
        self.shard_row[row] = -1
        return row

    def drop_job(self, job: int) -> None:
        """Forget a job whose shards and trees are gone."""
        row = int(self.job_row[job])
        self.job_row[job] = -1
        self._free_job_rows.append(row)

    def room_for_trees(self, count: int) -> bool:
        """Whether :meth:`add_tree` can be called ``count`` times."""
        return len(self._free_tree_rows) >= count

    def add_tree(self, job_row: int, tree: int = 0) -> int:
        """Row of a new tree with this id. Raises :class:`OutOfSlots` when the table is full."""
        if not self._free_tree_rows:
            raise OutOfSlots(f"this node already takes part in {MAX_TREES} trees; wait for a job to end")
        row = self._free_tree_rows.pop()
        self.trees[row] = 0
        self.trees[row, TreeColumn.JOB] = job_row
        self.since[row] = 0
        self.child_endpoint[row] = -1
        self.mask[row] = 0
        self.taken[row] = 0
        self.tree_ids[row] = tree
        self.links[row * LINKS : (row + 1) * LINKS] = 0
        self.first_row[row] = -1
        return row

    def drop_tree(self, row: int) -> None:
        """Give a tree's row back."""
        self.tree_ids[row] = -1
        self._free_tree_rows.append(row)

    def add_shard(self, job: int, shard: int, tree_row: int, fold: int, count: int, active: int) -> int:
        """Row of a new shard with ``count`` slots, open for rounds after ``active``.

        Raises :class:`OutOfSlots` if its slots do not fit in one piece.
        """
        if not 0 <= shard < MAX_SHARDS_PER_JOB or not self._free_shard_rows:
            raise OutOfSlots(f"job {job} has too many tensors (shard {shard}); reuse names or drop some")
        slot0 = _take(self._free_slots, count)
        if slot0 is None:
            raise OutOfSlots(
                f"job {job} needs {count * ROW_BYTES} B of slots in one piece; {self.free_slots() * ROW_BYTES} B of "
                f"{self.capacity * ROW_BYTES} B are free: raise [node] memory"
            )
        groups = -(-count // GROUP)
        group0 = _take(self._free_groups, groups)
        assert group0 is not None, "there are more group entries than slots and shards can use"
        row = self._free_shard_rows.pop()
        job_row = int(self.job_row[job])
        self.shards[row] = 0
        self.shards[row, ShardColumn.SLOT0] = slot0
        self.shards[row, ShardColumn.COUNT] = count
        self.shards[row, ShardColumn.FOLD] = fold
        self.shards[row, ShardColumn.TREE] = tree_row
        self.shards[row, ShardColumn.JOB] = job_row
        self.shards[row, ShardColumn.SHARD] = shard
        self.shards[row, ShardColumn.ACTIVE] = active & 0xFFFFFFFF
        self.shards[row, ShardColumn.COMMITTED] = 1
        self.shards[row, ShardColumn.GROUP0] = group0
        self.state[slot0 : slot0 + count] = State.FREE
        self.cursors[row] = -1
        self.leaves[row] = 0
        self.shard_row[job_row, shard] = row
        return row

    def drop_shard(self, row: int) -> None:
        """Give a shard's slots back."""
        values = self.shards[row]
        count = int(values[ShardColumn.COUNT])
        self.shard_row[values[ShardColumn.JOB], values[ShardColumn.SHARD]] = -1
        # it holds addresses
        self.leaves[row] = 0
        _give(self._free_slots, int(values[ShardColumn.SLOT0]), count)
        _give(self._free_groups, int(values[ShardColumn.GROUP0]), -(-count // GROUP))
        self._free_shard_rows.append(row)


def _take(free: list[tuple[int, int]], size: int) -> int | None:
    """First fit: start of ``size`` consecutive entries, or None."""
    for position, (start, length) in enumerate(free):
        if length >= size:
            if length == size:
                del free[position]
            else:
                free[position] = (start + size, length - size)
            return start
    return None


def _give(free: list[tuple[int, int]], start: int, size: int) -> None:
    """Return a range and join it with its neighbours."""
    free.append((start, size))
    free.sort()
    joined: list[tuple[int, int]] = []
    for begin, length in free:
        if joined and joined[-1][0] + joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((begin, length))
    free[:] = joined
