"""XAgg's figures of the kernel program: small measurements, and what is made of the numbers."""

import pytest

from inanet.bench import xdp, xdp_cores
from inanet.papers import xagg_xdp
from inanet.papers.registry import Entry, run
from inanet.service.exits import Exit
from inanet.xdp.attach import why_not
from tests.xdp.conftest import lacking


@pytest.fixture
def privileged() -> None:
    """Skips where BPF programs cannot be loaded, or namespaces not made."""
    reason = why_not()
    if reason is not None:
        lacking(reason)


def standin(gbps: float, cpu: float, latency: float) -> xdp.Hop:
    """A path with these figures."""
    return xdp.Hop(gbps, cpu, {"p50": latency, "p99": 2 * latency})


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything measured is known in advance."""
    alone = {"32": 200.0, "64": 210.0, "128": 220.0, "256": 256.0, "320": 800.0}
    monkeypatch.setattr(xagg_xdp, "available", lambda: None)
    monkeypatch.setattr(xagg_xdp, "program_alone", lambda *_: alone)
    monkeypatch.setattr(xagg_xdp, "kernel_hop", lambda *_: standin(16.0, 0.5, 7.0))
    monkeypatch.setattr(xagg_xdp, "tcp_hop", lambda *_: standin(4.0, 2.0, 10.0))


@pytest.mark.usefixtures("numbers")
def test_claims_are_judged_by_what_was_measured() -> None:
    six = {claim.name: claim for claim in xagg_xdp.fig6().claims}
    assert six["million packets per second and core, 32 values"].ours == 5.0
    assert six["million packets per second and core, 320 values"].ours == 1.25
    assert all(claim.holds for claim in six.values())
    seven = {claim.name: claim.ours for claim in xagg_xdp.fig7().claims}
    assert seven == {
        "Gbit/s of one core, 256 values": 32.0,
        "Gbit/s over a cable, 256 values, sums sent": 16.0,
        "times TCP-Agg": 4.0,
    }
    ten = xagg_xdp.fig10().claims
    assert [claim.ours for claim in ten] == [pytest.approx(30.0)] * 4
    assert all(claim.holds for claim in ten)


def test_without_a_compiler_other_sizes_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise xdp.NotMeasured("clang is not installed")

    monkeypatch.setattr(xagg_xdp, "available", lambda: None)
    monkeypatch.setattr(xagg_xdp, "program_alone", refuse)
    with pytest.raises(xagg_xdp.CompilerMissing, match="clang is not installed") as missing:
        xagg_xdp.fig6()
    assert missing.value.code == Exit.MISSING


@pytest.mark.privileged("makes network namespaces, loads BPF programs")
def test_load_and_processors(privileged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xagg_xdp, "LOADS", (0.5, 1.0))
    monkeypatch.setattr(xagg_xdp, "tcp_hop", lambda *_: standin(4.0, 2.0, 10.0))
    outcome = xagg_xdp.fig9(310, 0.02)
    loads, paths = outcome.tables
    assert len(loads.rows) == 2
    assert all(gbps > 0 for gbps, _ in loads.rows)
    assert paths.rows[1][1] == 2.0


def test_cores_and_losses_become_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xagg_xdp, "available", lambda: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(xagg_xdp, "on_cores", lambda cores, *_: 15.0 * len(cores))
    eight = xagg_xdp.fig8()
    assert [(claim.paper, claim.ours, claim.holds) for claim in eight.claims] == [
        (13.0, 15.0, True),
        (26.0, 30.0, True),
        (2, 2.0, True),
    ]
    monkeypatch.setattr(xagg_xdp, "kernel_hop", lambda *_: standin(16.0, 0.5, 7.0))
    monkeypatch.setattr(
        xagg_xdp, "kernel_losses", lambda _, loads, full, __: [(full * load, 0.002 * load) for load in loads]
    )
    monkeypatch.setattr(xagg_xdp, "tcp_retransmitted", lambda *_: (4.0, 0.015))
    eleven = xagg_xdp.fig11()
    assert [(round(claim.ours, 3), claim.holds) for claim in eleven.claims] == [
        (0.3, False),
        (0.15, True),
        (1.5, True),
    ]


@pytest.mark.privileged("makes network namespaces, loads BPF programs")
def test_what_is_lost_and_sent_again_is_counted(privileged: None) -> None:
    ((gbps, lost),) = xdp_cores.kernel_losses(62, (1.0,), 1.0, 0.001)
    assert gbps > 0
    assert 0.0 <= lost <= 1.0
    gbps, again = xdp_cores.tcp_retransmitted(62, 0.001)
    assert gbps > 0
    assert 0.0 <= again <= 1.0


@pytest.mark.privileged("loads BPF programs")
def test_the_program_runs_on_several_cores(privileged: None) -> None:
    try:
        assert xdp_cores.on_cores([0, 0], 62, 1) > 0
    except xdp.NotMeasured as reason:
        lacking(str(reason))


def test_a_measurement_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def measure() -> xagg_xdp.Outcome:
        turns.append(len(turns))
        return xagg_xdp.Outcome(())

    monkeypatch.setattr(xagg_xdp, "fig6", measure)
    entry = Entry("x", "X", "Fig. 0", "w", "s", "inanet.papers.xagg_xdp:fig6", measured=True)
    assert run(entry)[0]["ok"]
    assert turns == [0]
