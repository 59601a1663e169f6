"""Table 6, measured: what is made of runs; the runs themselves need a quiet machine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from inanet.bench.peers.rank import Sample, Team
from inanet.bench.registry import Peer
from inanet.bench.runs import Run
from inanet.launch.counters import Counters
from inanet.papers import netreduce_live
from inanet.papers.netreduce_live import Found, measure, table6


def test_medians_are_made_of_what_runs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def started(chosen: Sequence[Peer], stage: Any) -> Iterator[dict[str, Team]]:
        assert [peer.name for peer in chosen] == ["ps"]
        assert stage.world == 2
        yield {"ps": Team("ps", [])}

    def interleaved(teams: Mapping[str, Team], size: int, repetitions: int) -> dict[str, list[Run]]:
        return {
            name: [Run(Sample(k * size * 8e-9, k * 0.5, 0.0), None) for k in range(1, repetitions + 1)]
            for name in teams
        }

    monkeypatch.setattr(netreduce_live, "started", started)
    monkeypatch.setattr(netreduce_live, "interleaved", interleaved)
    found, skipped = measure((), ("ps",), workers=2, large=10**6, repetitions=3)
    assert not skipped
    # the second of three: 16 ns a byte, one second of processors for 2 MB of two ranks
    assert found["ps"].goodput == pytest.approx(0.5e9)
    assert found["ps"].cpu == pytest.approx(500)
    assert found["ps"].trip == pytest.approx(1024 * 16e-9)


def test_values_in_what_is_sent_count_headers_of_datagrams() -> None:
    ended = []
    fabric = SimpleNamespace(
        shutdown=lambda: ended.append(True),
        stats=lambda: {"worker0": Counters(tx_bytes=972, tx_packets=1)} if ended else {},
    )
    assert netreduce_live._share(fabric, 800) == pytest.approx(0.8)  # type: ignore[arg-type]
    fabric.stats = dict
    assert netreduce_live._share(fabric, 800) is None  # type: ignore[arg-type]


def test_claims_say_why_they_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "netreduce": Found(4e9, 2.0, 1e-3, 0.9),
        "switchml": Found(1e9, 8.0, 2e-3, 0.7),
        "atp": Found(4e9, 2.0, 1e-3, 0.7),
        "gloo": Found(2e9, 1.0, 1e-3),
    }
    monkeypatch.setattr(
        netreduce_live, "measure", lambda **_: (found, ["ps was not measured: it is not here."])
    )
    outcome = table6()
    held = {claim.name for claim in outcome.claims if claim.holds}
    assert held == {"goodput over switchml's", "processor time of a bit, of switchml's"}
    assert all(claim.reason for claim in outcome.claims if not claim.holds)
    assert "ps was not measured: it is not here." in outcome.notes
    json.dumps([table.as_dict() for table in outcome.tables])
    rows = {row[0]: row for row in outcome.tables[0].rows}
    assert rows["netreduce"][1] == pytest.approx(4 / 0.9)
    assert rows["gloo"][1] == "-"
