"""Classic BPF programs for sockets: the kernel drops what a socket is not meant to see before it costs
buffer.
"""

import ctypes
import socket
import struct
from collections.abc import Sequence

SO_ATTACH_FILTER = 26

#: (code, jump if true, jump if false, operand), as in ``struct sock_filter``
Instruction = tuple[int, int, int, int]

_LD_WORD, _LD_HALF, _LD_BYTE = 0x20, 0x28, 0x30
_LD_HALF_INDEXED = 0x48
_LDX_HEADER_LENGTH = 0xB1
_JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET = 0x15, 0x35, 0x45
_RETURN = 0x06
_EVERYTHING = 0xFFFFFFFF
#: offsets of facts about a packet that are not in it
_AD_PACKET_TYPE = 0xFFFFF000 + 4
_PACKET_OTHERHOST = 3
#: a jump to "drop", resolved when the program is complete
_DROP = -1

DROP_ALL: tuple[Instruction, ...] = ((_RETURN, 0, 0, 0),)


def udp_filter(own: Sequence[int]) -> list[Instruction]:
    """Takes unfragmented UDP over IPv4 over Ethernet, addressed to this host's hardware, for the endpoints
    ``own``.

    Addresses and ports are matched independently of each other: a finer distinction is left to the reader.
    Raises ``ValueError`` for more endpoints than jumps can span.
    """
    addresses = sorted({endpoint >> 16 for endpoint in own})
    ports = sorted({endpoint & 0xFFFF for endpoint in own})
    if not own or len(addresses) + len(ports) > 200:
        raise ValueError(
            f"a socket filter takes 1 to 200 addresses and ports, not {len(addresses) + len(ports)}"
        )
    program: list[Instruction] = [
        (_LD_HALF, 0, 0, 12),
        (_JUMP_EQUAL, 0, _DROP, 0x0800),
        (_LD_BYTE, 0, 0, 23),
        (_JUMP_EQUAL, 0, _DROP, socket.IPPROTO_UDP),
        (_LD_HALF, 0, 0, 20),
        (_JUMP_SET, _DROP, 0, 0x3FFF),
        (_LD_WORD, 0, 0, _AD_PACKET_TYPE),
        (_JUMP_GREATER_EQUAL, _DROP, 0, _PACKET_OTHERHOST),
        (_LD_WORD, 0, 0, 30),
        *_any_of(addresses),
        (_LDX_HEADER_LENGTH, 0, 0, 14),
        (_LD_HALF_INDEXED, 0, 0, 16),
        *_any_of(ports),
        (_RETURN, 0, 0, _EVERYTHING),
        (_RETURN, 0, 0, 0),
    ]
    last = len(program) - 1
    return [
        (code, last - at - 1 if yes == _DROP else yes, last - at - 1 if no == _DROP else no, operand)
        for at, (code, yes, no, operand) in enumerate(program)
    ]


def _any_of(values: Sequence[int]) -> list[Instruction]:
    """Go on behind these instructions if the accumulator is one of ``values``, else drop."""
    return [
        (_JUMP_EQUAL, len(values) - 1 - i, _DROP if i == len(values) - 1 else 0, value)
        for i, value in enumerate(values)
    ]


def attach(sock: socket.socket, program: Sequence[Instruction]) -> None:
    """Give a socket a filter, replacing the one it has."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    sock.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(buffer))
    )
