"""The life of a daemon's process, on real processes: start, signals, drain, reload, watchdog, exit codes."""

import json
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.daemons.processes import config, running

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("loop", "number"), [("uvloop", signal.SIGTERM), ("asyncio", signal.SIGINT)])
def test_a_signal_drains_and_ends_with_0(tmp_path: Path, loop: str, number: signal.Signals) -> None:
    stats = tmp_path / "stats.json"
    environ = {"INA_STATS_FILE": str(stats)}
    with running(tmp_path, "a0", "--loop", loop, environ=environ) as daemon:
        assert daemon.notified("READY")["X_INANET_LOOP"].partition(".")[0] == loop
        daemon.signal(number)
        stopping = daemon.notified("STOPPING")
        assert int(stopping["EXTEND_TIMEOUT_USEC"]) >= 10_000_000
        assert daemon.notified("STATUS")["STATUS"] == "draining, True"
        status, errors = daemon.end()
    assert status == 0, errors
    assert number.name in errors
    assert "event=stopped" in errors
    assert json.loads(stats.read_text()) == {"rx_packets": 7, "drops": {"short": 1}}


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "endless") as daemon:
        daemon.notified("READY")
        daemon.signal(signal.SIGTERM)
        daemon.notified("STOPPING")
        daemon.signal(signal.SIGTERM)
        status, errors = daemon.end()
    assert status == 1
    assert "second signal" in errors


def test_a_drain_that_takes_too_long_is_cut_off(tmp_path: Path) -> None:
    with running(tmp_path, "endless", extra='drain_timeout = "1 ms"\n') as daemon:
        daemon.notified("READY")
        daemon.signal(signal.SIGTERM)
        status, errors = daemon.end()
    assert status == 1
    assert "did not drain within 0.001 s" in errors


def test_a_frozen_loop_is_ended_with_a_traceback(tmp_path: Path) -> None:
    with running(tmp_path, "frozen", extra='drain_timeout = "1 ms"\n') as daemon:
        daemon.notified("READY")
        daemon.signal(signal.SIGTERM)
        status, errors = daemon.end()
    assert status == 1
    assert "toy.py" in errors


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("failure", 1, "start ina-ps"),
        ("system", 1, "127.0.0.1:7400: Address already in use"),
        ("permission", 4, "permission denied: raw socket"),
        ("missing", 5, "pip install 'inanet[net]'"),
        ("bug", 70, "please report it"),
        ("callback", 70, "ZeroDivisionError"),
    ],
)
def test_the_cause_decides_the_exit_code(tmp_path: Path, name: str, code: int, says: str) -> None:
    with running(tmp_path, name) as daemon:
        status, errors = daemon.end()
    assert status == code, errors
    assert says in errors
    assert ("Traceback" in errors) == (code == 70)


def test_reload_applies_the_log_level_and_names_what_must_wait(tmp_path: Path) -> None:
    with running(tmp_path, "a0") as daemon:
        daemon.notified("READY")
        config(tmp_path, "a0", 'heartbeat = "2 s"\n[log]\nlevel = "error"\n[node2]\n')
        daemon.signal(signal.SIGHUP)
        assert int(daemon.notified("RELOADING")["MONOTONIC_USEC"]) > 0
        daemon.notified("READY")
        config(tmp_path, "a0", 'heartbeat = "2 s"\n[log]\nlevel = "warning"\n')
        daemon.signal(signal.SIGHUP)
        daemon.notified("RELOADING")
        daemon.notified("READY")
        daemon.signal(signal.SIGTERM)
        status, errors = daemon.end()
    assert status == 0
    refused, waiting = (errors.index("node2: unknown section"), errors.index("control.heartbeat"))
    assert refused < waiting
    assert "event=stopping" not in errors, "the new level hides info"


def test_reload_keeps_the_level_of_the_command_line(tmp_path: Path) -> None:
    with running(tmp_path, "a0", "--log-level", "info") as daemon:
        daemon.notified("READY")
        config(tmp_path, "a0", '[log]\nlevel = "error"\n')
        daemon.signal(signal.SIGHUP)
        daemon.notified("READY")
        daemon.signal(signal.SIGTERM)
        _, errors = daemon.end()
    assert "event=stopping" in errors


@pytest.mark.parametrize(("name", "alive"), [("a0", True), ("stuck", False)])
def test_the_watchdog_is_fed_only_while_the_data_path_moves(tmp_path: Path, name: str, alive: bool) -> None:
    extra = '[metrics]\nlisten = "127.0.0.1:0"\n'
    with running(tmp_path, name, extra=extra, environ={"WATCHDOG_USEC": "2000"}) as daemon:
        if alive:
            daemon.notified("WATCHDOG")
        else:
            ready = daemon.notified("READY")
            url = f"http://127.0.0.1:{ready['X_INANET_METRICS']}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
            assert "inanet_watchdog_misses_total" in text
            assert 'inanet_packets_dropped_total{reason="short"} 3.0' in text
            assert 'role="agg"' in text
        daemon.signal(signal.SIGTERM)
        status, errors = daemon.end()
    assert status == 0
    assert ("proof of life withheld" in errors) != alive


def test_the_journal_gets_json_with_priorities(tmp_path: Path) -> None:
    with running(tmp_path, "a0", "--log-format", "json", extra='[impair]\ndrop = "5 %"\n') as daemon:
        daemon.notified("READY")
        daemon.signal(signal.SIGTERM)
        _, errors = daemon.end()
    lines = [json.loads(line) for line in errors.splitlines()]
    assert {line["role"] for line in lines} == {"agg"}
    impaired = next(line for line in lines if line["event"].startswith("impairment"))
    assert (impaired["level"], impaired["drop"]) == ("warning", 0.05)
