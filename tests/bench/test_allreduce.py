"""The all-reduce benchmark: its arithmetic, its table, and one small run through real daemons."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from inanet.bench.allreduce import (
    Options,
    Printer,
    Reading,
    _with_metrics,
    in_network_share,
    metrics_port,
    row,
)
from inanet.bench.cli import bench
from inanet.bench.measure import Ticks
from inanet.bench.samples import CHUNK, check, exact, fill, source, tensor, tolerance, wide
from inanet.client.arrays import as_array
from inanet.launch.topology import NodeSpec
from inanet.service.exits import Failure

#: 60 % idle
PERIOD = (Ticks(0, 0), Ticks(100, 60))


def test_sizes_are_a_geometric_series_or_have_a_step_in_bytes() -> None:
    assert list(Options(begin=1024, end=70000, factor=4).sizes()) == [1024, 4096, 16384, 65536]
    assert list(Options(begin=1024, end=4096, step=1024).sizes()) == [1024, 2048, 3072, 4096]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4k", 4096), ("4K", 4096), ("2m", 2 << 20), ("1G", 1 << 30), ("4 kB", 4000), ("64", 64)],
)
def test_sizes_are_those_of_nccl_tests_too(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []

    def run(options: Options, *more: object) -> dict[str, Any]:
        asked.append(options)
        raise Failure("enough")

    monkeypatch.setattr("inanet.bench.allreduce.run", run)
    CliRunner().invoke(bench, ["allreduce", "-b", text, "-e", "8G"])
    assert [options.begin for options in asked] == [size]


def rank_result(**changes: Any) -> dict[str, Any]:
    return {
        "seconds": [0.2, 0.1],
        "cpu": 0.5,
        "wrong": 0,
        "max_error": 0.0,
        "rows_sent": 16,
        "leaves": 16,
        "packet_bytes": 1094,
    } | changes


def test_time_is_the_slowest_ranks_and_counts_are_the_whole_fabrics() -> None:
    options = Options(begin=4096, end=4096, workers=2, repetitions=2, warmups=2)
    moved = Reading(8, 3, {"stale_round": 2, "bad_checksum": 1}, {"worker": 2.0, "ps": 1.0})
    answers = [rank_result(), rank_result(seconds=[0.1, 0.3], wrong=3, max_error=0.5)]
    made = row(options, 4096, answers, moved, PERIOD)
    assert made["seconds"] == pytest.approx(0.25)  # median of max(0.2, 0.1) and max(0.1, 0.3)
    assert made["algbw_bps"] == pytest.approx(4096 * 8 / 0.25)
    assert made["busbw_bps"] == pytest.approx(made["algbw_bps"])  # 2(n-1)/n = 1 for two
    assert (made["wrong"], made["max_error"], made["retransmissions"]) == (3, 0.5, 3)
    assert made["drops"] == {"stale_round": 2, "bad_checksum": 1}
    assert made["in_network_share"] == 0.75  # 8 of 32 reached the root as such
    assert made["wire_bytes_per_worker"] == 4 * 1094  # 16 fragments in four rounds
    gigabytes = 2 * 4096 * 4 / 1e9
    assert made["cpu_s_per_gb"] == pytest.approx(
        {"rank": 1 / gigabytes, "worker": 2 / gigabytes, "ps": 1 / gigabytes}
    )
    assert made["short_of_cpu"] is False
    result = {**asdict(options), "ok": False, "rows": [made], "incomplete": ""}
    printer = Printer(options)
    lines = [*printer.heading(), *printer.row(made), *printer.ending(result)]
    data = [line for line in lines if not line.startswith("#")]
    assert len(data) == 1
    assert data[0].split()[:4] == ["4096", "1024", "float32", "sum"]
    assert "# drops: stale_round 2, bad_checksum 1" in lines
    assert "# Out of bounds values : 3 FAILED" in lines


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_exact_results_and_tolerances(op: str) -> None:
    values = [source("float32", 100, rank) for rank in range(3)]
    assert exact(op, values) == pytest.approx(getattr(np, op)(np.stack(values).astype(np.float64), axis=0))
    allowed = tolerance("float32", op, values)
    assert (allowed == 0) == (op in ("max", "min"))
    assert allowed < 1e-5


def test_every_wrong_element_is_found_whichever_block_it_is_in() -> None:
    array = np.zeros(CHUNK + 10, np.int32)
    total = np.zeros_like(array)
    for rank in range(3):
        fill(array, rank)
        total += array
    assert check(total, "sum", 3) == (0, 0.0)
    total[5] += 1
    total[-1] -= 4
    assert check(total, "sum", 3) == (2, 4.0)
    floats = np.zeros(10, np.float32)
    fill(floats, 0)
    assert check(floats, "sum", 1) == (0, 0.0)
    floats[3] = np.nan
    assert check(floats, "sum", 1)[0] == 1


def test_bfloat16_is_summed_and_checked_like_every_other_format() -> None:
    bits = np.zeros(CHUNK + 10, np.uint16)
    fill(bits, 0, "bfloat16")
    array, form = as_array(tensor(bits, "bfloat16"))
    assert (form, np.shares_memory(array, bits)) == ("bf16", True)
    assert check(bits, "max", 1, "bfloat16") == (0, 0.0)
    exactly = source("float32", 10, 0)
    near = wide(source("bfloat16", 10, 0), "bfloat16")
    assert np.abs(near / exactly - 1).max() <= 2.0**-8
    assert 0 < tolerance("bfloat16", "sum", [near, near]) < 0.1
    bits[3] ^= 0x4000
    assert check(bits, "sum", 1, "bfloat16")[0] == 1


METRICS = """
# TYPE inanet_packets_dropped_total counter
inanet_packets_dropped_total{reason="stale_round"} 2.0
inanet_packets_dropped_total{reason="bad_tag"} 0.0
inanet_retransmissions_total{cause="requested"} 5.0
inanet_packets_received_total{role="ps",kind="all"} 100.0
inanet_packets_received_total{role="ps",kind="contribution"} 40.0
"""


def test_counters_of_nodes_add_up_and_only_the_roots_contributions_count() -> None:
    before, after = Reading(), Reading(cpu={"ps": 2.0})
    before.add("ps", METRICS)
    for role in ("ps", "ps", "agg"):
        after.add(role, METRICS)
    assert after.since(before) == Reading(40, 10, {"stale_round": 4}, {"ps": 2.0})
    assert in_network_share(40, 0) is None


def test_a_daemon_gets_an_endpoint_and_its_log_tells_the_port(tmp_path: Path) -> None:
    config, log = tmp_path / "ps.toml", tmp_path / "ps.log"
    for text in ("[metrics]\n[node]\n", "[node]\n"):
        config.write_text(text)
        for _ in range(2):  # a restart finds it there
            command = _with_metrics(NodeSpec("ps", None), config)
        assert command[-1] == str(config)
        assert config.read_text().count('[metrics]\nlisten = "127.0.0.1:0"\n') == 1
    log.write_text(
        "event='serving metrics' port=1\nevent='serving metrics' address=127.0.0.1 port=4711 x=y\n"
    )
    assert metrics_port(log) == 4711
    log.write_text("nothing\n")
    with pytest.raises(Failure, match="the log of ps names no port"):
        metrics_port(log)


@pytest.mark.processes
@pytest.mark.parametrize("where", [[], ["--one-host"]], ids=["hosts", "one-host"])
def test_a_small_run_through_daemons_is_correct(where: list[str]) -> None:
    arguments = [
        "allreduce",
        "-b",
        "4K",
        "-e",
        "64KiB",
        "-f",
        "4",
        "-n",
        "2",
        "-w",
        "1",
        "--workers",
        "2",
        "--json",
    ]
    result = CliRunner().invoke(bench, [*arguments, *where], catch_exceptions=False)
    printed = json.loads(result.output)
    assert printed["ok"]
    assert [row["bytes"] for row in printed["rows"]] == [4096, 16384, 65536]
    last = printed["rows"][-1]
    assert all(row["wrong"] == 0 and row["seconds"] > 0 for row in printed["rows"])
    assert (last["wire_bytes_per_worker"] >= 64 * 1094) == (not where)
    assert set(last["cpu_s_per_gb"]) == {"rank", "worker", "ps"} | (set() if where else {"agg"})
    # one worker under each of two aggregators: nothing meets before the root
    assert last["in_network_share"] == (None if where else 0.0)
