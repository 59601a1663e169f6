"""``ina plan --scheduler krgs``."""

import json

import pytest

from inanet.cli.main import main


def test_the_schedule_of_a_topology_with_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "goat-testbed", "--size", "44 MB", "--scheduler", "krgs", "--registers", "20 MB"]
    assert main([*arguments, "--explain", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["scheduler"], report["ps"], report["bytes"]) == ("krgs", "ps", 44_000_000)
    assert report["lp_bound"] <= report["cost"] < report["without_aggregation"]
    ends = 0
    used: dict[str, int] = {}
    for part in report["submodels"]:
        assert part["start"] == ends
        ends += part["bytes"]
        assert sum(len(node["workers"]) for node in part["nodes"].values()) == 8
        assert part["fraction"].keys() == {"s1", "s2", "s3"}
        for name, node in part["nodes"].items():
            assert (node["base"] is None) == (name == "ps")
            used[name] = used.get(name, 0) + part["bytes"] * (name != "ps")
    assert ends == 44_000_000
    assert max(used.values()) <= 20_000_000
    assert main([*arguments, "--explain"]) == 0
    assert "s1: " in capsys.readouterr().out


def test_fewer_switches_cost_more(capsys: pytest.CaptureFixture[str]) -> None:
    costs = []
    for chosen in ([], ["--programmable", "s1"]):
        arguments = ["plan", "goat-testbed", "--size", "44 MB", "--scheduler", "krgs", "--registers", "20 MB"]
        assert main([*arguments, *chosen, "--json"]) == 0
        costs.append(json.loads(capsys.readouterr().out)["cost"])
    assert costs[0] < costs[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--programmable", "s9"], "s9: no such switch"), (["--registers", "1 kB"], "at least 2048 B")],
)
def test_what_cannot_be_scheduled_is_a_usage_error(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "goat-testbed", "--size", "1 MB", "--scheduler", "krgs", *more]) == 2
    assert message in capsys.readouterr().err
