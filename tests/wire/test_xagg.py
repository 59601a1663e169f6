"""The XAgg framing: golden bytes, every field where the table says, and nothing that raises anything but its own error."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.wire import xagg
from inanet.wire.drops import Drop
from inanet.wire.integrity import checksum, header_tag
from inanet.wire.serial import is_newer
from inanet.wire.xagg import Flag, Kind, MalformedPacket, Packet, body_bytes, decode

KEY = 0x0123_4567_89AB_CDEF

#: header of every kind, sealed with :data:`KEY`; the payload is that of ``counting``
GOLDEN = {
    Kind.DATA: "a2113412040000004d010000feffffff0700ff032e245881",
    Kind.EXPONENT: "a2123412040000004d010000feffffff0700ff03c8cd24f9",
    Kind.RESULT: "a2133412040000004d010000feffffff0700ff039393ff9d",
    Kind.RESTART: "a2143412040000004d010000feffffff0700ff03f8dc1b56",
    Kind.SENT: "a2153412040000004d010000feffffff0700ff03505a2275",
    Kind.LOST: "a2163412040000004d010000feffffff0700ff03dd7a3f38",
    Kind.DONE: "a2173412040000004d010000feffffff0700ff03edb26f04",
    Kind.READY: "a2183412040000004d010000feffffff0700ff03568590b5",
    Kind.OPEN: "a2193412040000004d010000feffffff0700ff03ce2c276e",
    Kind.CREDIT: "a21a3412040000004d010000feffffff0700ff03a3905618",
    Kind.PROBE: "a21b3412040000004d010000feffffff0700ff0347e266ff",
}
CHECKSUMS = {1024: "802aaa00", 128: "50530000", 8: "03000000"}


def counting(size: int) -> bytes:
    return np.arange(size // 4, dtype="<i4").tobytes()


def packet_of(kind: Kind) -> Packet:
    return Packet(kind, 0x1234, 4, 0x14D, 0xFFFFFFFE, 7, 0xFF, 3, counting(body_bytes(kind)), Flag.GROUP_END)


@pytest.mark.parametrize("kind", Kind)
def test_golden_bytes(kind):
    packet = packet_of(kind)
    encoded = packet.encode(KEY)
    body = counting(body_bytes(kind))
    assert encoded.hex() == GOLDEN[kind] + body.hex() + CHECKSUMS[len(body)]
    assert decode(encoded, KEY) == packet


def test_the_table_in_the_docstring_is_the_dtype():
    rows = re.findall(r"^(\d+) +(\d+) +(\w+) ", xagg.__doc__, re.MULTILINE)
    table = {name: (int(offset), int(size)) for offset, size, name in rows}
    assert xagg.HEADER.names is not None
    fields = {name: xagg.HEADER.fields[name] for name in xagg.HEADER.names}
    assert {name: (offset, dtype.itemsize) for name, (dtype, offset) in fields.items()} == {
        name: place for name, place in table.items() if name in fields
    }
    assert set(table) - set(fields) == {"payload", "checksum"}
    assert table["payload"] == (xagg.HEADER_BYTES, xagg.PAYLOAD_BYTES)
    assert table["checksum"] == (xagg.ROW.fields["checksum"][1], xagg.CHECKSUM_BYTES)
    assert all(dtype.str[0] in "<|" for dtype, _ in fields.values())


packets = st.sampled_from(Kind).flatmap(
    lambda kind: st.builds(
        Packet,
        st.just(kind),
        st.integers(0, 0xFFFF),
        st.integers(0, 0xFFFFFFFF),
        st.integers(0, 0xFFFFFFFF),
        st.integers(0, 0xFFFFFFFF),
        st.integers(0, 0xFFFF),
        st.integers(0, 255),
        st.integers(0, 255),
        st.binary(min_size=8, max_size=64).map(lambda b: (b * body_bytes(kind))[: body_bytes(kind)]),
        st.sampled_from([Flag.NONE, Flag.GROUP_END, Flag.DOWN, Flag.GROUP_END | Flag.DOWN]),
    )
)


@given(packets, st.integers(0, 2**64 - 1))
def test_decoding_undoes_encoding(packet, key):
    assert decode(packet.encode(key), key) == packet


@given(packets, st.integers(0, 63))
def test_another_key_is_a_bad_tag(packet, bit):
    with pytest.raises(MalformedPacket) as caught:
        decode(packet.encode(KEY), KEY ^ 1 << bit)
    assert caught.value.reason == Drop.BAD_TAG.label


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.LOST, Kind.CREDIT])
def test_every_flipped_bit_is_found(kind):
    encoded = packet_of(kind).encode(KEY)
    reasons: dict[str, set[int]] = {}
    for bit in range(len(encoded) * 8):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedPacket) as caught:
            decode(bytes(damaged), KEY)
        reasons.setdefault(caught.value.reason, set()).add(bit // 8)
    assert reasons.pop("bad_magic") == {0}
    assert reasons.pop("bad_checksum") == set(range(24, len(encoded)))
    # bits of the kind make it unknown, or of another length
    assert reasons.pop("bad_tag") >= set(range(2, 24))
    assert reasons.keys() <= {"bad_type", "short", "oversized"}
    assert all(bytes_ == {1} for bytes_ in reasons.values())


@given(st.binary(max_size=1100))
def test_random_bytes_are_malformed(data):
    with pytest.raises(MalformedPacket) as caught:
        decode(data, KEY)
    assert Drop[caught.value.reason.upper()]


@given(packets, st.integers(-1052, 200))
def test_other_lengths_are_short_or_oversized(packet, change):
    encoded = packet.encode(KEY)
    data = encoded[: max(0, len(encoded) + change)] + bytes(max(0, change))
    if change == 0:
        return
    with pytest.raises(MalformedPacket) as caught:
        decode(data, KEY)
    assert caught.value.reason == ("short" if change < 0 else "oversized")


def test_a_body_of_another_size_is_not_encoded():
    with pytest.raises(ValueError, match="DATA carries 1024 B, not 8"):
        Packet(Kind.DATA, 0, 1, 0, 1, 0, 1, 0, bytes(8)).encode(KEY)


def test_the_tag_depends_on_every_bit_it_covers():
    words = (0xA2, 4, 333, 1, 7)
    tags = {header_tag(words, KEY)}
    for word in range(5):
        for bit in range(32):
            changed = list(words)
            changed[word] ^= 1 << bit
            tags.add(header_tag(tuple(changed), KEY))
    assert len(tags) == 1 + 5 * 32
    assert len({header_tag(words, KEY ^ 1 << bit) for bit in range(64)} | {header_tag(words, KEY)}) == 65


@given(st.lists(st.binary(min_size=1024, max_size=1024), min_size=1, max_size=4))
def test_the_checksum_of_a_sum_is_the_sum_of_checksums(payloads):
    total = sum(np.frombuffer(p, "<u4").astype(np.uint64) for p in payloads).astype("<u4")
    assert checksum(total.tobytes(), "<") == sum(checksum(p, "<") for p in payloads) & 0xFFFFFFFF


@pytest.mark.parametrize("bits", [8, 32])
def test_serial_numbers_wrap(bits):
    top = (1 << bits) - 1
    assert is_newer(0, top, bits)
    assert not is_newer(top, 0, bits)
    assert not is_newer(5, 5, bits)
    assert is_newer((1 << bits - 1) - 1, 0, bits)
    assert not is_newer(1 << bits - 1, 0, bits)


def test_reasons_have_one_name_each():
    assert len({drop.label for drop in Drop}) == len(Drop)
    assert [drop.value for drop in Drop] == list(range(len(Drop)))
