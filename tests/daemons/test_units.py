"""The systemd units: valid, hardened, and in step with the code."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from inanet.config.control import Control
from inanet.config.daemons import PROGRAMS, Local, Role, WorkerConfig, load
from inanet.service.exits import Exit
from inanet.units import parse_duration

ROOT = Path(__file__).parents[2]
ROLES = list(PROGRAMS)


def unit(role: Role) -> Path:
    """The unit file of a role."""
    return ROOT / "systemd" / f"{PROGRAMS[role]}.service"


def settings(role: Role) -> dict[str, list[str]]:
    """All assignments of a unit's [Service] section, by key."""
    found: dict[str, list[str]] = {}
    section = unit(role).read_text().partition("[Service]")[2].partition("\n[Install]")[0]
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze; skip where there is none, fail where there must be one."""
    program = shutil.which("systemd-analyze")
    if program is None:
        reason = "systemd-analyze is not installed (Debian: apt-get install systemd)"
        if os.environ.get("INA_REQUIRE_PRIVILEGED") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("role", ROLES)
def test_systemd_takes_every_line(role: Role, tmp_path: Path) -> None:
    # the daemon need not be installed where the tests run: any program stands in for it
    copy = tmp_path / unit(role).name
    program = shutil.which("true")
    assert program is not None
    copy.write_text(unit(role).read_text().replace(f"/usr/local/bin/{PROGRAMS[role]} ", f"{program} "))
    done = analyze("verify", "--man=no", str(copy))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("ProtectClock=", "ProtectClok="))
    assert "ProtectClok" in analyze("verify", "--man=no", str(copy)).stderr, "verify notices mistakes"


@pytest.mark.parametrize("role", ROLES)
def test_the_exposure_is_low(role: Role) -> None:
    done = analyze("security", "--offline=true", "--threshold=20", str(unit(role)))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("role", ROLES)
def test_the_unit_starts_what_exists(role: Role) -> None:
    service = settings(role)
    program, *arguments = service["ExecStart"][0].split()
    assert Path(program).name == PROGRAMS[role]
    assert f'{PROGRAMS[role]} = "daemons.' in (ROOT / "pyproject.toml").read_text()
    assert arguments == ["--config", f"%E/inanet/{role}.toml"]
    assert (ROOT / "configs" / f"{role}.toml").exists()


@pytest.mark.parametrize("role", ROLES)
def test_the_unit_agrees_with_the_code(role: Role) -> None:
    service = settings(role)
    assert service["RestartPreventExitStatus"] == [f"{Exit.USAGE:d} {Exit.PERMISSION:d} {Exit.MISSING:d}"]
    drain = parse_duration(Control.model_fields["drain_timeout"].default)
    assert int(service["TimeoutStopSec"][0]) > drain
    assert service["Type"] == ["notify"], "notify-reload needs systemd 253"
    assert service["MemoryDenyWriteExecute"] == ["no"], "numba compiles at run time"
    cache = service["CacheDirectory"][0]
    assert f"NUMBA_CACHE_DIR=%C/{cache}" in service["Environment"][0]
    families = service["RestrictAddressFamilies"][0].split()
    assert families == ["AF_INET", "AF_UNIX"]


def test_the_worker_can_tell_its_users_apart() -> None:
    service = settings("worker")
    config = load(ROOT / "configs" / "worker.toml")
    assert isinstance(config, WorkerConfig)
    assert Path(config.local.socket).parent == Path("/run") / service["RuntimeDirectory"][0]
    assert service["PrivateUsers"] == ["no"], (
        "SO_PEERCRED shows strangers as nobody in a user namespace of its own"
    )
    assert "sched_setaffinity" in service["SystemCallFilter"]
    assert "cpus" in Local.model_fields


def test_the_units_differ_only_where_they_must() -> None:
    mine = {"ExecStart", "CacheDirectory", "RuntimeDirectory", "RuntimeDirectoryMode", "Environment"}
    exceptions = {
        "worker": {"PrivateUsers", "SystemCallFilter"},
        "agg": set(),
        "ps": {"StateDirectory", "StateDirectoryMode"},
        "manager": {"StateDirectory", "StateDirectoryMode"},
        "switch": set(),
    }
    for role in ROLES:
        keys = settings("agg").keys() | settings(role).keys()
        for key in keys - mine - exceptions[role]:
            # each has its own certificate
            values = [
                value.replace(f"{role}.", "agg.").replace(f"/ina-{role} ", "/ina-agg ")
                for value in settings(role).get(key, [])
            ]
            assert values == settings("agg").get(key, []), f"{role}: {key}"
