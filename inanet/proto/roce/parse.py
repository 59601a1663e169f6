"""Finding the fields of received packets, and whether they are packets at all."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.icrc import is_sound
from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8, PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.roce import (
    BTH_AT,
    CONGESTED,
    HEADER_BYTES,
    ICRC_BYTES,
    IMMEDIATE_BYTES,
    IP_BYTES,
    PAYLOAD_AT,
    PORT,
    TRAITS,
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
