"""Golden packets of Zebra's framing, decoded by a table written out here, and by the kernels."""

import struct

import numpy as np
import pytest

from inanet.proto.zebra.packets import Column, EncodedPackets, Header, ParsedBatch
from inanet.wire import zebra
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.xagg import MalformedPacket
from inanet.wire.zebra import Flag, Kind, Packet, Refusal

KEY = 0x0123456789ABCDEF
HOT = Packet(Kind.HOT, 7, 3, 2, 9, 5, 1, 0, (0, 17), (1, 0xFFFFFFFF))
GOLDEN = [
    (HOT, "5101000700030002000000090000000500020100", "000000000000000100000011ffffffff"),
    (
        Packet(Kind.COLD, 7, 3, 2, 9, 0, 2, 0, (1 << 63,), (0x3F800000, 0xBF800000)),
        "5102000700030002000000090000000000010200",
        "8000000000000000 3f800000 bf800000",
    ),
    (
        Packet(Kind.NEWS, 7, 1, 2, 9, 4, 2, Flag.END, next_version=3),
        "5104000700010002000000090000000400000201",
        "00000003",
    ),
    (
        Packet(Kind.PULL, 7, 3, 2, 9, 1, 2, 0, (5, 6)),
        "5105000700030002000000090000000100020200",
        "0000000000000005 0000000000000006",
    ),
    (
        Packet(Kind.VALUES, 7, 3, 2, 9, 1, 1, 0, (), (0x40000000,)),
        "5106000700030002000000090000000100010100",
        "40000000",
    ),
    (Packet(Kind.ACK, 7, 3, 2, 9, 1, 0, Kind.HOT << 4), "5107000700030002000000090000000100000010", ""),
    # to attempt 3, by a switch in its life 517
    (
        Packet(Kind.ACK, 7, 3, 2, 9, 1, 0, Kind.HOT << 4 | 3, life=517),
        "5107000700030002000000090000000102050013",
        "",
    ),
    # a process of rank 3 with the number 0xdeadbeef
    (Packet(Kind.JOIN, 7, 3, 0, 0xDEADBEEF, 0, 2, Flag.END), "5108000700030000deadbeef0000000000000201", ""),
    # shard 1 waits for rank 4 and two more in iteration 9
    (Packet(Kind.WAITING, 7, 1, 2, 9, 4, 2), "510a000700010002000000090000000400000200", ""),
    # shard 1 has iteration 9 and no part in 12
    (Packet(Kind.REFUSAL, 7, 1, Refusal.LOST, 9, 12, 2), "5109000700010001000000090000000c00000200", ""),
]


def batch_of(*packets: bytes) -> PacketBatch:
    arena = np.frombuffer(b"".join(packets), np.uint8).copy()
    lengths = np.array([len(packet) for packet in packets], np.int64)
    return PacketBatch(arena, np.cumsum(lengths) - lengths, lengths, np.ones(len(packets), np.uint64))


@pytest.mark.parametrize(
    ("packet", "head", "body"), GOLDEN, ids=lambda x: x.kind.name if isinstance(x, Packet) else ""
)
def test_golden_packets(packet: Packet, head: str, body: str) -> None:
    data = packet.encode(KEY)
    assert data[:20].hex() == head
    assert data[24:-4].hex() == body.replace(" ", "")
    words = struct.unpack(f">{len(data[24:-4]) // 4}I", data[24:-4])
    assert struct.unpack(">I", data[-4:])[0] == sum((2 * j + 1) * w for j, w in enumerate(words)) % (1 << 32)
    assert zebra.decode(data, KEY) == packet
    parsed = ParsedBatch(batch_of(data), 7, KEY)
    assert parsed.reason.tolist() == [0]
    assert parsed[Column.SEQUENCE].tolist() == [packet.sequence]
    assert parsed[Column.SENDER].tolist() == [packet.sender]
    assert parsed[Column.VERSION].tolist() == [packet.version]
    if packet.kind == Kind.ACK:
        assert parsed[Column.PAIRS].tolist() == [packet.life]
        return
    names, values = parsed.entries(np.array([0]))
    assert tuple(names.tolist()) == packet.names or packet.kind == Kind.VALUES
    assert tuple(values.ravel().tolist()) == packet.words


def test_the_tag_is_what_it_was() -> None:
    """A change of the mix would cut running jobs in two."""
    assert HOT.encode(KEY)[20:24].hex() == "b1a3b51d"


def test_any_flipped_bit_is_found_by_decoder_and_kernel() -> None:
    data = HOT.encode(KEY)
    damaged = []
    for bit in range(8 * len(data)):
        copy = bytearray(data)
        copy[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(copy))
    reasons = ParsedBatch(batch_of(*damaged), 7, KEY).reason
    assert reasons.all()
    for copy, reason in zip(damaged, reasons.tolist(), strict=True):
        with pytest.raises(MalformedPacket) as caught:
            zebra.decode(copy, KEY)
        # a foreign job is the receiver's to see, before the tag; the decoder looks at the length first
        found = {caught.value.reason, "foreign_job" if copy[2:4] != data[2:4] else "bad_tag"}
        assert Drop(reason).label in found


def test_short_long_and_foreign_packets_have_reasons() -> None:
    data = HOT.encode(KEY)
    parsed = ParsedBatch(batch_of(b"", data[:27], data[:-4], data + b"....", b"\0" + data[1:], data), 7, KEY)
    assert [Drop(x).label for x in parsed.reason.tolist()] == [
        "short",
        "short",
        "short",
        "oversized",
        "bad_magic",
        "ok",
    ]
    assert ParsedBatch(batch_of(data), 8, KEY).reason.tolist() == [Drop.FOREIGN_JOB]
    assert ParsedBatch(batch_of(data), 7, KEY + 1).reason.tolist() == [Drop.BAD_TAG]


def test_a_sheaf_is_the_packets_one_by_one() -> None:
    head = Header(7, KEY, 3, 2, 9, 1)
    names = np.array([4, 5, 6], np.uint64)
    words = np.array([[1], [2], [3]], np.uint32)
    packets = EncodedPackets(Kind.HOT, head, np.array([2, 1]), names, words)
    packets = [
        packets.arena[at : at + length].tobytes()
        for at, length in zip(packets.offsets.tolist(), packets.lengths.tolist(), strict=True)
    ]
    assert packets == [
        Packet(Kind.HOT, 7, 3, 2, 9, 0, 1, 0, (4, 5), (1, 2)).encode(KEY),
        Packet(Kind.HOT, 7, 3, 2, 9, 1, 1, 0, (6,), (3,)).encode(KEY),
        Packet(Kind.HOT, 7, 3, 2, 9, 2, 1, Flag.END).encode(KEY),
    ]
