"""``ina check``: any daemon's file, as text and as JSON."""

import json
from pathlib import Path

import pytest

from inanet.cli.main import main
from inanet.config.daemons import PROGRAMS, Role
from inanet.trust import authority

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("role", PROGRAMS)
def test_shipped_files_are_recognised(role: Role, capsys: pytest.CaptureFixture[str]) -> None:
    file = CONFIGS / f"{role}.toml"
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: a valid configuration for {PROGRAMS[role]}\n"
    assert main(["check", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["ok"], report["role"], report["errors"]) == (1, True, role, [])
    if role == "switch":
        assert report["config"]["switch"]["sample"] == "100 ms"
    elif role == "manager":
        assert report["config"]["planning"]["tensor"] == "100 MiB"
    else:
        assert report["config"]["timing"]["retransmit"] == "20 ms"


def test_a_sparse_job_is_recognised_with_a_coordinator_or_with_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = CONFIGS / "sparse.toml"
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: a valid sparse job for inanet.join_sparse\n"
    file = tmp_path / "job.toml"
    file.write_text(
        '[job]\nsecret = "00112233445566ff"\nworkers = ["10.0.0.1:4000"]\nshards = ["10.0.0.9"]\n'
    )
    assert main(["check", str(file), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["role"], [error["key"] for error in report["errors"]]) == ("job", ["job.shards"])


def test_a_ps_under_a_manager_looks_like_an_aggregator_but_for_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, says in (
        ("ps", "ina-ps"),
        ("agg", "ina-agg"),
        ("a0", "ina-agg"),
        ("ps1", "ina-ps"),
        ("node7", "ina-agg or ina-ps: give --role"),
    ):
        file = tmp_path / f"{name}.toml"
        file.write_text('[control]\ncoordinator = "unix:/run/ina.sock"\n')
        assert main(["check", str(file)]) == 0
        assert capsys.readouterr().out == f"{file}: a valid configuration for {says}\n"
    assert main(["check", str(file), "--role", "ps"]) == 0
    assert capsys.readouterr().out == f"{file}: a valid configuration for ina-ps\n"


def test_a_certificate_for_something_else_is_a_mistake_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file that may be of one of two daemons, one for neither is."""
    authority.initialise(tmp_path, 1)
    file = tmp_path / "node.toml"

    def check(own: Path) -> int:
        keys = f'ca_file = "{tmp_path}/ca.pem"\nkey_file = "{own}"\n'
        file.write_text(f'[node]\nname = "n0"\n[control]\ncoordinator = "10.0.0.1:7400"\n{keys}')
        return main(["check", str(file), "--json"])

    for name, roles, said in (
        ("n1", ("ps",), "its certificate is that of n1, not of 'n0'"),
        ("n0", ("worker",), "its certificate lets it be worker, not to be aggregator"),
    ):
        assert check(authority.issue(tmp_path, name, roles=roles, days=1)) == 2
        (error,) = json.loads(capsys.readouterr().out)["errors"]
        assert error["key"] == "control.key_file"
        assert said in error["what"]
    (tmp_path / "n0.pem").unlink()
    assert check(authority.issue(tmp_path, "n0", roles=("ps",), days=1)) == 0


@pytest.mark.parametrize("file", sorted((CONFIGS / "lab").glob("*.toml")), ids=lambda file: file.stem)
def test_files_of_networks_are_recognised(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: a valid network for ina lab and ina plan\n"
    assert main(["check", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["role"], report["config"]["name"]) == (True, "network", file.stem)


def test_errors_of_a_network_are_those_of_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text('name = "x"\nsummary = "x"\n[[switch]]\nname = "s"\n[[host]]\nname = "h"\nswitch = "t"\n')
    assert main(["check", str(file)]) == 2
    assert "host 'h': there is no switch 't'; allowed: s" in capsys.readouterr().err
    file.write_text('name = "x"\nsummary = "x"\n[[switch]]\nname = "s"\n')
    assert main(["check", str(file)]) == 2
    assert "at least one [[host]]" in capsys.readouterr().err


def test_another_role_finds_the_sections_foreign(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(CONFIGS / "worker.toml"), "--role", "agg", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["role"] == "agg"
    assert [error["key"] for error in report["errors"]] == ["local"]
    assert "only ina-worker has it" in report["errors"][0]["what"]


def test_all_errors_are_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[control]\ncoordinator = "h:x"\nheartbeat = "1"\n')
    assert main(["check", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(": ")[1] for line in captured.err.splitlines()] == [
        "control.heartbeat",
        "control.coordinator",
    ]


@pytest.mark.parametrize(
    ("name", "says"), [("nosuch.toml", "no such file; searched"), ("", "is a directory")]
)
def test_no_file_no_traceback(
    tmp_path: Path, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / name), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert says in report["errors"][0]["what"]


def test_a_file_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.toml"
    file.touch()

    def refuse(path: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert main(["check", str(file), "--json"]) == 4
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["errors"][0]["what"] == f"permission denied: {file}: Permission denied"


def test_a_file_without_telling_sections_is_for_whom_it_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[node]\nname = "n"\n')
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: a valid configuration for ina-manager\n"
    file.write_text('[node]\nname = "n"\nlisten = 3\n')
    assert main(["check", str(file)]) == 2
    assert "cannot tell which daemon this file is for" in capsys.readouterr().err
