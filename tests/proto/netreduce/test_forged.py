"""Packets with right checksums from whoever should not send them, and from lives that are over."""

import itertools

import numpy as np
import pytest

from inanet.kernels.icrc import seal
from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Connection, Sizes, rack, racks
from inanet.wire import roce
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from tests.proto.netreduce.packets import (
    LENGTH,
    SIZE,
    Bench,
    connections,
    header,
    message,
    payload,
    values_of,
)

RANKS = 3
STRANGER = endpoint("10.0.0.99", 50000)


def bench() -> Bench:
    program = NetReduceProgram()
    program.add_ring(rack(3, connections(RANKS), Sizes(LENGTH, 2, SIZE)))
    return Bench(program)


def all_of(number: int, start: int = 100) -> list[list[bytes]]:
    values = values_of(RANKS, number)
    return [
        message(connection, header(rank, number), values[rank], start + 1000 * rank + number * LENGTH)
        for rank, connection in enumerate(connections(RANKS))
    ]


def test_a_late_message_of_an_earlier_life_of_the_connection_takes_no_place() -> None:
    """Same ring, epoch and queue pair, another first PSN, and a MsgID that is newer than any of this life's."""
    rig = bench()
    rig.give(itertools.chain(*all_of(0)))
    late = message(connections(RANKS)[0], header(0, 2), values_of(RANKS, 9)[0], 5000)
    assert rig.give(late) == []
    assert rig.dropped[0] is Drop.STALE_MSG
    # this life's messages go on
    for number in (1, 2, 3):
        sent = rig.give(itertools.chain(*all_of(number)))
        assert (len(sent), rig.dropped) == (RANKS * LENGTH, [])


def test_a_message_that_its_sender_cannot_have_reached_takes_no_place() -> None:
    """Nobody is more than a window ahead of his own oldest message without a sum, which the switch has."""
    rig = bench()
    rig.give(itertools.chain(*all_of(0)))
    assert rig.give(all_of(3)[0]) == []
    assert rig.dropped[0] is Drop.STALE_MSG
    assert len(rig.give(itertools.chain(*all_of(1)))) == RANKS * LENGTH


@pytest.mark.parametrize("what", ["source", "queue_pair", "destination"])
def test_packets_of_other_connections_pass_and_change_nothing(what: str) -> None:
    rig, one = bench(), connections(RANKS)[0]
    ends = {"source": one.source, "destination": one.destination, "queue_pair": one.queue_pair}
    other = Connection(**{**ends, what: ends[what] + 77})
    forged = message(other, header(0, 0), values_of(RANKS, 5)[0], 100)
    assert rig.give(forged) == []
    assert rig.passed == forged
    sent = rig.give(itertools.chain(*all_of(0)))
    mine = [packet for packet in sent if roce.decode(packet).destination >> 16 == one.destination]
    expected = values_of(RANKS, 0).sum(axis=0, dtype=np.int32)
    assert payload(mine)[24:] == expected.tobytes()


def test_a_tenants_connection_speaks_for_its_own_ring_alone() -> None:
    """Whatever RingID, MsgID, rank or MsgLen it writes into its headers."""
    rig = bench()
    theirs = connections(RANKS, queue_pair=0x51)
    rig.program.add_ring(rack(4, theirs, Sizes(LENGTH, 2, SIZE)))
    rig.give(all_of(0)[0])
    forged = message(theirs[1], header(1, 0, ring=3), values_of(RANKS, 5)[1], 0)
    assert rig.give(forged) == []
    assert rig.dropped[0] is Drop.FOREIGN_JOB
    packets = all_of(0)
    sent = rig.give(packets[1] + packets[2])
    assert len(sent) == RANKS * LENGTH


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(25, 1, Drop.SHORT), (29, 0x4F, Drop.BAD_TYPE), (29, 0x70, Drop.SHORT)],
    ids=["UDP length", "transport version", "padding"],
)
def test_what_its_receiver_would_refuse_does_not_count(at: int, value: int, reason: Drop) -> None:
    """The sum would leave under these headers, and nobody would take it."""
    rig, packets = bench(), all_of(0)
    rig.give([*packets[1], *packets[2], packets[0][0]])
    bad = np.frombuffer(bytearray(packets[0][1]), np.uint8)
    bad[at] = value
    seal(bad, 0, len(bad))
    assert rig.give([bytes(bad)]) == []
    assert rig.dropped == [reason]
    assert len(rig.give(packets[0][1:])) == RANKS * (LENGTH - 1)


def test_message_lengths_are_those_that_headers_have_room_for() -> None:
    assert Sizes(2).length == 2
    assert Sizes(0xFFFF).length == 0xFFFF
    for length in (0, 1, 0x10000):
        with pytest.raises(ValueError, match=f"messages of {length} packets"):
            Sizes(length)


# ---------------------------------------------------------------- several racks


def leaf() -> tuple[Bench, list[Connection]]:
    """The switch of ranks 0 and 1; rank 2, which sends to rank 0, is on another rack."""
    hosts = [connection.source for connection in connections(RANKS)]
    program = NetReduceProgram()
    program.add_ring(racks(3, connections(RANKS), 1, {2: hosts[:2], 3: hosts[2:]}, Sizes(LENGTH, 2, SIZE))[2])
    return Bench(program), connections(RANKS)


def notice(connection: Connection, number: int, rank: int, psn: int) -> bytes:
    """What the other rack's switch makes of a first packet."""
    other = NetReduceProgram()
    hosts = [one.source for one in connections(RANKS)]
    other.add_ring(racks(3, connections(RANKS), 1, {2: hosts[:2], 3: hosts[2:]}, Sizes(LENGTH, 2, SIZE))[3])
    first = message(connections(RANKS)[2], header(2, number), values_of(RANKS, 0)[2], psn)[0]
    made = bytearray(next(one for one in Bench(other).give([first]) if one[28] == 0xC0))
    made[12:16], made[16:20] = connection.source.to_bytes(4, "big"), connection.destination.to_bytes(4, "big")
    made[33:36] = connection.queue_pair.to_bytes(3, "big")
    made[56 + 14 : 56 + 16] = rank.to_bytes(2, "big")
    array = np.frombuffer(made, np.uint8)
    seal(array, 0, len(array))
    return bytes(array)


def test_a_notice_of_no_connection_of_the_ring_is_nobodys() -> None:
    rig, ring = leaf()
    good = notice(ring[2], 0, 2, 0)
    for forged in (
        notice(Connection(STRANGER >> 16, ring[2].destination, ring[2].queue_pair), 0, 2, 0),
        notice(Connection(ring[2].source, ring[2].destination, 0x77), 0, 2, 0),
        notice(Connection(ring[2].source, ring[1].source, ring[2].queue_pair), 0, 2, 0),
        notice(ring[2], 0, 1, 0),
    ):
        rig.give([forged])
        assert rig.passed == [forged]
        assert not rig.program._rings[3].memory.held.any()
    rig.give([good])
    assert rig.passed == []
    assert rig.program._rings[3].memory.held.any()


def test_a_notice_from_beyond_the_window_takes_no_place() -> None:
    rig, ring = leaf()
    rig.give([notice(ring[2], 0, 2, 0)])
    rig.give([notice(ring[2], 1 << 20, 2, 0)])
    held = rig.program._rings[3].memory
    assert held.message[held.held == 1].tolist() == [0]
