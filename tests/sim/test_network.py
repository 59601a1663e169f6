"""Nodes, ways and virtual time, with machines that only write down what they see."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.testing.pump import Stuck
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint

LINK = LinkSpec(rate=8e6, delay=0.001, overhead=0, grain=1)
GROUP = endpoint("239.0.0.1", 5)


def address(number: int) -> int:
    return endpoint(f"10.0.0.{number}", 4000)


class Notebook:
    """Sends what it is given, and remembers what comes: (time, source, first byte)."""

    def __init__(self) -> None:
        self.out: list[Transmission] = []
        self.seen: list[tuple[float, int, int]] = []
        self.due: float | None = None
        self.rung: list[float] = []

    def say(self, to: int, *values: int, length: int = 1000) -> None:
        arena = np.repeat(np.array(values, np.uint8), length)
        self.out.append(Transmission(to, arena, np.arange(len(values), dtype=np.int64) * length, length))

    def receive(self, batch: PacketBatch, now: float) -> None:
        for index in range(len(batch)):
            self.seen.append((round(now, 9), int(batch.sources[index]), batch.packet(index)[0]))

    def transmit(self, now: float) -> Any:
        while self.out:
            yield self.out.pop(0)

    def timer(self) -> float | None:
        return self.due

    def on_timer(self, now: float) -> None:
        self.rung.append(now)
        self.due = None

    def events(self) -> Sequence[Any]:
        return ()


def star(count: int, link: LinkSpec = LINK, **how: Any) -> tuple[Network, list[Notebook]]:
    network = Network(seed=1)
    network.add_switch("s")
    books = [Notebook() for _ in range(count)]
    for number, book in enumerate(books):
        network.add_host(f"h{number}", address(number), book, **how)
        network.connect(f"h{number}", "s", link)
    return network, books


def test_a_packet_is_stored_and_forwarded_at_each_hop() -> None:
    network, (one, other) = star(2)
    one.say(address(1), 7, 8)
    network.run(lambda: len(other.seen) == 2, deadline=1.0)
    assert other.seen == [(0.004, address(0), 7), (0.005, address(0), 8)]


def test_two_senders_share_a_port_and_its_queue_overflows() -> None:
    network = Network(seed=1)
    network.add_switch("s")
    books = [Notebook() for _ in range(3)]
    for number, book in enumerate(books):
        network.add_host(f"h{number}", address(number), book)
        network.connect(
            f"h{number}",
            "s",
            LINK,
            LinkSpec(rate=8e6, delay=0.001, overhead=0, grain=1, queue=5000, ecn=2000),
        )
    for number in (1, 2):
        books[number].say(address(0), *range(20))
    network.run(lambda: network._next() is None, deadline=1.0)
    counters = network.counters()["s-h0"]
    # two arrive each millisecond and one leaves; 5 find room at a time
    assert counters["dropped"] == 40 - counters["packets"] == 40 - len(books[0].seen)
    assert counters["packets"] == 20 + 5 - 1
    assert counters["peak_bytes"] <= 5000
    assert network.hosts["h0"].marked == counters["marked"] > 10


def test_a_host_waits_for_its_link_and_sends_everything() -> None:
    network, (one, other) = star(2, send_buffer=3000)
    for value in range(30):
        one.say(address(1), value)
    network.run(lambda: len(other.seen) == 30, deadline=1.0)
    assert [value for _, _, value in other.seen] == list(range(30))
    assert other.seen[-1][0] == pytest.approx(0.033)
    assert network.counters()["h0-s"]["peak_bytes"] <= 4000


class Listing(Notebook):
    """Gives what it has at the time, all at once, as machines may."""

    def transmit(self, now: float) -> list[Transmission]:
        out, self.out = self.out, []
        return out


def test_what_a_machine_has_for_a_link_that_is_full_leaves_when_it_has_room() -> None:
    network = Network(seed=1)
    network.add_switch("s")
    sender, receiver = Listing(), Notebook()
    for number, machine in enumerate((sender, receiver)):
        network.add_host(f"h{number}", address(number), machine, send_buffer=2000)
        network.connect(f"h{number}", "s", LINK)
    for value in range(6):
        sender.say(address(1), value)

    def more() -> None:
        sender.say(address(1), 6)
        network.wake("h0")

    # the link takes 1 ms for a packet: at this time four of six are still waiting, and nothing happens after them
    network.at(0.0005, more)
    network.run(lambda: len(receiver.seen) == 7, deadline=1.0)
    assert [value for _, _, value in receiver.seen] == list(range(7))
    assert receiver.seen[-1][0] == 0.01


def tree(hosts: int) -> tuple[Network, list[Notebook]]:
    """Two leaves with half of the hosts each under two spines."""
    network = Network()
    for name in ("leaf0", "leaf1", "spine0", "spine1"):
        network.add_switch(name)
    for leaf in ("leaf0", "leaf1"):
        for spine in ("spine0", "spine1"):
            network.connect(leaf, spine, LINK)
    books = [Notebook() for _ in range(hosts)]
    for number, book in enumerate(books):
        network.add_host(f"h{number}", address(number), book)
        network.connect(f"h{number}", f"leaf{2 * number // hosts}", LINK)
    return network, books


def test_equal_ways_are_shared_by_pairs_of_addresses() -> None:
    network, books = tree(8)
    for sender in range(4):
        for receiver in range(4, 8):
            books[sender].say(address(receiver), sender, receiver)
    network.run(lambda: sum(len(book.seen) for book in books) == 32, deadline=1.0)
    for receiver in range(4, 8):
        # a flow keeps its way, and so its order
        for sender in range(4):
            mine = [value for _, source, value in books[receiver].seen if source == address(sender)]
            assert mine == [sender, receiver]
    counters = network.counters()
    ways = [counters[f"leaf0-spine{spine}"]["packets"] for spine in (0, 1)]
    assert sum(ways) == 32
    assert min(ways) >= 8


def test_a_group_gets_one_copy_per_link_and_the_sender_none() -> None:
    network = Network()
    for name in ("a", "b"):
        network.add_switch(name)
    network.connect("a", "b", LINK)
    books = [Notebook() for _ in range(5)]
    for number, book in enumerate(books):
        network.add_host(f"h{number}", address(number), book)
        network.connect(f"h{number}", "a" if number < 2 else "b", LINK)
    for number in (0, 1, 2, 3):
        network.join(GROUP, f"h{number}")
    books[0].say(GROUP, 9)
    network.run(lambda: network._next() is None, deadline=1.0)
    assert [len(book.seen) for book in books] == [0, 1, 1, 1, 0]
    assert network.counters()["a-b"]["packets"] == 1
    network.leave(GROUP, "h3")
    books[0].say(GROUP, 9)
    network.wake("h0")
    network.run(lambda: network._next() is None, deadline=1.0)
    assert [len(book.seen) for book in books] == [0, 2, 2, 1, 0]
    with pytest.raises(ValueError, match="not a multicast group"):
        network.join(address(1), "h1")


def test_what_nobody_can_take_is_counted() -> None:
    network, (one, _) = star(2)
    one.say(address(99), 1, 2)
    with pytest.raises(Stuck, match="nothing on its way"):
        network.run(lambda: False, deadline=1.0)
    assert network.switches["s"].unroutable == 2


def test_timers_ring_at_their_time_and_deadlines_hold() -> None:
    network, (one, other) = star(2)
    one.due, other.due = 0.25, 0.75
    network.run(lambda: bool(other.rung), deadline=1.0)
    assert (one.rung, other.rung) == ([0.25], [0.75])
    one.due = 5.0
    with pytest.raises(Stuck, match=r"not done after 1\.0 s"):
        network.run(lambda: False, deadline=1.0)


def test_appointments_are_kept_to_the_instant() -> None:
    network, (one, other) = star(2)

    def speak() -> None:
        one.say(address(1), 4)
        network.wake("h0")

    network.at(0.5, speak)
    network.run(lambda: bool(other.seen), deadline=1.0)
    assert other.seen == [(0.504, address(0), 4)]
    with pytest.raises(ValueError, match="is over"):
        network.at(0.25, speak)


def test_a_machine_whose_timer_stays_due_is_found_out() -> None:
    network, (one, _) = star(2)
    one.due = 0.5
    one.on_timer = lambda now: None  # type: ignore[method-assign]
    with pytest.raises(Stuck, match="time stands still"):
        network.run(lambda: False, deadline=1.0)


def test_mistakes_of_building_are_refused() -> None:
    network, _ = star(2)
    with pytest.raises(ValueError, match="already"):
        network.add_host("h0", address(9), Notebook())
    with pytest.raises(ValueError, match="belongs to 'h1' already"):
        network.add_host("h9", address(1), Notebook())
    network.add_switch("t")
    with pytest.raises(ValueError, match="'h0' has a link already"):
        network.connect("h0", "t", LINK)
    network.connect("s", "t", LINK)
    with pytest.raises(ValueError, match="connected already"):
        network.connect("t", "s", LINK)


def test_with_ticks_everything_happens_at_the_nearest_one() -> None:
    network = Network(seed=1, tick=0.004)
    network.add_switch("s")
    books = [Notebook() for _ in range(2)]
    for number, book in enumerate(books):
        network.add_host(f"h{number}", address(number), book)
        network.connect(f"h{number}", "s", LinkSpec(rate=8e6, delay=0.0025, overhead=0, grain=1))
    books[0].say(address(1), *range(9))
    books[1].due = 0.0125
    network.run(lambda: len(books[1].seen) == 9 and bool(books[1].rung), deadline=1.0)
    # those that arrive at the switch from 2 to 6 ms are there at 4 ms, and leave one after the other
    assert [at for at, _, _ in books[1].seen] == [0.008] * 3 + [0.012] * 3 + [0.016] * 3
    assert [value for _, _, value in books[1].seen] == list(range(9))
    assert books[1].rung == [pytest.approx(0.012)]


def test_within_a_tick_a_packet_crosses_switches_that_are_near() -> None:
    network = Network(tick=0.01)
    near = LinkSpec(rate=8e9, delay=1e-5, overhead=0)
    for name in ("a", "b", "c"):
        network.add_switch(name)
    network.connect("a", "b", near)
    network.connect("b", "c", near)
    books = [Notebook() for _ in range(2)]
    for number, (book, switch) in enumerate(zip(books, "ac", strict=True)):
        network.add_host(f"h{number}", address(number), book)
        network.connect(f"h{number}", switch, LinkSpec(rate=8e9, delay=0.01, overhead=0))
    books[0].say(address(1), 5)
    network.run(lambda: bool(books[1].seen), deadline=1.0)
    assert books[1].seen == [(0.02, address(0), 5)]


def test_machines_on_one_computer_share_its_link_in_both_directions() -> None:
    network, books = star(2)
    beside = Notebook()
    network.add_host("h2", address(2), beside)
    network.share("h2", "h0")
    books[0].say(address(1), 1, 2)
    beside.say(address(1), 3, 4)
    books[1].say(address(0), 5)
    books[1].say(address(2), 6)
    network.run(lambda: len(books[1].seen) == 4 and bool(beside.seen), deadline=1.0)
    assert sorted(at for at, _, _ in books[1].seen) == [0.004, 0.005, 0.006, 0.007]
    assert (books[0].seen, beside.seen) == ([(0.004, address(1), 5)], [(0.005, address(1), 6)])
    with pytest.raises(ValueError, match="'h2' has a link already"):
        network.share("h2", "h1")
