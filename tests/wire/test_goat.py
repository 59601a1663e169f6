"""GOAT's framing: bytes by the table, a decoder that refuses everything else, and kernels that agree with it."""

import numpy as np
import pytest

from inanet.proto.slots.goat.frames import FrameChecks, seal
from inanet.wire import goat
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.goat import FRAME_BYTES, Kind, Packet, decode
from inanet.wire.integrity import checksum
from inanet.wire.xagg import MalformedPacket

KEY = 0xFEED_F00D_1234_5678
PACKET = Packet(Kind.DATA, 7, 3, 258, 70_000, 0x89AB_CDEF, 1 << 5, tuple(range(-32, 32)), asker=0)


def test_bytes_are_those_of_the_table():
    data = PACKET.encode(KEY)
    assert len(data) == FRAME_BYTES == 284
    assert data[:20].hex() == "610107000003010200011170" + "89abcdef" + "00000020"
    assert data[24:28].hex() == "ffffffe0"
    total = sum((2 * j + 1) * (j - 32) for j in range(64)) & 0xFFFFFFFF
    assert int.from_bytes(data[280:], "big") == total
    assert decode(data, KEY) == PACKET


def test_checksums_add_up():
    a = np.array(PACKET.values, ">i4")
    b = (a * a).astype(">i4")
    both = checksum((a + b).astype(">i4").tobytes(), ">")
    assert both == (checksum(a.tobytes(), ">") + checksum(b.tobytes(), ">")) & 0xFFFFFFFF


@pytest.mark.parametrize("bit", range(0, 8 * FRAME_BYTES, 37))
def test_any_flipped_bit_is_found(bit):
    data = bytearray(PACKET.encode(KEY))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedPacket) as found:
        decode(bytes(data), KEY)
    assert _reason(bytes(data)).label == found.value.reason or _reason(bytes(data)) is Drop.FOREIGN_JOB


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (PACKET.encode(KEY)[:-1], Drop.SHORT),
        (b"", Drop.SHORT),
        (PACKET.encode(KEY) + b"\0", Drop.OVERSIZED),
        (b"\x60" + PACKET.encode(KEY)[1:], Drop.BAD_MAGIC),
        (b"\x61\x04" + PACKET.encode(KEY)[2:], Drop.BAD_TYPE),
        (PACKET.encode(KEY + 1), Drop.BAD_TAG),
    ],
)
def test_malformed_packets_have_their_reason_in_the_kernel_and_in_the_decoder(data, reason):
    assert _reason(data) is reason
    with pytest.raises(MalformedPacket) as found:
        decode(data, KEY)
    assert found.value.reason == reason.label


def test_the_kernel_writes_what_the_decoder_wants():
    frames = np.zeros(5, goat.FRAME)
    frames["magic"], frames["kind"], frames["job"] = goat.MAGIC_VERSION, Kind.SUM, 7
    frames["number"] = [0, 1, 2**31, 2**32 - 1, 99]
    frames["values"] = np.random.default_rng(1).integers(-(2**31), 2**31, (5, 64))
    raw = frames.view(np.uint8).reshape(5, FRAME_BYTES)
    seal(raw, np.uint64(KEY))
    for row, frame in zip(raw, frames, strict=True):
        assert decode(row.tobytes(), KEY).values == tuple(frame["values"].tolist())


def _reason(data: bytes) -> Drop:
    checks = FrameChecks()
    checks.add(7, KEY)
    arena = np.frombuffer(bytearray(data), np.uint8)
    batch = PacketBatch(arena, np.zeros(1, np.int64), np.array([len(data)]), np.zeros(1, np.uint64))
    return Drop(int(checks.reasons(batch, np.arange(1))[0]))
