"""``ina lab`` as a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inanet.cli.main import main
from inanet.lab import cli, namespaces
from inanet.lab.layout import namespace
from inanet.lab.model import Topology
from inanet.service.exits import Exit

DEADLINE = 100.0
#: All-reduces 1 MiB and prints a digest of the result and of one that came before.
RANK = """
import hashlib, os
import numpy as np
import inanet

rank = int(os.environ["RANK"])
tensor = np.random.default_rng(rank).standard_normal(1 << 18, dtype=np.float32)
with inanet.connect("digest", timeout=60) as job:
    job.all_reduce(tensor)
    counts = job.all_reduce(np.full(1000, rank + 1, np.int32))
print("digest", hashlib.sha256(tensor).hexdigest(), int(counts.min()), int(counts.max()))
"""


@pytest.fixture
def file(pair: Topology, tmp_path: Path) -> str:
    """Path of the file that ``pair`` was read from."""
    return str(tmp_path / "topology.toml")


def no_privileges() -> None:
    raise namespaces.Unprivileged("making one was refused: run it as root")


@pytest.mark.parametrize("arguments", [["up", "star2"], ["down", "star2"], ["run", "star2", "--", "true"]])
def test_without_privileges_it_says_so_and_ends_with_4(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(namespaces, "require_privileges", no_privileges)
    assert main(["lab", *arguments]) == 4
    assert "run it as root" in capsys.readouterr().err


def test_the_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted", name)

    monkeypatch.setattr(namespaces, "_call", refuse)
    with pytest.raises(namespaces.Unprivileged, match=r"sudo ina lab .*CAP_SYS_ADMIN.*'ina demo'"):
        namespaces.require_privileges()


def test_list_shows_topologies_without_privileges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["ok"]) == (cli.SCHEMA, True)
    (star,) = [one for one in shown["topologies"] if one["name"] == "star4"]
    assert (star["hosts"], star["ranks"]) == (5, 4)
    assert main(["lab", "list"]) == 0
    assert "star4 " in capsys.readouterr().out


def test_wrong_files_and_command_lines_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text('name = "bad"\nsummary = 1\n')
    assert main(["lab", "up", str(tmp_path / "bad.toml")]) == 2
    err = capsys.readouterr().err
    assert "summary: 1 is not allowed" in err
    assert "switch: missing" in err
    for arguments in (
        ["up", "star3"],
        ["up", "star2", "--name", "no.dots"],
        ["down"],
        ["down", "star2", "--all"],
        ["run", "star2", "--"],
        ["run", "--set", "memory=1", "star2", "true"],
    ):
        assert main(["lab", *arguments]) == 2, arguments


@pytest.mark.parametrize(
    ("up", "down", "shown"),
    [
        (10**9, 10**9, "1 Gbit/s"),
        (None, None, "not limited"),
        (10**9, None, "up 1 Gbit/s, down not limited"),
    ],
)
def test_a_host_shows_its_rate_or_both(up: int | None, down: int | None, shown: str) -> None:
    assert cli._rates({"rate_bps": up, "down_bps": down}) == shown


def test_settings_are_toml_or_plain_text() -> None:
    settings = ("node.memory=2 GiB", 'log.level="debug"', "impair.drop=0.1", "node.transport=rawip")
    assert cli._overrides(settings) == {
        "node": {"memory": "2 GiB", "transport": "rawip"},
        "log": {"level": "debug"},
        "impair": {"drop": 0.1},
    }


@pytest.mark.privileged("network namespaces")
def test_up_twice_and_down(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["lab", "up", file, "--name", name, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["lab"] == name
        assert shown["hosts"][0] == {
            "name": "ps",
            "role": "ps",
            "address": "10.201.0.1",
            "rate_bps": 800_000_000,
            "down_bps": 800_000_000,
            "namespace": namespace(name, "ps"),
        }
    assert main(["lab", "list"]) == 0
    assert f"up: {name} (4 namespaces" in capsys.readouterr().out
    assert main(["lab", "run", "--name", name, file, "true"]) == 2
    assert f"ina lab down {name}" in capsys.readouterr().err
    assert main(["lab", "down", name]) == 0
    assert main(["lab", "down", name, "--name", name]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: 4 namespaces removed",
        f"{name}: was not up",
    ]


def test_a_lab_that_is_gone_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(namespaces, "labs", dict)
    assert main(["lab", "down", "nu2"]) == 1
    assert capsys.readouterr().err == "ina: no lab nu2 is up ('ina lab list' shows those that are)\n"
    assert main(["lab", "down", "./nu2.toml"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.privileged("network namespaces")
def test_ctrl_c_takes_everything_down(name: str, file: str) -> None:
    command = [sys.executable, "-m", "inanet.cli.main", "lab", "run", "--network-only", "--name", name, file]
    with subprocess.Popen(
        [*command, "--", "sh", "-c", "echo up; exec sleep 1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert b"] up" in running.stdout.readline()
        running.send_signal(2)
        _, errors = running.communicate(timeout=DEADLINE)
    assert running.returncode == Exit.INTERRUPTED
    assert b"SIGINT: every process of the lab was ended and the lab removed" in errors
    assert name not in namespaces.labs()


@pytest.mark.processes
@pytest.mark.privileged("network namespaces")
def test_ranks_reduce_through_daemons_of_their_hosts(name: str, file: str, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "inanet.cli.main", "lab", "run", "--name", name, file, "--"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " digest " in line]
    assert sorted(line[0] for line in lines) == ["[0@w0]", "[1@w1]"]
    assert lines[0][1:] == lines[1][1:]
    assert lines[0][3:] == ["3", "3"]
    assert name not in namespaces.labs()
