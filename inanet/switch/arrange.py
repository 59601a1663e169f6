"""What leaves the pipeline, put in order: packets that go the same way become runs, which leave as super-frames.

Order within one way is that of arrival. A run ends where length or mark change, because the segments of a super-frame
share both.
"""

import numpy as np

from inanet.kernels.jit import njit
from inanet.proto.common.program import Action
from inanet.wire.batch import I64, U8, U64
from inanet.wire.drops import Drop

#: ways that one call tells apart; a power of two, and how many of them may be taken
WAYS = 2048
MOST_WAYS = WAYS // 2
#: columns of ``runs``
RUN_ACTION, RUN_TARGET, RUN_ORIGIN, RUN_LENGTH, RUN_MARK, RUN_START, RUN_COUNT = range(7)
RUN_COLUMNS = 7
#: entries of ``tally``
ABSORBED, EMITTED, PASSED_ON, RECIRCULATED, MOST_SEEN, MARKS, OVER = range(7)
TALLY = 7

_PASS, _DROP, _UNICAST, _GROUP, _REPLY = (int(action) for action in Action)
_OK, _TOO_MANY_PASSES = int(Drop.OK), int(Drop.TOO_MANY_PASSES)


@njit(
    "int64(uint8[::1], int64[::1], uint8[::1], uint8[::1], uint64[::1], uint64[::1], int64, int64, int64,"
    " int64[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def find_ways(
    action: U8,
    target: I64,
    reason: U8,
    passes: U8,
    origins: U64,
    senders: U64,
    first: int,
    count: int,
    most_passes: int,
    ways: I64,
    slots: I64,
    way_of: I64,
    drops: I64,
    tally: I64,
) -> int:
    """Give every packet from ``first`` on a way or drop it; returns the index of the first packet not looked at,
    which is ``count`` unless the ways ran out.

    ``ways[k]`` becomes (action, target, origin or sender, packets); ``slots`` (WAYS, filled with -1 here) is the hash
    table over them; ``way_of[i]`` is -1 for what does not leave. ``ways[MOST_WAYS, 0]`` is set to how many there are.
    """
    for k in range(WAYS):
        slots[k] = -1
    used = np.int64(0)
    last = np.int64(-1)
    i = np.int64(first)
    while i < count:
        what = np.int64(action[i])
        made = np.int64(passes[i])
        if what == _DROP:
            way_of[i] = -1
            if reason[i] == _OK:
                tally[ABSORBED] += 1
                # its values are in a slot already: it cannot be undone, but it is told
                tally[OVER] += made > most_passes
            else:
                drops[reason[i]] += 1
        elif made > most_passes:
            way_of[i] = -1
            tally[OVER] += 1
            drops[_TOO_MANY_PASSES] += 1
        else:
            whither = target[i] if _UNICAST <= what <= _GROUP else np.int64(0)
            whence = np.int64(senders[i]) if what == _GROUP else np.int64(origins[i])
            if last >= 0 and ways[last, 0] == what and ways[last, 1] == whither and ways[last, 2] == whence:
                k = last
            else:
                mix = np.uint64(whither) * np.uint64(0x9E3779B97F4A7C15)
                mix ^= mix >> np.uint64(29)
                mix = (mix ^ np.uint64(whence) ^ np.uint64(what)) * np.uint64(0xBF58476D1CE4E5B9)
                at = np.int64(mix >> np.uint64(32)) & (WAYS - 1)
                while True:
                    k = slots[at]
                    if k < 0 or (ways[k, 0] == what and ways[k, 1] == whither and ways[k, 2] == whence):
                        break
                    at = (at + 1) & (WAYS - 1)
                if k < 0:
                    if used == MOST_WAYS:
                        break
                    k = used
                    used += 1
                    slots[at] = k
                    ways[k, 0], ways[k, 1], ways[k, 2], ways[k, 3] = what, whither, whence, 0
                last = k
            way_of[i] = k
            ways[k, 3] += 1
            if what == _PASS:
                tally[PASSED_ON] += 1
            else:
                tally[EMITTED] += 1
        tally[RECIRCULATED] += made - 1
        tally[MOST_SEEN] = max(tally[MOST_SEEN], made)
        i += 1
    ways[MOST_WAYS, 0] = used
    return i


@njit(
    "int64(int64[::1], uint8[::1], int64[::1], int64, int64, int64[:, ::1], int64[::1], int64[::1], int64[:, ::1],"
    " int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def build_runs(
    length: I64,
    mark: U8,
    offsets: I64,
    first: int,
    end: int,
    ways: I64,
    way_of: I64,
    ordered: I64,
    runs: I64,
    tally: I64,
) -> int:
    """Lay the offsets of packets ``first`` to ``end - 1`` out by way in ``ordered``; returns how many runs they make.

    ``runs`` has a row for each: (action, target, origin, length, mark, start in ``ordered``, packets). Uses up the
    packet counts in ``ways``.
    """
    used = ways[MOST_WAYS, 0]
    at = np.int64(0)
    for k in range(used):
        packets = ways[k, 3]
        ways[k, 3] = at
        at += packets
    # the index first: lengths and marks are needed to find where runs end
    for i in range(first, end):
        k = way_of[i]
        if k >= 0:
            ordered[ways[k, 3]] = i
            ways[k, 3] += 1
    made = np.int64(0)
    start = np.int64(0)
    for k in range(used):
        for j in range(start, ways[k, 3]):
            i = ordered[j]
            ordered[j] = offsets[i]
            marked = np.int64(mark[i] != 0)
            tally[MARKS] += marked
            if j == start or runs[made - 1, RUN_LENGTH] != length[i] or runs[made - 1, RUN_MARK] != marked:
                runs[made, RUN_ACTION] = ways[k, 0]
                runs[made, RUN_TARGET] = ways[k, 1]
                runs[made, RUN_ORIGIN] = ways[k, 2]
                runs[made, RUN_LENGTH] = length[i]
                runs[made, RUN_MARK] = marked
                runs[made, RUN_START] = j
                runs[made, RUN_COUNT] = 0
                made += 1
            runs[made - 1, RUN_COUNT] += 1
        start = ways[k, 3]
    return made
