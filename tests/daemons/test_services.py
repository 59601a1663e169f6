"""The services under a real systemd: installed with the command, killed, reloaded, given broken files and new certificates, removed."""

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from inanet.config.daemons import PROGRAMS, Role
from tests.daemons.machine import HOME, PATIENCE, Machine, booted

pytestmark = [
    pytest.mark.privileged("systemd in namespaces of its own"),
    pytest.mark.processes,
    pytest.mark.timeout(600),
]

ROLES: Sequence[Role] = ("ps", "agg", "worker")
INSTALL = (f"{HOME}/bin/ina", "install", "ps", "agg", "worker", "--listen", "lo")
ANSWERS = ("--aggregator", "lab-agg", "--worker", "lab-worker", "--worker", "second", "--keys", "/root/keys")
#: Two ranks on two hosts, as processes: the one prints what it got.
RANK = """
import sys
import numpy as np
import inanet
with inanet.connect(sys.argv[1], rank=int(sys.argv[2]), world=2, socket=sys.argv[3]) as job:
    values = np.full(100_000, job.rank + 1.0, np.float32)
    for _ in range(20):
        job.all_reduce(values, op="mean", name="values")
    print(values[0], values[-1])
"""


def unit(role: Role) -> str:
    """The name of its unit."""
    return f"{PROGRAMS[role]}.service"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with certificates in /root/keys."""
    with booted(tmp_path_factory.mktemp("machine")) as one:
        one.run(f"{HOME}/bin/ina", "keys", "init", "/root/keys")
        issue(one)
        (one.outside / "rank.py").write_text(RANK)
        yield one


def issue(machine: Machine) -> None:
    """Certificates for all nodes."""
    keys = (f"{HOME}/bin/ina", "keys", "issue", "/root/keys")
    machine.run(*keys, "lab-ps", "--coordinator")
    machine.run(*keys, "lab-agg", "--role", "aggregator,status")
    machine.run(*keys, "lab-worker", "second")


@contextmanager
def awaited(machine: Machine, wanted: Callable[[dict[str, Any]], bool], *match: str) -> Iterator[None]:
    """At the end of the block wait for an entry of the journal that came since its beginning."""
    machine.run("journalctl", "--sync")
    cursor = (
        machine.run("journalctl", "--lines=0", "--show-cursor").stdout.partition("-- cursor: ")[2].strip()
    )
    yield
    command = machine.command(
        "journalctl", "--follow", "--no-tail", f"--after-cursor={cursor}", "--output=json", "--all", *match
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            deadline = time.monotonic() + PATIENCE
            buffer = b""
            while True:
                left = max(0.0, deadline - time.monotonic())
                assert select.select([process.stdout], [], [], left)[0], "no such entry"
                buffer += os.read(process.stdout.fileno(), 1 << 16)
                *lines, buffer = buffer.split(b"\n")
                if any(wanted(json.loads(line)) for line in lines):
                    return
        finally:
            process.kill()


def ready(entry: dict[str, Any]) -> bool:
    """Whether a daemon says that it is."""
    return entry.get("EVENT") == "ready"


def train(machine: Machine, name: str) -> list[str]:
    """Two ranks at two agents: what both print."""
    sockets = ("/run/ina-worker/worker.sock", "/run/second/worker.sock")
    commands = [
        machine.command(f"{HOME}/bin/python", "/run/outside/rank.py", name, str(rank), socket)
        for rank, socket in enumerate(sockets)
    ]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [out for out, _ in said]


def test_one_command_installs_a_fabric_that_trains(machine: Machine) -> None:
    refused = machine.run(*INSTALL, "--keys", "/root/keys", check=False)
    assert refused.returncode == 2
    assert "who trains? Give --worker NAME" in refused.stderr
    assert machine.run("ls", "/etc/inanet", check=False).returncode != 0, "nothing was changed"
    done = machine.run(*INSTALL, *ANSWERS, seconds=200)
    assert "run systemctl enable ina-ps.service ina-agg.service ina-worker.service\n" in done.stdout
    for role in ROLES:
        state = machine.show(unit(role), "ActiveState", "UnitFileState", "StatusText", "NRestarts")
        assert (state["ActiveState"], state["UnitFileState"], state["NRestarts"]) == (
            "active",
            "enabled",
            "0",
        )
    assert machine.show(unit("agg"), "StatusText")["StatusText"] == "connected to 127.0.0.1:7400"
    assert machine.run(*INSTALL, *ANSWERS).stdout == "nothing to do: everything is as it shall be\n"
    caches = machine.run("find", "/var/cache/private", "-name", "*.nbc").stdout
    assert caches == "", "no daemon compiles for itself what was compiled at installation"
    second(machine)
    assert train(machine, "first") == ["1.5 1.5\n", "1.5 1.5\n"]
    begun, ended = machine.journal("JOB=first", "--unit", unit("worker"))
    assert begun["MESSAGE"] == "job begun (job first, ranks [0], world 2, system xagg)"
    assert (ended["EVENT"], ended["ROUNDS"], ended["BYTES"]) == ("job ended", "20", "8000000")
    assert {entry["SYSLOG_IDENTIFIER"] for entry in (begun, ended)} == {"ina-worker"}
    assert "lab-agg" in machine.run("ina", "status").stdout


def second(machine: Machine) -> None:
    """A second worker, as if on another host, as a transient unit."""
    text = machine.run("cat", "/etc/inanet/worker.toml").stdout
    text = (
        text.replace("lab-worker", "second")
        .replace("lo:7420", "lo:7430")
        .replace("/run/ina-worker/", "/run/second/")
    )
    text = text.replace("/worker.pem", "/second.pem")
    (machine.outside / "second.toml").write_text(text)
    machine.run("cp", "/root/keys/second.pem", "/run/outside/second.toml", "/etc/inanet/")
    properties = (
        "Type=notify",
        "DynamicUser=yes",
        "RuntimeDirectory=second",
        "RuntimeDirectoryMode=0755",
        "LoadCredential=ca.pem:/etc/inanet/ca.pem",
        "LoadCredential=second.pem:/etc/inanet/second.pem",
    )
    machine.run(
        "systemd-run",
        "--unit=second",
        *(f"--property={one}" for one in properties),
        f"{HOME}/bin/ina-worker",
        "--config",
        "/etc/inanet/second.toml",
    )


def test_a_killed_daemon_comes_back_and_the_fabric_trains_again(machine: Machine) -> None:
    for role in ROLES:
        with awaited(machine, ready, "--unit", unit(role)):
            machine.run("systemctl", "kill", "--signal=KILL", unit(role))
        assert machine.show(unit(role), "NRestarts")["NRestarts"] == "1"
    assert train(machine, "again") == ["1.5 1.5\n", "1.5 1.5\n"]


def test_a_daemon_that_stands_still_is_restarted_by_its_watchdog(machine: Machine) -> None:
    machine.run("mkdir", "-p", "/run/systemd/system/ina-agg.service.d")
    (machine.outside / "quick.conf").write_text(
        "[Service]\nWatchdogSec=5\nRestartSec=100ms\nTimeoutAbortSec=1\n"
    )
    machine.run("cp", "/run/outside/quick.conf", "/run/systemd/system/ina-agg.service.d/")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", unit("agg"))
    with awaited(machine, ready, "--unit", unit("agg")):
        machine.run("systemctl", "kill", "--signal=STOP", unit("agg"))
    machine.run("rm", "-r", "/run/systemd/system/ina-agg.service.d")
    assert machine.show(unit("agg"), "NRestarts")["NRestarts"] != "0"
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", unit("agg"))


def test_a_reload_tells_its_verdict(machine: Machine) -> None:
    machine.run("sh", "-c", "printf '[log]\\nlevel = \"debug\"\\n' >> /etc/inanet/agg.toml")
    machine.run("systemctl", "reload", unit("agg"))
    machine.run("sed", "-i", 's/level = "debug"/level = "loud"/', "/etc/inanet/agg.toml")
    with awaited(machine, lambda entry: "reload refused" in str(entry), "--unit", unit("agg")):
        refused = machine.run("systemctl", "reload", unit("agg"), check=False)
    assert refused.returncode != 0
    state = machine.show(unit("agg"), "ActiveState", "StatusText")
    assert state["ActiveState"] == "active"
    assert state["StatusText"].startswith("connected to 127.0.0.1:7400 (file of ")
    assert "log.level: 'loud' is unknown" in state["StatusText"]


def test_a_start_with_a_broken_file_ends_with_the_reason_and_no_restarts(machine: Machine) -> None:
    assert machine.run("systemctl", "restart", unit("agg"), check=False).returncode != 0
    state = machine.show(unit("agg"), "ActiveState", "Result", "ExecMainStatus", "NRestarts")
    assert state == {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "2", "NRestarts": "0"}
    reasons = [entry["MESSAGE"] for entry in machine.journal("--unit", unit("agg"), "--priority=err")]
    assert any("agg.toml: log.level: 'loud' is unknown" in reason for reason in reasons)
    told = machine.run(*INSTALL, *ANSWERS, check=False)
    assert (told.returncode, "log.level: 'loud' is unknown" in told.stderr) == (2, True)
    machine.run("sed", "-i", 's/level = "loud"/level = "info"/', "/etc/inanet/agg.toml")
    mended = machine.run(*INSTALL, *ANSWERS).stdout
    assert mended == "run systemctl restart ina-agg.service\n"


def test_new_certificates_come_with_the_same_command(machine: Machine) -> None:
    before = machine.show(unit("agg"), "ExecMainPID")
    machine.run("rm", "/root/keys/lab-agg.pem")
    machine.run(f"{HOME}/bin/ina", "keys", "issue", "/root/keys", "lab-agg", "--role", "aggregator,status")
    done = machine.run(*INSTALL, *ANSWERS).stdout
    assert done == "change /etc/inanet/agg.pem (mode 0600)\nrun systemctl restart ina-agg.service\n"
    assert machine.show(unit("agg"), "ExecMainPID") != before
    assert machine.show(unit("agg"), "StatusText")["StatusText"] == "connected to 127.0.0.1:7400"


def test_units_that_are_stopped_together_stop_in_good_order(machine: Machine) -> None:
    machine.run("journalctl", "--rotate")
    machine.run("journalctl", "--vacuum-time=1s")
    since = machine.run("date", "+%s").stdout.strip()
    machine.run("systemctl", "stop", "ina-*.service", "second.service")
    entries = machine.journal(f"--since=@{since}", "--priority=warning")
    assert [entry["MESSAGE"] for entry in entries if entry.get("EVENT") == "lost"] == []
    for role in ROLES:
        assert machine.show(unit(role), "Result", "ExecMainStatus") == {
            "Result": "success",
            "ExecMainStatus": "0",
        }


def test_uninstall_leaves_nothing(machine: Machine) -> None:
    machine.run("ina", "uninstall", "--purge")
    left = machine.run(
        "find",
        "/etc/systemd",
        "/etc/inanet",
        "/usr/local/bin",
        "/var/lib/private",
        "/var/cache/private",
        "-name",
        "ina*",
    )
    assert [line for line in left.stdout.splitlines() if line not in ("/etc/inanet",)] == []
    assert (
        "No files found" in machine.run("systemctl", "list-unit-files", "ina-*", check=False).stdout or True
    )
