"""RoCE packets in batches: finding the fields of received ones, and making runs of one WRITE's packets, acknowledgements and
notifications, checksums included.
"""

from enum import IntEnum

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.icrc import is_sound, seal
from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8, PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.roce import (
    ACK_REQUEST,
    AETH_BYTES,
    BECN,
    BTH_AT,
    CNP_BYTES,
    CNP_TOS,
    CONGESTED,
    DONT_FRAGMENT,
    ECT0,
    HEADER,
    HEADER_BYTES,
    ICRC_BYTES,
    IMMEDIATE_BYTES,
    IP_BYTES,
    MIGRATED,
    PAD_SHIFT,
    PAYLOAD_AT,
    PORT,
    PSN_MASK,
    RETH_BYTES,
    TRAITS,
    TTL,
    UDP_PROTOCOL,
    Opcode,
    Trait,
)


class Field(IntEnum):
    """Columns of a parsed batch."""

    #: number of the queue pair it is for; -1 where a packet was dropped
    QP = 0
    OPCODE = 1
    PSN = 2
    ACK_REQUEST = 3
    #: whether the network marked it
    CONGESTED = 4
    #: where its payload is in the arena, and how many bytes that has without padding
    AT = 5
    LENGTH = 6
    #: of the RETH, the immediate data and the AETH, 0 if the packet has none
    ADDRESS = 7
    KEY = 8
    TOTAL = 9
    IMMEDIATE = 10
    SYNDROME = 11
    #: IPv4 address it came from
    SOURCE = 12
    PARTITION = 13


_QP, _OPCODE, _PSN, _ACK_REQUEST, _CONGESTED, _AT, _LENGTH = range(7)
_ADDRESS, _KEY, _TOTAL, _IMMEDIATE, _SYNDROME, _SOURCE, _PARTITION = range(7, 14)
_SHORT, _BAD_MAGIC, _BAD_TYPE = int(Drop.SHORT), int(Drop.BAD_MAGIC), int(Drop.BAD_TYPE)
_BAD_ICRC, _UNKNOWN_QP = int(Drop.BAD_ICRC), int(Drop.UNKNOWN_QP)
_ACKNOWLEDGE, _STARTS, _HAS_IMMEDIATE = int(Opcode.ACKNOWLEDGE), int(Trait.STARTS), int(Trait.IMMEDIATE)


@njit("int64(uint8[::1], int64, int64)", cache=True, nogil=True, _nrt=False)
def big_endian(arena: U8, at: int, size: int) -> int:
    """The unsigned big-endian number in ``size`` bytes; eight bytes are read as two's complement."""
    value = 0
    for j in range(size):
        value = value << 8 | int(arena[at + j])
    return value


@njit("int64(uint8[::1], int64, int64, int64, int64[::1], int64[::1])", cache=True, nogil=True, _nrt=False)
def _examine(arena: U8, at: int, length: int, own: int, numbers: I64, row: I64) -> int:
    """Fill in the fields of one packet; returns the reason to drop it, or 0."""
    if length < HEADER_BYTES + ICRC_BYTES:
        return _SHORT
    if arena[at] != 0x45 or arena[at + 9] != 17 or big_endian(arena, at + 22, 2) != PORT:
        return _BAD_MAGIC
    if big_endian(arena, at + 6, 2) & 0x3FFF:
        return _BAD_MAGIC
    if big_endian(arena, at + 2, 2) != length or big_endian(arena, at + 24, 2) != length - IP_BYTES:
        return _SHORT
    bth = at + BTH_AT
    opcode, flags = np.int64(arena[bth]), np.int64(arena[bth + 1])
    traits, begin = TRAITS[opcode], PAYLOAD_AT[opcode]
    if not traits or flags & 0x0F:
        return _BAD_TYPE
    payload = length - begin - ICRC_BYTES - (flags >> 4 & 3)
    if payload < 0:
        return _SHORT
    if not is_sound(arena, at, length):
        return _BAD_ICRC
    number = big_endian(arena, bth + 5, 3)
    mine = False
    for i in range(len(numbers)):
        mine |= numbers[i] == number
    if not mine or big_endian(arena, at + 16, 4) != own:
        return _UNKNOWN_QP
    row[_OPCODE], row[_PSN] = opcode, big_endian(arena, bth + 9, 3)
    row[_ACK_REQUEST] = arena[bth + 8] >> 7
    row[_CONGESTED] = arena[at + 1] & 3 == CONGESTED
    row[_AT], row[_LENGTH] = at + begin, payload
    row[_ADDRESS] = row[_KEY] = row[_TOTAL] = row[_IMMEDIATE] = row[_SYNDROME] = 0
    if traits & _STARTS:
        row[_ADDRESS] = big_endian(arena, at + HEADER_BYTES, 8)
        row[_KEY] = big_endian(arena, at + HEADER_BYTES + 8, 4)
        row[_TOTAL] = big_endian(arena, at + HEADER_BYTES + 12, 4)
    if traits & _HAS_IMMEDIATE:
        row[_IMMEDIATE] = big_endian(arena, at + begin - IMMEDIATE_BYTES, 4)
    if opcode == _ACKNOWLEDGE:
        row[_SYNDROME] = arena[at + HEADER_BYTES]
    row[_SOURCE] = big_endian(arena, at + 12, 4)
    row[_PARTITION] = big_endian(arena, bth + 2, 2)
    row[_QP] = number
    return 0


@njit(
    "void(uint8[::1], int64[::1], int64[::1], int64, int64[::1], int64[:, ::1], int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def _parse(arena: U8, offsets: I64, lengths: I64, own: int, numbers: I64, fields: I64, drops: I64) -> None:
    for i in range(len(offsets)):
        reason = _examine(arena, offsets[i], lengths[i], own, numbers, fields[i])
        if reason:
            fields[i, _QP] = -1
            drops[reason] += 1


def parse(batch: PacketBatch, own: int, numbers: I64, drops: NDArray[np.int64]) -> I64:
    """Fields of all packets, int64[packets, :class:`Field`], in their order.

    ``own`` is this host's IPv4 address as an integer, ``numbers`` its queue pairs' numbers (int64). Packets that are none,
    damaged, or for nobody here are counted in ``drops`` by :class:`~inanet.wire.drops.Drop`.
    """
    fields = np.empty((len(batch), len(Field)), np.int64)
    _parse(batch.arena, batch.offsets, batch.lengths, own, numbers, fields, drops)
    return fields


_READABLE = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES, _INDEX, _INT = types.uint8[::1], types.int64[::1], types.int64
_FIRST, _MIDDLE, _LAST = int(Opcode.WRITE_FIRST), int(Opcode.WRITE_MIDDLE), int(Opcode.WRITE_LAST)
_ONLY, _CNP = int(Opcode.WRITE_ONLY), int(Opcode.CNP)
#: opcodes with immediate data are the next higher ones
assert (Opcode.WRITE_LAST_IMMEDIATE, Opcode.WRITE_ONLY_IMMEDIATE) == (_LAST + 1, _ONLY + 1)
#: headers, RETH, immediate data and ICRC: the most that a packet has beside its payload
OVERHEAD = HEADER_BYTES + RETH_BYTES + IMMEDIATE_BYTES + ICRC_BYTES
ACK_LENGTH = HEADER_BYTES + AETH_BYTES + ICRC_BYTES
CNP_LENGTH = HEADER_BYTES + CNP_BYTES + ICRC_BYTES


def template(source: int, destination: int, number: int, partition: int, dscp: int) -> U8:
    """The 40 bytes that all packets of a direction begin with: endpoints and queue pair are filled in, the rest is not."""
    header = np.zeros((), HEADER)
    ip, udp, bth = header["ip"], header["udp"], header["bth"]
    ip["version"], ip["tos"], ip["ttl"] = 0x45, dscp << 2 | ECT0, TTL
    ip["fragment"], ip["protocol"] = DONT_FRAGMENT, UDP_PROTOCOL
    ip["source"], ip["destination"] = source >> 16, destination >> 16
    udp["source"], udp["destination"] = source & 0xFFFF, PORT
    bth["flags"], bth["key"], bth["qp"] = MIGRATED, partition, number
    return np.frombuffer(header.tobytes(), np.uint8).copy()


@njit("void(uint8[::1], int64, int64, int64)", cache=True, nogil=True, _nrt=False)
def put(out: U8, at: int, value: int, size: int) -> None:
    """Write a big-endian number of ``size`` bytes."""
    for j in range(size):
        out[at + j] = np.uint8(value >> 8 * (size - 1 - j) & 0xFF)


@njit("void(uint8[::1], int64, int64, uint8[::1], int64, int64, int64)", cache=True, nogil=True, _nrt=False)
def _put_headers(out: U8, at: int, length: int, head: U8, opcode: int, pad: int, psn: int) -> None:
    """The first 40 bytes of a packet of ``length`` bytes; ``psn`` with the bit that asks for an acknowledgement.

    The identification is never 0, which some network stacks would replace (the ICRC covers it).
    """
    for j in range(HEADER_BYTES):
        out[at + j] = head[j]
    put(out, at + 2, length, 2)
    put(out, at + 4, 1 + (psn & PSN_MASK) % 0xFFFF, 2)
    total = np.int64(0)
    for j in range(0, IP_BYTES, 2):
        total += np.int64(out[at + j]) << 8 | np.int64(out[at + j + 1])
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    put(out, at + 10, ~total & 0xFFFF, 2)
    put(out, at + 24, length - IP_BYTES, 2)
    out[at + BTH_AT] = opcode
    out[at + BTH_AT + 1] |= pad << PAD_SHIFT
    put(out, at + BTH_AT + 8, psn, 4)


@njit(
    types.int64(
        _BYTES, _INT, _BYTES, _READABLE, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INDEX, _INDEX
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def build_writes(
    out: U8,
    at: int,
    head: U8,
    data: U8,
    mtu: int,
    first: int,
    count: int,
    packets: int,
    psn: int,
    address: int,
    key: int,
    immediate: int,
    every: int,
    offsets: I64,
    lengths: I64,
) -> int:
    """Packets ``first`` to ``first + count - 1`` of the WRITE of ``data`` that has ``packets`` of them; returns where they end.

    They follow each other from ``out[at]``; ``offsets`` and ``lengths`` get one entry each. ``psn`` is the first of these
    packets' number, counted without end; ``immediate`` is -1 for none. The last packet of the message asks for an
    acknowledgement, and every packet whose number is divisible by ``every``.
    """
    for i in range(count):
        index = first + i
        begin = index * mtu
        size = min(mtu, len(data) - begin)
        starts, ends = index == 0, index == packets - 1
        opcode = (_ONLY if ends else _FIRST) if starts else (_LAST if ends else _MIDDLE)
        body = at + HEADER_BYTES
        if starts:
            put(out, body, address, 8)
            put(out, body + 8, key, 4)
            put(out, body + 12, len(data), 4)
            body += RETH_BYTES
        if ends and immediate >= 0:
            opcode += 1
            put(out, body, immediate, 4)
            body += IMMEDIATE_BYTES
        pad = -size & 3
        to, source = np.uint64(body), np.uint64(begin)
        for j in range(np.uint64(size)):
            out[to + j] = data[source + j]
        for j in range(pad):
            out[body + size + j] = 0
        length = body + size + pad + ICRC_BYTES - at
        number = psn + i
        asks = ends or number % every == 0
        _put_headers(out, at, length, head, opcode, pad, number & PSN_MASK | (ACK_REQUEST if asks else 0))
        seal(out, at, length)
        offsets[i], lengths[i] = at, length
        at += length
    return at


@njit("void(uint8[::1], uint8[::1], int64, int64, int64)", cache=True, nogil=True, _nrt=False)
def build_acknowledgement(out: U8, head: U8, psn: int, syndrome: int, msn: int) -> None:
    """An acknowledgement, positive or negative, as the :data:`ACK_LENGTH` bytes of ``out``."""
    put(out, HEADER_BYTES, syndrome << 24 | msn, 4)
    _put_headers(out, 0, ACK_LENGTH, head, _ACKNOWLEDGE, 0, psn & PSN_MASK)
    seal(out, 0, ACK_LENGTH)


@njit("void(uint8[::1], uint8[::1])", cache=True, nogil=True, _nrt=False)
def build_notification(out: U8, head: U8) -> None:
    """A congestion notification packet as the :data:`CNP_LENGTH` bytes of ``out``, which are zero."""
    _put_headers(out, 0, CNP_LENGTH, head, _CNP, 0, 0)
    put(out, BTH_AT + 4, BECN >> 24, 1)
    seal(out, 0, CNP_LENGTH)


def notification_template(head: U8) -> U8:
    """``head`` in the traffic class of congestion notifications."""
    changed = head.copy()
    changed[1] = CNP_TOS
    return changed
