"""A switch's program, packet by packet: what is its own is summed, the rest passed on, and nobody speaks for another."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.proto.common.plan import Scheduled
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.slots.goat.job import GoatJob, sites
from inanet.proto.slots.goat.program import GoatProgram, tenant_at
from inanet.proto.slots.registers import OutOfRegisters
from inanet.proto.slots.tenants import Tenant
from inanet.wire.drops import Drop
from inanet.wire.goat import Kind, Packet, decode
from tests.proto.slots.goat.lab import TESTBED
from tests.proto.tree.rig import batch_of

KEY = 77
ENDPOINTS = {name: 1000 + index for index, name in enumerate(("ps", *TESTBED.switches, *TESTBED.workers))}
S1, S2, S3, PS = (ENDPOINTS[name] for name in ("s1", "s2", "s3", "ps"))
W0, W1, W4 = (ENDPOINTS[name] for name in ("w0", "w1", "w4"))
SITES, ENTRIES = sites(TESTBED.parents, TESTBED.switches, TESTBED.workers, ENDPOINTS)
FACTS = GoatJob(
    "goat", 1, tuple(ENDPOINTS[w] for w in TESTBED.workers), 0, 0, 0, 8, ps=PS, sites=SITES, entries=ENTRIES
)
#: at S2: one of its own rack's two first workers, one of w0 and w4; one elsewhere
PARTS = (
    Scheduled(0, 0, 4, (2, 2, 0, 0, 0, 0, 0, 0), (-1, 10, -1)),
    Scheduled(1, 4, 2, (2, 0, 0, 0, 2, 0, 0, 0), (-1, 14, -1)),
    Scheduled(2, 6, 2, (3,) * 8, (-1, -1, 0)),
)


def data(worker: int, *, node: int = 2, submodel: int = 0, fragment: int = 0, number: int = 5) -> Packet:
    values = tuple(range(worker * 100, worker * 100 + 64))
    return Packet(Kind.DATA, 1, node, submodel, fragment, number, 1 << worker, values)


@pytest.fixture
def program() -> GoatProgram:
    return at("s2")


def at(name: str) -> GoatProgram:
    made = GoatProgram(budget=100 * 284)
    made.add_job(tenant_at(FACTS, TESTBED.switches.index(name) + 1, KEY))
    made.hold(1, PARTS)
    return made


def judge(program: GoatProgram, *packets: tuple[Packet | bytes, int], now: float = 0.0):
    """Action, target or reason, packet afterwards, for each."""
    batch = batch_of((p if isinstance(p, bytes) else p.encode(KEY), s) for p, s in packets)
    verdicts = Verdicts(len(packets))
    program.process(batch, np.zeros(len(packets), np.uint8), verdicts, now)
    found = []
    for i in range(len(batch)):
        action, reason = Action(verdicts.action[i]), Drop(verdicts.reason[i])
        where = reason if action is Action.DROP else int(verdicts.target[i])
        found.append((action, where, None if action is Action.DROP else decode(batch.packet(i), KEY)))
    return found


def test_routes_lead_along_the_tree():
    assert list(ENTRIES) == [S2] * 4 + [S3] * 4
    assert SITES[0].to_sites == (0, S2, S3)
    assert SITES[1].to_sites == (S1, 0, S1)
    assert SITES[1].ways == (*(ENDPOINTS[f"w{k}"] for k in range(4)), S1, S1, S1, S1)
    assert [site.to_ps for site in SITES] == [PS, S1, S1]


def test_the_last_of_those_who_send_here_leaves_with_the_sum_for_the_ps(program):
    first, last = judge(program, (data(0), W0), (data(1), W1))
    assert first[:2] == (Action.DROP, Drop.OK)
    action, target, packet = last
    assert (action, target) == (Action.UNICAST, S1)
    assert (packet.kind, packet.node, packet.bitmap, packet.asker) == (Kind.SUM, 2, 0b11, 0)
    assert packet.values == tuple(100 + 2 * i for i in range(64))


def test_what_is_for_another_node_or_the_ps_is_passed_on_as_it_is(program):
    for node, target in ((3, S1), (1, S1), (0, S1)):
        action, where, packet = judge(program, (data(0, node=node), W0))[0]
        assert (action, where, packet) == (Action.UNICAST, target, data(0, node=node))
    middle = at("s1")
    assert judge(middle, (data(0, node=3), S2))[0][:2] == (Action.UNICAST, S3)
    assert judge(middle, (data(4, node=2), S3))[0][:2] == (Action.UNICAST, S2)
    whole = replace(data(0), kind=Kind.SUM, bitmap=0b11)
    assert judge(middle, (whole, S2))[0][:2] == (Action.UNICAST, PS)
    assert program.stats()["folded"] == 0


def test_workers_of_another_rack_are_summed_too(program):
    _, (action, _, packet) = judge(
        program, (data(0, submodel=1, fragment=1), W0), (data(4, submodel=1, fragment=1), S1)
    )
    assert action is Action.UNICAST
    assert packet.bitmap == 0b1_0001


def test_a_repeated_contribution_asks_again_once_the_sum_has_left_and_not_all_the_time(program):
    judge(program, (data(0), W0))
    assert judge(program, (data(0), W0))[0][:2] == (Action.DROP, Drop.DUPLICATE)
    judge(program, (data(1), W1))
    assert judge(program, (data(1), W1), now=0.001)[0][:2] == (Action.DROP, Drop.DUPLICATE)
    action, target, packet = judge(program, (data(1), W1), now=0.01)[0]
    assert (action, target, packet.kind, packet.asker) == (Action.UNICAST, S1, Kind.SUM, 2)
    assert packet.values[0] == 100


def test_the_next_round_takes_the_slot_and_who_is_late_asks_the_ps(program):
    judge(program, (data(0), W0), (data(1), W1), (data(0, number=9), W0))
    action, target, packet = judge(program, (data(1), W1))[0]
    assert (action, target) == (Action.UNICAST, S1)
    assert (packet.kind, packet.bitmap, packet.asker, packet.values) == (Kind.SUM, 0b10, 2, data(1).values)
    # the slot still waits for the new round
    assert judge(program, (data(1, number=9), W1))[0][0] is Action.UNICAST


def test_results_go_to_those_that_they_are_for(program):
    result = Packet(Kind.RESULT, 1, 0, 0, 0, 5, 0xFF, (1,) * 64)
    assert judge(program, (result, S1))[0][:2] == (Action.GROUP, 1)
    assert judge(program, (replace(result, bitmap=0b10), S1))[0][:2] == (Action.UNICAST, W1)
    assert judge(at("s1"), (replace(result, bitmap=1 << 4), PS))[0][:2] == (Action.UNICAST, S3)


def test_a_slot_whose_values_were_damaged_is_forgotten_and_summed_again(program):
    judge(program, (data(0), W0))
    program.file.registers.values[10, 63] ^= 1
    assert judge(program, (data(1), W1))[0][:2] == (Action.DROP, Drop.BAD_CHECKSUM)
    _, (action, _, packet) = judge(program, (data(0), W0), (data(1), W1))
    assert action is Action.UNICAST
    assert packet.values == tuple(100 + 2 * i for i in range(64))


@pytest.mark.parametrize(
    ("packet", "source", "reason"),
    [
        (data(0).encode(KEY + 1), W0, Drop.BAD_TAG),
        (replace(data(0), job=2), W0, Drop.FOREIGN_JOB),
        (data(0), W1, Drop.FOREIGN_HOST),
        (data(4), W0, Drop.FOREIGN_HOST),
        (replace(data(0), bitmap=3), W0, Drop.FOREIGN_HOST),
        (data(2), ENDPOINTS["w2"], Drop.FOREIGN_HOST),
        (data(0, submodel=3), W0, Drop.BAD_SLOT),
        (data(0, submodel=2), W0, Drop.BAD_SLOT),
        (data(0, fragment=4), W0, Drop.BAD_SLOT),
        (data(0, node=4), W0, Drop.NO_ROUTE),
        (data(0, node=64), W0, Drop.NO_ROUTE),
        (replace(data(0), kind=Kind.SUM), W0, Drop.FOREIGN_HOST),
        (replace(data(0), kind=Kind.RESULT), W0, Drop.FOREIGN_HOST),
    ],
)
def test_every_drop_has_its_reason(program, packet, source, reason):
    assert judge(program, (packet, source))[0][:2] == (Action.DROP, reason)
    assert program.stats()[f"drop_{reason.label}"] == 1
    assert not program.file.registers.occupied.any()


def test_memory_is_exclusive_and_bounded(program):
    assert program.stats()["held_slots"] == 6
    beyond = Scheduled(3, 8, 2, (2,) * 8, (-1, 99, -1))
    with pytest.raises(OutOfRegisters, match="slots up to 101 of"):
        program.hold(1, [beyond])
    with pytest.raises(OutOfRegisters, match="another's"):
        program.hold(1, [replace(beyond, bases=(-1, 13, -1))])
    with pytest.raises(ValueError, match="sub-model 4 after 3"):
        program.hold(1, [replace(beyond, number=4)])
    program.hold(1, [replace(beyond, bases=(-1, 16, -1))])
    judge(program, (data(0), W0))
    program.remove_job(1)
    assert program.stats()["held_slots"] == 0
    assert judge(program, (data(0), W0))[0][:2] == (Action.DROP, Drop.FOREIGN_JOB)
    with pytest.raises(ValueError, match="come from a coordinator"):
        program.add_job(Tenant(1, {W0: 1}, 1))


def test_every_register_is_accessed_once_a_pass(program):
    for number in range(20):
        judge(program, *[(data(k, number=number), s) for k, s in ((0, W0), (1, W1), (0, W0))], now=number)
    stats = program.stats()
    assert stats["recirculations"] == 0
    assert stats["accesses_key"] == stats["accesses_bitmap"] == stats["packets"] == 60
    assert stats["accesses_values"] <= 60
    assert program.register_bytes() <= 100 * 284
