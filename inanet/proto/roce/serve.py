"""What every received packet does to a queue pair: the responder's and the requester's rules, one packet at a time.

The state of a queue pair that packets touch is a row of integers, so that a batch costs one call. What takes more than
integers (completions, timers, state changes) is left in the row for :mod:`inanet.proto.roce.queue_pair`.

*Responder* (InfiniBand 9.7.4 to 9.7.5): the expected PSN is served; what lies behind it is acknowledged once more; what lies
ahead is answered by one NAK until the expected one comes. *Requester* (9.7.5.1, 9.7.6): an acknowledgement covers everything
up to its PSN; a NAK everything before, and sending goes back to it. Packets are counted without end here, from the first
PSN on; on the wire the count is cut to 24 bits.
"""

from enum import IntEnum

import numpy as np

from inanet.kernels.jit import njit
from inanet.proto.roce.packets import Field
from inanet.proto.roce.verbs import ACCESS, BASE, KEY, LENGTH
from inanet.wire.batch import I64
from inanet.wire.drops import Drop
from inanet.wire.roce import (
    PSN_HALF,
    PSN_MASK,
    SYNDROME_ACK,
    SYNDROME_KIND,
    SYNDROME_NAK,
    SYNDROME_RNR,
    SYNDROME_VALUE,
    TRAITS,
    Nak,
    Opcode,
    Trait,
)


class Column(IntEnum):
    """The row of integers of a queue pair; -1 means none where a value may be missing."""

    NUMBER = 0
    #: the peer's IPv4 address
    REMOTE = 1
    #: whether requests are served, and acknowledgements taken
    SERVING = 2
    SENDING = 3
    MTU = 4
    PARTITION = 5
    # responder
    EXPECTED = 6
    MSN = 7
    #: the message that is arriving: whether there is one, its region, where it began and goes on, its bytes, and those to come
    IN_MESSAGE = 8
    REGION = 9
    BEGIN = 10
    OFFSET = 11
    TOTAL = 12
    LEFT = 13
    #: receives posted and not consumed
    RECEIVES = 14
    RNR_TIMER = 15
    ACK_DUE = 16
    #: syndrome of the NAK to send, and whether the expected PSN has been asked for already
    NAK = 17
    ASKED = 18
    # requester
    SQ_PSN = 19
    #: packets acknowledged, next to send, ever sent
    UNACKED = 20
    NEXT = 21
    HIGH = 22
    PROGRESS = 23
    WENT_BACK = 24
    #: code of the timer that "receiver not ready" asked for; code of the NAK that ends the connection
    NOT_READY = 25
    ENDED = 26
    # congestion
    MARKED = 27
    CNPS = 28
    # answers of this call
    PLACED = 29
    MESSAGES = 30
    #: last PSN that was dropped for a gap before it since the peer was asked to go back
    AHEAD = 31


(_NUMBER, _REMOTE, _SERVING, _SENDING, _MTU, _PARTITION, _EXPECTED, _MSN, _IN_MESSAGE, _REGION) = range(10)
(_BEGIN, _OFFSET, _TOTAL, _LEFT, _RECEIVES, _RNR_TIMER, _ACK_DUE, _NAK, _ASKED, _SQ_PSN) = range(10, 20)
(_UNACKED, _NEXT, _HIGH, _PROGRESS, _WENT_BACK, _NOT_READY, _ENDED, _MARKED, _CNPS) = range(20, 29)
(_PLACED, _MESSAGES, _AHEAD) = range(29, 32)
_F_QP, _F_OPCODE, _F_PSN, _F_ACK_REQUEST = (
    int(Field.QP),
    int(Field.OPCODE),
    int(Field.PSN),
    int(Field.ACK_REQUEST),
)
_F_CONGESTED, _F_AT, _F_LENGTH = int(Field.CONGESTED), int(Field.AT), int(Field.LENGTH)
_F_ADDRESS, _F_KEY, _F_TOTAL = int(Field.ADDRESS), int(Field.KEY), int(Field.TOTAL)
_F_IMMEDIATE, _F_SYNDROME = int(Field.IMMEDIATE), int(Field.SYNDROME)
_F_SOURCE, _F_PARTITION = int(Field.SOURCE), int(Field.PARTITION)
_STARTS, _ENDS, _HAS_IMMEDIATE = int(Trait.STARTS), int(Trait.ENDS), int(Trait.IMMEDIATE)
_ACKNOWLEDGE, _CNP = int(Opcode.ACKNOWLEDGE), int(Opcode.CNP)
_DUPLICATE, _PSN_GAP, _NOT_READY_DROP = int(Drop.DUPLICATE), int(Drop.PSN_GAP), int(Drop.NOT_READY)
_REFUSED, _WRONG_STATE, _UNKNOWN_QP = int(Drop.REFUSED), int(Drop.WRONG_STATE), int(Drop.UNKNOWN_QP)
_STALE = int(Drop.STALE_SEQUENCE)
_SEQUENCE, _INVALID, _NO_ACCESS = int(Nak.PSN_SEQUENCE), int(Nak.INVALID_REQUEST), int(Nak.REMOTE_ACCESS)


@njit("void(int64[::1], int64)", cache=True, nogil=True, _nrt=False)
def _refuse(state: I64, code: int) -> None:
    """Answer with a NAK that ends the connection."""
    state[_NAK] = SYNDROME_NAK | code
    state[_SERVING] = state[_SENDING] = 0


@njit("int64(int64[::1], int64[::1], int64[:, ::1])", cache=True, nogil=True, _nrt=False)
def _find_region(row: I64, state: I64, regions: I64) -> int:
    """The region that a RETH names and lies in, -1 if there is none; one past the last for requests of no bytes, which need
    none (9.7.4.1.5)."""
    if row[_F_TOTAL] == 0:
        return len(regions)
    for i in range(len(regions)):
        if regions[i, KEY] == row[_F_KEY]:
            offset = row[_F_ADDRESS] - regions[i, BASE]
            inside = 0 <= offset <= regions[i, LENGTH] - row[_F_TOTAL]
            return i if inside and regions[i, ACCESS] else -1
    return -1


@njit("int64(int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1])", cache=True, nogil=True)
def _respond(row: I64, state: I64, regions: I64, placements: I64, messages: I64) -> int:
    """Serve a request; returns the reason to drop it, or 0."""
    ahead = (row[_F_PSN] - state[_EXPECTED]) & PSN_MASK
    if ahead >= PSN_HALF:
        state[_ACK_DUE] = 1
        return _DUPLICATE
    if ahead:
        if not state[_ASKED]:
            state[_ASKED] = 1
            state[_NAK] = SYNDROME_NAK | _SEQUENCE
            state[_AHEAD] = row[_F_PSN]
        elif (row[_F_PSN] - state[_AHEAD]) & PSN_MASK < PSN_HALF:
            state[_AHEAD] = row[_F_PSN]
        return _PSN_GAP
    opcode, length = row[_F_OPCODE], row[_F_LENGTH]
    traits = TRAITS[opcode]
    starts, ends = traits & _STARTS != 0, traits & _ENDS != 0
    immediate = traits & _HAS_IMMEDIATE != 0
    if starts == (state[_IN_MESSAGE] != 0):
        _refuse(state, _INVALID)
        return _REFUSED
    region, offset, left = state[_REGION], state[_OFFSET], state[_LEFT]
    if starts:
        left = row[_F_TOTAL]
    # a message is cut into whole packets and a rest of at least one byte (9.7.4.1.6)
    wrong = length != left or length > state[_MTU] if ends else length != state[_MTU] or length >= left
    if wrong or (length == 0 and not starts):
        _refuse(state, _INVALID)
        return _REFUSED
    if starts:
        region = _find_region(row, state, regions)
        if region < 0:
            _refuse(state, _NO_ACCESS)
            return _REFUSED
        offset = row[_F_ADDRESS] - regions[region, BASE] if left else np.int64(0)
    if immediate and state[_RECEIVES] == 0:
        state[_ASKED] = 1
        state[_NAK] = SYNDROME_RNR | state[_RNR_TIMER]
        return _NOT_READY_DROP
    if starts:
        state[_REGION], state[_BEGIN], state[_TOTAL] = region, offset, left
    if length:
        at = state[_PLACED]
        placements[at, 0], placements[at, 1] = region, offset
        placements[at, 2], placements[at, 3] = row[_F_AT], length
        state[_PLACED] += 1
    state[_OFFSET], state[_LEFT] = offset + length, left - length
    state[_EXPECTED] = (state[_EXPECTED] + 1) & PSN_MASK
    if state[_NAK] < 0:
        state[_ASKED] = 0
    elif (state[_AHEAD] - state[_EXPECTED]) & PSN_MASK >= PSN_HALF:
        # the NAK has not been sent yet, and all that it was for has come in the same batch
        state[_NAK] = -1
        state[_ASKED] = 0
        state[_ACK_DUE] = 1
    state[_IN_MESSAGE] = not ends
    if row[_F_ACK_REQUEST]:
        state[_ACK_DUE] = 1
    if ends:
        state[_MSN] = (state[_MSN] + 1) & PSN_MASK
    if immediate:
        state[_RECEIVES] -= 1
        at = state[_MESSAGES]
        messages[at, 0], messages[at, 1] = row[_F_IMMEDIATE], region
        messages[at, 2], messages[at, 3] = state[_BEGIN], state[_TOTAL]
        state[_MESSAGES] += 1
    return 0


@njit("int64(int64[::1], int64[::1])", cache=True, nogil=True, _nrt=False)
def _acknowledge(row: I64, state: I64) -> int:
    """Take an acknowledgement of either sign; returns the reason to drop it, or 0."""
    covered = (row[_F_PSN] - state[_SQ_PSN] - state[_UNACKED]) & PSN_MASK
    if covered >= state[_HIGH] - state[_UNACKED]:
        return _STALE
    kind, value = row[_F_SYNDROME] & SYNDROME_KIND, row[_F_SYNDROME] & SYNDROME_VALUE
    if kind == SYNDROME_ACK:
        covered += 1
    elif kind != SYNDROME_RNR and kind != SYNDROME_NAK:
        return _STALE
    if covered:
        state[_UNACKED] += covered
        state[_PROGRESS] = 1
        # what a NAK before in this batch complained of has come after all
        state[_WENT_BACK] = 0
        state[_NOT_READY] = -1
    if kind == SYNDROME_ACK:
        state[_NEXT] = max(state[_NEXT], state[_UNACKED])
        return 0
    state[_NEXT] = state[_UNACKED]
    if kind == SYNDROME_RNR:
        state[_NOT_READY] = value
    elif value == _SEQUENCE:
        state[_WENT_BACK] = 1
    else:
        state[_ENDED] = value
        state[_SERVING] = state[_SENDING] = 0
    return 0


@njit(
    "void(int64[:, ::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def serve(fields: I64, state: I64, regions: I64, placements: I64, messages: I64, drops: I64) -> None:
    """Take all packets of a parsed batch that are for the queue pair with this ``state`` (:class:`Column`).

    Rows of ``placements`` become (region, offset in it, offset in the arena, bytes), those of ``messages`` (immediate, region,
    offset, bytes); the state says how many. Both need as many rows as there are packets. Drops are counted by reason.
    """
    state[_PLACED] = state[_MESSAGES] = 0
    for i in range(len(fields)):
        row = fields[i]
        if row[_F_QP] != state[_NUMBER]:
            continue
        opcode = row[_F_OPCODE]
        if row[_F_SOURCE] != state[_REMOTE] or (row[_F_PARTITION] ^ state[_PARTITION]) & 0x7FFF:
            drops[_UNKNOWN_QP] += 1
            continue
        if not (state[_SENDING] if opcode == _ACKNOWLEDGE else state[_SERVING]):
            drops[_WRONG_STATE] += 1
            continue
        if opcode == _CNP:
            state[_CNPS] += 1
            continue
        if opcode == _ACKNOWLEDGE:
            reason = _acknowledge(row, state)
        else:
            # acknowledgements are not paced, so nothing is gained by notifying of theirs
            state[_MARKED] += row[_F_CONGESTED]
            reason = _respond(row, state, regions, placements, messages)
        drops[reason] += 1
