"""``ina bench switch``: rows that are right, and what is said about those that cannot be had."""

import json

import pytest
from click.testing import CliRunner

from inanet.bench import switch
from inanet.bench.cli import bench
from inanet.bench.switch import run, table
from inanet.bench.switch_loads import FRAGMENTS, LOADS, Rounds
from tests.phy.conftest import lacking

KEYS = {"program", "phy", "gbps", "ns_per_fragment", "wall_gbps", "rounds"}


def test_rows_without_privileges() -> None:
    output = CliRunner().invoke(bench, ["switch", "--only", "-64 ", "--seconds", "0.01", "--json"])
    result = json.loads(output.stdout)
    assert result["schema"] == 1
    assert result["wrong"] == {}
    assert output.exit_code == 0
    rows = {row["phy"]: row for row in result["rows"]}
    assert {"kernel", "udp"} <= rows.keys()
    for row in rows.values():
        assert row.keys() >= KEYS
        assert row["program"] == "switchml-64"
        bits = 64 * 32
        assert row["gbps"] == pytest.approx(bits / row["ns_per_fragment"])
    assert [mark["met"] for mark in result["marks"]] == [None] * 4
    lines = list(table(result))
    assert all(line.startswith(("#", "  switchml-64 ")) for line in lines)


@pytest.mark.privileged("CAP_NET_RAW, and CAP_SYS_ADMIN for namespaces")
def test_rows_of_frames() -> None:
    for only in ("forward", "a2tp-62 packet", "a2tp-62 ring"):
        result = run(0.01, only)
        if result["lacking"]:
            lacking(str(result["lacking"]))
        assert result["wrong"] == {}
        (row,) = result["rows"]
        assert f"{row['program']} {row['phy']}".startswith(only)
        assert row["gbps"] > 0
        assert sum(mark["met"] is not None for mark in result["marks"]) == 1


def test_a_wrong_sum_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "SUM", 11)
    result = run(0.01, "switchml-64 kernel")
    assert (result["ok"], result["rows"]) == (False, [])
    assert result["wrong"]["switchml-64 kernel"].startswith("a sum is not 11: ")
    assert list(table(result))[2].startswith("# switchml-64 kernel: a sum is not 11")


def test_what_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "making a network namespace needs root")

    monkeypatch.setattr(switch, "forward", refuse)
    result = run(0.01, "forward")
    assert result["lacking"] == {"forward packet": "[Errno 1] making a network namespace needs root"}
    assert not result["ok"]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_rounds_are_numbered_on(load: switch.Load) -> None:
    rounds = Rounds(load)
    first, second = rounds.next(), rounds.next()
    number = "packet_id" if load.system == "switchml" else "seq"
    assert first[0][number].tolist() == list(range(FRAGMENTS))
    assert second[3][number].tolist() == list(range(FRAGMENTS, 2 * FRAGMENTS))
    assert (second[3]["values"] == 4).all()
