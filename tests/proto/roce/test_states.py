"""The states of a queue pair: which there are ways between, and what each lets it do."""

import numpy as np
import pytest

from inanet.proto.roce import (
    Access,
    Attributes,
    Completion,
    Drained,
    MemoryRegion,
    Peer,
    ProtectionDomain,
    QueuePair,
    State,
    Status,
)
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from tests.proto.roce.rig import Wire, batch_of, in_state

#: what ibv_modify_qp allows a reliable connection
WAYS = {
    State.RESET: {State.RESET, State.INIT},
    State.INIT: {State.RESET, State.INIT, State.RTR, State.ERR},
    State.RTR: {State.RESET, State.RTS, State.ERR},
    State.RTS: {State.RESET, State.RTS, State.SQD, State.ERR},
    State.SQD: {State.RESET, State.RTS, State.SQD, State.ERR},
    State.ERR: {State.RESET, State.ERR},
}
BYTE = np.ones(1, np.uint8)


@pytest.mark.parametrize("to", list(State))
@pytest.mark.parametrize("from_", list(State))
def test_ways_between_states(from_: State, to: State) -> None:
    pair = in_state(Wire(connect=False).a.pair, from_)
    if to in WAYS[from_]:
        pair.modify(to)
        assert pair.state is to
    else:
        with pytest.raises(ValueError, match=f"no way from {from_.name} to {to.name}; it can go to "):
            pair.modify(to)
        assert pair.state is from_


@pytest.mark.parametrize(
    ("state", "write", "receive", "served", "sent"),
    [
        (State.RESET, "refused", "refused", False, False),
        (State.INIT, "refused", "queued", False, False),
        (State.RTR, "refused", "queued", True, False),
        (State.RTS, "queued", "queued", True, True),
        (State.SQD, "queued", "queued", True, False),
        (State.ERR, "flushed", "flushed", False, False),
    ],
)
def test_what_a_state_allows(state: State, write: str, receive: str, served: bool, sent: bool) -> None:
    wire = Wire(connect=False)
    pair = in_state(wire.a.pair, state)
    pair.events()
    for outcome, post in (
        (write, lambda: pair.post_write(BYTE, 0, wr_id=1)),
        (receive, lambda: pair.post_receive(1)),
    ):
        if outcome == "refused":
            with pytest.raises(ValueError, match=f"in {state.name}"):
                post()
        else:
            post()
            flushed = [Completion(1, Status.WR_FLUSH_ERR)] if outcome == "flushed" else []
            assert pair.events() == flushed
    assert bool(pair.transmit(0.0)) == sent
    wire.b.pair.connect()
    wire.b.pair.post_write(BYTE, 7)
    (request,) = wire.b.pair.transmit(0.0)
    pair.receive(batch_of([request.packet(0)]), 0.0)
    assert wire.a.memory[7] == served
    assert pair.drops[Drop.WRONG_STATE] == (not served)


def test_a_drained_queue_finishes_the_messages_it_has_begun_and_no_other() -> None:
    wire = Wire(Attributes(window=4))
    pair = wire.a.pair
    for k in range(3):
        pair.post_write(np.full(6 * 1024, k + 1, np.uint8), k * 6144, wr_id=k)
    pair.transmit(0.0)
    pair.modify(State.SQD)
    wire.run()
    assert wire.a.statuses() == [(0, Status.SUCCESS)]
    assert wire.a.events[-1] == Drained()
    assert wire.b.memory[6143:6145].tolist() == [1, 0]
    pair.modify(State.RTS)
    wire.run()
    assert wire.a.statuses() == [(k, Status.SUCCESS) for k in range(3)]
    assert wire.a.events.count(Drained()) == 1
    pair.modify(State.SQD)
    assert pair.events() == [Drained()]


def test_into_error_everything_is_flushed_in_order() -> None:
    wire = Wire()
    pair = wire.a.pair
    pair.post_receive(20, count=2)
    for k in range(3):
        pair.post_write(BYTE, k, wr_id=k)
    pair.transmit(0.0)
    pair.modify(State.ERR)
    assert pair.events() == [Completion(wr_id, Status.WR_FLUSH_ERR) for wr_id in (0, 1, 2, 20, 20)]
    assert pair.timer() is None
    assert pair.transmit(0.0) == []
    pair.modify(State.RESET)
    assert pair.events() == []


def test_after_a_reset_it_connects_anew() -> None:
    wire = Wire()
    wire.a.pair.post_write(BYTE, 0, wr_id=1)
    wire.run()
    for host in wire.hosts:
        host.pair.modify(State.RESET)
        host.pair.connect()
    wire.a.pair.post_write(BYTE, 1, wr_id=2)
    wire.run()
    assert wire.b.memory[:2].tolist() == [1, 1]
    with pytest.raises(ValueError, match="no way from RTS to INIT"):
        wire.a.pair.connect()


def test_what_does_not_fit_a_request_is_refused() -> None:
    pair = Wire().a.pair
    with pytest.raises(ValueError, match="32 bits"):
        pair.post_write(BYTE, 0, 1 << 32)
    with pytest.raises(ValueError, match="contiguous"):
        pair.post_write(np.zeros(10, np.uint8)[::2], 0)
    assert str(pair) == "queue pair 0x11 to 10.0.0.2:50002, 0x12"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path_mtu", 1000),
        ("timeout", 32),
        ("retry_cnt", 8),
        ("rnr_retry", -1),
        ("min_rnr_timer", 32),
        ("partition", 1 << 16),
        ("window", 1 << 23),
        ("window", 0),
        ("ack_every", 0),
        ("dscp", 64),
        ("line_rate", 0.0),
    ],
)
def test_attributes_out_of_bounds_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is .*not {value}"):
        Attributes(**{field: value})  # type: ignore[arg-type]


def test_numbers_have_24_bits() -> None:
    with pytest.raises(ValueError, match="psn has 24 bits"):
        Peer(endpoint("10.0.0.1", 1), 1, psn=1 << 24)
    with pytest.raises(ValueError, match="number has 24 bits"):
        Peer(endpoint("10.0.0.1", 1), -1)


def test_memory_must_be_contiguous_writable_and_registered() -> None:
    domain = ProtectionDomain()
    for unfit in (np.zeros(10)[::2], np.frombuffer(b"frozen", np.uint8)):
        with pytest.raises(ValueError, match="contiguous writable"):
            domain.register(unfit)
    region = domain.register(np.zeros(10), access=Access.NONE)
    domain.deregister(region)
    with pytest.raises(ValueError, match="not registered here"):
        domain.deregister(region)
    with pytest.raises(ValueError, match="not registered here"):
        domain.deregister(MemoryRegion(np.zeros(1, np.uint8), 1, 0, 9))


def test_two_partitions_do_not_hear_each_other() -> None:
    wire = Wire()
    other = QueuePair(
        wire.a.pair.local, wire.a.pair.remote, attributes=Attributes(partition=0x8001, retry_cnt=0)
    )
    other.connect()
    other.post_write(BYTE, 0)
    (request,) = other.transmit(0.0)
    wire.b.pair.receive(batch_of([request.packet(0)]), 0.0)
    assert wire.b.pair.drops[Drop.UNKNOWN_QP] == 1
    assert not wire.b.memory.any()
