"""Labs that last as long as their block, and what runs in them."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inanet.lab import namespaces, run
from inanet.lab.build import LabError
from inanet.lab.fabric import Daemons, NoFabric, Rank, rank_environment, ranks
from inanet.lab.model import Topology
from inanet.lab.session import Lab

DEADLINE = 20.0
#: Prints what a rank sees of its place, and exits with 3 on rank 1.
WHERE = """
import os, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1 + int(os.environ["RANK"])], 0))
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["INA_LAB_HOST"], s.getsockname()[0])
print("last words", end="", file=sys.stderr)
sys.exit(3 * int(os.environ["RANK"]))
"""


def test_ranks_are_numbered_host_after_host(pair: Topology) -> None:
    hosts = tuple(
        host.model_copy(update={"ranks": 2}) if host.role == "worker" else host for host in pair.host
    )
    assert ranks(pair.model_copy(update={"host": hosts})) == [
        Rank("w0", 0, 0, 2, 4),
        Rank("w0", 1, 1, 2, 4),
        Rank("w1", 2, 0, 2, 4),
        Rank("w1", 3, 1, 2, 4),
    ]


def test_exit_statuses_are_those_of_a_shell() -> None:
    assert [run.exit_status(code) for code in (0, 3, -signal.SIGKILL)] == [0, 3, 137]


def test_a_rank_finds_its_place_in_its_environment(pair: Topology) -> None:
    lab = Lab(pair, "x")
    environment = rank_environment(lab, ranks(pair)[1])
    assert environment["RANK"] == "1"
    assert environment["LOCAL_WORLD_SIZE"] == "1"
    assert environment["MASTER_ADDR"] == lab.address("w0")
    with pytest.raises(RuntimeError, match="lab x is not up"):
        _ = lab.directory


def test_a_network_without_ps_has_no_daemons(pair: Topology) -> None:
    alone = pair.model_copy(update={"host": tuple(host for host in pair.host if host.role == "worker")})
    with pytest.raises(NoFabric, match="no host with the role 'ps'"):
        Daemons(Lab(alone, "x"))


@pytest.mark.privileged("network namespaces")
def test_commands_run_on_their_hosts_and_the_worst_status_counts(pair: Topology, name: str) -> None:
    shown: list[tuple[str, str]] = []
    with Lab(pair, name) as lab:
        directory = lab.directory
        command = [sys.executable, "-c", WHERE, lab.address("w0"), lab.address("w1")]
        status = run.run(lab, None, command, lambda label, line: shown.append((label, line)))
    assert status == 3
    assert sorted(shown) == [
        ("0@w0", "0 2 w0 10.201.0.2"),
        ("0@w0", "last words"),
        ("1@w1", "1 2 w1 10.201.0.3"),
        ("1@w1", "last words"),
    ]
    assert name not in namespaces.labs()
    assert not directory.exists()


@pytest.mark.privileged("network namespaces")
def test_the_block_ends_what_runs_in_the_lab(pair: Topology, name: str) -> None:
    with Lab(pair, name) as lab:
        child = lab.spawn("w0", ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
        assert child.stdout is not None
        grandchild = os.pidfd_open(int(child.stdout.readline()))
        missing = lab.spawn("w1", ["/nowhere/command"], stderr=subprocess.DEVNULL)
        assert missing.wait(DEADLINE) == 127
        with pytest.raises(KeyError):
            lab.spawn("w7", ["true"])
        assert lab.uplink("w0") is not None
        assert lab.downlink("w0") is not None
    assert child.returncode == -signal.SIGTERM
    ended, _, _ = select.select([grandchild], [], [], DEADLINE)
    os.close(grandchild)
    assert ended
    assert name not in namespaces.labs()


@pytest.mark.privileged("network namespaces")
def test_a_lab_that_cannot_be_built_leaves_nothing(pair: Topology, name: str) -> None:
    class Unwanted(Exception):
        pass

    calls = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 6:
            raise Unwanted

    lab = Lab(pair, name, check)
    with pytest.raises(Unwanted), lab:
        pass
    assert name not in namespaces.labs()
    wide = pair.model_copy(update={"host": (pair.host[0].model_copy(update={"name": "a/b"}),)})
    with pytest.raises(LabError, match=r"a/b"), Lab(wide, name):
        pass
    assert name not in namespaces.labs()


_HOLD = """
import subprocess, sys
from inanet.lab.session import Lab

with Lab(sys.argv[1], sys.argv[2]) as lab:
    child = lab.spawn("w0", ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
    print(lab._guardian.pid, lab.directory, int(child.stdout.readline()), flush=True)
    sys.stdin.read()
"""


@pytest.mark.privileged("network namespaces")
@pytest.mark.usefixtures("pair")
def test_the_guardian_takes_the_lab_of_a_killed_owner_down(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "topology.toml"), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        guardian, directory, sleeper = owner.stdout.readline().split()
        handles = [os.pidfd_open(int(guardian)), os.pidfd_open(int(sleeper))]
        assert name in namespaces.labs()
        owner.kill()
    for handle in handles:
        ended, _, _ = select.select([handle], [], [], DEADLINE)
        os.close(handle)
        assert ended
    assert name not in namespaces.labs()
    assert not Path(os.fsdecode(directory)).exists()


def test_names_of_labs_differ(pair: Topology) -> None:
    assert Lab(pair).name != Lab(pair).name
    assert Lab(pair).name.startswith("pair-")
