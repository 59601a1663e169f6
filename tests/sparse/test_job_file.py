"""A sparse job whose switch and PS shards are processes; both are killed in the middle of an iteration."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from inanet.cli.zebra import zebra
from inanet.config.file import ConfigError
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.store import Ftrl
from inanet.service.shard_state import StateFile
from inanet.sparse.job_file import SparseFile
from inanet.sparse.member import join_sparse

from .test_group import KEYS, gradients, total

RANKS = 2


def ports(count: int) -> list[int]:
    """UDP ports that are free now."""
    with ExitStack() as stack:
        made = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(count)]
        for one in made:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in made]


def write(folder: Path, more: str = "", **changed: str) -> Path:
    """A job's file: two ranks, two shards and a switch."""
    at = [f'"127.0.0.1:{port}"' for port in ports(5)]
    (folder / "hot.txt").write_text("".join(f"{key}\n" for key in KEYS[:100].tolist()))
    fields = {
        "secret": '"00112233445566ff"',
        "workers": f"[{at[0]}, {at[1]}]",
        "shards": f"[{at[2]}, {at[3]}]",
        "switch": at[4],
        "width": "2",
        "hot": '"hot.txt"',
    } | changed
    lines = [f"{name} = {value}" for name, value in fields.items() if value]
    path = folder / "job.toml"
    path.write_text("\n".join(["[job]", *lines, more, ""]))
    return path


class Served:
    """``ina zebra serve`` as a process."""

    def __init__(self, path: Path, name: str) -> None:
        command = [sys.executable, "-m", "inanet.cli.main", "zebra", "serve", str(path), name]
        if name != "switch":
            command += ["--state", str(path.with_name(f"{name}.state"))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "not ready after 60 s"
        return self.process.stdout.readline()

    def end(self, how: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            os.kill(self.process.pid, how)
        status = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Served]]]:
    # one shard: starting a process is most of what this test takes
    path = write(tmp_path, shards=f'["127.0.0.1:{ports(1)[0]}"]')
    running = {name: Served(path, name) for name in ("switch", "shard0")}
    try:
        yield path, running
    finally:
        for one in running.values():
            one.end(signal.SIGKILL)


@pytest.mark.processes
def test_a_switch_and_a_shard_that_are_killed_and_started_again_lose_nothing(
    served: tuple[Path, dict[str, Served]],
) -> None:
    path, running = served
    said = [one.wait().split(" at ")[0] for one in running.values()]
    assert said == ["ready: switch", "ready: shard0"]
    with ExitStack() as stack:
        members = [stack.enter_context(join_sparse(path, rank)) for rank in range(RANKS)]
        pushed = []
        for iteration in range(3):
            now = gradients(RANKS, iteration)
            pushed += now
            if iteration == 1:
                # one rank has sent everything, to machines that die before the other begins
                members[0].job.push(*now[0], wait=False)
                for one in running.values():
                    one.end(signal.SIGKILL)
                running |= {name: Served(path, name) for name in running}
                said = [one.wait() for one in running.values()]
                assert said[1].endswith(", after iteration 1\n")
            threads = [
                threading.Thread(target=member.job.push, args=mine, kwargs={"timeout": 60.0})
                for rank, (member, mine) in enumerate(zip(members, now, strict=True))
                if not (iteration == 1 and rank == 0)
            ]
            for thread in threads:
                thread.start()
            if iteration == 1:
                members[0].job.wait()
            for thread in threads:
                thread.join(timeout=60)
        assert all((member.job.pull(KEYS) == total(pushed)).all() for member in members)
        stats = members[0].worker.stats()
        assert stats["hot_pairs"] > 0 < stats["cold_pairs"]
    assert running["shard0"].end() == 0


def test_the_file_says_what_machines_are(tmp_path: Path) -> None:
    path = write(tmp_path, optimiser='"ftrl"', rate="0.2", initial="0.1")
    found = SparseFile(path)
    assert found.names() == ("shard0", "shard1", "switch")
    assert found.hot is not None
    assert found.hot.keys.tolist() == KEYS[:100].tolist()
    shard, address = found.machine("shard1")
    assert isinstance(shard, ParameterShard)
    assert address == found.job.shards[1]
    assert (np.abs(shard.store.read(KEYS)) <= 0.1).all()
    assert shard.store._optimiser == Ftrl(0.2)
    with pytest.raises(ValueError, match="no 'shard2'; it has shard0, shard1, switch"):
        found.machine("shard2")
    with pytest.raises(ValueError, match="ranks 0 to 1, not 2"):
        join_sparse(path, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"secret": '"xyz"'}, "allowed: 16 hexadecimal digits"),
        ({"workers": "[]"}, "needs one endpoint at least"),
        ({"switch": ""}, "nothing can be hot without a switch"),
        ({"hot": '"missing.txt"'}, "cannot read .*missing.txt"),
        ({"hot": "", "switch": '"127.0.0.1:9"', "shards": '["127.0.0.1:9"]'}, "needs an address of its own"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    path = write(tmp_path, **changed)
    with pytest.raises(ConfigError, match=message):
        SparseFile(path)
    ran = CliRunner().invoke(zebra, ["serve", str(path), "switch"])
    assert ran.exit_code == 2
    assert "job.toml" in ran.stderr


def test_machines_whose_files_differ_do_not_understand_each_other(tmp_path: Path) -> None:
    """Another hot set under the same ranks, or another order of shards, would give wrong sums without a word."""
    path = write(tmp_path)
    text, keys = path.read_text(), {SparseFile(path).job.key}
    for old, new in (
        ("width = 2", "width = 3"),
        ("[job]", '[job]\nsharding = "range"'),
        ("[job]", "[job]\nshift = 9"),
    ):
        path.write_text(text.replace(old, new))
        keys.add(SparseFile(path).job.key)
    path.write_text(text)
    (tmp_path / "hot.txt").write_text("7\n8\n")
    keys.add(SparseFile(path).job.key)
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["switch", "--state", "s"], "a switch has no state"),
        (["shard0", "--anew"], "give the shard's state file"),
        (["shard0", "--state", "s", "--iteration", "3"], "can only begin anew"),
        (["shard0", "--state", "s", "--anew", "--iteration", "3"], "no model of iteration 3"),
        (["shard0", "--state", "other"], "this is job 1, shard 0 of 2"),
    ],
)
def test_a_state_that_cannot_be_used_is_told(tmp_path: Path, options: list[str], message: str) -> None:
    path = write(tmp_path)
    with closing(StateFile(tmp_path / "other")) as other:
        SparseFile(path).machine("shard1", other)
    options = [str(tmp_path / one) if one in ("s", "other") else one for one in options]
    ran = CliRunner().invoke(zebra, ["serve", str(path), *options])
    assert ran.exit_code == 2
    assert message in ran.stderr


def test_hot_keys_that_do_not_fit_are_told_by_the_command(tmp_path: Path) -> None:
    path = write(tmp_path, memory='"1 KiB"')
    ran = CliRunner().invoke(zebra, ["serve", str(path), "switch"])
    assert ran.exit_code == 2
    assert "make the hot set smaller" in ran.stderr
