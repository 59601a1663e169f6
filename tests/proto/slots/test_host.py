"""A host in a job on a switch: rounds in order whatever the order of their layouts, failed ones leave arrays alone."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.proto.common.events import PeerSilent, RoundDone
from inanet.proto.common.plan import ExponentMode, NodePlan, Parent, Placement, TensorLayout, TensorSpec
from inanet.proto.common.refusal import NoRoom
from inanet.proto.slots.a2tp.windows import A2tpPace
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.host import SwitchedHost
from inanet.proto.slots.switchml.job import SwitchMLJob
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.window import TIMING
from inanet.testing.switched import SWITCH, Star
from inanet.wire.endpoint import endpoint

JOB, NUMBER = 4711, 9
SPEC = TensorSpec("t", "i32", (500,), "sum", ExponentMode.NONE)
OTHER = TensorSpec("u", "i32", (20,), "sum", ExponentMode.NONE)


class Pair:
    """Two hosts in a job on SwitchML, and the events of each."""

    def __init__(self) -> None:
        program = SwitchMLProgram(budget=100_000, age=5.0)
        self.star = Star(program)
        self.places = [endpoint(f"10.0.0.{index}", 4000) for index in (1, 2)]
        program.add_job(
            Tenant(NUMBER, {place: 1 << index for index, place in enumerate(self.places)}, NUMBER, slots=8)
        )
        self.star.group(NUMBER, self.places)
        facts = SwitchMLJob("switchml", NUMBER, tuple(self.places), SWITCH, SWITCH, 0, 8, slots=8)
        self.hosts = [SwitchedHost(place, replace(TIMING, silent=1.0)) for place in self.places]
        for index, host in enumerate(self.hosts):
            parent = Parent("s0", SWITCH, 1 << index, 8)
            host.apply(NodePlan(JOB, 1, 1, 2, (Placement(0, parent),), switched=facts), 0.0)
            for tensor, spec in enumerate((SPEC, OTHER)):
                host.add_layout(JOB, TensorLayout(tensor, spec))
            self.star.attach(self.places[index], host)

    def done(self, *rounds: int) -> bool:
        log = {(where, event.round) for where, event in self.star.log if isinstance(event, RoundDone)}
        return all((place, round_) in log for place in self.places for round_ in rounds)


def test_rounds_wait_for_those_before_them() -> None:
    pair = Pair()
    first = [np.full(500, 1, np.int32), np.full(500, 2, np.int32)]
    second = [np.full(20, 5, np.int32), np.full(20, 6, np.int32)]
    pair.hosts[0].begin(JOB, 1, 2, [second[0]], 0.0)
    pair.hosts[1].begin(JOB, 0, 1, [first[1]], 0.0)
    pair.hosts[1].begin(JOB, 1, 2, [second[1]], 0.0)
    pair.star.settle(0.1)
    assert not pair.done(2)
    pair.hosts[0].begin(JOB, 0, 1, [first[0]], pair.star.now)
    pair.star.run(lambda: pair.done(1, 2))
    assert [event.job for _, event in pair.star.log] == [JOB] * 4
    np.testing.assert_array_equal(first, 3)
    np.testing.assert_array_equal(second, 11)


def test_a_round_that_nobody_begins_is_passed_over() -> None:
    pair = Pair()
    values = [np.full(20, 5, np.int32), np.full(20, 6, np.int32)]
    pair.hosts[0].begin(JOB, 1, 2, [values[0]], 0.0)
    for host in pair.hosts:
        host.fail_round(JOB, 1, (), 0.0)
    pair.hosts[1].begin(JOB, 1, 2, [values[1]], 0.0)
    pair.star.run(lambda: pair.done(2))
    np.testing.assert_array_equal(values, 11)


def test_a_failed_round_goes_on_without_its_arrays_and_without_a_word() -> None:
    pair = Pair()
    failed = [np.full(500, 1, np.int32), np.full(500, 2, np.int32)]
    pair.hosts[0].begin(JOB, 0, 1, [failed[0]], 0.0)
    pair.star.settle(0.01)
    pair.hosts[0].fail_round(JOB, 1, (0,), pair.star.now)
    # its owner uses the memory again, for a round that the other host begins as well
    failed[0][:] = 30
    pair.hosts[1].begin(JOB, 0, 1, [failed[1]], pair.star.now)
    pair.hosts[1].fail_round(JOB, 1, (0,), pair.star.now)
    failed[1][:] = 40
    for host, array in zip(pair.hosts, failed, strict=True):
        host.begin(JOB, 0, 2, [array], pair.star.now)
    pair.star.run(lambda: pair.done(2))
    assert {event.round for _, event in pair.star.log if isinstance(event, RoundDone)} == {2}
    np.testing.assert_array_equal(failed, 70)


def test_silence_is_told_with_the_switchs_name_and_figures_outlive_the_job() -> None:
    pair = Pair()
    pair.hosts[0].begin(JOB, 1, 1, [np.zeros(20, np.int32)], 0.0)
    pair.star.settle(1.5)
    (event,) = {event for _, event in pair.star.log}
    assert isinstance(event, PeerSilent)
    assert (event.job, event.name) == (JOB, "s0")
    before = pair.hosts[0].stats()
    assert before["leaf_contributions"] == 1
    assert before["gradient_sent"] == 1024 * before["rows_sent"] > 1024
    pair.hosts[0].drop_job(JOB)
    assert pair.hosts[0].stats() == before | {"jobs": 0}
    assert pair.hosts[0].timer() is None
    with pytest.raises(NoRoom, match="65536 tensors"):
        pair.hosts[1].add_layout(JOB, TensorLayout(1 << 16, SPEC))


def test_options_of_a_host_reach_the_workers_of_their_system() -> None:
    place = endpoint("10.0.0.1", 4000)
    facts = AtpJob("a2tp", NUMBER, (place,), SWITCH, SWITCH, 0, 8, ps=place, slots=8)
    plan = NodePlan(JOB, 1, 1, 1, (Placement(0, Parent("s0", SWITCH, 1, 8)),), switched=facts)
    options = {"a2tp": {"profile": "artifact", "weight": 2.0, "straggling": False}, "atp": {"unknown": 1}}
    host = SwitchedHost(place, TIMING, options)
    host.apply(plan, 0.0)
    assert host._worker is not None
    pace = host._worker.pace
    assert isinstance(pace, A2tpPace)
    windows = pace.windows
    assert (windows.profile.name, windows.weight, windows.straggling) == ("artifact", 2.0, False)
