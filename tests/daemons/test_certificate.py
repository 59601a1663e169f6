"""A daemon whose certificate is for something else says so, and does not start."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from daemons._chassis import command
from inanet.config.certificate import check, problems
from inanet.config.daemons import Role, load
from inanet.service.exits import Exit
from inanet.trust import authority
from inanet.trust.certificates import KeyFileError, WrongCertificate
from tests.daemons.processes import PATIENCE, ROOT

CALLS = 'coordinator = "127.0.0.1:1"'
TOPOLOGY = '[topology]\nworkers = [{ name = "w0", parent = "n0" }]\n'
#: What each role's file has in ``[control]``, and besides.
FILES: dict[Role, tuple[str, str]] = {
    "worker": (CALLS, '[local]\nsocket = "/run/none.sock"\n'),
    "agg": (CALLS, ""),
    "ps": ('listen = "127.0.0.1:0"', TOPOLOGY),
    "switch": (CALLS, '[switch]\n[[switch.programs]]\nsystem = "atp"\nmemory = "1 MB"\n'),
    "manager": ('listen = "127.0.0.1:0"', ""),
}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    authority.initialise(tmp_path, 1)
    return tmp_path


async def started(config: object, context: object) -> None:
    """A daemon that must not be started."""
    raise AssertionError("started")


def written(keys: Path, role: Role, own: Path, control: str = "", rest: str = "") -> Path:
    """The file of the node n0 with this certificate."""
    its = FILES[role]
    file = keys / f"{role}.toml"
    file.write_text(
        f'[node]\nname = "n0"\n[control]\n{control or its[0]}\n'
        f'ca_file = "{keys / "ca.pem"}"\nkey_file = "{own}"\n{rest or its[1]}'
    )
    return file


def checked(keys: Path, role: Role, own: Path, control: str = "", rest: str = "") -> None:
    check(role, load(written(keys, role, own, control, rest), role))


@pytest.mark.parametrize(
    ("role", "roles", "coordinator", "says", "makes"),
    [
        ("ps", ("worker", "status"), False, "the certificate of n0 lets it be status, worker, not to coordinate", "--coordinator"),
        ("ps", ("ps",), False, "lets it be ps, not to coordinate", "--coordinator"),
        # it is a node like all others as well
        ("ps", ("status",), True, "its certificate lets it be status, not to be ps", "--coordinator"),
        ("manager", ("ps", "status"), False, "lets it be ps, status, not to coordinate", "--coordinator"),
        ("worker", ("aggregator",), False, "lets it be aggregator, not to be worker", "--role worker,status"),
        ("agg", ("worker",), False, "lets it be worker, not to be aggregator", "--role aggregator,status"),
        ("switch", ("worker",), False, "lets it be worker, not to be switch", "--role switch,status"),
        ("agg", (), True, "names no role", "--role aggregator,status"),
    ],
)  # fmt: skip
def test_another_role_is_refused_with_the_command_that_makes_the_right_one(
    keys: Path, role: Role, roles: tuple[str, ...], coordinator: bool, says: str, makes: str
) -> None:
    own = authority.issue(keys, "n0", roles=roles, coordinator=coordinator, days=1)
    with pytest.raises(WrongCertificate) as caught:
        checked(keys, role, own)
    assert caught.value.code is Exit.USAGE
    assert str(caught.value).startswith(f"ina-{role} 'n0' does not start with {own}: ")
    assert says in str(caught.value)
    assert f"'ina keys issue DIRECTORY n0 {makes}' makes the right one" in str(caught.value)


@pytest.mark.parametrize("role", FILES)
def test_the_right_role_starts(keys: Path, role: Role) -> None:
    coordinator = role in ("ps", "manager")
    called = {"agg": "aggregator", "manager": "ps"}.get(role, role)
    own = authority.issue(keys, "n0", roles=(called,), coordinator=coordinator, days=1)
    checked(keys, role, own)


def test_another_nodes_certificate_and_one_that_nobody_takes(keys: Path) -> None:
    own = authority.issue(keys, "w0", roles=("worker",), days=1)
    with pytest.raises(WrongCertificate, match="its certificate is that of w0, not of 'n0'"):
        checked(keys, "worker", own)
    # a manager is no node: whatever it is called
    checked(keys, "manager", authority.issue(keys, "m", roles=(), coordinator=True, days=1))
    late = authority.issue(keys, "n0", roles=("worker",), days=0)
    with pytest.raises(KeyFileError, match=r"ina-worker 'n0' does not start: nobody who has .* has expired"):
        checked(keys, "worker", late)
    authority.initialise(keys / "other", 1)
    other = authority.issue(keys / "other", "n0", roles=("worker",), days=1)
    with pytest.raises(
        KeyFileError, match=r"does not start: nobody who has .* 'ina keys issue' makes another"
    ):
        checked(keys, "worker", other)


def test_a_ps_under_a_manager_and_whoever_meets_nobody_over_tls_need_no_coordinators(keys: Path) -> None:
    own = authority.issue(keys, "n0", roles=("ps",), days=1)
    checked(keys, "ps", own, control=CALLS, rest="\n")
    checked(keys, "ps", own, control=f'listen = "unix:{keys}/s"')
    checked(keys, "agg", own, control=f'coordinator = "unix:{keys}/s"')
    checked(keys, "switch", own, control="\n")


def test_whoever_only_looks_at_a_file_hears_it_too(keys: Path) -> None:
    own = authority.issue(keys, "w0", roles=("worker", "status"), days=1)
    file = written(keys, "worker", own)
    run = CliRunner().invoke(command("worker", started, "A worker."), ["--config", str(file), "--check"])
    assert (run.exit_code, run.stdout) == (Exit.USAGE, "")
    assert run.stderr.startswith(f"{file}: control.key_file: ina-worker 'n0' does not start with {own}: ")
    assert "its certificate is that of w0, not of 'n0'" in run.stderr
    authority.initialise(keys / "other", 1)
    late = authority.issue(keys, "n0", roles=("worker",), days=0)
    (problem,) = problems("worker", load(written(keys, "worker", late), "worker"))
    assert "has expired" in problem.what
    right = authority.issue(keys / "other", "n0", roles=("worker",), days=1)
    right.replace(keys / "right.pem")
    shutil.copy(keys / "other" / "ca.pem", keys / "ca.pem")
    assert problems("worker", load(written(keys, "worker", keys / "right.pem"), "worker")) == []


@pytest.mark.processes
def test_the_process_ends_with_the_sentence_and_never_says_that_it_is_ready(keys: Path) -> None:
    """A worker's certificate where a PS coordinates: until now its callers found out, each for itself."""
    own = authority.issue(keys, "n0", roles=("worker", "status"), days=1)
    command = [sys.executable, "-m", "daemons.ps", "--config", str(written(keys, "ps", own))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == Exit.USAGE
    assert "lets it be status, worker, not to coordinate" in ended.stderr
    assert "ready" not in ended.stderr
