"""Comparing with peers: the TCP server's sums, who takes part, tables made of samples, marks, the picture."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inanet.bench import compare, registry
from inanet.bench.cli import bench
from inanet.bench.hetero import faster_server, hetero
from inanet.bench.local import ingest
from inanet.bench.loss import loss
from inanet.bench.measure import Limit
from inanet.bench.peers.rank import Sample, Team, cpu_seconds
from inanet.bench.registry import Peer, peers
from inanet.bench.runs import KEYS, Run, interleaved, row, started
from inanet.bench.stage import LocalStage
from inanet.bench.star import star
from inanet.config.file import ConfigError
from inanet.lab import namespaces
from inanet.lab.library import find
from inanet.lab.model import load
from inanet.launch.interrupts import Interrupted
from inanet.service.exits import Failure


@pytest.fixture(scope="module")
def tcp_team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with ExitStack() as stack:
        stage = LocalStage(3, tmp_path_factory.mktemp("tcp"), stack)
        wanted = [peer for peer in peers("local") if peer.name == "tcp-agg-1k"]
        yield stack.enter_context(started(wanted, stage))["tcp-agg-1k"]


@pytest.mark.processes
@pytest.mark.parametrize("size", [0, 4, 1020, 1024, 4100, (1 << 20) + 12])
def test_a_tcp_server_sums_tensors_that_fit_no_message(tcp_team: Team, size: int) -> None:
    sample = tcp_team.run(size, 60)  # raises if a sum is wrong
    assert sample.seconds >= 0
    assert sample.cpu >= sample.served > 0


@pytest.mark.processes
def test_a_rank_that_is_late_makes_the_all_reduce_that_late(tcp_team: Team) -> None:
    assert tcp_team.run(1024, 60, [0.0, 0.05, 0.0]).seconds >= 0.05


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


@pytest.mark.processes
def test_what_a_failing_peer_complained_of_is_shown(tmp_path: Path) -> None:
    def start(stage: Any) -> Team:
        return Team("broken", [stage.spawn("localhost", ["sh", "-c", "echo no luck >&2"], {})])

    with (
        ExitStack() as stack,
        pytest.raises(Failure, match=r"broken: rank 0 ended during starting\nno luck"),
        started([Peer("broken", ("local",), start, "tree")], LocalStage(1, tmp_path, stack)),
    ):
        pytest.fail("it started")


def test_processor_time_of_a_process_counts_all_its_threads() -> None:
    assert cpu_seconds(os.getpid()) > 0


class Scripted(Team):
    """A team whose times are known beforehand; notes who ran when."""

    def __init__(self, name: str, log: list[str], times: list[float]) -> None:
        super().__init__(name, [])
        self.log = log
        self.times = times

    def run(self, size: int, deadline: float = 0.0, late: Any = ()) -> Sample:
        self.log.append(f"{self.name}:{size}:{list(late)}")
        return Sample(self.times.pop(0), 1.0, 0.5)


def test_repetitions_alternate_and_the_first_does_not_count() -> None:
    log: list[str] = []
    teams = {name: Scripted(name, log, [9.0, 1.0, 2.0]) for name in ("a", "b")}
    counter = iter(range(0, 1000, 10))
    runs = interleaved(teams, 8, 2, [0.5], lambda: next(counter))
    assert log == ["a:8:[0.5]", "b:8:[0.5]"] * 3
    assert [run.sample.seconds for run in runs["a"]] == [1.0, 2.0]
    assert [run.sent for run in runs["b"]] == [10, 10]


def test_beyond_the_time_limit_everybody_has_one_repetition_that_counts() -> None:
    now = iter([0.0, *[100.0] * 20])
    teams = {name: Scripted(name, [], [9.0, 1.0, 2.0]) for name in ("a", "b")}
    limit = Limit(10.0, clock=lambda: next(now))
    runs = interleaved(teams, 8, 2, limit=limit)
    assert [len(mine) for mine in runs.values()] == [1, 1]
    assert limit.reason == "the time limit was reached (--seconds)"
    assert not limit.interrupted


def test_what_was_measured_before_ctrl_c_is_kept() -> None:
    class Waiting(Scripted):
        def run(self, size: int, deadline: float = 0.0, late: Any = ()) -> Sample:
            self.check()
            return super().run(size, deadline, late)

    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 6:
            raise Interrupted("SIGINT")

    teams = {name: Waiting(name, [], [9.0, 1.0, 2.0]) for name in ("a", "b")}
    limit = Limit(check=check)
    runs = interleaved(teams, 8, 2, limit=limit.part(3))
    assert [len(mine) for mine in runs.values()] == [2, 1]
    assert (limit.is_over, limit.interrupted) == (True, True)


def test_rows_come_one_by_one_and_tables_without_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, told = Limit(), []

    def table(table: str, *_: object) -> Iterator[dict[str, Any]]:
        for made in some_rows():
            yield made
            assert told[-1] is made
        limit.stop("SIGINT: it ended early")

    monkeypatch.setattr(compare, "_table", table)
    monkeypatch.setattr(namespaces, "require_privileges", lambda: None)
    result = compare.run(compare.Wanted(("local", "star"), row=told.append, limit=limit))
    assert result["rows"] == told
    assert result["skipped"] == ["star: no time was left"]
    assert result["incomplete"] == "SIGINT: it ended early"
    assert "# INCOMPLETE: SIGINT: it ended early; rows have" in "\n".join(compare.table(result))


def test_what_was_measured_is_kept_when_a_contestant_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tables follow, and the exit status says that something is wrong."""

    def failing(*_: object) -> Iterator[dict[str, Any]]:
        yield some_rows()[0]
        raise Failure("xagg-udp: rank 3 ended during an all-reduce of 8 B")

    def present(table: str) -> list[Peer]:
        return [Peer("gloo", (table,), lambda stage: Team("gloo", []), "tree")]  # type: ignore[arg-type]

    monkeypatch.setattr(namespaces, "require_privileges", lambda: None)
    monkeypatch.setattr(compare, "peers", present)
    monkeypatch.setattr(compare, "local", failing)
    monkeypatch.setattr("inanet.bench.star.star", lambda *_: iter(some_rows()[1:2]))
    asked = ["compare", "--table", "local", "--table", "star", "--topology", "star4", "--json"]
    outcome = CliRunner().invoke(bench, asked)
    assert outcome.exit_code == 1
    result = json.loads(outcome.stdout)
    assert [one["system"] for one in result["rows"]] == ["gloo", "xagg-udp"]
    assert result["failed"] == ["local: xagg-udp: rank 3 ended during an all-reduce of 8 B"]
    assert "# FAILED local: xagg-udp: rank 3 ended" in "\n".join(compare.table(result))


def test_peers_register_themselves_for_tables_once() -> None:
    def start(stage: Any) -> Team:
        return Team("new", [])

    peer = registry.register(Peer("new", ("local",), start, "tree"))
    try:
        assert peer in peers("local")
        assert peer not in peers("star")
        with pytest.raises(ValueError, match="'new' in the table 'local'"):
            registry.register(Peer("new", ("star", "local"), start, "tree"))
        assert "new" not in [other.name for other in peers("star")]
    finally:
        registry.unregister(peer)
    assert peer not in peers("local")


def runs(*values: tuple[float, float, float], idle: float | None = 0.5, sent: int | None = None) -> list[Run]:
    return [Run(Sample(*value), idle, sent) for value in values]


def test_rows_have_medians_paired_ratios_and_all_the_keys() -> None:
    gloo = runs((2.0, 1.0, 0.0), (4.0, 1.0, 0.0), (30.0, 1.0, 0.0))
    mine = runs((1.0, 3.0, 1.0), (3.0, 5.0, 2.0), (9.0, 4.0, 0.5), sent=1100)
    made = row("star", "xagg-udp", 2, 1000, mine, gloo=gloo, link=10**9, limit=1.5, topology="x")
    assert set(KEYS) <= set(made)
    assert (made["seconds"], made["limit_seconds"], made["ratio_to_limit"]) == (3.0, 1.5, 2.0)
    assert made["ratio_to_gloo"] == 0.5  # median of 1/2, 3/4 and 9/30, not 3/4
    assert made["cpu_s_per_gb"] == pytest.approx(4.0 / (2 * 1000 / 1e9))
    assert (made["wire_bytes_per_worker"], made["topology"]) == (1100, "x")
    assert made["payload_per_wire"] == pytest.approx(1000 / 1100)
    alone = row("local", "xagg-udp", 2, 1000, mine[:1])
    assert (alone["ratio_to_gloo"], alone["limit_seconds"], alone["ratio_to_limit"]) == (None, None, None)


@pytest.mark.parametrize(("idle", "short"), [(0.5, False), (0.01, True), (None, None)])
def test_rows_say_when_processors_were_short(idle: float | None, short: bool | None) -> None:
    assert row("local", "a", 2, 8, runs((1.0, 1.0, 1.0), idle=idle))["short_of_cpu"] is short


def test_ingest_is_the_processor_time_of_the_server_alone() -> None:
    made = {
        row["system"]: row
        for row in ingest(
            2,
            1000,
            {
                "tcp-agg-1k": runs((3.0, 6.0, 4.0), (3.0, 6.0, 6.0), (3.0, 6.0, 4.0)),
                "xagg-udp": runs((1.0, 3.0, 1.0), (2.0, 3.0, 2.0), (9.0, 3.0, 0.5)),
                "idle": runs((1.0, 0.0, 0.0)),
            },
        )
    }
    assert list(made) == ["tcp-agg-1k", "xagg-udp"]
    assert made["xagg-udp"]["seconds"] == 1.0  # median of what the server used
    assert made["xagg-udp"]["algbw_bps"] == 2 * 1000 * 8
    assert made["xagg-udp"]["ratio_to_tcp_agg_1k"] == 4.0  # median of 4, 3 and 8
    assert made["xagg-udp"]["ratio_to_tcp_agg_1m"] is None
    assert made["tcp-agg-1k"]["ratio_to_tcp_agg_1k"] == 1.0


def test_systems_that_nobody_knows_are_refused_with_those_there_are() -> None:
    with pytest.raises(compare.NoSuchPeer, match=r"no system 'glo' in local; allowed: .*gloo") as caught:
        compare.run(compare.Wanted(("local",), ("glo",)))
    assert caught.value.code == 2


def test_what_is_not_installed_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(stage: Any) -> Team:
        raise AssertionError("started without its package")

    peer = registry.register(Peer("lacking", ("local",), start, "tree", lambda: "no such package"))
    monkeypatch.setattr(compare, "_possible", lambda skipped: ("local",))
    try:
        result = compare.run(compare.Wanted(systems=("lacking",)))
    finally:
        registry.unregister(peer)
    assert result["rows"] == []
    assert result["skipped"] == ["local: lacking: no such package", "local: nobody is left to run"]
    assert {mark["met"] for mark in result["marks"]} == {None}


def test_without_privileges_labs_are_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    skipped: list[str] = []
    assert compare._possible(skipped) == ("local",)
    assert skipped == ["star, loss, hetero: need root and the 'net' extra"]

    def refuse() -> None:
        raise namespaces.Unprivileged("run it as root")

    monkeypatch.setattr(namespaces, "require_privileges", refuse)
    with pytest.raises(namespaces.Unprivileged):
        compare.run(compare.Wanted(("hetero",)))


def test_a_topology_that_is_not_there_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> Iterator[dict[str, Any]]:
        raise AssertionError("it ran")

    monkeypatch.setattr(namespaces, "require_privileges", lambda: None)
    monkeypatch.setattr(compare, "_table", never)
    with pytest.raises(ConfigError, match="did you mean 'star4'"):
        compare.run(compare.Wanted(("local", "star"), topologies=("sta4",)))


def test_sizes_below_a_value_are_a_wrong_command_line() -> None:
    result = CliRunner().invoke(bench, ["compare", "--size", "3"])
    assert result.exit_code == 2
    assert "below one value of 4 B" in result.output


def some_rows() -> list[dict[str, Any]]:
    return [
        row("local", "gloo", 2, 1000, runs((1.0, 1.0, 0.0))),
        row("local", "xagg-udp", 2, 1000, runs((1.0, 1.0, 0.5), idle=0.0)),
        row("hetero", "xagg-udp", 4, 10, runs((1.0, 1.0, 0.5)), topology="xagg-fig1", ratio_to_ps=0.75),
    ]


def test_every_line_of_the_table_is_a_row_or_a_comment() -> None:
    result = {
        "rows": some_rows(),
        "cores": 2,
        "load": 0.5,
        "skipped": ["gloo: not installed"],
        "failed": [],
        "incomplete": "",
        "marks": compare.judge(compare.COMPARE, some_rows()),
    }
    lines = list(compare.table(result))
    data = [line for line in lines if not line.startswith("#")]
    assert len(data) == len(result["rows"])
    assert [line.endswith("*") for line in data] == [False, True, False]
    assert "0.750" in data[2]
    assert "# skipped gloo: not installed" in lines
    assert len([line for line in lines if line.startswith("# mark")]) == len(compare.COMPARE)


def test_the_picture_shows_the_largest_size_of_each_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from inanet.bench.plot import draw, panels

    assert [len(panel) for panel in panels(some_rows()).values()] == [2, 1]
    many = [row("star", "a", 2, 8, runs((1.0, 1.0, 1.0)), topology=f"t{number}") for number in range(6)]
    assert len(panels(some_rows() + many)) == 8
    draw(some_rows() + many, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def root() -> None:
    """Skips without the privileges that a lab needs; fails instead where the run promises to have them."""
    try:
        namespaces.require_privileges()
    except namespaces.Unprivileged as error:
        if os.environ.get("INA_REQUIRE_PRIVILEGED") == "1":
            pytest.fail(f"INA_REQUIRE_PRIVILEGED=1, but {error}")
        pytest.skip(str(error))


def chosen(table: registry.Table, *names: str) -> list[Peer]:
    return [peer for peer in peers(table) if peer.name in names]


def stars() -> set[str]:
    """Labs like this module's; other tests may have others at the same time."""
    return {name for name in namespaces.labs() if name.startswith("star2-")}


@pytest.mark.processes
@pytest.mark.privileged("root, for a lab of network namespaces")
@pytest.mark.usefixtures("root")
def test_a_star_has_a_row_for_every_contestant() -> None:
    before = stars()
    found = star(chosen("star", "tcp-agg", "xagg-udp"), "star2", 1 << 20, 1)
    assert [row["system"] for row in found] == ["tcp-agg", "xagg-udp"]
    for made in found:
        assert set(KEYS) <= set(made)
        assert made["link_bps"] == 10**9
        # a shaped link cannot be beaten by more than its bucket holds
        assert made["seconds"] > 0.5 * made["limit_seconds"]
        assert made["server_cpu_s_per_gb"] > 0
        assert made["wire_bytes_per_worker"] > 1 << 20
    assert stars() == before


@pytest.mark.processes
@pytest.mark.privileged("root, for a lab of network namespaces and XDP programs")
@pytest.mark.usefixtures("root")
def test_every_share_of_losses_has_rows_that_count_what_was_lost_and_resent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inanet.bench.loss.SHARES", (0.0, 0.1))
    before = stars()
    quiet, lossy = loss(chosen("loss", "xagg-udp"), "star2", 1 << 20, 2)
    assert (quiet["loss"], quiet["lost"], quiet["resent_per_lost"]) == (0.0, 0, None)
    assert lossy["loss"] == 0.1
    # some 2,000 contributions and as many results, two of whose repetitions are counted
    assert 200 < lossy["lost"] < 1200
    assert lossy["resent_per_lost"] > 0.5
    assert lossy["mean_seconds"] > 0
    assert stars() == before


@pytest.mark.processes
@pytest.mark.privileged("root, for a lab of network namespaces")
@pytest.mark.usefixtures("root")
def test_the_late_worker_of_fig_1_holds_up_everybody(tmp_path: Path) -> None:
    text = find("xagg-fig1-push").read_text().replace("lateness = 2", "lateness = 3")
    (tmp_path / "later.toml").write_text(text)
    (made,) = hetero(chosen("hetero", "switch-sync"), load(tmp_path / "later.toml"), 1 << 19, 1)
    assert (made["system"], made["ratio_to_ps"]) == ("switch-sync", None)
    assert made["late_seconds"] == pytest.approx(3 * made["bytes"] * 8 * 1094 / 1024 / 5e8, rel=0.01)
    # nobody could send ahead of the late one, and W2's link is half as fast; its bucket lets some through at once
    assert made["seconds"] > made["late_seconds"] + 0.5 * made["bytes"] * 8 / 2.5e8


def test_the_paper_compares_with_the_ps_that_was_faster() -> None:
    times = {"ps": [4.0, 3.0], "tcp-agg": [3.5, 5.0], "xagg-udp": [1.0, 1.0]}
    assert faster_server(times) == [3.5, 3.0]
    assert faster_server({"xagg-udp": [1.0]}) == []


def test_json_is_one_object_with_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_table", lambda table, wanted, skipped, left: iter(some_rows()))
    result = CliRunner().invoke(bench, ["compare", "--table", "local", "--json"], catch_exceptions=False)
    printed = json.loads(result.stdout)
    assert (printed["schema"], printed["ok"]) == (compare.SCHEMA, True)
    assert [set(KEYS) <= set(made) for made in printed["rows"]] == [True] * 3
    assert {"name", "value", "least", "most", "met", "short_of_cpu"} <= set(printed["marks"][0])
