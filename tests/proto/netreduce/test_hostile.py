"""Packets that keep no rule, with checksums that are right."""

import numpy as np

from inanet.kernels.icrc import seal
from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Sizes, rack, racks
from inanet.wire import roce
from inanet.wire.drops import Drop
from tests.proto.netreduce.packets import LENGTH, SIZE, Bench, connections, header, message, values_of

RANKS = 3


def messages(numbers: range) -> list[bytes]:
    packets = []
    for number in numbers:
        values = values_of(RANKS, number)
        for rank, connection in enumerate(connections(RANKS)):
            packets += message(connection, header(rank, number), values[rank], 16 * rank + number * LENGTH)
    return packets


def spoilt(packet: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes of the transport's and the INA header, or the length, are something else; the checksums fit."""
    array = np.frombuffer(bytearray(packet), np.uint8)
    for at in rng.choice([28, 29, 36, 37, 38, 39, *range(40, min(80, len(packet) - 4))], 3):
        array[at] = rng.integers(0, 256)
    if rng.random() < 0.3:
        array = array[: 4 * rng.integers(11, len(array) // 4)].copy()
        array[2:4] = (len(array) >> 8, len(array) & 0xFF)
        array[24:26] = (len(array) - 20 >> 8, len(array) - 20 & 0xFF)
    seal(array, 0, len(array))
    return array.tobytes()


def test_nothing_breaks_and_what_leaves_is_well_formed():
    rng = np.random.default_rng(11)
    sizes = Sizes(LENGTH, 2, SIZE)
    hosts = [connection.source for connection in connections(RANKS)]
    leaf = racks(3, connections(RANKS), 1, {2: hosts[:2], 3: hosts[2:]}, sizes)[2]
    for plan in (rack(3, connections(RANKS), sizes), leaf):
        program = NetReduceProgram()
        program.add_ring(plan)
        rig, reasons = Bench(program), set()
        # connections that begin well are not taken for plain ones
        rig.give(messages(range(1)))
        for number in range(0, 40, 4):
            good = messages(range(number, number + 4))
            bad = [spoilt(packet, rng) for packet in good for _ in range(3)]
            mixed = [*good, *bad]
            rng.shuffle(mixed)
            for packet in rig.give(mixed):
                if packet[28] != 0xC0:
                    assert len(roce.decode(packet).payload) == SIZE
            reasons |= set(rig.dropped)
        assert reasons >= {Drop.UNRESOLVED, Drop.SHORT, Drop.BAD_FRAGMENT, Drop.FOREIGN_JOB}
        assert sum(program.drops) > 100


def test_a_ring_is_whole_again_after_hostile_packets():
    rng = np.random.default_rng(12)
    program = NetReduceProgram()
    program.add_ring(rack(3, connections(RANKS), Sizes(LENGTH, 2, SIZE)))
    rig = Bench(program)
    rig.give([spoilt(packet, rng) for packet in messages(range(8)) for _ in range(4)])
    plan = rack(3, connections(RANKS), Sizes(LENGTH, 2, SIZE), epoch=1)
    program.remove_ring(3)
    program.add_ring(plan)
    values = values_of(RANKS, 1)
    packets = [
        packet
        for rank, connection in enumerate(connections(RANKS))
        for packet in message(connection, header(rank, 7, epoch=1), values[rank], 99)
    ]
    assert len(rig.give(packets)) == RANKS * LENGTH
