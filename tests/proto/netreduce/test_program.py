import itertools
from collections import defaultdict

import numpy as np
import pytest

from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Sizes, rack, restarted
from inanet.proto.slots.registers import OutOfRegisters
from inanet.wire import netreduce, roce
from inanet.wire.drops import Drop
from inanet.wire.netreduce import Operation
from tests.proto.netreduce.packets import (
    HOSTS,
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


def bench(*, window: int = 2, ranks: int = RANKS) -> Bench:
    program = NetReduceProgram()
    program.add_ring(rack(3, connections(ranks), Sizes(LENGTH, window, SIZE)))
    return Bench(program)


def all_of(number: int, *, start: int = 100, ranks: int = RANKS, **options) -> list[list[bytes]]:
    """Packets of every rank of one message."""
    values = values_of(ranks, number)
    return [
        message(c, header(rank, number, **options), values[rank], start + rank * 1000 + number * LENGTH)
        for rank, c in enumerate(connections(ranks))
    ]


def by_receiver(packets: list[bytes]) -> dict[int, list[bytes]]:
    sorted_ = defaultdict(list)
    for packet in packets:
        sorted_[roce.decode(packet).destination >> 16].append(packet)
    return sorted_


def test_every_rank_gets_the_sum_from_its_predecessor_under_the_original_headers():
    rig, packets = bench(), all_of(0)
    sent = rig.give(itertools.chain(*zip(*packets, strict=True)))
    assert rig.passed == []
    assert rig.dropped == []
    expected = values_of(RANKS, 0).sum(axis=0, dtype=np.int32)
    for rank, connection in enumerate(connections(RANKS)):
        got = by_receiver(sent)[connection.destination]
        body = payload(got)
        head = netreduce.decode(body)
        assert (head.aggregated, head.rank, head.message) == (RANKS, rank, 0)
        np.testing.assert_array_equal(np.frombuffer(body[netreduce.HEADER_BYTES :], np.int32), expected)
        # in order, with nothing but payload and ICRC changed
        for before, after in zip(packets[rank], got, strict=True):
            first = roce.decode(before).opcode == roce.Opcode.WRITE_FIRST
            head_bytes = roce.payload_at(roce.decode(before).opcode)
            assert before[:head_bytes] == after[:head_bytes]
            assert not first or after[head_bytes + 16 : head_bytes + 18] == b"\0\3"


def test_floats_are_summed_in_the_order_of_ranks_whatever_comes_first():
    values = np.random.default_rng(1).standard_normal((RANKS, values_of(RANKS).shape[1])).astype(np.float32)
    packets = [
        message(c, header(rank, 0, operation=Operation.ADD_FLOAT), values[rank], 0)
        for rank, c in enumerate(connections(RANKS))
    ]
    expected = (values[0] + values[1]) + values[2]
    for order in itertools.permutations(range(RANKS)):
        sent = bench().give(itertools.chain(*(packets[rank] for rank in order)))
        for got in by_receiver(sent).values():
            assert payload(got)[netreduce.HEADER_BYTES :] == expected.tobytes()


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [(Operation.MAX32, np.int32), (Operation.MAX64, np.int64), (Operation.MAX8, np.uint8)],
)
def test_maxima(operation, dtype):
    values = values_of(RANKS, 5)
    packets = [
        message(c, header(rank, 0, operation=operation), values[rank], 0)
        for rank, c in enumerate(connections(RANKS))
    ]
    sent = bench().give(itertools.chain(*packets))
    expected = values.view(dtype).max(axis=0).tobytes()
    assert {payload(got)[netreduce.HEADER_BYTES :] for got in by_receiver(sent).values()} == {expected}


def test_repeating_a_packet_before_or_after_the_sum_changes_nothing():
    rig, packets = bench(), all_of(0)
    assert rig.give(packets[0] + packets[0]) == []
    sent = rig.give(packets[1] + packets[2])
    again = rig.give(packets[1])
    assert again == by_receiver(sent)[connections(RANKS)[1].destination]
    stats = rig.program.stats()
    assert (stats["repeated"], stats["answered"], stats["completed"]) == (LENGTH, LENGTH, LENGTH)
    assert stats["contributions_summed"] == (RANKS - 1) * LENGTH


def test_everything_else_passes_as_it_came():
    rig, one = bench(), connections(RANKS)[0]
    foreign = message(type(one)(one.source, one.destination, 0x99), header(0, 0), values_of(1)[0], 0)
    ack = roce.Packet(HOSTS[1], HOSTS[0], roce.Opcode.ACKNOWLEDGE, 0x42, 5, syndrome=0x1F, msn=3).encode()
    nak = roce.Packet(HOSTS[1], HOSTS[0], roce.Opcode.ACKNOWLEDGE, 0x42, 5, syndrome=0x60).encode()
    cnp = roce.Packet(HOSTS[1], HOSTS[0], roce.Opcode.CNP, 0x42, 0, becn=True).encode()
    tcp = bytes([0x45, 0, 0, 40]) + bytes(5) + bytes([6]) + bytes(30)
    others = [*foreign, ack, nak, cnp, tcp, b"\x45"]
    assert rig.give(others) == []
    assert rig.passed == others
    assert rig.dropped == []


def test_a_damaged_packet_is_not_summed():
    rig, packets = bench(), all_of(0)
    broken = bytearray(packets[0][1])
    broken[50] ^= 4
    assert rig.give([bytes(broken)]) == []
    assert rig.dropped == [Drop.BAD_ICRC]


def test_packets_whose_first_was_lost_are_dropped_until_it_comes_again():
    rig, packets = bench(), all_of(0)
    rig.give(packets[0][1:])
    assert rig.dropped == [Drop.UNRESOLVED] * (LENGTH - 1)
    rig.give(packets[0])
    # the next message's first packet is lost
    later = all_of(1)[0]
    rig.give(later[1:])
    assert rig.dropped == [Drop.UNRESOLVED] * (LENGTH - 1)


def test_go_back_n_may_restart_in_the_middle_of_an_older_message():
    rig = bench()
    first, second = all_of(0), all_of(1)
    # packet 2 of message 0 of rank 0 is lost, message 1 begins, then everything from packet 2 on comes again
    rig.give([*first[0][:2], first[0][3], *second[0][:2]])
    assert rig.dropped == []
    rig.give(first[0][2:] + second[0])
    sent = rig.give([*first[1], *first[2], *second[1], *second[2]])
    assert len(sent) == 2 * RANKS * LENGTH
    for got in by_receiver(sent).values():
        psns = [roce.decode(packet).psn for packet in got]
        assert psns == list(range(psns[0], psns[0] + 2 * LENGTH))


@pytest.mark.parametrize("start", [0xFFFFFE, 0xFFFFFF - 2 * LENGTH + 1])
def test_sequence_numbers_may_wrap_in_the_middle_of_a_message(start):
    rig = bench()
    for number in range(4):
        sent = rig.give(itertools.chain(*all_of(number, start=start)))
        assert len(sent) == RANKS * LENGTH
        assert rig.dropped == []


def test_messages_may_wrap():
    rig = bench()
    values = values_of(RANKS, 0)
    for k in range(6):
        number = (2**32 - 3 + k) % 2**32
        packets = [
            message(c, header(rank, number), values[rank], 50 + k * LENGTH)
            for rank, c in enumerate(connections(RANKS))
        ]
        assert len(rig.give(itertools.chain(*packets))) == RANKS * LENGTH
    assert rig.program.stats()["taken_over"] == 2


def test_a_place_is_taken_over_by_a_newer_message_only():
    rig = bench(window=1)
    for number in range(3):
        rig.give(itertools.chain(*all_of(number)))
    # message 2 holds the place of message 0 now
    rig.give(all_of(0)[0])
    assert rig.dropped[0] == Drop.STALE_MSG
    assert len(rig.dropped) == LENGTH
    assert rig.program.stats()["taken_over"] == 1


def test_nothing_is_freed_on_arrival():
    """What would deadlock if it was (message takeover): rank 0 sends message N while rank 1 still asks for message 0."""
    rig = bench(window=2)
    for number in range(2):
        rig.give(itertools.chain(*all_of(number)))
    rig.give(all_of(2)[0])
    asked = rig.give(all_of(0)[1])
    assert len(asked) == LENGTH
    assert rig.dropped == []


def test_switch_that_lost_its_tables_lets_no_raw_gradient_through():
    rig = bench()
    packets = all_of(0)
    rig.give(packets[0][:2])
    plan = rig.program._rings[3].plan
    rig.program.remove_ring(3)
    rig.program.add_ring(plan)
    assert rig.give(packets[0][2:]) == []
    assert rig.passed == []
    assert rig.dropped == [Drop.UNRESOLVED] * 2


def test_plain_messages_on_a_rings_connection_pass():
    rig, one = bench(), connections(RANKS)[0]
    body = np.full(values_of(1).shape[1] + 6, 7, np.int32)
    plain = message(one, header(0, 0), body[6:], 0)
    # the same bytes without a tag in front
    plain[0] = roce.Packet(
        HOSTS[0],
        HOSTS[1],
        roce.Opcode.WRITE_FIRST,
        one.queue_pair,
        0,
        payload=body[: SIZE // 4].tobytes(),
        length=256,
    ).encode()
    assert rig.give(plain) == []
    assert rig.passed == plain
    rig.give(all_of(1)[0])
    assert rig.dropped[0] == Drop.OTHER_MODE


def test_headers_that_are_not_this_rings_are_refused():
    rig, one = bench(), connections(RANKS)[0]
    for wrong, reason in (
        (header(0, 0, ring=4), Drop.FOREIGN_JOB),
        (header(0, 0, epoch=1), Drop.FOREIGN_JOB),
        (header(1, 0), Drop.FOREIGN_HOST),
        (netreduce.Header(3, 0, LENGTH, 0, Operation.ADD, RANKS), Drop.FOREIGN_HOST),
        (netreduce.Header(3, 0, LENGTH + 1, 0), Drop.BAD_FRAGMENT),
    ):
        body = wrong.encode() + bytes(SIZE - netreduce.HEADER_BYTES)
        rig.give(
            [
                roce.Packet(
                    HOSTS[0], HOSTS[1], roce.Opcode.WRITE_FIRST, one.queue_pair, 0, payload=body
                ).encode()
            ]
        )
        assert rig.dropped == [reason]


def test_a_restarted_ring_knows_nothing_of_the_one_before():
    rig = bench()
    rig.give(all_of(0)[0])
    plan = rig.program._rings[3].plan
    rig.program.remove_ring(3)
    rig.program.add_ring(restarted(plan))
    rig.give(all_of(0)[0])
    assert rig.dropped[0] == Drop.FOREIGN_JOB
    sent = rig.give(itertools.chain(*all_of(0, epoch=1)))
    assert len(sent) == RANKS * LENGTH


def test_two_rings_do_not_meet():
    rig = bench()
    others = connections(RANKS, queue_pair=0x51)
    rig.program.add_ring(rack(4, others, Sizes(LENGTH, 2, SIZE)))
    mine = all_of(0)
    values = values_of(RANKS, 9)
    theirs = [message(c, header(rank, 0, ring=4), values[rank], 0) for rank, c in enumerate(others)]
    sent = rig.give(itertools.chain(*zip(*mine, *theirs, strict=True)))
    assert len(sent) == 2 * RANKS * LENGTH
    bodies = {
        netreduce.decode(roce.decode(p).payload).ring
        for p in sent
        if roce.decode(p).opcode == roce.Opcode.WRITE_FIRST
    }
    assert bodies == {3, 4}


def test_rings_that_do_not_fit_are_refused():
    rig = bench()
    with pytest.raises(ValueError, match="served already"):
        rig.program.add_ring(rack(3, connections(RANKS, 0x31), Sizes(LENGTH, 2, SIZE)))
    with pytest.raises(ValueError, match="another ring's"):
        rig.program.add_ring(rack(4, connections(RANKS), Sizes(LENGTH, 2, SIZE)))
    with pytest.raises(OutOfRegisters, match="window smaller"):
        NetReduceProgram(budget=1 << 20).add_ring(rack(3, connections(RANKS)))
    with pytest.raises(ValueError, match="power of two"):
        Sizes(window=3)
    with pytest.raises(ValueError, match="24 bits"):
        Sizes(window=1 << 16)
