"""The sender's side of acknowledgement, packet by packet, at literal times."""

import numpy as np

from inanet.proto.zebra.packets import EncodedPackets, Header
from inanet.proto.zebra.stream import RoundTrips, Stream, Timing
from inanet.wire.zebra import HEADER, Kind

TIMING = Timing(window=6, first=0.1, least=0.01)


def stream(receivers: list[int], group: int | None = None) -> Stream:
    names = np.arange(9, dtype=np.uint64)
    packets = EncodedPackets(
        Kind.HOT, Header(1, 0, 0, 0, 1, 1), np.ones(9, np.int64), names, np.zeros((9, 1), np.uint32)
    )
    return Stream(packets, receivers, RoundTrips(TIMING), group=group)


def sent(sender: Stream, now: float) -> list[tuple[int, int]]:
    """Destination and sequence number of what leaves."""
    return sorted(
        (transmission.destination, int(np.frombuffer(transmission.packet(i), HEADER, 1)["sequence"][0]))
        for transmission in sender.transmit(now)
        for i in range(len(transmission))
    )


def ack(sender: Stream, *sequences: int, receiver: int = 0, now: float = 0.001) -> list[bool]:
    return sender.acknowledge(np.array(sequences, np.int64), receiver, now).tolist()


def test_the_window_opens_with_the_first_answers() -> None:
    sender = stream([5])
    assert sent(sender, 0.0) == [(5, i) for i in range(6)]
    assert sent(sender, 0.0) == []
    assert ack(sender, 1, 2) == [True, True]
    assert sent(sender, 0.0) == []
    assert ack(sender, 0, 0, 1, 77) == [True, False, False, False]
    assert sent(sender, 0.001) == [(5, 6), (5, 7), (5, 8)]
    # the END is a packet like the others
    ack(sender, 3, 4, 5, 6, 7, 8)
    assert sent(sender, 0.001) == [(5, 9)]
    ack(sender, 9)
    assert sender.done
    assert sender.timer() is None


def test_what_is_not_answered_is_repeated_ever_more_slowly() -> None:
    sender = stream([5])
    sent(sender, 0.0)
    assert sender.timer() == 0.1
    assert sent(sender, 0.09) == []
    assert sent(sender, 0.1) == [(5, i) for i in range(6)]
    assert sender.timer() == 0.1 + 0.2
    ack(sender, 0, now=0.11)
    # an answer to what was sent twice measures nothing
    assert sent(sender, 0.11) == [(5, 6)]
    # the timer begins anew with every answer
    assert sent(sender, 0.305) == []
    assert sent(sender, 0.32) == [(5, i) for i in range(1, 7)]


def test_a_packet_that_later_ones_have_overtaken_is_repeated_once() -> None:
    sender = stream([5])
    sent(sender, 0.0)
    ack(sender, 1, 2, 3)
    assert sent(sender, 0.001) == []
    ack(sender, 4)
    assert sent(sender, 0.001) == [(5, 0)]
    ack(sender, 5)
    assert sent(sender, 0.001) == []


def test_a_group_gets_everything_once_and_each_what_it_lacks() -> None:
    sender = stream([5, 6], group=99)
    assert sent(sender, 0.0) == [(99, i) for i in range(6)]
    ack(sender, 0, 1, 2, 3, 4, 5)
    ack(sender, 0, 2, 3, 4, 5, receiver=1)
    assert sender.lacking() == [5, 6]
    # 0 is answered by all; 6 opens up, and 1 is repeated to the one who lacks it
    assert sent(sender, 0.001) == [(6, 1), (99, 6)]
