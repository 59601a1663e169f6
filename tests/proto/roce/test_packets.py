"""One packet in, what comes out: the rules of responder and requester."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.proto.roce import (
    Access,
    AsyncError,
    Attributes,
    Completion,
    Event,
    Failed,
    Received,
    State,
    Status,
)
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import PORT, PSN_HALF, PSN_MASK, Nak, Opcode, Packet
from tests.proto.roce.rig import BASE, Wire, batch_of, packets_of

FIRST, MIDDLE, LAST, ONLY = Opcode.WRITE_FIRST, Opcode.WRITE_MIDDLE, Opcode.WRITE_LAST, Opcode.WRITE_ONLY
ACK, RNR, NAK = 0x1F, 0x20, 0x60
#: first PSN of the requester in all these tests
PSN = 100
MTU = 256
SMALL = Attributes(path_mtu=MTU, retry_cnt=2, rnr_retry=2, timeout=10)


def request(opcode: int, ahead: int = 0, size: int = MTU, **fields: object) -> Packet:
    """A request to host b, ``ahead`` packets from the first."""
    return Packet(
        endpoint("10.0.0.1", 50001),
        endpoint("10.0.0.2", PORT),
        opcode,
        0x12,
        PSN + ahead & PSN_MASK,
        bytes([opcode]) * size,
        **{"address": BASE, "key": 0x100, "length": size, **fields},  # type: ignore[arg-type]
    )


def answer(syndrome: int, ahead: int = 0) -> Packet:
    """An acknowledgement to host a."""
    return Packet(
        endpoint("10.0.0.2", 50002),
        endpoint("10.0.0.1", PORT),
        Opcode.ACKNOWLEDGE,
        0x11,
        PSN + ahead & PSN_MASK,
        syndrome=syndrome,
    )


def serve(wire: Wire, *packets: Packet) -> list[tuple[int, int]]:
    """Give packets to host b as one batch; its answers as syndrome and PSN from the first."""
    wire.b.pair.receive(batch_of(packet.encode() for packet in packets), wire.clock.now)
    answers = packets_of(wire.b.pair.transmit(wire.clock.now))
    return [(packet.syndrome, packet.psn - PSN & PSN_MASK) for packet in answers]


REFUSED = [
    ("middle first", [request(MIDDLE)], Nak.INVALID_REQUEST, 0),
    ("last first", [request(LAST)], Nak.INVALID_REQUEST, 0),
    ("two firsts", [request(FIRST, length=900), request(FIRST, 1, length=900)], Nak.INVALID_REQUEST, 1),
    ("only inside a message", [request(FIRST, length=900), request(ONLY, 1)], Nak.INVALID_REQUEST, 1),
    ("short first", [request(FIRST, size=255, length=900)], Nak.INVALID_REQUEST, 0),
    ("first that is all", [request(FIRST, length=256)], Nak.INVALID_REQUEST, 0),
    ("long only", [request(ONLY, size=257)], Nak.INVALID_REQUEST, 0),
    ("only with another length", [request(ONLY, length=255)], Nak.INVALID_REQUEST, 0),
    ("too much", [request(FIRST, length=300), request(MIDDLE, 1)], Nak.INVALID_REQUEST, 1),
    ("too little", [request(FIRST, length=300), request(LAST, 1, size=43)], Nak.INVALID_REQUEST, 1),
    ("empty last", [request(FIRST, length=257), request(LAST, 1, size=0)], Nak.INVALID_REQUEST, 1),
    ("unknown key", [request(ONLY, key=0x99)], Nak.REMOTE_ACCESS, 0),
    ("before the region", [request(ONLY, address=BASE - 1)], Nak.REMOTE_ACCESS, 0),
    ("past the region", [request(ONLY, address=BASE + 4096 - 255)], Nak.REMOTE_ACCESS, 0),
    ("message longer than the region", [request(FIRST, length=4097)], Nak.REMOTE_ACCESS, 0),
    ("address at the top of the space", [request(ONLY, address=2**64 - 1)], Nak.REMOTE_ACCESS, 0),
    ("not writable", [request(ONLY, key=0x101, size=1)], Nak.REMOTE_ACCESS, 0),
]


@pytest.mark.parametrize(
    ("packets", "code", "at"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_requests_against_the_rules_end_the_connection(packets: list[Packet], code: Nak, at: int) -> None:
    wire = Wire(SMALL, memory=4096)
    wire.b.pair.domain.register(np.zeros(9, np.uint8), base=BASE, access=Access.NONE)
    wire.b.pair.post_receive(5)
    assert serve(wire, *packets) == [(NAK | code, at)]
    assert wire.b.pair.state is State.ERR
    reason = AsyncError.QP_ACCESS_ERR if code is Nak.REMOTE_ACCESS else AsyncError.QP_REQ_ERR
    assert wire.b.pair.events() == [Failed(reason), Completion(5, Status.WR_FLUSH_ERR)]
    assert wire.b.pair.drops[Drop.REFUSED] == 1
    written = MTU if at else 0
    assert wire.b.memory[:written].all()
    assert not wire.b.memory[written:].any()
    assert serve(wire, request(ONLY, at)) == []


@pytest.mark.parametrize(
    ("packet", "written"),
    [
        (request(ONLY, address=BASE + 4096 - 256), 256),
        (request(ONLY, size=0, key=0, address=0, length=0), 0),
        (request(ONLY, size=1, address=BASE + 4095), 1),
    ],
)
def test_requests_at_the_edge_of_a_region_are_served(packet: Packet, written: int) -> None:
    wire = Wire(SMALL, memory=4096)
    assert serve(wire, replace(packet, ack_request=True)) == [(ACK, 0)]
    assert np.count_nonzero(wire.b.memory) == written


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("a gap is asked for once", [([1, 2], [(NAK, 0)]), ([3], []), ([0, 1, 2, 3], [(ACK, 3)])]),
        ("a gap in the middle", [([0, 2, 3], [(NAK, 1)]), ([1], [(ACK, 1)])]),
        ("a gap that closes in the same batch", [([1, 0, 1], [(ACK, 1)]), ([2], [(ACK, 2)])]),
        ("a gap that moves in the same batch", [([1, 0], [(NAK, 1)]), ([2], []), ([1, 2], [(ACK, 2)])]),
        ("the last of several is still missing", [([3, 2, 0, 1, 2], [(NAK, 3)]), ([3], [(ACK, 3)])]),
        ("a second gap is asked for as well", [([1], [(NAK, 0)]), ([0, 2], [(NAK, 1)])]),
        ("the same again", [([0, 1], [(ACK, 1)]), ([0], [(ACK, 1)]), ([1, 0], [(ACK, 1)])]),
        ("the same and a new one", [([0], [(ACK, 0)]), ([0, 1], [(ACK, 1)])]),
        ("half the space behind", [([0], [(ACK, 0)]), ([1 - PSN_HALF], [(ACK, 0)])]),
        ("half the space ahead", [([0], [(ACK, 0)]), ([PSN_HALF], [(NAK, 1)])]),
    ],
)
def test_sequence(name: str, batches: list[tuple[list[int], list[tuple[int, int]]]]) -> None:
    wire = Wire(SMALL, memory=4096)
    for numbers, expected in batches:
        assert serve(wire, *(request(ONLY, n, 1, ack_request=True) for n in numbers)) == expected, name


def test_a_gap_that_has_closed_is_acknowledged_unasked() -> None:
    wire = Wire(SMALL, memory=4096)
    assert serve(wire, *(request(ONLY, n, 1) for n in (1, 0, 1))) == [(ACK, 1)]
    assert serve(wire, request(ONLY, 2, 1)) == []


def test_acknowledgements_are_sent_where_they_are_asked_for() -> None:
    wire = Wire(SMALL, memory=4096)
    assert serve(wire, request(FIRST, 0, length=600), request(MIDDLE, 1)) == []
    assert serve(wire, request(LAST, 2, 88, ack_request=True)) == [(ACK, 2)]
    assert wire.b.pair.stats()["acks_sent"] == 1


def test_acknowledgements_count_messages() -> None:
    wire = Wire(SMALL, memory=4096)
    counted = []
    for packet in (request(FIRST, 0, length=344), request(LAST, 1, 88), request(ONLY, 2), request(ONLY, 2)):
        asking = replace(packet, ack_request=True)
        wire.b.pair.receive(batch_of([asking.encode()]), 0.0)
        counted += [answer.msn for answer in packets_of(wire.b.pair.transmit(0.0))]
    assert counted == [0, 1, 2, 2]


def test_an_overtaken_repetition_does_not_write_again() -> None:
    wire = Wire(SMALL, memory=4096)
    serve(wire, request(ONLY, 0))
    wire.b.memory[:] = 7
    serve(wire, request(ONLY, 0))
    assert (wire.b.memory == 7).all()
    assert wire.b.pair.drops[Drop.DUPLICATE] == 1


def test_immediate_data_waits_for_a_receive() -> None:
    wire = Wire(SMALL, memory=4096)
    with_immediate = request(Opcode.WRITE_ONLY_IMMEDIATE, 0, immediate=77)
    following = request(ONLY, 1)
    assert serve(wire, with_immediate, following) == [(RNR | 12, 0)]
    assert not wire.b.memory.any()
    assert serve(wire, with_immediate) == [(RNR | 12, 0)]
    wire.b.pair.post_receive(6)
    assert serve(wire, replace(with_immediate, ack_request=True), following) == [(ACK, 1)]
    assert wire.b.pair.events() == [Received(77, 0, 256, 0x100, 6)]
    assert wire.b.pair.drops[Drop.NOT_READY] == 2
    assert wire.b.pair.drops[Drop.PSN_GAP] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"qp": 0x13}, Drop.UNKNOWN_QP),
        ({"source": endpoint("10.0.0.9", 50001)}, Drop.UNKNOWN_QP),
        ({"destination": endpoint("10.0.0.3", PORT)}, Drop.UNKNOWN_QP),
        ({"partition": 0x1234}, Drop.UNKNOWN_QP),
    ],
)
def test_packets_for_others_are_dropped(change: dict[str, int], reason: Drop) -> None:
    wire = Wire(SMALL, memory=4096)
    assert serve(wire, replace(request(ONLY, ack_request=True), **change)) == []  # type: ignore[arg-type]
    assert wire.b.pair.drops[reason] == 1
    assert not wire.b.memory.any()


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, 0x46, Drop.BAD_MAGIC),
        (6, 0x20, Drop.BAD_MAGIC),
        (9, 6, Drop.BAD_MAGIC),
        (23, 0, Drop.BAD_MAGIC),
        (3, 0, Drop.SHORT),
        (25, 0, Drop.SHORT),
        (28, 0x0C, Drop.BAD_TYPE),
        (29, 0x41, Drop.BAD_TYPE),
        (4, 0xFF, Drop.BAD_ICRC),
        (60, 0, Drop.BAD_ICRC),
    ],
)
def test_damaged_packets_are_dropped_for_a_reason(at: int, value: int, reason: Drop) -> None:
    wire = Wire(SMALL, memory=4096)
    data = bytearray(request(ONLY).encode())
    data[at] = value
    wire.b.pair.receive(batch_of([bytes(data), bytes(data[:43])]), 0.0)
    assert wire.b.pair.drops[reason] == 1 + (reason is Drop.SHORT)
    assert wire.b.pair.drops[Drop.SHORT] >= 1
    assert not wire.b.memory.any()


# ------------------------------------------------------------------------------------------------ requester


def posted(count: int = 4, attributes: Attributes = SMALL) -> Wire:
    """Host a has sent ``count`` messages of a packet each, all under way."""
    wire = Wire(attributes, memory=4096)
    for k in range(count):
        wire.a.pair.post_write(np.full(8, k, np.uint8), 8 * k, wr_id=k)
    assert len(packets_of(wire.a.pair.transmit(wire.clock.now))) == count
    return wire


def take(wire: Wire, *packets: Packet) -> tuple[list[Event], list[int]]:
    """Give answers to host a; what happened, and the packets it sends then, counted from the first."""
    wire.a.pair.receive(batch_of(packet.encode() for packet in packets), wire.clock.now)
    sent = packets_of(wire.a.pair.transmit(wire.clock.now))
    return wire.a.pair.events(), [packet.psn - PSN & PSN_MASK for packet in sent]


def done(*wr_ids: int) -> list[Completion]:
    return [Completion(wr_id, Status.SUCCESS) for wr_id in wr_ids]


def flushed(*wr_ids: int) -> list[Completion]:
    return [Completion(wr_id, Status.WR_FLUSH_ERR) for wr_id in wr_ids]


@pytest.mark.parametrize(
    ("name", "packets", "events", "sent"),
    [
        ("one", [answer(ACK, 0)], done(0), []),
        ("coalesced", [answer(ACK, 3)], done(0, 1, 2, 3), []),
        ("twice", [answer(ACK, 1), answer(ACK, 1)], done(0, 1), []),
        ("overtaken", [answer(ACK, 2), answer(ACK, 0)], done(0, 1, 2), []),
        ("never sent", [answer(ACK, 4)], [], []),
        ("before the first", [answer(ACK, -1)], [], []),
        ("reserved kind", [answer(0x40, 2)], [], []),
        ("go back to the first", [answer(NAK, 0)], [], [0, 1, 2, 3]),
        ("go back to the third", [answer(NAK, 2)], done(0, 1), [2, 3]),
        ("go back, then all is there", [answer(NAK, 2), answer(ACK, 3)], done(0, 1, 2, 3), []),
        (
            "refused",
            [answer(NAK | 1, 1)],
            [*done(0), Completion(1, Status.REM_INV_REQ_ERR), *flushed(2, 3)],
            [],
        ),
        ("no access", [answer(NAK | 2, 0)], [Completion(0, Status.REM_ACCESS_ERR), *flushed(1, 2, 3)], []),
        ("failed there", [answer(NAK | 3, 0)], [Completion(0, Status.REM_OP_ERR), *flushed(1, 2, 3)], []),
        (
            "unknown code",
            [answer(NAK | 9, 0)],
            [Completion(0, Status.REM_INV_REQ_ERR), *flushed(1, 2, 3)],
            [],
        ),
        ("not ready", [answer(RNR | 12, 1)], done(0), []),
    ],
)
def test_acknowledgements(name: str, packets: list[Packet], events: list[Event], sent: list[int]) -> None:
    wire = posted()
    assert take(wire, *packets) == (events, sent), name
    ended = any(event.status is Status.WR_FLUSH_ERR for event in events if isinstance(event, Completion))
    assert (wire.a.pair.state is State.ERR) == ended
    if len(events) == 4:
        assert wire.a.pair.timer() is None


def test_silence_is_asked_after_and_then_given_up() -> None:
    wire = posted()
    for attempt in range(3):
        at = wire.a.pair.timer()
        assert at == pytest.approx(wire.clock.now + 4.096e-6 * 1024)
        wire.a.pair.on_timer(wire.clock.now + 0.004)
        assert wire.a.pair.stats()["timeouts"] == attempt
        wire.clock.now = at
        wire.a.pair.on_timer(at)
        again = packets_of(wire.a.pair.transmit(at))
        assert len(again) == (4 if attempt < 2 else 0)
    assert wire.a.pair.events() == [Completion(0, Status.RETRY_EXC_ERR), *flushed(1, 2, 3)]
    assert wire.a.pair.state is State.ERR
    assert wire.a.pair.timer() is None
    assert wire.a.pair.stats()["retransmissions"] == 8


def test_progress_gives_new_retries() -> None:
    wire = posted()
    for number in range(4):
        for _ in range(2):
            wire.clock.now = wire.a.pair.timer() or 0.0
            wire.a.pair.on_timer(wire.clock.now)
            wire.a.pair.transmit(wire.clock.now)
        assert take(wire, answer(ACK, number))[0] == done(number)
    assert wire.a.pair.timer() is None


def test_naks_without_progress_are_counted_too() -> None:
    wire = posted()
    assert take(wire, answer(NAK, 1)) == (done(0), [1, 2, 3])
    assert take(wire, answer(NAK, 1)) == ([], [1, 2, 3])
    assert take(wire, answer(NAK, 1)) == ([Completion(1, Status.RETRY_EXC_ERR), *flushed(2, 3)], [])


def test_without_a_timeout_it_waits_for_ever() -> None:
    assert posted(attributes=replace(SMALL, timeout=0)).a.pair.timer() is None


@pytest.mark.parametrize("limit", [0, 2, 7])
def test_a_peer_that_is_not_ready_is_asked_again_in_its_own_time(limit: int) -> None:
    wire = posted(attributes=replace(SMALL, rnr_retry=limit))
    for _ in range(limit if limit < 7 else 20):
        assert take(wire, answer(RNR | 12, 0)) == ([], [])
        assert wire.a.pair.timer() == pytest.approx(wire.clock.now + 0.64e-3)
        assert wire.a.pair.transmit(wire.clock.now + 0.6e-3) == []
        wire.clock.now = wire.a.pair.timer() or 0.0
        wire.a.pair.on_timer(wire.clock.now)
        assert len(packets_of(wire.a.pair.transmit(wire.clock.now))) == 4
    events, sent = take(wire, answer(RNR | 12, 0))
    assert sent == []
    assert events == ([Completion(0, Status.RNR_RETRY_EXC_ERR), *flushed(1, 2, 3)] if limit < 7 else [])


def test_patience_that_was_asked_for_is_not_cut_short_by_a_late_nak() -> None:
    wire = posted(attributes=replace(SMALL, timeout=1))
    # 0.49 s, against an acknowledgement timeout of 8 us
    take(wire, answer(RNR | 31, 0))
    assert take(wire, answer(NAK, 0)) == ([], [])
    assert wire.a.pair.timer() == pytest.approx(wire.clock.now + 0.49152)


def test_a_receive_posted_late_lets_the_message_through() -> None:
    wire = Wire(SMALL)
    wire.a.pair.post_write(np.full(1000, 9, np.uint8), 0, 5)
    wire.run(until=lambda: wire.a.pair.stats()["rnr_naks_received"] == 2)
    wire.b.pair.post_receive()
    wire.run()
    assert wire.a.statuses() == [(0, Status.SUCCESS)]
    assert (wire.b.memory[:1000] == 9).all()
