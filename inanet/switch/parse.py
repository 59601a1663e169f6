"""Parse and filter: INA packets are found inside super-frames, checked, and laid out as offsets into the arena.

Everything else is left as it is. A frame's flow says who sent it to whom; its headers are kept with the flow, because what
a program makes of its packets leaves under them.
"""

from enum import IntEnum

import numpy as np

from inanet.kernels.jit import njit
from inanet.phy.vnet import (
    DATA_VALID,
    ETHERTYPE_IPV4,
    GSO_NONE,
    GSO_UDP_L4,
    HEADER_BYTES,
    IP_BYTES,
    NEEDS_CSUM,
    UDP,
    UDP_BYTES,
    big16,
    internet_sum,
)
from inanet.switch.programs import RAW_ETHERTYPE
from inanet.wire.batch import I64, U8, U64
from inanet.wire.drops import Drop

#: flows told apart at a time; a power of two, and how many places of the table may be taken
FLOWS = 4096
MOST_FLOWS = FLOWS // 2
#: headers kept with a flow: virtio-net, Ethernet (absent on TUN), IPv4 without options, UDP
TEMPLATE_BYTES = HEADER_BYTES + 14 + IP_BYTES + UDP_BYTES
ETHERTYPE_ARP = 0x0806
CONGESTED = 3


class Kind(IntEnum):
    """What a frame is to the switch."""

    #: forwarded by the tables
    ORDINARY = 0
    #: packets of a program
    INA = 1
    #: refused by the filter
    REFUSED = 2
    #: the flow table is full: look at this frame again when it has been cleared
    AGAIN = 3


#: columns of ``places``
KIND, AT, BYTES, SEGMENT, PROGRAM, FLOW = range(6)
PLACES = 6

_ORDINARY, _INA, _REFUSED, _AGAIN = (int(kind) for kind in Kind)
_SHORT, _BAD_CHECKSUM, _FOREIGN_HOST = int(Drop.SHORT), int(Drop.BAD_CHECKSUM), int(Drop.FOREIGN_HOST)


@njit("uint64(uint8[::1], int64, int64)", cache=True, nogil=True, _nrt=False)
def big(arena: U8, at: int, size: int) -> np.uint64:
    """The big-endian integer of ``size`` bytes at ``at``."""
    value = np.uint64(0)
    for j in range(size):
        value = value << np.uint64(8) | np.uint64(arena[at + j])
    return value


@njit("int64(uint64, uint64, uint64, uint64[:, ::1], int64[::1])", cache=True, nogil=True, _nrt=False)
def find_flow(source: int, destination: int, rest: int, keys: U64, used: I64) -> int:
    """Place of a flow in the table, which it is put into if need be (``used[0]`` grows); -1 if that is full.

    ``rest`` (type of service, ingress, framing) is never 0.
    """
    mix = (source ^ (destination * np.uint64(0x9E3779B97F4A7C15)) ^ rest) * np.uint64(0xBF58476D1CE4E5B9)
    at = np.int64(mix >> np.uint64(40)) & (FLOWS - 1)
    while keys[at, 2] != 0:
        if keys[at, 0] == source and keys[at, 1] == destination and keys[at, 2] == rest:
            return int(at)
        at = (at + 1) & (FLOWS - 1)
    if used[0] == MOST_FLOWS:
        return -1
    keys[at, 0], keys[at, 1], keys[at, 2] = source, destination, rest
    used[0] += 1
    return int(at)


@njit("boolean(uint64[:, ::1], int64, uint64, int64)", cache=True, nogil=True, _nrt=False)
def is_member(members: U64, program: int, source: int, ingress: int) -> bool:
    """Whether an endpoint may send to a program, and from this port; see :func:`find_packets`."""
    for j in range(len(members)):
        if np.int64(members[j, 0]) == program and members[j, 1] == source:
            return bool(members[j, 2] == 0 or np.int64(members[j, 2]) == ingress + 1)
    return False


@njit(
    "int64(uint8[::1], int64, int64, int64, int64[:, ::1], int64, int64[:, ::1], int64)",
    cache=True,
    nogil=True,
    _nrt=False,
)
def examine(
    arena: U8, head: int, end: int, link: int, ports: I64, raw_program: int, places: I64, i: int
) -> int:
    """Whether the frame ``arena[head:end]`` holds packets of a program: 0 if it does, and then all of ``places[i]`` but
    the flow is set; -1 if it does not; or the reason why it is refused.
    """
    ip = head + HEADER_BYTES + link
    if end - ip < IP_BYTES:
        return -1
    ethertype = big16(arena, ip - 2) if link else ETHERTYPE_IPV4
    kind = arena[head + 1] & 0x7F
    if ethertype == RAW_ETHERTYPE and raw_program >= 0 and kind == GSO_NONE:
        places[i, 1], places[i, 2] = ip + IP_BYTES, end - ip - IP_BYTES
        places[i, 3], places[i, 4] = places[i, 2], raw_program
        return 0
    udp = ip + IP_BYTES
    if (
        ethertype != ETHERTYPE_IPV4
        or arena[ip] != 0x45
        or arena[ip + 9] != UDP
        or kind not in (GSO_UDP_L4, GSO_NONE)
        or big16(arena, ip + 6) & 0x3FFF
        or end - udp < UDP_BYTES
    ):
        return -1
    aim = big16(arena, udp + 2)
    program = np.int64(-1)
    for j in range(len(ports)):
        if ports[j, 0] <= aim <= ports[j, 1]:
            program = ports[j, 2]
            break
    if program < 0:
        return -1
    length = big16(arena, udp + 4)
    size = np.int64(arena[head + 4]) | np.int64(arena[head + 5]) << 8
    if length < UDP_BYTES or udp + length > end or (kind == GSO_UDP_L4 and size == 0):
        return _SHORT
    if arena[head] & (NEEDS_CSUM | DATA_VALID) == 0 and big16(arena, udp + 6) != 0:
        pseudo = internet_sum(arena, ip + 12, 8, UDP + length)
        if internet_sum(arena, udp, length, pseudo) != 0xFFFF:
            return _BAD_CHECKSUM
    places[i, 1], places[i, 2] = udp + UDP_BYTES, length - UDP_BYTES
    places[i, 3] = min(size, places[i, 2]) if kind == GSO_UDP_L4 else places[i, 2]
    places[i, 4] = program
    return 0


@njit(
    "int64(uint8[::1], int64[::1], int64[::1], int64, int64, int64[:, ::1], int64, uint64[:, ::1], int64[:, ::1],"
    " uint64[:, ::1], int64[::1], uint8[:, ::1], int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def find_packets(
    arena: U8,
    offsets: I64,
    lengths: I64,
    link: int,
    ingress: int,
    ports: I64,
    raw_program: int,
    members: U64,
    places: I64,
    flow_keys: U64,
    flow_used: I64,
    templates: U8,
    drops: I64,
) -> int:
    """Find INA packets in frames; returns how many there are.

    ``link`` is the length of link headers (14 or 0). ``ports`` has rows (first, last, program), ``raw_program`` is whose
    frames of ethertype 0x0700 are, or -1. ``members`` has rows (program, endpoint, port it must come in at + 1 or 0):
    others are refused (bound endpoints). ``places[i]`` becomes (:class:`Kind`, offset of the first packet, bytes of all its
    packets, bytes per packet, program, flow). ``drops`` counts what is refused, in packets, by
    :class:`~inanet.wire.drops.Drop`.
    """
    packets = np.int64(0)
    last = np.int64(-1)
    for i in range(len(offsets)):
        head = offsets[i]
        verdict = examine(arena, head, head + lengths[i], link, ports, raw_program, places, i)
        if verdict:
            places[i, 0] = _ORDINARY if verdict < 0 else _REFUSED
            if verdict > 0:
                drops[verdict] += 1
            continue
        ip, at, payload, program = head + HEADER_BYTES + link, places[i, 1], places[i, 2], places[i, 4]
        source = big(arena, ip + 12, 4) << np.uint64(16)
        destination = big(arena, ip + 16, 4) << np.uint64(16)
        if at - ip > IP_BYTES:
            source |= np.uint64(big16(arena, ip + IP_BYTES))
            destination |= np.uint64(big16(arena, ip + IP_BYTES + 2))
        count = np.int64(1) if payload == 0 else (payload + places[i, 3] - 1) // places[i, 3]
        rest = (
            np.uint64(arena[ip + 1])
            | np.uint64(ingress + 1) << np.uint64(8)
            | np.uint64(program) << np.uint64(40)
        )
        flow = last
        # frames come in trains
        if (
            last < 0
            or flow_keys[last, 0] != source
            or flow_keys[last, 1] != destination
            or flow_keys[last, 2] != rest
        ):
            if not is_member(members, program, source, ingress):
                places[i, 0] = _REFUSED
                drops[_FOREIGN_HOST] += count
                continue
            flow = find_flow(source, destination, rest, flow_keys, flow_used)
            if flow < 0:
                places[i, 0] = _AGAIN
                continue
            last = flow
            # what changes from frame to frame (hardware addresses, time to live) is as it was last seen
            for j in range(min(TEMPLATE_BYTES, at - head)):
                templates[flow, j] = arena[head + j]
        places[i, 0], places[i, 5] = _INA, flow
        packets += count
    return int(packets)


@njit(
    "int64(int64[:, ::1], int64, int64, int64, int64[::1], int64[::1], uint64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def lay_out(places: I64, frames: int, program: int, base: int, offsets: I64, lengths: I64, flows: U64) -> int:
    """Lay out the packets of one program that :func:`find_packets` has found; returns how many.

    The last packet of a super-frame may be shorter than the others. ``flows[i]`` is packet *i*'s flow on top of ``base``.
    """
    at = np.int64(0)
    for i in range(frames):
        if places[i, 0] != _INA or places[i, 4] != program:
            continue
        done = np.int64(0)
        while True:
            offsets[at] = places[i, 1] + done
            lengths[at] = min(places[i, 3], places[i, 2] - done)
            flows[at] = np.uint64(base + places[i, 5])
            at += 1
            done += places[i, 3]
            if done >= places[i, 2]:
                break
    return int(at)


@njit("int64(uint8[::1], int64[::1], int64[::1], int64, int64[::1])", cache=True, nogil=True, _nrt=False)
def wire_bytes(arena: U8, offsets: I64, lengths: I64, link: int, sizes: I64) -> int:
    """Bytes that frames take on a wire when their super-frames are cut; returns the fragments they make."""
    total = np.int64(0)
    for i in range(len(offsets)):
        head = offsets[i]
        sizes[i] = lengths[i] - HEADER_BYTES
        segment = np.int64(arena[head + 4]) | np.int64(arena[head + 5]) << 8
        headers = np.int64(arena[head + 2]) | np.int64(arena[head + 3]) << 8
        fragments = np.int64(1)
        if arena[head + 1] & 0x7F != GSO_NONE and segment > 0 and link <= headers < sizes[i]:
            fragments = (sizes[i] - headers + segment - 1) // segment
            sizes[i] += (fragments - 1) * headers
        total += fragments
    return int(total)
