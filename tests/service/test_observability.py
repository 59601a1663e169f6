"""Logs, metrics and notifications, as their readers see them."""

import contextlib
import io
import json
import logging
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from inanet.service import logs
from inanet.service.exits import Failure
from inanet.service.journal import PRIORITIES, is_journal
from inanet.service.logs import RATE_BURST, RATE_KINDS, RATE_SECONDS, configure
from inanet.service.metrics import (
    DURATION_BUCKETS,
    FAMILIES,
    Durations,
    Sample,
    Scrape,
)
from inanet.service.sd_notify import Notifier
from inanet.wire.drops import Drop
from tests.service.serving import serving


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers


def journal_variable(stream: Any) -> dict[str, str]:
    """JOURNAL_STREAM as systemd would set it for a stream."""
    status = os.fstat(stream.fileno())
    return {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}


def test_json_has_the_fixed_keys_first_and_takes_numpy() -> None:
    stream = io.StringIO()
    configure("info", "json", stream=stream, environ={})
    log = structlog.get_logger().bind(role="agg")
    log.info("fragment lost", zeta=1, reason="stale_round", slot=np.int64(3), rank=2, who=Path("a"))
    line = json.loads(stream.getvalue())
    assert list(line) == ["timestamp", "level", "event", "role", "rank", "slot", "reason", "zeta", "who"]
    assert line["slot"] == 3
    assert line["timestamp"].endswith("Z")


def test_json_lines_have_priorities_and_no_time_in_the_journal(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as stream:
        configure("debug", "json", stream=stream, environ=journal_variable(stream))
        log = structlog.get_logger()
        for level in PRIORITIES:
            getattr(log, level)("x")
        stream.seek(0)
        lines = stream.read().splitlines()
    assert [line.partition("{")[0] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    assert all("timestamp" not in json.loads(line[3:]) for line in lines)


def test_the_journal_variable_counts_only_if_it_names_this_stream(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as ours, (tmp_path / "b").open("w") as other:
        assert is_journal(ours, journal_variable(ours))
        assert not is_journal(ours, journal_variable(other))
        assert not is_journal(ours, {})
        assert not is_journal(ours, {"JOURNAL_STREAM": "x:y"})
        assert not is_journal(io.StringIO(), journal_variable(ours))


def test_a_terminal_gets_colours_and_a_file_key_value_lines() -> None:
    for stream, coloured in ((Terminal(), True), (io.StringIO(), False)):
        configure("info", "auto", stream=stream, environ={})
        structlog.get_logger().info("ready", port=7400)
        assert ("\x1b[" in stream.getvalue()) == coloured
        assert ("event=ready" in stream.getvalue()) != coloured


def test_a_traceback_follows_a_plain_line_as_it_is() -> None:
    stream = io.StringIO()
    configure("info", "plain", stream=stream, environ={})
    try:
        _ = 1 // 0
    except ZeroDivisionError as error:
        structlog.get_logger().error("broke", exc_info=error, reason="two words")
    first, second, *rest = stream.getvalue().splitlines()
    assert first.endswith('level=error event=broke reason="two words"')
    assert second == "Traceback (most recent call last):"
    assert rest[-1].startswith("ZeroDivisionError")


def test_the_level_can_be_changed_for_loggers_that_exist() -> None:
    stream = io.StringIO()
    threshold = configure("warning", "plain", stream=stream, environ={}).threshold
    log = structlog.get_logger().bind(role="ps")
    log.info("first")
    threshold.level = "debug"
    log.debug("second")
    assert "first" not in stream.getvalue()
    assert "second" in stream.getvalue()


def test_a_flood_is_cut_and_the_number_left_out_reported() -> None:
    stream, clock = io.StringIO(), Clock()
    configure("info", "json", stream=stream, environ={}, clock=clock)
    log = structlog.get_logger()
    for _ in range(RATE_BURST + 7):
        log.warning("dropped", reason="bad_tag")
    log.warning("dropped", reason="short")
    log.critical("dropped", reason="bad_tag")
    clock.now = RATE_SECONDS
    log.warning("dropped", reason="bad_tag")
    clock.now = 2 * RATE_SECONDS
    log.warning("dropped", reason="bad_tag")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    tags = [line for line in lines if line["reason"] == "bad_tag"]
    assert len(lines) - len(tags) == 1
    assert len(tags) == RATE_BURST + 1 + 2
    assert [line.get("suppressed") for line in tags[-2:]] == [7, None]


def test_ever_changing_texts_do_not_fill_the_memory() -> None:
    limiter = logs.RateLimiter(Clock())
    for number in range(3 * RATE_KINDS):
        with contextlib.suppress(structlog.DropEvent):
            limiter(None, "info", {"event": f"peer {number}", "level": "info"})
    assert len(limiter._kinds) <= RATE_KINDS + 1
    assert len(limiter._passed) <= RATE_KINDS + 1


def test_what_libraries_log_arrives_too() -> None:
    stream = io.StringIO()
    configure("info", "json", stream=stream, environ={})
    configure("info", "json", stream=stream, environ={})
    logging.getLogger("asyncio").error("Task exception was %s", "never retrieved")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["event"] == "Task exception was never retrieved"
    assert json.loads(line)["logger"] == "asyncio"


def scraped(*samples: Sample) -> str:
    """The text that a scrape of these samples gives."""
    scrape, registry = Scrape(), CollectorRegistry(auto_describe=False)
    scrape.add(lambda: samples)
    registry.register(scrape)
    return generate_latest(registry).decode()


def test_plain_counters_become_metrics() -> None:
    counters = np.zeros(len(Drop), np.int64)
    counters[Drop.BAD_TAG] = 5
    text = scraped(
        *(Sample("inanet_packets_dropped", counters[drop], (drop.label,)) for drop in Drop if drop)
    )
    assert "# TYPE inanet_packets_dropped_total counter" in text
    assert 'inanet_packets_dropped_total{reason="bad_tag"} 5.0' in text
    assert 'inanet_packets_dropped_total{reason="short"} 0.0' in text


def test_durations_become_a_cumulative_histogram() -> None:
    durations = Durations()
    for seconds in (0.00005, 0.0001, 0.02, 0.02, 1000.0):
        durations.add(seconds)
    text = scraped(Sample("inanet_round_duration_seconds", durations))
    assert 'inanet_round_duration_seconds_bucket{le="0.0001"} 2.0' in text
    assert 'inanet_round_duration_seconds_bucket{le="0.03"} 4.0' in text
    assert 'inanet_round_duration_seconds_bucket{le="30.0"} 4.0' in text
    assert 'inanet_round_duration_seconds_bucket{le="+Inf"} 5.0' in text
    assert "inanet_round_duration_seconds_count 5.0" in text
    assert "inanet_round_duration_seconds_sum 1000.04015" in text


def test_undeclared_names_and_labels_are_errors() -> None:
    with pytest.raises(KeyError, match="inanet_nonsense"):
        scraped(Sample("inanet_nonsense", 1))
    with pytest.raises(ValueError, match="has the labels"):
        scraped(Sample("inanet_retransmissions", 1))


def test_names_follow_the_conventions() -> None:
    assert list(DURATION_BUCKETS) == sorted(DURATION_BUCKETS)
    for name, family in FAMILIES.items():
        assert name.startswith("inanet_")
        assert not name.endswith("_total"), "the suffix is added"
        assert family.help.endswith(".")
        assert not set(family.labels) & {"seq", "tensor", "fragment", "round"}, "labels without a bound"


def test_the_metrics_server_serves_and_leaves_nothing() -> None:
    scrape = Scrape()
    scrape.add(lambda: [Sample("inanet_jobs", 2)])
    with serving(scrape) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b"inanet_jobs 2.0" in answer.read()
        with (
            pytest.raises(Failure, match=rf"127\.0\.0\.1:{server.port} .*change metrics\.listen"),
            serving(scrape, server.port),
        ):
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_notifications_are_datagrams_of_lines(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"\0inanet-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(address)
        channel.settimeout(10)
        notifier = Notifier({"NOTIFY_SOCKET": address.replace("\0", "@")})
        assert notifier.active
        notifier.ready("serving\n3 jobs", port=7400)
        notifier.status("1.2 Gbit/s")
        notifier.reloading()
        notifier.stopping(2.5)
        notifier.watchdog()
        messages = [channel.recv(4096).decode().splitlines() for _ in range(5)]
    assert messages[0] == ["READY=1", "STATUS=serving 3 jobs", "X_INANET_PORT=7400"]
    assert messages[1] == ["STATUS=1.2 Gbit/s"]
    assert messages[2][0] == "RELOADING=1"
    assert messages[2][1].removeprefix("MONOTONIC_USEC=").isdigit()
    assert messages[3] == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=2500000"]
    assert messages[4] == ["WATCHDOG=1"]


def test_a_service_manager_that_is_not_there_stops_nothing(tmp_path: Path) -> None:
    assert not Notifier({}).active
    Notifier({}).ready("x")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("x")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "full"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "full")})
        for _ in range(5000):
            notifier.watchdog()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time(environ: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environ).watchdog_interval == seconds
