"""Messages as packets, made by hand, and a switch program around them."""

from collections.abc import Iterable, Sequence

import numpy as np

from inanet.proto.common.program import Action, Verdicts
from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Connection
from inanet.wire import roce
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from inanet.wire.netreduce import HEADER_BYTES, Header, Operation
from inanet.wire.roce import Opcode, Packet

LENGTH, SIZE = 4, 64
HOSTS = [endpoint(f"10.0.0.{rank + 1}", roce.PORT) for rank in range(6)]


def connections(ranks: int, queue_pair: int = 0x11) -> list[Connection]:
    return [
        Connection(HOSTS[rank] >> 16, HOSTS[(rank + 1) % ranks] >> 16, queue_pair + (rank + 1) % ranks)
        for rank in range(ranks)
    ]


def message(
    connection: Connection,
    header: Header,
    values: np.ndarray,
    psn: int,
    *,
    size: int = SIZE,
) -> list[bytes]:
    """The packets of one WRITE with immediate, ``values`` filling them exactly."""
    body = header.encode() + values.tobytes()
    count = header.length
    assert len(body) == count * size
    made = []
    for k in range(count):
        opcode = (
            Opcode.WRITE_FIRST
            if k == 0
            else Opcode.WRITE_LAST_IMMEDIATE
            if k == count - 1
            else Opcode.WRITE_MIDDLE
        )
        made.append(
            Packet(
                source=connection.source << 16 | 50000,
                destination=connection.destination << 16 | roce.PORT,
                opcode=opcode,
                qp=connection.queue_pair,
                psn=psn + k & 0xFFFFFF,
                payload=body[k * size : (k + 1) * size],
                address=0x1000,
                key=7,
                length=len(body),
                immediate=header.message,
                ack_request=k == count - 1,
                identification=1000 + k,
            ).encode()
        )
    return made


def batch_of(packets: Sequence[bytes]) -> PacketBatch:
    lengths = np.array([len(packet) for packet in packets], np.int64)
    offsets = np.cumsum(lengths) - lengths
    arena = np.frombuffer(bytearray(b"".join(packets)), np.uint8)
    sources = np.array([int.from_bytes(p[12:16], "big") << 16 | 4791 for p in packets], np.uint64)
    return PacketBatch(arena, offsets, lengths, sources)


class Bench:
    """A program, fed packets; ``passed`` and ``dropped`` are of the last batch."""

    def __init__(self, program: NetReduceProgram) -> None:
        self.program = program
        self.passed: list[bytes] = []
        self.dropped: list[Drop] = []

    def give(self, packets: Iterable[bytes]) -> list[bytes]:
        """What leaves beside packets that pass."""
        given = list(packets)
        verdicts, batch = Verdicts(max(1, len(given))), batch_of(given)
        self.program.process(batch, np.zeros(len(given), np.uint8), verdicts, 0.0)
        actions = verdicts.action[: len(given)]
        self.passed = [batch.packet(i) for i in np.flatnonzero(actions == Action.PASS)]
        reasons = verdicts.reason[: len(given)][actions == Action.DROP]
        self.dropped = [Drop(int(reason)) for reason in reasons if reason != Drop.OK]
        return [t.packet(i) for t in self.program.spilled() for i in range(len(t))]


def values_of(ranks: int, seed: int = 0, *, length: int = LENGTH, size: int = SIZE) -> np.ndarray:
    """int32[ranks, values] of one message."""
    rng = np.random.default_rng(seed)
    return rng.integers(-(2**24), 2**24, (ranks, (length * size - HEADER_BYTES) // 4), np.int32)


def header(
    rank: int, number: int, *, ring: int = 3, operation: Operation = Operation.ADD, epoch: int = 0
) -> Header:
    return Header(ring, number, LENGTH, rank, operation, 0, epoch)


def payload(packets: Sequence[bytes]) -> bytes:
    """Payloads of packets, in the order of their sequence numbers."""
    decoded = sorted((roce.decode(packet) for packet in packets), key=lambda p: p.psn)
    return b"".join(packet.payload for packet in decoded)
