"""Golden frames of SwitchML, ATP, A2TP and ESA, decoded by field tables written out here and nowhere else."""

import struct

import pytest

from inanet.wire import a2tp, atp, esa, switchml
from inanet.wire.xagg import MalformedPacket

#: ATP family: (name, bits, byte order) in wire order; 31 values a pass, two halves
_ATP_TABLE = [
    ("bitmap", "I", ">"),
    ("num_worker", "B", ">"),
    ("flags", "B", ">"),
    ("appID", "H", ">"),
    ("seq_num", "H", ">"),
    ("mark", "B", ">"),
    ("agtr", "H", ">"),
    ("agtr2", "H", ">"),
    ("vector", "62i", ">"),
    ("key", "Q", "<"),
    ("len_tensor", "I", ">"),
]


def by_table(data: bytes, table: list[tuple[str, str, str]]) -> dict[str, object]:
    """Fields of a packet, read one after the other."""
    out: dict[str, object] = {}
    at = 0
    for name, code, order in table:
        form = order + code
        values = struct.unpack_from(form, data, at)
        out[name] = values[0] if len(values) == 1 else values
        at += struct.calcsize(form)
    assert at == len(data)
    return out


VALUES = tuple(range(-31, 31))
PACKET = atp.Packet(
    bitmap=0x80000001,
    fan_in=4,
    app=0x0307,
    seq=0xFFFE,
    agtr=449,
    values=VALUES,
    flags=atp.Flag.ECN | atp.Flag.RESEND,
    key=0x1122334455667788,
    length=1024000,
)
HEX_HEAD = "80000001040c0307fffe"
HEX_SLOTS = "01c14fe1"
HEX_TAIL = "8877665544332211000fa000"


@pytest.mark.parametrize(
    ("frame", "size", "mark"),
    [(atp.FRAME, 274, ""), (a2tp.FRAME, 275, "03"), (esa.FRAME, 275, "c8")],
    ids=["atp", "a2tp", "esa"],
)
def test_atp_family_is_bit_for_bit(frame, size, mark):
    value = int(mark, 16) if mark else 0
    packet = atp.Packet(**{f: getattr(PACKET, f) for f in PACKET.__slots__} | {"mark": value})
    data = packet.encode(frame)
    body = b"".join(struct.pack(">i", x) for x in VALUES)
    assert data == bytes.fromhex(HEX_HEAD + mark + HEX_SLOTS) + body + bytes.fromhex(HEX_TAIL)
    assert len(data) == size
    table = _ATP_TABLE if mark else [row for row in _ATP_TABLE if row[0] != "mark"]
    fields = by_table(data, table)
    assert fields["bitmap"] == 0x80000001
    assert fields["num_worker"] == 4
    assert fields["flags"] == 0x08 | 0x04
    assert (fields["appID"], fields["seq_num"]) == (0x0307, 0xFFFE)
    assert (fields["agtr"], fields["agtr2"]) == (449, 20449)
    assert fields["vector"] == VALUES
    assert (fields["key"], fields["len_tensor"]) == (0x1122334455667788, 1024000)
    if mark:
        assert fields["mark"] == value
    assert atp.decode(data, frame) == packet


def test_a2tp_makes_frames_of_309_bytes():
    assert a2tp.LINK_FRAME_BYTES == 309
    assert atp.LINK_BYTES + atp.FRAME_BYTES == 308
    assert (a2tp.HEADER_BYTES + atp.TRAILER_BYTES, 4 * atp.VALUES) == (27, 248)


@pytest.mark.parametrize(("values", "code", "size"), [(64, 1, 266), (256, 3, 1034)])
def test_switchml_is_bit_for_bit(values, code, size):
    numbers = tuple((-1) ** i * i * 8388607 for i in range(values))
    packet = switchml.Packet(0x1A7, 0x01020304, 0x2ABC, 1, numbers, (-3, 17))
    data = packet.encode()
    assert data[:10].hex() == f"1{code}a704030201aabcfd11"
    assert len(data) == size
    table = [
        ("type_size", "B", ">"),
        ("job_number", "B", ">"),
        ("tsi", "I", "<"),
        ("pool_index", "H", ">"),
        ("e0", "b", ">"),
        ("e1", "b", ">"),
        ("values", f"{values}i", ">"),
    ]
    fields = by_table(data, table)
    assert fields["pool_index"] == 0x8000 | 0x2ABC
    assert (fields["e0"], fields["e1"], fields["tsi"]) == (-3, 17, 0x01020304)
    assert fields["values"] == numbers
    decoded = switchml.decode(data)
    assert (decoded.job, decoded.slot, decoded.version) == (0xA7, 0x2ABC, 1)
    assert decoded.values == numbers
    assert list(switchml.SWITCH_PORTS) == [port for port in range(65536) if port & 0xFFF0 == 0xBEE0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "short"),
        (bytes(266), "bad_type"),
        (b"\x13" + bytes(265), "short"),
        (b"\x11" + bytes(266), "oversized"),
        (b"\x12" + bytes(300), "bad_type"),
    ],
)
def test_malformed_switchml_is_refused(data, reason):
    with pytest.raises(MalformedPacket) as error:
        switchml.decode(data)
    assert error.value.reason == reason


@pytest.mark.parametrize(("size", "reason"), [(0, "short"), (273, "short"), (275, "oversized")])
def test_malformed_atp_is_refused(size, reason):
    with pytest.raises(MalformedPacket) as error:
        atp.decode(bytes(size))
    assert error.value.reason == reason


def test_values_that_switchml_does_not_have_are_refused():
    with pytest.raises(ValueError, match="64, 256"):
        switchml.Packet(0, 0, 0, 0, (1,) * 62).encode()
