"""Messages arrive once each and in order, wherever connections are cut."""

from hypothesis import given
from hypothesis import strategies as st

from inanet.messages import delivery
from inanet.messages.delivery import HEARD_EVERY, Delivery


class End:
    """One end, and what has come to it."""

    def __init__(self) -> None:
        self.delivery = Delivery()
        self.taken: list[bytes] = []

    def take(self, frames: list[bytes], other: "End") -> None:
        for frame in frames:
            self.taken.append(frame)
            if (count := self.delivery.take()) is not None:
                other.delivery.heard(count)


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), max_size=12))
def test_whatever_a_cut_connection_loses_comes_over_the_next(turns: list[tuple[int, int]]) -> None:
    sender, receiver = End(), End()
    said: list[bytes] = []
    for sent, arrives in turns:
        frames = [sender.delivery.send(b"%d" % (len(said) + i)) for i in range(sent)]
        said += frames
        # the connection breaks after some of them
        receiver.take(frames[:arrives], sender)
        assert sender.delivery.continues(receiver.delivery.received)
        lacking = list(sender.delivery.lacking(receiver.delivery.received))
        receiver.take(lacking, sender)
        assert receiver.taken == said


def test_what_is_heard_is_not_kept() -> None:
    sender = Delivery()
    for number in range(3 * HEARD_EVERY):
        sender.send(b"%d" % number)
    sender.heard(2 * HEARD_EVERY)
    assert not sender.continues(2 * HEARD_EVERY - 1)
    assert len(list(sender.lacking(2 * HEARD_EVERY))) == HEARD_EVERY
    assert not sender.continues(3 * HEARD_EVERY + 1)


def test_an_end_that_never_says_what_it_heard_costs_bounded_memory_and_cannot_continue() -> None:
    sender = Delivery()
    for _ in range(20):
        sender.send(bytes(1 << 20))
    assert not sender.continues(0)
    assert sum(map(len, sender.lacking(12))) <= delivery.MOST_KEPT
    sender.keep_nothing()
    sender.send(b"x")
    assert list(sender.lacking(0)) == []
