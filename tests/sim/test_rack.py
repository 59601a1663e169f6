"""Jobs of switch systems around one switch: how fast they loop, and what a straggler does to whom."""

import pytest

from inanet.sim.link import LinkSpec
from inanet.sim.rack import OVERHEAD, SYSTEMS, Rack

RATE, DELAY = 2e9, 20e-6
#: bytes of values per byte on the wire, 62 of them in a packet of ATP, and 64 in one of SwitchML
ATP_SHARE, SWITCHML_SHARE = 248 / (274 + OVERHEAD), 256 / (266 + OVERHEAD)
ROUND = 62 * 1000
GRAIN = 8


def link(rate: float = RATE) -> LinkSpec:
    return LinkSpec(rate=rate, delay=DELAY, overhead=OVERHEAD, grain=GRAIN)


def throughput(rack: Rack, number: int, seconds: float = 1e-3) -> float:
    """Bits of values per second that a worker has had answered."""
    before = rack.answered(number)
    rack.run(seconds)
    return (rack.answered(number) - before) * 8 / seconds


@pytest.mark.parametrize("name", ["atp", "esa", "a2tp"])
def test_a_job_alone_fills_its_link_and_the_ps_gets_one_packet_for_all(name: str) -> None:
    rack = Rack(SYSTEMS[name], slots=256, link=link())
    rack.add_job(1, 3, 96)
    rack.loop(1, ROUND)
    rack.run(0.5e-3)
    assert throughput(rack, 1) / (RATE * ATP_SHARE) == pytest.approx(1.0, abs=0.12)
    stats, counters = rack.program.stats(), rack.network.counters()
    assert stats["collisions"] == 0
    assert counters["switch-ps1"]["packets"] == pytest.approx(stats["completed"], rel=0.1)
    assert 0 < rack.occupied(1) <= 96 / 256


def test_switchml_is_bound_by_its_slots_and_jobs_with_shares_do_not_meet() -> None:
    rack = Rack(SYSTEMS["switchml"], slots=64, link=link())
    for number, links in ((1, {}), (2, {2: link(RATE / 8)})):
        rack.add_job(number, 3, 64, slots=16, links=links)
    rack.loop(1, ROUND)
    rack.run(0.3e-3)
    alone = throughput(rack, 1)
    # a slot is used again after a delay there and one back, and what pieces wait for their last packet
    piece = GRAIN * (266 + OVERHEAD) * 8 / RATE
    assert 16 * 256 * 8 / (2 * DELAY + 3 * piece) < alone < 16 * 256 * 8 / (2 * DELAY)
    rack.loop(2, ROUND)
    rack.run(0.3e-3)
    before = rack.answered(2)
    assert throughput(rack, 1) == pytest.approx(alone, rel=0.1)
    assert (rack.answered(2) - before) * 8 / 1e-3 == pytest.approx(RATE / 8 * SWITCHML_SHARE, rel=0.15)


def test_a_straggler_slows_its_own_job_to_its_rate_and_a2tp_sees_it() -> None:
    rack = Rack(SYSTEMS["a2tp"], slots=512, link=link())
    quick = rack.add_job(1, 3, 96)
    slow = rack.add_job(2, 3, 96, links={2: link(RATE / 4)})
    for number in (1, 2):
        rack.loop(number, ROUND)
    rack.run(3e-3)
    assert throughput(rack, 2) / (RATE / 4 * ATP_SHARE) == pytest.approx(1.0, abs=0.12)
    gammas = [[machine.pace.degrees()["gamma"] for machine in job] for job in (quick, slow)]  # type: ignore[attr-defined]
    assert min(gammas[0]) > 0.6
    assert max(gammas[1]) < 0.45


def test_jobs_stop_and_runs_repeat() -> None:
    def run() -> tuple[float, dict[str, int], dict[str, dict[str, int]]]:
        rack = Rack(
            SYSTEMS["atp"],
            slots=24,
            link=LinkSpec(rate=RATE, delay=DELAY, overhead=OVERHEAD, grain=8, loss=0.01),
        )
        for number in (1, 2):
            rack.add_job(number, 2, 32)
            rack.loop(number, 62 * 100)
        rack.run(1e-3)
        rack.stop(1)
        rack.stop(2)
        rack.run(60e-3)
        ended = rack.answered(1)
        rack.run(1e-3)
        assert rack.answered(1) == ended
        return ended, rack.program.stats(), rack.network.counters()

    first = run()
    assert first == run()
    assert first[1]["collisions"] > 0
