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


def test_every_stage_of_every_submodel_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"{1000 + 40 * n} kB" for n in range(9)]
    arguments = [
        "plan",
        "goat-testbed",
        "--layers",
        ", ".join(sizes),
        "--scheduler",
        "krgs",
        "--registers",
        "2 MB",
    ]
    assert main([*arguments, "--explain", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == sum((1000 + 40 * n) * 1000 for n in range(9))
    torn = 0
    for part in report["submodels"]:
        x = part["fraction"]
        torn += any(0 < value < 1 for value in x.values())
        assert part["required"] == int(sum(x.values()) + 1e-6)
        assert part["knapsack"].keys() == part["workers"].keys() == {name for name in x if x[name] > 0}
        assert all(part["workers"][name] <= x[name] + 1e-9 for name in part["workers"])
        assert set(part["rounded"]) <= part["knapsack"].keys()
        assert len(part["rounded"]) <= part["required"]
    # memory binds, so that there is something to round
    assert torn
    assert report["lp_bound"] <= report["lp_value"] * (1 + 1e-9)
    assert main([*arguments, "--explain"]) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if line.startswith("layer8[0]: "))
    assert "; x " in line
    assert "; k " in line
    assert "; rounded to " in line
    assert "; now " in line


def test_the_papers_networks_and_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "leaf-spine:12",
        "--layers",
        "alexnet",
        "--scheduler",
        "krgs",
        "--seed",
        "2",
        "--json",
    ]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == 244_403_360
    (end,) = {sum(len(its["workers"]) for its in part["nodes"].values()) for part in report["submodels"]}
    assert end == 12
    # nobody goes to the PS with what could be summed on the way
    assert main([*arguments, "--spare-ps", "1"]) == 0
    spared = json.loads(capsys.readouterr().out)
    assert spared["ps_bytes_not_aggregated"] <= report["ps_bytes_not_aggregated"]
    assert report["cost"] <= spared["cost"] <= 1.05 * report["cost"]
    assert main(["plan", "leaf-spine:50", "--size", "1 MB", "--scheduler", "krgs"]) == 2
    assert "51 servers; the topology has 50" in capsys.readouterr().err


class _Parameter:
    def numel(self) -> int:
        return 1000


class _Net:
    def named_parameters(self) -> list[tuple[str, _Parameter]]:
        return [("a", _Parameter()), ("b", _Parameter())]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("4 MB,x", "'x'"),
        ("3", "positive multiples of 4"),
        ("no.such.module:net", "no"),
        ("tests.cli.test_krgs:json", "neither a model"),
    ],
)
def test_layers_that_are_none_are_usage_errors(
    layers: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "goat-testbed", "--layers", layers, "--scheduler", "krgs"]) == 2
    assert message in capsys.readouterr().err


def test_layers_of_a_model_that_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "goat-testbed",
        "--layers",
        "tests.cli.test_krgs:_Net",
        "--scheduler",
        "krgs",
        "--json",
    ]
    assert main(arguments) == 0
    parts = json.loads(capsys.readouterr().out)["submodels"]
    assert [(part["name"], part["bytes"]) for part in parts] == [("a", 4000), ("b", 4000)]


@pytest.mark.parametrize("more", [[], ["--scheduler", "krgs"], ["--layers", "alexnet"]])
def test_size_or_layers_are_needed(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "goat-testbed", *more]) == 2
    assert "--size" in capsys.readouterr().err
