"""Claims, entries, and the command."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner

from inanet.cli.main import main
from inanet.cli.papers import papers
from inanet.papers import registry
from inanet.papers.claims import Claim, Relation, ratio, reduction
from inanet.papers.entries import ENTRIES, Entry
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.papers.registry import UnknownEntry, find, run


@pytest.mark.parametrize(
    ("relation", "paper", "ours", "tolerance", "holds"),
    [
        ("==", 7, 7, 0.0, True),
        ("==", 7, 8, 0.0, False),
        ("<=", 10.0, 10.4, 0.05, True),
        ("<=", 10.0, 10.6, 0.05, False),
        (">=", 2.0, 1.9, 0.0, False),
        (">=", 2.0, 1.95, 0.05, True),
        ("~", -4.0, -4.1, 0.05, True),
        ("~", 4.0, 4.3, 0.05, False),
        (">=", 2.0, math.inf, 0.0, False),
        ("<=", 2.0, math.nan, 0.0, False),
    ],
)
def test_claims_hold_or_do_not(
    relation: Relation, paper: float, ours: float, tolerance: float, holds: bool
) -> None:
    claim = Claim("c", paper, ours, relation, tolerance)
    assert claim.holds is holds
    assert claim.as_dict()["holds"] is holds
    json.dumps(claim.as_dict(), allow_nan=False)


def test_reductions_and_ratios_know_nothing() -> None:
    assert (reduction(25.0, 100.0), reduction(0.0, 0.0), reduction(120.0, 100.0)) == (
        75.0,
        0.0,
        pytest.approx(-20),
    )
    assert (ratio(6.0, 2.0), ratio(1.0, 0.0), ratio(0.0, 0.0)) == (3.0, math.inf, 1.0)


def test_every_entry_can_be_imported_and_says_what_it_is() -> None:
    assert list(ENTRIES) == sorted(
        ENTRIES, key=lambda name: (name.partition("-")[0], list(ENTRIES).index(name))
    )
    for name, entry in ENTRIES.items():
        assert name == entry.name
        assert callable(entry.function())
        assert all((entry.paper, entry.figure, entry.what, entry.scale))


def test_an_unknown_entry_is_a_usage_error_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownEntry, match="Did you mean 'goat-fig2'"):
        find("goat-fig02")
    assert main(["papers", "run", "nothing-like-it"]) == 2
    assert "ina papers list" in capsys.readouterr().err


def test_a_run_prints_one_object_with_its_claims() -> None:
    said = CliRunner().invoke(papers, ["run", "goat-fig2", "--json"])
    assert said.exit_code == 0, said.output
    report = json.loads(said.output)
    assert (report["schema"], report["ok"], report["name"]) == (1, True, "goat-fig2")
    assert len(report["claims"]) == 6
    for claim in report["claims"]:
        assert claim.keys() >= {"name", "paper", "ours", "relation", "tolerance", "holds"}
        assert claim["holds"]


def test_the_list_names_all() -> None:
    said = CliRunner().invoke(papers, ["list"])
    assert [line.split()[0] for line in said.output.splitlines()] == list(ENTRIES)
    listed = json.loads(CliRunner().invoke(papers, ["list", "--json"]).output)
    assert [row["name"] for row in listed["entries"]] == list(ENTRIES)


_turn = 0


def _restless() -> Outcome:
    global _turn
    _turn += 1
    return Outcome((Claim("turn", 1, _turn, "=="),), (Table("t", ("a",), ((math.inf,),)),))


def _talkative() -> Outcome:
    structlog.get_logger().info("joined")
    return Outcome((Claim("one", 1, 1, "=="),))


def test_what_a_run_logs_is_no_part_of_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "ENTRIES", {"test": _entry("_talkative")})
    assert main(["papers", "run", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    structlog.reset_defaults()


def _missed() -> Outcome:
    panel = Panel("p", "x", "y", {"s": [(1, 2.0), (2, 3.0)]})
    return Outcome((Claim("faster", 2.0, 1.5, ">=", reason="it is slower"),), (), (panel,))


def _entry(function: str) -> Entry:
    return Entry("test", "none", "Fig. 0", "what", "scale", f"{__name__}:{function}")


def test_runs_that_differ_are_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = run(_entry("_restless"))
    assert not report["ok"]
    assert report["tables"][0]["rows"] == [{"a": None}]
    everything: dict[str, Any] = {"test": _entry("_restless")}
    monkeypatch.setattr(registry, "ENTRIES", everything)
    said = CliRunner().invoke(papers, ["run", "test"])
    assert said.exit_code == 1
    assert "not reproducible" in said.output


def _process() -> Outcome:
    return Outcome((Claim("process", 1, os.getpid(), ">="),))


def test_long_entries_make_their_two_runs_in_two_processes() -> None:
    report, outcome = run(replace(_entry("_process"), long=True))
    assert not report["ok"]
    assert outcome.claims[0].ours == os.getpid()


def test_a_claim_that_does_not_hold_is_reported_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    monkeypatch.setattr(registry, "ENTRIES", {"test": _entry("_missed")})
    picture = tmp_path / "figure.png"
    said = CliRunner().invoke(papers, ["run", "test", "--plot", str(picture)])
    assert said.exit_code == 0, said.output
    assert "DOES NOT HOLD: faster: 1.5 >= 2" in said.output
    assert "it is slower" in said.output
    assert picture.read_bytes().startswith(b"\x89PNG")
