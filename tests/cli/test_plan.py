"""``ina plan``: priced candidates, the choice and why, also where the answer is a ring; and the example of docs/planning.md."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from inanet.cli.main import main
from inanet.config.daemons import PsConfig
from inanet.planning.costs import Costs, save

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.fixture(autouse=True)
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement of the machine that the test runs on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def output(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["plan", *arguments]) == status
    return capsys.readouterr().out


def test_a_fast_server_is_chosen_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(output(capsys, "star4-fast-aggregator", "--size", "97 MiB", "--json"))
    assert (report["schema"], report["ok"], report["helps"]) == (1, True, True)
    assert report["chosen"] == "configured trees, unicast"
    # one tensor at 1 Gbit/s, 1094 bytes on the wire for 1024, and exponents, a byte for eight values
    assert report["seconds"] == pytest.approx(97 * 1024 * 1094 * 33 / 32 * 8 / 1e9, rel=0.01)
    assert report["ring_seconds"] == pytest.approx(1.5 * 97 * 2**20 * 8 / 1e9 * 1514 / 1448, rel=0.01)
    assert {row["kind"] for row in report["plans"]} == {"ring", "configured", "colocated", "mixed"}
    assert report["config"]["topology"]["roots"] == ["ps"]
    assert "bound by 1 tensor out of w" in report["reasons"][1]


def test_the_answer_may_be_a_ring(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "star2", "--size", "97 MiB")
    assert re.search(r"^> +\d\.\d+ +1\.00  ring$", text, re.MULTILINE)
    assert "use ring: no plan with aggregation moves less" in text
    report = json.loads(output(capsys, "star2", "--size", "97 MiB", "--json"))
    assert (report["chosen"], report["helps"], report["config"]) == ("ring", False, None)
    assert output(capsys, "star2", "--size", "97 MiB", "--config", status=1).startswith("# use ring")
    assert "exit code 1" in " ".join(output(capsys, "--help").split())


def test_steps_without_much_communication_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "star4-fast-aggregator", "--size", "97 MiB", "--compute", "20 s")
    assert "less than 10%" in text
    assert "configured trees" in text
    assert "less than 10%" not in output(
        capsys, "star4-fast-aggregator", "--size", "97 MiB", "--compute", "1 s"
    )


def test_the_shorthand_takes_rates_of_real_networks(capsys: pytest.CaptureFixture[str]) -> None:
    save(Costs(worker_ns=50.0, sum_ns=50.0, result_ns=30.0))
    report = json.loads(output(capsys, "8x10Gbit/s+1x100Gbit/s", "--size", "500 MB", "--json"))
    assert report["helps"]
    assert report["hosts"] == {"s0": "s0"}
    alone = json.loads(output(capsys, "4x10Gbit/s", "--size", "500 MB", "--json"))
    assert {row["kind"] for row in alone["plans"]} == {"ring", "colocated"}


def test_the_pattern_is_named_for_hosts_with_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("4x100Gbit/s", "--size", "236 MB", "--ranks-per-host", "8", "--inside", "1200 Gbit/s")
    assert "pattern for 8 ranks a host, 1200 Gbit/s within it: parallel-netreduce" in output(capsys, *command)
    pattern = json.loads(output(capsys, *command, "--json"))["pattern"]
    assert (pattern["chosen"], pattern["without_switch"]) == ("parallel-netreduce", "parallel-ring")
    assert (pattern["ranks_per_host"], pattern["every_size"]) == (8, True)
    assert pattern["seconds"].keys() == {"flat-ring", "tencent", "parallel-ring", "parallel-netreduce"}
    assert json.loads(output(capsys, "1x10Gbit/s", "--size", "1 MB", "--json"))["pattern"] is None


def test_explain_shows_everything_with_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    brief = output(capsys, "xagg-fig12", "--size", "10 MiB")
    assert "dearer ones: --explain shows all" in brief
    full = output(capsys, "xagg-fig12", "--size", "10 MiB", "--explain")
    assert "dearer ones" not in full
    assert re.search(r"ring: 1\.71 tensors through the link of slow\d at 400 Mbit/s", full)


@pytest.mark.parametrize(
    "topology", ["two-rack", "star4-two-aggregators", "xagg-fig12", "star4-four-aggregators"]
)
def test_what_it_prints_for_the_ps_is_a_configuration(
    topology: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = tomllib.loads(output(capsys, topology, "--size", "97 MiB", "--config"))
    root = sections["topology"]["roots"][0]
    config = PsConfig.model_validate({"node": {"name": root}, **sections})
    assert config.topology.fabric(root).roots[0] == root


def test_a_measurement_of_this_machine_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not of this machine" in output(capsys, "star4-fast-aggregator", "--size", "97 MiB")
    save(Costs(worker_ns=1e6))
    slow = output(capsys, "star4-fast-aggregator", "--size", "97 MiB", "--explain")
    assert "measured on this machine" in slow
    assert "processors: 99.328 s of work on w0" in slow
    shared = output(capsys, "star4-fast-aggregator", "--size", "97 MiB", "--explain", "--lab")
    assert "cores that all nodes share" in shared


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["star4"], "Missing option '--size'"),
        (["star4", "--size", "much"], "is not a quantity"),
        (["4xfast", "--size", "1 MiB"], "'fast' is not a quantity"),
        (["4x0bit/s", "--size", "1 MiB"], "a link without a rate"),
        (["0x1Gbit/s", "--size", "1 MiB"], "no worker to plan for"),
        (["star4", "--size", "1 MiB", "--inside", "0 bit/s"], "nothing moves at a rate of 0"),
        (["star44", "--size", "1 MiB"], "did you mean 'star4'?"),
        (["star4", "--size", "1 MiB", "--compute", "5"], "'5' has no unit"),
        (["star4", "--size", "0 B"], "a tensor of 0 bytes"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    [(command, shown)] = re.findall(
        r"^```console\n\$ (ina plan [^\n]*)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == shown


def test_a_size_without_a_unit_that_no_packet_would_be_full_of_is_asked_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "star2", "--size", "97"]) == 2
    assert "'97 MiB' perhaps, or '97 B'?" in " ".join(capsys.readouterr().err.split())
