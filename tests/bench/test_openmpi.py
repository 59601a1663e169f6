"""Open MPI as a peer: right sums on one host and between the hosts of a lab."""

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inanet.bench.peers import openmpi
from inanet.bench.peers.rank import Team
from inanet.lab.session import Lab
from inanet.launch.process import python_environment
from inanet.service.exits import Failure

needs_mpi = pytest.mark.skipif(not openmpi.installed(), reason="needs mpi4py and openmpi")


@contextmanager
def team(command: list[str], start: Callable[..., Any] = subprocess.Popen) -> Iterator[Team]:
    process = start(
        command,
        env=openmpi.environment(python_environment()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    peer = Team("openmpi", [process])
    try:
        peer.wait_ready(60)
        yield peer
    finally:
        peer.close()


@needs_mpi
def test_ranks_on_one_host_agree_on_the_sum(tmp_path: Path) -> None:
    with team(openmpi.command(3, tmp_path)) as peer:
        for size in (0, 4, 4096, 1 << 20, 4096):
            sample = peer.run(size, 60)  # raises if a sum is wrong
            assert sample.seconds >= 0
            assert sample.cpu >= 0


@needs_mpi
@pytest.mark.privileged("root, for a lab of network namespaces")
def test_ranks_on_hosts_of_a_lab_speak_over_its_links(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, for a lab of network namespaces")
    with Lab("star2") as lab:
        hosts = [host.name for host in lab.topology.workers()]
        command = openmpi.command_on(hosts, lab.namespace("{host}"), "eth0", tmp_path)
        with team(command, lambda argv, **options: lab.spawn(hosts[0], argv, **options)) as peer:
            before = lab.uplink(hosts[0])
            peer.run(4 << 20, 60)
            after = lab.uplink(hosts[0])
        assert before is not None
        assert after is not None
        # between two ranks a ring sends the tensor once: through the link, not through shared memory
        assert after.sent_bytes - before.sent_bytes > 4 << 20


def test_a_start_that_fails_is_reported_at_once(tmp_path: Path) -> None:
    front = openmpi.command(2, tmp_path)
    command = [*front[: front.index("front") + 3], "/bin/false"]
    with pytest.raises(Failure, match="rank 0 ended during starting"), team(command):
        pytest.fail("it started")


def test_the_command_survives_the_shells_it_passes(tmp_path: Path) -> None:
    command = openmpi.command_on(["w0", "w1"], "ina.star2.{host}", "eth0", tmp_path)
    inner = shlex.split(command[-1])
    # the stand-in for ssh is one argument of mpirun, with the namespace's pattern untouched
    shell = inner[inner.index("plm_ssh_agent") + 1]
    assert command[-2 - len(shell.split()) :] == [*shell.split(), "w0", command[-1]]
    assert "ina.star2.{host}" in shell
    assert inner[inner.index("--host") + 1] == "w0:1,w1:1"


def test_the_rules_switch_to_the_segmented_ring_at_a_mebibyte(tmp_path: Path) -> None:
    openmpi.command_on(["w0", "w1", "w2"], "ina.x.{host}", "eth0", tmp_path)
    numbers = [
        [int(word) for word in line.split()] for line in (tmp_path / "algorithms").read_text().splitlines()
    ]
    assert numbers == [[1], [2], [1], [3], [2], [0, 3, 0, 0], [1048576, 4, 0, 1048576]]
