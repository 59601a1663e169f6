"""Programs of switches on simulated links: SwitchML's workers, and what a program may say."""

from typing import Any

import numpy as np
import pytest

from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.switchml.worker import switchml_worker
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.worker import Membership
from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from tests.sim.test_network import Notebook

SWITCH = endpoint("10.0.0.254", 0xBEE0)
RATE = 1e9


def worker_at(index: int) -> int:
    return endpoint(f"10.1.0.{index + 1}", 4000)


@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_switchml_sums_at_line_rate_whatever_the_number_of_workers(loss: float) -> None:
    workers, pool, elements = 4, 64, 256 * 200
    members = {worker_at(index): 1 << index for index in range(workers)}
    program = SwitchMLProgram(values=256)
    program.add_job(Tenant(1, members, 7, slots=pool))
    network = Network(seed=2)
    switch = network.add_switch("s", program, SWITCH)
    switch.groups[7] = tuple(members)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-1000, 1000, elements, dtype=np.int32) for _ in range(workers)]
    expected = sum(arrays)
    machines = [
        switchml_worker(Membership(1, index, workers, workers, SWITCH), pool) for index in range(workers)
    ]
    link = LinkSpec(rate=RATE, grain=4, loss=loss)
    for index, machine in enumerate(machines):
        network.add_host(f"w{index}", worker_at(index), machine)
        network.connect(f"w{index}", "s", link)
        machine.add_tensor(0, TensorSpec("t", "i32", (elements,), "sum", ExponentMode.NONE))
        machine.begin(0, 1, [arrays[index]], network.now)

    def done() -> bool:
        return sum(isinstance(event, RoundDone) for _, event in network.log) == workers

    network.run(done, deadline=10.0)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    if not loss:
        sent = network.counters()["w0-s"]
        # sums of int32 travel in two halves
        assert sent["packets"] == 400
        # one gradient on a worker's link, not one for each of them
        assert 1.0 < network.now / (sent["bytes"] * 8 / RATE) < 1.15
        assert network.counters()["s-w0"]["packets"] == 400
    else:
        assert sum(machine.stats()["retransmissions"] for machine in machines) > 0


class Scripted:
    """Does with every packet what its first byte says; the second is a number to aim at."""

    name = "scripted"

    def __init__(self) -> None:
        self.congested: list[int] = []
        self.due: float | None = None
        self.out: list[Transmission] = []

    def process(self, batch: PacketBatch, congested: Any, verdicts: Verdicts, now: float) -> None:
        self.congested += congested.tolist()
        for index in range(len(batch)):
            packet = batch.packet(index)
            verdicts.action[index] = packet[0]
            verdicts.target[index] = 5 if packet[0] == Action.GROUP else worker_at(packet[1])
            verdicts.length[index] = 4
            verdicts.mark[index] = 1
            if packet[0] == Action.DROP:
                verdicts.reason[index] = Drop.DUPLICATE

    def spilled(self) -> list[Transmission]:
        out, self.out = self.out, []
        return out

    def timer(self) -> float | None:
        return self.due

    def on_timer(self, now: float) -> None:
        self.due = None
        self.out.append(Transmission(worker_at(0), np.full(3, 99, np.uint8), np.zeros(1, np.int64), 3))

    def register_bytes(self) -> int:
        return 0

    def stats(self) -> dict[str, int]:
        return {}


def test_verdicts_are_carried_out() -> None:
    program, network = Scripted(), Network()
    switch = network.add_switch("s", program, SWITCH, {worker_at(0): worker_at(1)})
    switch.groups[5] = (worker_at(1), worker_at(2))
    books = [Notebook() for _ in range(4)]
    for index, book in enumerate(books):
        network.add_host(f"w{index}", worker_at(index), book)
        # the queue towards the second is above its threshold from the first packet on
        network.connect(
            f"w{index}", "s", LinkSpec(delay=1e-3), LinkSpec(rate=1e4, ecn=0 if index == 1 else None)
        )
    arena = np.array([[action, 3, 0, 0, 0] for action in Action], np.uint8).reshape(-1)
    offsets = np.arange(len(Action), dtype=np.int64) * 5
    books[0].out.append(Transmission(SWITCH, arena, offsets, 5))
    program.due = 2.0
    network.run(lambda: network._next() is None, deadline=10.0)
    assert program.congested == [1] * len(Action)
    # unicast keeps the source, an answer to a member of the group and replies are the switch's own
    assert [(source, value) for _, source, value in books[3].seen] == [(worker_at(0), Action.UNICAST)]
    assert [(source, value) for _, source, value in books[0].seen] == [
        (SWITCH, Action.REPLY),
        (SWITCH, 99),
    ]
    assert [(source, value) for _, source, value in books[1].seen] == [(worker_at(0), Action.GROUP)]
    assert books[2].seen[0][1] == worker_at(0)
    assert switch.drops[Drop.DUPLICATE] == 1
    assert switch.unroutable == 1
    assert network.hosts["w3"].marked == 1


def test_results_to_members_come_from_the_switch() -> None:
    program, network = Scripted(), Network()
    network.add_switch("s", program, SWITCH).groups[5] = (worker_at(0), worker_at(1))
    books = [Notebook() for _ in range(2)]
    for index, book in enumerate(books):
        network.add_host(f"w{index}", worker_at(index), book)
        network.connect(f"w{index}", "s", LinkSpec())
    books[0].say(SWITCH, Action.GROUP, length=8)
    network.run(lambda: all(book.seen for book in books), deadline=1.0)
    assert {source for book in books for _, source, _ in book.seen} == {SWITCH}
