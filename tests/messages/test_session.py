"""Frames: everything that is sent is received, and any other bytes end in one kind of error."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.messages.session import FRAME_LIMIT, SessionError, Unpacker, field, pack


@given(st.lists(st.integers(1, 9)), st.text(max_size=40), st.integers(0, 1 << 62))
def test_frames_arrive_however_the_stream_is_cut(cuts: list[int], text: str, number: int) -> None:
    stream = pack("a", text=text) + pack("b", number=number, list=[1, None]) + pack("c")
    unpacker = Unpacker()
    messages = []
    for cut in cuts:
        part, stream = stream[:cut], stream[cut:]
        messages += unpacker.feed(part)
    messages += unpacker.feed(stream)
    assert messages == [{"t": "a", "text": text}, {"t": "b", "number": number, "list": [1, None]}, {"t": "c"}]


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_a_session_error(data: bytes) -> None:
    unpacker = Unpacker()
    try:
        messages = unpacker.feed(len(data).to_bytes(4, "big") + data)
    except SessionError:
        return
    assert all(isinstance(message["t"], str) for message in messages)


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb([1, 2]),
        msgpack.packb({"kind": "hello"}),
        msgpack.packb({"t": 1}),
        msgpack.packb({"t": "x", "list": list(range(5000))}),
        msgpack.packb({"t": "x", "text": "x" * 20000}),
        msgpack.packb({"t": "x", "map": {str(number): 0 for number in range(300)}}),
        msgpack.packb({"t": "x", 3: 4}),
        msgpack.packb({"t": "x", "own": msgpack.ExtType(5, b"xyz")}),
        b"\x91" * 3000,
        msgpack.packb({"t": "x"}) + b"\x00",
        b"",
    ],
)
def test_what_exceeds_a_limit_is_no_message(body: bytes) -> None:
    with pytest.raises(SessionError):
        Unpacker().feed(len(body).to_bytes(4, "big") + body)


def test_oversized_frames_are_refused_before_they_arrive() -> None:
    with pytest.raises(SessionError, match="4294967295 B exceeds"):
        Unpacker().feed(b"\xff\xff\xff\xff")
    with pytest.raises(SessionError, match="use a shorter name"):
        pack("reduce", name="x" * FRAME_LIMIT)


def test_fields_have_exactly_their_type_and_range() -> None:
    message = {"t": "hello", "rank": 3, "flag": True, "text": "x"}
    assert field(message, "rank", int, low=3, high=3) == 3
    for name, kind in [("flag", int), ("rank", float), ("text", bytes), ("missing", int)]:
        with pytest.raises(SessionError, match=rf"hello\.{name} is"):
            field(message, name, kind)
    for low, high in [(4, None), (None, 2)]:
        with pytest.raises(SessionError, match=r"hello\.rank = 3 is not between"):
            field(message, "rank", int, low=low, high=high)
