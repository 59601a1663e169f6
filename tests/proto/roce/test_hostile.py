"""Well-formed packets from a peer that keeps no rule: nothing outside the region is written, nothing false is reported."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.proto.roce import (
    Attributes,
    Completion,
    Failed,
    Peer,
    ProtectionDomain,
    QueuePair,
    Received,
    State,
    Status,
)
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import PORT, PSN_MASK, Opcode, Packet
from tests.proto.roce.rig import BASE, batch_of, packets_of

HERE, THERE = endpoint("10.0.0.2", 50002), endpoint("10.0.0.1", 50001)
REGION, GUARD, MTU = 1000, 4096, 256
PSN = PSN_MASK - 2

opcodes = st.sampled_from([code for code in Opcode if code < Opcode.ACKNOWLEDGE])
requests = st.fixed_dictionaries(
    {
        "opcode": opcodes,
        "psn": st.one_of(st.integers(0, 6), st.integers(0, PSN_MASK)).map(
            lambda ahead: PSN + ahead & PSN_MASK
        ),
        "payload": st.sampled_from([0, 1, 88, 255, 256, 257]).map(bytes),
        "address": st.one_of(
            st.integers(BASE - 2, BASE + REGION + 2),
            st.sampled_from([0, 1 << 63, (1 << 64) - 1, BASE + (1 << 32)]),
        ),
        "key": st.sampled_from([0x100, 0x100, 0x100, 0x101, 0, 0xFFFFFFFF]),
        "length": st.sampled_from([0, 1, 88, 256, 257, 344, 600, 1000, 1001, 1 << 31, (1 << 32) - 1]),
        "ack_request": st.booleans(),
    }
)


@settings(max_examples=60)
@given(batches=st.lists(st.lists(requests, max_size=6), max_size=6), receives=st.integers(0, 3))
def test_requests(batches: list[list[dict]], receives: int) -> None:  # type: ignore[type-arg]
    around = np.zeros(2 * GUARD + REGION, np.uint8)
    domain = ProtectionDomain()
    domain.register(around[GUARD : GUARD + REGION], base=BASE)
    pair = QueuePair(
        Peer(HERE, 5, key=0x100, base=BASE),
        Peer(THERE, 6, psn=PSN),
        domain=domain,
        attributes=Attributes(path_mtu=MTU),
    )
    pair.connect()
    pair.post_receive(1, receives)
    count = 0
    events = []
    for batch in batches:
        count += len(batch)
        packets = [
            Packet(
                THERE,
                endpoint("10.0.0.2", PORT),
                qp=5,
                **{**fields, "payload": b"\xff" * len(fields["payload"])},
            )
            for fields in batch
        ]
        pair.receive(batch_of(packet.encode() for packet in packets), 1.0)
        answers = packets_of(pair.transmit(1.0))
        assert len(answers) <= 1
        events += pair.events()
    assert not around[:GUARD].any()
    assert not around[GUARD + REGION :].any()
    # every packet was served or dropped for one reason
    assert int(pair.drops.sum()) == count
    assert len(events) - receives <= 1
    assert (pair.state is State.ERR) == any(isinstance(event, Failed) for event in events)
    assert pair.drops[Drop.REFUSED] == (pair.state is State.ERR)
    for event in events:
        if isinstance(event, Received):
            assert 0 <= event.offset <= event.offset + event.length <= REGION


answers = st.tuples(
    st.one_of(st.integers(-3, 12), st.integers(0, PSN_MASK)),
    st.one_of(st.sampled_from([0x1F, 0x00, 0x60, 0x2C]), st.integers(0, 255)),
)


@settings(max_examples=60)
@given(batches=st.lists(st.lists(answers, max_size=4), max_size=6), messages=st.integers(1, 4))
def test_acknowledgements(batches: list[list[tuple[int, int]]], messages: int) -> None:
    pair = QueuePair(
        Peer(HERE, 5, psn=PSN), Peer(THERE, 6), attributes=Attributes(path_mtu=MTU, window=3, retry_cnt=1)
    )
    pair.connect()
    for k in range(messages):
        pair.post_write(np.zeros(600, np.uint8), 0, wr_id=k)
    sent, completed = set(), []
    now = 1.0
    for batch in batches:
        out = packets_of(pair.transmit(now))
        sent |= {packet.psn - PSN & PSN_MASK for packet in out}
        assert pair.unacknowledged <= 3
        pair.receive(
            batch_of(
                Packet(
                    THERE,
                    endpoint("10.0.0.2", PORT),
                    Opcode.ACKNOWLEDGE,
                    5,
                    PSN + ahead & PSN_MASK,
                    syndrome=syndrome,
                ).encode()
                for ahead, syndrome in batch
            ),
            now,
        )
        completed += pair.events()
        now += 0.01
        pair.on_timer(now)
        completed += pair.events()
    assert sent == set(range(len(sent)))
    assert all(isinstance(event, Completion) for event in completed)
    assert [event.wr_id for event in completed] == list(range(len(completed)))
    good = [event for event in completed if event.status is Status.SUCCESS]
    assert completed[: len(good)] == good
    assert 3 * len(good) <= len(sent)
    if len(completed) > len(good):
        assert pair.state is State.ERR
        assert len(completed) == messages
        assert completed[len(good)].status is not Status.WR_FLUSH_ERR
        assert pair.timer() is None
