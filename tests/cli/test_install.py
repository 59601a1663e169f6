"""'ina install' lays down what a service needs, says so, and refuses before it changes anything."""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from inanet.cli import installation
from inanet.cli.install import install, uninstall
from inanet.cli.installation import CONFIG, UNITS, Environment, unreachable
from inanet.cli.main import main
from inanet.config.daemons import PROGRAMS, Role, load
from inanet.trust import authority

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Programs where a unit can reach them, and a systemctl that says what it was told."""
    programs = tmp_path / "environment" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    for program in (programs / "ina", tmp_path / "tools" / "systemctl"):
        program.write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/told\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/tools:{os.environ['PATH']}")
    found = Environment(programs, Path("/usr/bin/env"), ())
    monkeypatch.setattr(Environment, "own", classmethod(lambda cls: found))
    monkeypatch.setattr("socket.gethostname", lambda: "h7.example")
    return found


def installs(root: Path, *arguments: str) -> Result:
    """What 'ina install' does below a folder."""
    return CliRunner().invoke(install, ["--prefix", str(root), "--no-kernels", *arguments])


def config(root: Path, role: Role) -> dict[str, dict[str, object]]:
    """A role's file."""
    return tomllib.loads((root / CONFIG / f"{role}.toml").read_text())


def test_a_worker_is_laid_down_with_its_answers(tmp_path: Path, environment: Environment) -> None:
    root = tmp_path / "root"
    answers = ("worker", "--coordinator", "127.0.0.1", "--listen", "lo", "--name", "w3")
    shown = installs(root, *answers, "--dry-run")
    assert (shown.exit_code, root.exists()) == (0, False)
    assert [line.removeprefix("would ") for line in shown.output.splitlines()] == (
        done := installs(root, *answers)
    ).output.splitlines()
    assert done.exit_code == 0, done.output
    found = config(root, "worker")
    assert (found["node"]["name"], found["node"]["listen"]) == ("w3", "lo:7420")
    assert found["control"] == {"coordinator": "127.0.0.1"}
    unit = (root / UNITS / "ina-worker.service").read_text()
    assert f"ExecStart={environment.programs}/ina-worker --config %E/inanet/worker.toml" in unit
    assert (root / "usr/local/bin/ina").readlink() == environment.programs / "ina"
    assert (tmp_path / "told").read_text().endswith(f"systemctl --root={root} enable ina-worker.service\n")


def test_a_second_time_changes_answers_and_nothing_else(tmp_path: Path) -> None:
    installs(tmp_path / "root", "worker", "--coordinator", "127.0.0.1")
    file = tmp_path / "root" / CONFIG / "worker.toml"
    file.write_text(file.read_text().replace('mode = "0666"', 'mode = "0600"  # mine'))
    again = installs(tmp_path / "root", "worker", "--listen", "127.0.0.1:9000")
    assert again.output.splitlines()[0] == f"change {file} (mode 0644)"
    assert len(again.output.splitlines()) == 2, "and systemctl enable"
    assert 'mode = "0600"  # mine' in file.read_text()
    assert config(tmp_path / "root", "worker")["node"] == {"name": "h7", "listen": "127.0.0.1:9000"}


def test_a_host_with_a_whole_fabric_finds_its_own_coordinator(tmp_path: Path) -> None:
    root = tmp_path / "root"
    workers = ("--worker", "h7-worker", "--worker", "w1:h7-ps", "--aggregator", "h7-agg")
    done = installs(root, "ps", "agg", "worker", "--listen", "lo", *workers)
    assert done.exit_code == 0, done.output
    assert config(root, "ps")["control"]["listen"] == "127.0.0.1:7400"
    assert config(root, "ps")["topology"] == {
        "aggregators": [{"name": "h7-agg", "parent": "h7-ps"}],
        "workers": [{"name": "h7-worker", "parent": "h7-agg"}, {"name": "w1", "parent": "h7-ps"}],
    }
    assert config(root, "agg")["control"]["coordinator"] == "127.0.0.1:7400"
    ports = {config(root, role)["node"]["listen"] for role in ("ps", "agg", "worker")}
    assert ports == {"lo:7420", "lo:7421", "lo:7422"}


def test_under_a_manager_a_server_has_no_trees(tmp_path: Path) -> None:
    done = installs(tmp_path / "root", "ps", "switch", "--coordinator", "127.0.0.1")
    assert done.exit_code == 0, done.output
    assert "topology" not in config(tmp_path / "root", "ps")
    assert config(tmp_path / "root", "ps")["control"] == {"coordinator": "127.0.0.1"}
    assert "jobs" not in str(config(tmp_path / "root", "switch"))


def test_certificates_come_with_their_node(tmp_path: Path) -> None:
    authority.initialise(tmp_path / "keys", 1)
    authority.issue(tmp_path / "keys", "a0", roles=("aggregator",), days=1)
    root = tmp_path / "root"
    arguments = ("agg", "--coordinator", "192.0.2.1", "--keys", str(tmp_path / "keys"))
    refused = CliRunner().invoke(install, ["--prefix", str(root), *arguments], catch_exceptions=True)
    assert "h7.pem: no such file: make it with 'ina keys issue" in str(refused.exception)
    assert not root.exists(), "nothing was changed"
    done = installs(root, *arguments, "--name", "a0")
    assert done.exit_code == 0, (done.output, done.exception)
    key = root / CONFIG / "agg.pem"
    assert (key.stat().st_mode & 0o777, (root / CONFIG / "ca.pem").stat().st_mode & 0o777) == (0o600, 0o644)
    os.environ["CREDENTIALS_DIRECTORY"] = str(root / CONFIG)
    try:
        assert load(root / CONFIG / "agg.toml", "agg").control.tls_keys() is not None
    finally:
        del os.environ["CREDENTIALS_DIRECTORY"]
    assert "LoadCredential=agg.pem:%E/inanet/agg.pem" in (root / UNITS / "ina-agg.service").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("agg",), "ina-agg needs a coordinator: give --coordinator HOST"),
        (("ps",), "who trains? Give --worker NAME"),
        (("worker", "--listen", "nowhere0"), "--listen: 'nowhere0' is neither an interface"),
        (("worker", "--coordinator", "192.0.2.1"), "open to other machines"),
        (("worker", "ps", "--name", "a", "--worker", "a"), "--name is of one daemon"),
        (("worker", "--coordinator", "no-such-host.invalid"), "control.coordinator: "),
    ],
)
def test_refusals(
    tmp_path: Path, arguments: Sequence[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    assert main(["install", "--prefix", str(root), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not root.exists()


def test_a_name_that_is_loopback_here_is_no_address_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [(2, 2, 17, "", ("127.0.1.1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *given: answers)
    done = installs(tmp_path / "root", "worker", "--listen", "h7")
    assert "h7 is 127.0.1.1 on this host, a loopback address that no other machine reaches" in str(
        done.exception
    )


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/home/ann/.pyenv/bin/python", r"ProtectHome=yes"),
        ("/root/.pyenv/versions/3.11/bin/python", r"ProtectHome=yes"),
        ("/tmp/venv/bin/python", r"PrivateTmp=yes"),
        ("/usr/nowhere/python", "missing"),
    ],
)
def test_what_units_cannot_reach_is_told(place: str, reason: str) -> None:
    assert reason in (unreachable(Path(place)) or "")


def test_a_folder_that_is_closed_to_others_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_HIDDEN", {})
    program = tmp_path / "closed" / "python"
    program.parent.mkdir(mode=0o700)
    program.touch(0o755)
    assert unreachable(program) == f"closed to other users (mode 0700 of {program.parent})"
    assert unreachable(Path("/usr/bin/env")) is None


def test_an_interpreter_that_units_cannot_reach_refuses_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = Environment(Path("/home/a/bin"), Path("/home/a/bin/python"), (Path("/home/a/bin/python"),))
    monkeypatch.setattr(Environment, "own", classmethod(lambda cls: hidden))
    done = installs(tmp_path / "root", "worker")
    assert "make an environment with an interpreter of the system" in str(done.exception)
    assert not (tmp_path / "root").exists()


def test_everything_goes_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    installs(root, "worker", "manager")
    one = CliRunner().invoke(uninstall, ["--prefix", str(root), "manager"])
    assert one.output.splitlines()[-1] == f"kept in {root / CONFIG}: manager.toml, worker.toml"
    assert installation.installed(root) == ["worker"]
    all_ = CliRunner().invoke(uninstall, ["--prefix", str(root), "--purge"])
    assert all_.exit_code == 0, all_.output
    assert [path for path in root.rglob("*") if not path.is_dir()] == []


def test_the_package_has_the_files_of_all_roles() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    here = Path(installation.__file__).parent.relative_to(ROOT)
    assert packed["systemd"] == f"{here}/host/systemd"
    for role in PROGRAMS:
        assert packed[f"configs/{role}.toml"] == f"{here}/host/configs/{role}.toml"
