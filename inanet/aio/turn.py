"""One turn of a node's loop over UDP, compiled: send, receive, fold, account, until the socket is empty, the device is full
or Python is needed.

The kernels are those that serve a node batch by batch (:mod:`inanet.proto.tree.flow`,
:mod:`inanet.proto.tree.xagg.policy`); here they run between two system calls without the interpreter. Python is entered
for what is decided: control packets other than CREDIT, rounds that begin or end, repetitions; and to encode and decode those
tensors of this host that kernels do not (all but float32 with a prologue). docs/datapath.md has the whole.

Arguments of the kernels: ``t`` and ``f`` are the tables, ``leaves`` the host's own parts (:mod:`inanet.proto.tree.leaf`), ``w``
the sockets, ``rows`` slot memory as bytes. ``events`` takes reports of packets, ``left`` those of what has left: int64[n, 4]
both, of which the first ``used[0]`` and ``left_used[0]`` are filled.
"""

import math
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from inanet.aio.moderation import Moderation, pause_after
from inanet.kernels.jit import njit
from inanet.phy.mmsg import CONTROL_BYTES as ANCILLARY_BYTES
from inanet.phy.mmsg import (
    HEADER_WORDS,
    NAME_BYTES,
    SendTable,
    expand,
    gather,
    segment_sizes,
)
from inanet.phy.udp import SEGMENTS, SUPERFRAMES, UdpDevice
from inanet.proto.tree import flow, leaf
from inanet.proto.tree.engine import COUNT_, TABLES, Event, Tables
from inanet.proto.tree.flow import BURST, FLOW, Flow, kernel
from inanet.proto.tree.membership import Tree
from inanet.proto.tree.node import Node
from inanet.proto.tree.slot_engine import UserSlots
from inanet.proto.tree.slots import GROUP_LINK, LINKS, ROW_BYTES, UP_LINK, JobColumn, LinkColumn, TreeColumn
from inanet.proto.tree.xagg.control import seal_control
from inanet.proto.tree.xagg.policy import ingest
from inanet.proto.tree.xagg.slotwork import missing_from_child, missing_results
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.xagg import CONTROL_BYTES, LOST_BODY_BYTES, MAGIC_VERSION, Flag, Kind

#: batches received in one turn
BUDGET = 8
#: seconds for which a busy turn does not look whether others in the event loop have been woken
DEAF = 0.002
#: seconds for which what neighbours want once more may wait for the end of a turn
LENIENT = 0.005
#: packets that one batch can hold: messages of one call, datagrams of one message
PACKETS = SUPERFRAMES * 128


class Time(IntEnum):
    """Entries of :attr:`Wires.times`: seconds on the node's clock."""

    #: when credit that was not sent yet is due
    CREDIT = 0
    #: when a full link may have to be looked at
    FULL = 1
    #: by when the turn has to be over; 0: as soon as the sockets are empty
    UNTIL = 2
    #: the latest time, which the turn reads by itself if it waits
    NOW = 3


class Need(IntEnum):
    """Why a turn has ended, as bits."""

    #: the sockets are empty
    DRAINED = 1
    #: the device takes no more; a burst is left over
    BLOCKED = 2
    #: the kernel has refused a message: the device knows what to do
    REFUSED = 4
    #: links with room have fragments that are to be sent again
    REPEAT = 8
    #: windows are full: time may tell that credit was lost
    FULL = 16
    #: reports that Python has to act on
    REPORTS = 32
    #: receiving has failed; the device says how
    FAILED = 64
    #: shards have all results, or results that kernels do not decode
    SINK = 128
    #: there may be something to encode that kernels do not
    PRODUCE = 256
    #: the descriptor that ends waits was ready
    WOKEN = 512


class Figure(IntEnum):
    """Counters of a turn, as in :meth:`inanet.phy.device.Device.counters`."""

    RX_PACKETS = 0
    RX_BYTES = 1
    RX_SUPERFRAMES = 2
    TX_PACKETS = 3
    TX_BYTES = 4
    TX_SUPERFRAMES = 5
    EAGAIN = 6
    PATH_ERRORS = 7
    #: packets of the last batch; rows that have left for groups; all rows that have left; batches
    LAST = 8
    GROUP_ROWS = 9
    ROWS = 10
    BATCHES = 11
    #: the burst that was left over: its link, packets in it, and how many the device took
    LINK = 12
    FOUND = 13
    TAKEN = 14
    #: socket that is read first next time
    FIRST = 15
    #: fragments of this host's own tensors that were encoded
    MADE = 16
    #: where the burst that was left over goes
    TO = 17


class Wires(NamedTuple):
    """Message tables and sockets as kernels see them."""

    #: the socket that sends as well, then those of multicast groups
    fds: NDArray[np.int64]
    #: the table of ``recvmmsg`` (:class:`~inanet.phy.mmsg.ReceiveTable`), a row per message
    in_words: NDArray[np.uint64]
    in_headers: NDArray[np.uint32]
    in_names: NDArray[np.uint8]
    in_control: NDArray[np.uint32]
    in_sizes: NDArray[np.int64]
    in_arena: NDArray[np.int32]
    #: of each packet received: where it is in the arena and how long, in bytes; the endpoint that it came from
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sources: NDArray[np.uint64]
    #: the table of ``sendmmsg`` (:class:`~inanet.phy.mmsg.SendTable`)
    out_words: NDArray[np.uint64]
    out_iovecs: NDArray[np.uint64]
    out_name: NDArray[np.uint8]
    #: byte offsets in slot memory of the rows that leave next
    burst: NDArray[np.int64]
    #: rows of (tree, index of the link), in the order in which they are served
    order: NDArray[np.int64]
    #: see :func:`inanet.proto.tree.flow.credits_due`: rows of ``out``, and packets withheld of each link (none)
    credits: NDArray[np.int64]
    withheld: NDArray[np.int64]
    #: indexed by :class:`Time`
    times: NDArray[np.float64]
    #: the descriptor that ends a wait, then those of ``fds``: rows of ``struct pollfd``
    polls: NDArray[np.int32]
    timespec: NDArray[np.int64]
    #: where a CREDIT packet is made
    staging: NDArray[np.int32]
    #: what lacks of a group
    missing: NDArray[np.uint8]
    #: indexed by :class:`Figure`
    figures: NDArray[np.int64]


_I, _U64 = types.int64[::1], types.uint64[:, ::1]
WIRES: Any = types.NamedTuple(
    (
        _I,
        _U64,
        types.uint32[:, ::1],
        types.uint8[:, ::1],
        types.uint32[:, ::1],
        _I,
        types.int32[::1],
        _I,
        _I,
        types.uint64[::1],
        _U64,
        _U64,
        types.uint8[::1],
        _I,
        types.int64[:, ::1],
        types.int64[:, ::1],
        _I,
        types.float64[::1],
        types.int32[:, ::1],
        _I,
        types.int32[:, ::1],
        types.uint8[::1],
        _I,
    ),
    Wires,
)
_i64, _f64 = types.int64, types.float64
_EVENTS = types.int64[:, ::1]
_recvmmsg = types.ExternalFunction(
    "recvmmsg", types.int32(types.int32, types.uintp, types.uint32, types.int32, types.uintp)
)
_sendmmsg = types.ExternalFunction(
    "sendmmsg", types.int32(types.int32, types.uintp, types.uint32, types.int32)
)
_sendto = types.ExternalFunction(
    "sendto", types.int64(types.int32, types.uintp, types.uintp, types.int32, types.uintp, types.uint32)
)
_ppoll = types.ExternalFunction("ppoll", types.int32(types.uintp, types.uint64, types.uintp, types.uintp))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())
_DONTWAIT, _EAGAIN, _EINTR = 0x40, 11, 4
_POLLIN, _POLLOUT, _MONOTONIC = 1, 4, 1
_CREDIT_DUE, _FULL_ENDS, _UNTIL, _NOW = map(int, Time)
#: as :data:`inanet.phy.mmsg.PATH_ERRORS`
_ECONNREFUSED, _EHOSTUNREACH, _ENETUNREACH, _EHOSTDOWN, _ENETDOWN, _ENOBUFS, _EPERM = (
    111,
    113,
    101,
    112,
    100,
    105,
    1,
)
_NAME_BYTES, _ANCILLARY, _HEADER = NAME_BYTES, ANCILLARY_BYTES, HEADER_WORDS * 8
_LINKS, _GROUP, _UP, _MOST, _ROW_BYTES = LINKS, GROUP_LINK, UP_LINK, BURST, ROW_BYTES
_ENDPOINT, _BIT, _GROUPED, _QUEUED, _IN_FLIGHT, _REPORTED, _LIVE = (
    int(LinkColumn.ENDPOINT),
    int(LinkColumn.BIT),
    int(LinkColumn.GROUPED),
    int(LinkColumn.QUEUED),
    int(LinkColumn.IN_FLIGHT),
    int(LinkColumn.REPORTED),
    int(LinkColumn.LIVE),
)
_JOB, _JOB_ID, _VERSION = int(TreeColumn.JOB), int(JobColumn.JOB), int(JobColumn.VERSION)
_DRAINED, _BLOCKED, _REFUSED, _REPEAT, _FULL, _REPORTS, _FAILED, _SINK, _PRODUCE, _WOKEN = map(int, Need)
_RX_PACKETS, _RX_BYTES, _RX_SUPER, _TX_PACKETS, _TX_BYTES, _TX_SUPER, _F_EAGAIN, _F_PATH = range(8)
_LAST, _GROUP_ROWS, _ROWS, _BATCHES, _LINK, _FOUND, _TAKEN, _FIRST, _MADE, _TO = range(8, 18)
_OTHERS, _CHUNK = leaf.OTHERS, leaf.CHUNK
_DEAF, _LENIENT = DEAF, LENIENT
_E_GROUP_END, _E_ANSWER = int(Event.GROUP_END), int(Event.ANSWER)
_E_AGAIN_UP, _E_AGAIN_DOWN, _E_LEFT = int(Event.AGAIN_UP), int(Event.AGAIN_DOWN), int(Event.LEFT)
_CREDIT, _DOWN, _CONTROL_BYTES, _MAGIC = int(Kind.CREDIT), int(Flag.DOWN), CONTROL_BYTES, MAGIC_VERSION


@njit(types.int32(), cache=True, nogil=True, _nrt=True)
def last_error() -> Any:
    """``errno`` of this thread."""
    return carray(_errno_location(), 1)[0]


@kernel(types.boolean(types.int32))
def is_path_error(code: int) -> bool:
    """See :data:`inanet.phy.mmsg.PATH_ERRORS`."""
    return code in (_ECONNREFUSED, _EHOSTUNREACH, _ENETUNREACH, _EHOSTDOWN, _ENETDOWN, _ENOBUFS, _EPERM)


@kernel(_i64(WIRES))
def take(w: Wires) -> Any:
    """One ``recvmmsg`` on each socket; packets in ``offsets``, ``lengths`` and ``sources``. Returns how many packets, or -1
    where a socket is unusable.
    """
    count, room, sockets = np.int64(0), len(w.in_words), len(w.fds)
    first = w.figures[_FIRST]
    for k in range(sockets):
        if count == room:
            break
        fd = np.int32(w.fds[(first + k) % sockets])
        for attempt in range(8):
            for i in range(count, room):
                w.in_headers[i, 2] = _NAME_BYTES
                w.in_words[i, 5] = _ANCILLARY
            table = w.in_words.ctypes.data + count * _HEADER
            got = _recvmmsg(fd, table, np.uint32(room - count), np.int32(_DONTWAIT), np.uintp(0))
            if got >= 0:
                count += got
                break
            code = last_error()
            if code in (_EAGAIN, _EINTR):
                break
            if not is_path_error(code) or attempt == 7:
                return -1
            # an ICMP answer to something sent earlier; reading it has cleared it
            w.figures[_F_PATH] += 1
    w.figures[_FIRST] = (first + 1) % sockets
    if count == 0:
        w.figures[_LAST] = 0
        return 0
    total = segment_sizes(w.in_headers, w.in_words, w.in_control, count, w.in_sizes)
    received = expand(w.in_headers, w.in_names, count, 65536, w.in_sizes, w.offsets, w.lengths, w.sources)
    w.figures[_RX_PACKETS] += total
    w.figures[_RX_BYTES] += received
    w.figures[_RX_SUPER] += count
    w.figures[_LAST] = total
    return total


@kernel(types.void(WIRES, _i64), inline=True)
def aim(w: Wires, endpoint: int) -> None:
    """Write a destination into the name of all messages to be sent."""
    for j in range(4):
        w.out_name[4 + j] = np.uint8(endpoint >> (40 - 8 * j) & 0xFF)
    w.out_name[2] = np.uint8(endpoint >> 8 & 0xFF)
    w.out_name[3] = np.uint8(endpoint & 0xFF)


@kernel(_i64(TABLES, WIRES, types.uint8[::1], _i64, _i64, _i64))
def push(t: Tables, w: Wires, rows: Any, endpoint: int, found: int, segments: int) -> Any:
    """Send rows of slot memory: the first ``found`` of ``burst``, without the :data:`Figure.TAKEN` that have left before.

    ``segments`` is how many packets a message may have. Returns 0, or the :class:`Need` that says why not all have left.
    """
    aim(w, endpoint)
    at = w.figures[_TAKEN]
    while at < found:
        base = w.out_iovecs.ctypes.data
        messages = gather(
            rows, w.burst[:found], at, _ROW_BYTES, segments, w.out_words, w.out_iovecs, np.uint64(base)
        )
        done = np.int64(0)
        while done < messages:
            table = w.out_words.ctypes.data + done * _HEADER
            sent = _sendmmsg(np.int32(w.fds[0]), table, np.uint32(messages - done), np.int32(_DONTWAIT))
            if sent < 0:
                code = last_error()
                if code == _EINTR:
                    continue
                w.figures[_TAKEN] = at
                if code == _EAGAIN:
                    w.figures[_F_EAGAIN] += 1
                    return _BLOCKED
                return _REFUSED
            done += sent
            packets = min(found - at, sent * segments)
            at += packets
            w.figures[_TX_PACKETS] += packets
            w.figures[_TX_BYTES] += packets * _ROW_BYTES
            w.figures[_TX_SUPER] += sent
    w.figures[_TAKEN] = w.figures[_FOUND] = 0
    return 0


@kernel(_i64(TABLES, FLOW, _EVENTS, WIRES, types.uint8[::1], _i64, _f64, _f64, _EVENTS, _I, _EVENTS, _I))
def give(
    t: Tables,
    f: Flow,
    leaves: Any,
    w: Wires,
    rows: Any,
    segments: int,
    retransmit: float,
    now: float,
    events: Any,
    used: Any,
    left: Any,
    left_used: Any,
) -> Any:
    """Send what windows allow, a burst of each link in turn; returns :class:`Need`. Full links wait ``retransmit`` seconds."""
    need: Any = np.int64(0)
    if w.figures[_FOUND]:
        # what the device has not taken goes first, unless the neighbour has gone meanwhile
        link, to = w.figures[_LINK], w.figures[_TO]
        if f.links[link, _LIVE] and f.links[link, _ENDPOINT] == to:
            stopped = push(t, w, rows, to, w.figures[_FOUND], segments)
            if stopped:
                return stopped
        w.figures[_FOUND] = w.figures[_TAKEN] = 0
    busy = True
    while busy:
        busy = False
        for k in range(len(w.order)):
            tree, index = w.order[k, 0], w.order[k, 1]
            link = tree * _LINKS + index
            if f.links[link, _QUEUED] and index != _GROUP:
                if flow.room(f.links, f.link_times, link) > 0:
                    need |= _REPEAT
                continue
            if index == _GROUP:
                most = flow.group_room(f, tree)
                if f.links[link, _QUEUED] and most > 0:
                    need |= _REPEAT
                    continue
                if most < 0:
                    continue
                if most == 0:
                    need |= _FULL
                    ends = flow.group_wait_ends(f, tree, retransmit, now)
                    w.times[_FULL_ENDS] = min(w.times[_FULL_ENDS], ends)
                    continue
                found = flow.next_for_group(t, f, tree, most, now, w.burst, left, left_used)
                w.figures[_GROUP_ROWS] += found
            else:
                if f.links[link, _GROUPED] and not flow.is_behind(f, tree, index):
                    continue
                most = min(flow.room(f.links, f.link_times, link), _MOST)
                if most == 0:
                    need |= _FULL
                    w.times[_FULL_ENDS] = min(w.times[_FULL_ENDS], flow.wait_ends(f, link, retransmit))
                    continue
                if index == _UP:
                    made = leaf.produce(t, f, leaves, tree, most, events, used)
                    w.figures[_MADE] += made % _OTHERS
                    if made >= _OTHERS:
                        need |= _PRODUCE
                found = flow.next_rows(t, f, tree, index, most, now, w.burst, left, left_used)
            if found == 0:
                continue
            busy = True
            w.figures[_ROWS] += found
            w.figures[_LINK] = link
            w.figures[_FOUND] = found
            w.figures[_TO] = f.links[link, _ENDPOINT]
            stopped = push(t, w, rows, f.links[link, _ENDPOINT], found, segments)
            if stopped:
                return need | stopped
            if left_used[0] + 64 > len(left) or used[0] + 4 * _CHUNK > len(events):
                return need | _REPORTS
    return need


@kernel(types.boolean(TABLES, FLOW, WIRES, _f64, _f64))
def give_credit(t: Tables, f: Flow, w: Wires, delay: float, now: float) -> bool:
    """Send CREDIT to whom it is due, after ``delay`` seconds at the latest; False if the device takes no more: it stays due."""
    seen = np.int64(-1)
    for k in range(len(w.order)):
        tree = w.order[k, 0]
        if tree == seen:
            continue
        seen = tree
        count = flow.credits_due(t, f, tree, w.withheld, delay, delay, now, w.credits, w.times)
        for i in range(count):
            index = w.credits[i, 0]
            link = tree * _LINKS + index
            job = t.trees[tree, _JOB]
            flags = _DOWN if index == _UP else 0
            seal_control(
                w.staging,
                0,
                np.uint32(_MAGIC)
                | np.uint32(_CREDIT | flags << 4) << np.uint32(8)
                | np.uint32(t.jobs[job, _JOB_ID]) << np.uint32(16),
                np.uint32(f.links[link, _BIT]),
                np.uint32(w.credits[i, 1] & 0xFFFFFFFF),
                np.uint32(0),
                np.uint32(t.jobs[job, _VERSION]) << np.uint32(16),
                t.keys[job],
                2,
                np.uint32(f.tree_ids[tree]),
            )
            aim(w, f.links[link, _ENDPOINT])
            left = _sendto(
                np.int32(w.fds[0]),
                w.staging.ctypes.data,
                np.uintp(_CONTROL_BYTES),
                np.int32(_DONTWAIT),
                w.out_name.ctypes.data,
                np.uint32(_NAME_BYTES),
            )
            if left < 0 and last_error() == _EAGAIN:
                # nobody was told: it stays due
                for j in range(i, count):
                    f.links[tree * _LINKS + w.credits[j, 0], _REPORTED] -= w.credits[j, 2]
                w.times[_CREDIT_DUE] = min(w.times[_CREDIT_DUE], now + delay)
                return False
            w.figures[_TX_PACKETS] += 1
            w.figures[_TX_BYTES] += _CONTROL_BYTES
    return True


@kernel(types.boolean(TABLES, WIRES, _EVENTS, _I, _i64, _f64))
def is_urgent(t: Tables, w: Wires, events: Any, used: Any, first: int, now: float) -> bool:
    """Whether something of what was reported from ``first`` on has to be acted on before the next batch is taken.

    A group that has ended can wait if nothing of it lacks; what is wanted once more waits for :data:`LENIENT` seconds.
    """
    for k in range(first, used[0]):
        code, row, child, group = events[k, 0], events[k, 1], events[k, 2], events[k, 3]
        if code == _E_GROUP_END:
            # a prod always wants an answer
            if group < 0:
                return True
            if child < 0:
                lacks = missing_results(t, row, group, w.missing)
            else:
                lacks = missing_from_child(t, row, child, group, w.missing)
            if lacks:
                return True
        elif code in (_E_ANSWER, _E_AGAIN_UP, _E_AGAIN_DOWN):
            w.times[_UNTIL] = min(w.times[_UNTIL], now + _LENIENT)
        elif code != _E_LEFT:
            return True
    return False


@kernel(types.boolean(TABLES, FLOW, _EVENTS, _I, _i64))
def has_ended(t: Tables, f: Flow, left: Any, left_used: Any, first: int) -> bool:
    """Whether all of a round has left by a link, as reported from ``first`` on: its receiver is to be told."""
    for k in range(first, left_used[0]):
        row = left[k, 1]
        if f.cursors[row, left[k, 2]] == t.shards[row, COUNT_]:
            return True
    return False


@kernel(_f64(WIRES))
def clock(w: Wires) -> Any:
    """Seconds of ``CLOCK_MONOTONIC``."""
    _clock_gettime(np.int32(_MONOTONIC), w.timespec.ctypes.data)
    return w.timespec[0] + w.timespec[1] * 1e-9


@kernel(types.boolean(WIRES, _f64, types.boolean, types.boolean))
def wait(w: Wires, seconds: float, reads: bool, writes: bool) -> Any:
    """Sleep until the first descriptor is ready, a socket can be read (``reads``) or the first one written (``writes``), or
    ``seconds`` are over. Returns whether the first descriptor has ended it, or a signal.
    """
    w.timespec[0] = np.int64(seconds)
    w.timespec[1] = np.int64((seconds - np.int64(seconds)) * 1e9)
    for k in range(len(w.polls)):
        w.polls[k, 1] = _POLLIN
    if writes:
        w.polls[1, 1] = _POLLIN | _POLLOUT if reads else _POLLOUT
    count = len(w.polls) if reads else 2 if writes else 1
    ready = _ppoll(w.polls.ctypes.data, np.uint64(count), w.timespec.ctypes.data, np.uintp(0))
    return ready < 0 or (ready > 0 and w.polls[0, 1] >> 16 != 0)


@kernel(types.boolean(WIRES))
def is_woken(w: Wires) -> Any:
    """Whether the descriptor that ends waits is ready."""
    w.timespec[0] = w.timespec[1] = 0
    w.polls[0, 1] = _POLLIN
    ready = _ppoll(w.polls.ctypes.data, np.uint64(1), w.timespec.ctypes.data, np.uintp(0))
    return ready > 0 and w.polls[0, 1] >> 16 != 0


@kernel(types.boolean(TABLES, FLOW, _EVENTS, WIRES))
def sink(t: Tables, f: Flow, leaves: Any, w: Wires) -> Any:
    """See :func:`inanet.proto.tree.leaf.sink`; of all trees."""
    needed = False
    for k in range(len(w.order)):
        if k == 0 or w.order[k, 0] != w.order[k - 1, 0]:
            needed |= leaf.sink(t, f, leaves, w.order[k, 0])
    return needed


@kernel(_i64(TABLES, FLOW, WIRES))
def lacking(t: Tables, f: Flow, w: Wires) -> Any:
    """Results that are still missing in the round nearest to its end; 0 if there is no round."""
    least: Any = np.int64(1) << 40
    for k in range(len(w.order)):
        if k == 0 or w.order[k, 0] != w.order[k - 1, 0]:
            least = flow.lacking(t, f, w.order[k, 0], least)
    return 0 if least == np.int64(1) << 40 else least


@kernel(
    _i64(
        TABLES,
        FLOW,
        _EVENTS,
        WIRES,
        types.uint8[::1],
        _i64,
        _i64,
        _i64,
        types.boolean,
        _f64,
        _f64,
        _EVENTS,
        _I,
        _EVENTS,
        _I,
        _I,
        _I,
    )
)
def turn(
    t: Tables,
    f: Flow,
    leaves: Any,
    w: Wires,
    rows: Any,
    segments: int,
    budget: int,
    batch: int,
    sends: bool,
    delay: float,
    retransmit: float,
    events: Any,
    used: Any,
    left: Any,
    left_used: Any,
    counts: Any,
    drops: Any,
) -> Any:
    """See the module's documentation. ``segments`` is how many packets a message may have, ``budget`` how many batches a turn
    takes that does not wait, ``batch`` for how many packets a turn that waits sleeps. Credit waits for ``delay`` seconds,
    a full link for ``retransmit`` seconds. ``counts`` and ``drops`` are those of :func:`~inanet.proto.tree.xagg.policy.ingest`.
    Returns :class:`Need`.
    """
    waits = w.times[_UNTIL] > 0
    now = w.times[_NOW]
    since, packets = now, np.int64(0)
    heard = began = now
    w.times[_FULL_ENDS] = np.inf
    need: Any = np.int64(0)
    while True:
        reported = used[0]
        if sends:
            w.times[_FULL_ENDS] = np.inf
            need &= _SINK
            told = left_used[0]
            need |= give(t, f, leaves, w, rows, segments, retransmit, now, events, used, left, left_used)
            if need & (_REFUSED | _REPORTS) or (need & _BLOCKED and not waits):
                break
            if waits and (need & _REPEAT or has_ended(t, f, left, left_used, told)):
                break
        if budget == 0:
            break
        total = take(w)
        if total < 0:
            need |= _FAILED
            break
        if total:
            w.figures[_BATCHES] += 1
            packets += total
            ingest(
                t,
                w.in_arena,
                w.offsets[:total],
                w.lengths[:total],
                w.sources[:total],
                events,
                used,
                counts,
                drops,
            )
            if used[0]:
                flow.take_credits(t, f, w.in_arena, w.offsets, w.sources, events, used, drops, now)
            if sink(t, f, leaves, w):
                need |= _SINK
        given = True
        if sends and (total or waits):
            w.times[_CREDIT_DUE] = np.inf
            given = give_credit(t, f, w, delay, now)
        if used[0] + 4 * len(w.offsets) + 16 > len(events) or is_urgent(t, w, events, used, reported, now):
            need |= _REPORTS
            break
        if need & _SINK and waits:
            break
        if not waits:
            if total == 0:
                need |= _DRAINED
                break
            if not given:
                break
            budget -= 1
            continue
        now = clock(w)
        until = w.times[_UNTIL]
        if need & _FULL:
            until = min(until, max(w.times[_FULL_ENDS], began + retransmit / 4))
        if now >= until:
            need |= _DRAINED if total == 0 else 0
            break
        if total:
            if now - heard > _DEAF:
                heard = now
                if is_woken(w):
                    need |= _WOKEN
                    break
            continue
        heard = now
        # the sockets are empty
        blocked = need & _BLOCKED != 0 or not given
        pause = pause_after(batch, packets, lacking(t, f, w), now - since)
        since, packets = now, np.int64(0)
        end = min(until, w.times[_CREDIT_DUE])
        seconds = max(0.0, end - now)
        if pause > 0:
            seconds = min(seconds, pause)
        if wait(w, seconds, pause == 0, blocked):
            need |= _DRAINED | _WOKEN
            break
        now = clock(w)
    w.times[_NOW] = now
    return need


class Turn:
    """Turns of one node on one device. ``node`` has its slots for itself. ``wake`` is a descriptor that ends waits when it is
    readable; -1: none.
    """

    def __init__(self, node: Node, device: UdpDevice, wake: int = -1) -> None:
        self._node = node
        self._device = device
        self._wake = wake
        self._batch = Moderation(device.rx_budget).batch
        table = device.received
        out = self._out = SendTable(SUPERFRAMES, SEGMENTS)
        self._segments = 0
        self._events: NDArray[np.int64] = np.zeros((8 * PACKETS + 32, 4), np.int64)
        self._used: NDArray[np.int64] = np.zeros(1, np.int64)
        self._wires = Wires(
            np.array([device.fileno()], np.int64),
            table.words,
            table.headers,
            table.names,
            table.control,
            table.sizes,
            table.arena.view(np.int32),
            np.zeros(PACKETS, np.int64),
            np.zeros(PACKETS, np.int64),
            np.zeros(PACKETS, np.uint64),
            out.words,
            out.iovecs,
            out.name,
            np.zeros(BURST, np.int64),
            np.zeros((0, 2), np.int64),
            np.zeros((LINKS, 3), np.int64),
            np.zeros(LINKS, np.int64),
            np.zeros(len(Time)),
            np.zeros((1, 2), np.int32),
            np.zeros(2, np.int64),
            np.zeros((1, 39), np.int32),
            np.zeros(LOST_BODY_BYTES, np.uint8),
            np.zeros(len(Figure), np.int64),
        )
        self._arena = table.arena
        #: plans and groups that :meth:`_follow` has seen
        self._known = (-1, -1)
        self._trees: list[Tree] = []

    def run(self, now: float, *, sends: bool = True, until: float = 0.0, budget: int = BUDGET) -> "Outcome":
        """One turn and what follows from it: up to ``budget`` batches are taken, 0 only sends.

        With ``until``, seconds of ``CLOCK_MONOTONIC``, it waits for more until then, or until the descriptor ``wake`` is ready.
        """
        node, w = self._node, self._wires
        state = node.state
        known = (state.plans, self._device.joins)
        if known != self._known:
            self._known = known
            w = self._follow()
        for tree in self._trees:
            # kernels follow the rows that this has linked
            tree.lineup()
        segments = self._device.segments_of(ROW_BYTES)
        if segments != self._segments:
            self._segments = segments
            self._out.aim(0, ROW_BYTES if segments > 1 else 0)
        state.now = max(state.now, now)
        w.figures[: Figure.LINK] = 0
        w.figures[Figure.MADE] = 0
        leftover, need = self._once(budget, sends, now, until)
        now = state.now
        others = need
        # what this host has encoded meanwhile leaves at once
        while leftover is None and others & _PRODUCE and node.produce(now):
            leftover, others = self._once(0, True, now)
        figures = w.figures.tolist()
        self._device.account(figures[: Figure.LAST])
        state.rows_sent += figures[Figure.ROWS]
        state.leaf_contributions += figures[Figure.MADE]
        state.results_multicast += figures[Figure.GROUP_ROWS]
        return Outcome(
            figures[Figure.RX_PACKETS],
            figures[Figure.BATCHES],
            bool(need & _DRAINED),
            leftover,
            figures[Figure.FOUND] > 0,
            bool(need & _WOKEN),
        )

    @property
    def deadline(self) -> float:
        """When Python has to look at the node; turns return credit by themselves."""
        due = self._node.state.next_timer
        return math.inf if due is None else due

    def _follow(self) -> Wires:
        """Links or sockets have changed."""
        self._trees = list(self._node.state.trees())
        order = [(tree.row, link.row - tree.row * LINKS) for tree in self._trees for link in tree.links()]
        self._wires = self._wires._replace(
            order=np.array(order, np.int64).reshape(-1, 2),
            fds=np.array(self._device.descriptors(), np.int64),
            polls=np.array([(fd, 0) for fd in (self._wake, *self._device.descriptors())], np.int32),
        )
        return self._wires

    def _once(
        self, budget: int, sends: bool, now: float, until: float = 0.0
    ) -> tuple[Transmission | None, int]:
        """The kernels' part, and Python's; what the device did not take, and :class:`Need`."""
        node, slots, w = self._node, self._node.slots, self._wires
        state, links, began = node.state, node.links, now
        self._used[0] = 0
        w.times[_NOW], w.times[_UNTIL], w.times[_CREDIT_DUE] = now, until, state.credit_due
        need = turn(
            slots.tables,
            slots.flow,
            node.memory.leaves,
            w,
            node.memory.bytes,
            self._segments,
            budget,
            self._batch,
            sends,
            node.timing.reorder,
            node.timing.retransmit,
            self._events,
            self._used,
            links.left.rows,
            links.left.used,
            slots.counts,
            slots.drops,
        )
        now = state.now = max(now, float(w.times[_NOW]))
        links.see_ends(now)
        if sends:
            state.credit_due = float(w.times[_CREDIT_DUE])
        if need & _FULL:
            state.wake(max(float(w.times[_FULL_ENDS]), began + node.timing.retransmit / 4))
        leftover = None
        if need & _REFUSED:
            rest = w.burst[w.figures[Figure.TAKEN] : w.figures[Figure.FOUND]].copy()
            leftover = Transmission(int(w.figures[Figure.TO]), node.memory.bytes, rest, ROW_BYTES)
            w.figures[Figure.FOUND] = w.figures[Figure.TAKEN] = 0
        if need & _FAILED:
            self._device.receive()
        if need & _REPEAT:
            state.dirty = True
        if self._used[0]:
            total = int(w.figures[Figure.LAST])
            batch = PacketBatch(self._arena, w.offsets[:total], w.lengths[:total], w.sources[:total])
            reports = [(row[0], row[1], row[2], row[3]) for row in self._events[: self._used[0]].tolist()]
            state.dirty |= any(report[0] != Event.GROUP_END for report in reports)
            node.act(reports, batch, now)
        if not sends:
            node.settle(now)
        elif need & (_SINK | _REPORTS):
            # credit has left already
            state.dirty = True
            node.rounds.sink(now)
        return leftover, int(need)


class Outcome(NamedTuple):
    """What a turn came to: packets and batches taken; whether the sockets are empty."""

    packets: int
    batches: int
    drained: bool
    #: what the kernel has refused: the device knows what to do
    leftover: Transmission | None
    #: the device takes no more; the next turn goes on
    blocked: bool
    #: the descriptor that ends waits was ready
    woken: bool


def turn_for(node: object, device: object, wake: int = -1) -> Turn | None:
    """Compiled turns, where a node has its slots for itself and a plain UDP socket; ``None``: batch by batch."""
    if type(node) is Node and isinstance(node.slots, UserSlots) and type(device) is UdpDevice:
        return Turn(node, device, wake)
    return None
