"""Comparing with peers: the TCP server's sums, bounds of topologies, the tables made of samples, the picture."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inanet.bench import compare
from inanet.bench.peers.rank import Sample, Team, cpu_seconds
from inanet.bench.plot import draw, panels
from inanet.bench.star import ring_limit, star, tree_limit
from inanet.control.exits import Failure
from inanet.lab.library import topology


@pytest.fixture(scope="module")
def tcp_team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with compare.tcp(3, tmp_path_factory.mktemp("tcp"), 1 << 10) as team:
        yield team


@pytest.mark.processes
@pytest.mark.parametrize("size", [0, 4, 1020, 1024, 4100, (1 << 20) + 12])
def test_a_tcp_server_sums_tensors_that_fit_no_message(tcp_team: Team, size: int) -> None:
    sample = tcp_team.run(size, 60)  # raises if a sum is wrong
    assert sample.seconds >= 0
    assert sample.cpu >= sample.served > 0


@pytest.mark.processes
def test_a_wrong_sum_is_a_failure() -> None:
    with (
        answering('{"seconds": 1, "cpu": 0, "wrong": true}') as team,
        pytest.raises(Failure, match="wrong sum"),
    ):
        team.run(8, 30)


@pytest.mark.processes
def test_a_rank_that_ends_is_named() -> None:
    with (
        answering("") as team,
        pytest.raises(Failure, match="peer: rank 0 ended during an all-reduce of 8 B"),
    ):
        team.run(8, 30)


@contextmanager
def answering(line: str) -> Iterator[Team]:
    process = subprocess.Popen(
        ["sh", "-c", f"read question; echo '{line}'" if line else "read question"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    team = Team("peer", [process])
    try:
        yield team
    finally:
        team.close()


def test_processor_time_of_a_process_counts_all_its_threads() -> None:
    assert cpu_seconds(os.getpid()) > 0


def test_the_tree_bound_is_that_of_the_busiest_link() -> None:
    fragments = 1024 * 1000
    # four workers into a link four times as fast: as long as one worker needs
    assert tree_limit(topology("star4-fast-aggregator"), fragments) == pytest.approx(1000 * 1094 * 8 / 1e9)
    # equal links: the server's is the busiest
    assert tree_limit(topology("star4"), fragments) == pytest.approx(4 * 1000 * 1094 * 8 / 1e9)
    # four roots share the tensor
    assert tree_limit(topology("star4-four-aggregators"), fragments) == pytest.approx(1000 * 1094 * 8 / 1e9)
    # three workers at S1
    assert tree_limit(topology("xagg-fig1"), fragments) == pytest.approx(3 * 1000 * 1094 * 8 / 1e9)


def test_the_ring_bound_counts_headers_and_the_slowest_worker() -> None:
    assert ring_limit(topology("star4"), 1448 * 1000) == pytest.approx(1.5 * 1000 * 1514 * 8 / 1e9)
    assert ring_limit(topology("xagg-fig1"), 1448 * 1000) == pytest.approx(1.5 * 1000 * 1514 * 8 / 5e8)


def rows() -> list[dict[str, Any]]:
    samples = {
        ("tcp-agg-1k", 1000): [Sample(3.0, 6.0, 4.0)],
        ("xagg-udp", 1000): [Sample(1.0, 3.0, 1.0), Sample(2.0, 3.0, 2.0), Sample(9.0, 3.0, 0.5)],
        ("xagg-udp", 10): [Sample(1.0, 1.0, 1.0)],
    }
    local = [compare._row("local", name, 2, size, runs, samples) for (name, size), runs in samples.items()]
    return local + list(compare._ingest(local, 2, 1000, samples))


def test_ingest_is_the_processor_time_of_the_server_alone() -> None:
    ingest = {row["system"]: row for row in rows() if row["table"] == "ingest"}
    assert list(ingest) == ["tcp-agg-1k", "xagg-udp"]
    assert ingest["xagg-udp"]["seconds"] == 1.0  # median of what the server used
    assert ingest["xagg-udp"]["algbw_bps"] == 2 * 1000 * 8
    assert ingest["xagg-udp"]["ratio_to_tcp_agg_1k"] == 4.0
    assert ingest["tcp-agg-1k"]["ratio_to_tcp_agg_1k"] == 1.0


def test_rows_have_medians_and_no_ratio_without_gloo() -> None:
    row = rows()[1]
    assert (row["system"], row["seconds"], row["ratio_to_gloo"]) == ("xagg-udp", 2.0, None)


def test_every_line_of_the_table_is_a_row_or_a_comment() -> None:
    result = {"rows": rows(), "cores": 2, "load": 0.5, "skipped": ["gloo: not installed"]}
    lines = list(compare.table(result))
    data = [line for line in lines if not line.startswith("#")]
    assert len(data) == len(result["rows"])
    assert lines[-1] == "# skipped gloo: not installed"


def test_the_picture_shows_the_largest_size_of_each_table(tmp_path: Path) -> None:
    assert [len(panel) for panel in panels(rows()).values()] == [2, 2]
    pytest.importorskip("matplotlib")
    draw(rows(), tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
@pytest.mark.privileged("root, for a lab of network namespaces")
def test_a_star_has_a_row_for_every_contestant() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, for a lab of network namespaces")
    found = star("star2", 1 << 20, 1, ("tcp-agg", "xagg-udp"))
    assert [row["system"] for row in found] == ["tcp-agg", "xagg-udp"]
    for row in found:
        assert row["link_bps"] == 10**9
        # a shaped link cannot be beaten by more than its bucket holds
        assert row["seconds"] > 0.5 * row["limit_seconds"]
        assert row["server_cpu_s_per_gb"] > 0
