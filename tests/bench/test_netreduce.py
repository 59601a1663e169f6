"""NetReduce against rings: rows and marks of known times; and a ring over two racks of real ina-switches, captured."""

import itertools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inanet.bench import netreduce, registry, star
from inanet.bench.bounds import ROCE, SEGMENT, spliced
from inanet.bench.cli import bench
from inanet.bench.marks import judge
from inanet.bench.peers.rank import Sample, Team
from inanet.bench.registry import Peer
from inanet.bench.rings import ring_stage, ring_team
from inanet.bench.runs import KEYS, Run
from inanet.lab import library, namespaces
from inanet.lab.model import Topology
from inanet.wire.roce import Opcode
from tests.proto.roce.decoding import check_checksums, dissect


def runs(*seconds: float) -> list[Run]:
    return [Run(Sample(each, 1.0, 0.5), 0.5) for each in seconds]


def some_rows() -> list[dict[str, Any]]:
    times = {
        "netreduce": runs(2.8, 3.0, 2.8),
        "ring": runs(4.4, 4.4, 8.0),
        "gloo": runs(4.2, 18.0, 18.0),
        "gloo-bridged": runs(4.8, 4.0, 5.6),
    }
    return netreduce.rows_of(library.topology("ring4"), netreduce.SIZE, times)


def test_netreduce_is_held_against_the_fastest_ring_of_each_repetition() -> None:
    mine, plain, gloo, _ = some_rows()
    assert set(KEYS) <= set(mine)
    assert mine["ratio_to_ring"] == pytest.approx(1.4 / 2.1)  # of 1.4/2.1, 1.5/2.0, 1.4/2.8
    assert mine["ratios"]["gloo-bridged"] == pytest.approx(1.4 / 2.4)
    limit = netreduce.SIZE * 1082 / 1024 * 8 / 25e6
    assert spliced(library.topology("ring4"), netreduce.SIZE) == pytest.approx(limit)
    assert mine["line_fraction"] == pytest.approx(limit / 2.8)
    # 2(n - 1)/n tensors, of RoCE packets or TCP segments
    assert plain["limit_seconds"] == pytest.approx(1.5 * limit)
    assert gloo["limit_seconds"] == pytest.approx(1.5 * limit * SEGMENT / ROCE)
    assert "ratio_to_ring" not in gloo


def test_marks_are_the_papers() -> None:
    judged = judge(netreduce.MARKS, some_rows())
    assert [(mark["met"], mark["least"], mark["most"]) for mark in judged] == [
        (True, None, 0.70),
        (True, 0.93, None),
        (None, None, 0.62),
        (None, 0.93, None),
    ]


def test_every_line_is_a_row_or_a_comment() -> None:
    result = {
        "cores": 2,
        "load": 0.5,
        "rows": some_rows(),
        "marks": judge(netreduce.MARKS, []),
        "capture": "f",
    }
    lines = list(netreduce.table(result))
    assert len([line for line in lines if not line.startswith("#")]) == 4
    assert "# packets of rank 0: f" in lines


def test_a_capture_is_of_one_lab() -> None:
    result = CliRunner().invoke(bench, ["netreduce", "--pcap", "x.pcap"])
    assert result.exit_code == 2
    assert "say which with one --topology" in result.output


def test_a_star_has_netreduce_in_a_lab_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's lab has the kernel's bridge, NetReduce's an ina-switch; the counters of both are what the worker sent."""
    names: list[str] = []

    class Stage:
        topology, world = library.topology("star2"), 2

        def __init__(self, kind: str) -> None:
            self.kind = kind

        def sent(self) -> int:
            return 100 * names.count(self.kind)

    class Timed(Team):
        def run(self, size: int, deadline: float = 0.0, late: Any = ()) -> Sample:
            names.append("ina" if self.name == "netreduce" else "bridge")
            return Sample(3.0 if self.name == "netreduce" else 4.0, 1.0, 0.5)

    def start(name: str) -> Any:
        def begin(stage: Any) -> Team:
            assert stage.kind == ("ina" if name == "netreduce" else "bridge")
            return Timed(name, [])

        return begin

    monkeypatch.setattr(star, "lab_stage", lambda name: nullcontext(Stage("bridge")))
    monkeypatch.setattr(star, "ring_stage", lambda name: nullcontext(Stage("ina")))
    monkeypatch.setattr(
        star, "started", lambda mine, stage: nullcontext({p.name: p.start(stage) for p in mine})
    )
    peers = [Peer("netreduce", (), start("netreduce"), "spliced"), Peer("gloo", (), start("gloo"), "ring")]
    mine, gloo = star.star(peers, "star2", 1000, 2)
    assert (mine["system"], gloo["system"]) == ("netreduce", "gloo")
    assert (mine["ratio_to_gloo"], mine["wire_bytes_per_worker"]) == (0.75, 100)
    assert mine["limit_seconds"] == pytest.approx(1000 * ROCE * 8 / 1e9)
    assert [peer.name for peer in registry.peers("star")].count("netreduce") == 1


@pytest.fixture
def root() -> None:
    """Skips without the privileges that a lab needs; fails instead where the run promises to have them."""
    try:
        namespaces.require_privileges()
    except namespaces.Unprivileged as error:
        if os.environ.get("INA_REQUIRE_PRIVILEGED") == "1":
            pytest.fail(f"INA_REQUIRE_PRIVILEGED=1, but {error}")
        pytest.skip(str(error))


def two_hosts(topology: Topology) -> Topology:
    """The same switches with a host on each leaf, without rates."""
    hosts = tuple(host.model_copy(update={"count": 1}) for host in topology.host)
    return topology.model_copy(update={"host": hosts, "link": type(topology.link)()})


@pytest.mark.processes
@pytest.mark.privileged("root, for a lab of network namespaces")
@pytest.mark.usefixtures("root")
def test_two_racks_of_ina_switches_sum_and_both_decoders_read_what_was_captured(tmp_path: Path) -> None:
    capture = tmp_path / "ring.pcap"
    with ring_stage(two_hosts(library.topology("ring-racks"))) as stage:
        addresses = [stage.lab.alias(place.host, 1) for place in stage.places]
        team = ring_team(stage, "netreduce", "switch", capture)
        try:
            team.wait_ready(120)
            sample = team.run(300_000, 120)  # raises if a sum is wrong
        finally:
            team.close()
        switches = stage.switches
    assert sample.served > 0
    figures = switches.stats()
    spine, leaves = figures["spine"]["programs"]["netreduce"], [figures[f"leaf{i}"] for i in range(2)]
    assert (spine["contributions"], spine["emitted"]) == (2 * spine["completed"], 0)
    for leaf in leaves:
        assert leaf["programs"]["netreduce"]["contributions"] == spine["completed"] > 0
        assert leaf["programs"]["netreduce"]["notices"] > 0
    assert stage.lab.name not in namespaces.labs()
    opcodes = check_checksums(capture)
    assert {Opcode.WRITE_FIRST, Opcode.WRITE_MIDDLE, Opcode.WRITE_LAST_IMMEDIATE} <= set(opcodes)
    rows = dissect(
        capture,
        "_ws.malformed",
        "_ws.expert.severity",
        "ip.src",
        "infiniband.bth.opcode",
        "infiniband.bth.psn",
    )
    assert len(rows) == len(opcodes)
    assert all(row[0] == "" and row[1] == "" for row in rows)
    sent, received = (
        [int(row[4]) for row in rows if row[2] == address and int(row[3]) < Opcode.ACKNOWLEDGE]
        for address in (addresses[0], addresses[-1])
    )
    # one by one, or back
    assert max(after - first for first, after in itertools.pairwise(sent)) == 1
    # a busy machine may have lost some on the way, which came again
    assert set(received) == set(range(min(received), max(received) + 1))
