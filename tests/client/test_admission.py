"""Who gets through to an agent: its socket's file, users, and the descriptors it has left."""

import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import inanet
from inanet.agent import listener as local_listener
from inanet.agent.server import LocalServer
from inanet.service.exits import Exit, explain
from tests.client.agent import PATIENCE, Agent, LoopbackBackend, error_from


class TestDescriptors:
    """An agent that has no file descriptors left."""

    SCRIPT = """
import asyncio, resource, sys
from pathlib import Path
from inanet.agent.server import LocalServer
from tests.client.agent import LoopbackBackend

async def main():
    server = LocalServer(Path(sys.argv[1]), LoopbackBackend(), shares=False)
    await server.start()
    used = len(__import__("os").listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + int(sys.argv[2]), used + 100))
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()

asyncio.run(main())
"""

    @pytest.fixture
    def limited(self, tmp_path: Path) -> Iterator[Callable[[int], Path]]:
        """Starts an agent in a process that may open only so many descriptors more."""
        processes = []

        def start(more: int) -> Path:
            path = tmp_path / "limited.sock"
            process = subprocess.Popen(
                [sys.executable, "-c", self.SCRIPT, str(path), str(more)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
            )
            processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            return path

        yield start
        for process in processes:
            process.communicate(timeout=PATIENCE)
            assert process.returncode == 0

    def test_processes_are_turned_away_with_the_reason(self, limited: Callable[[int], Path]) -> None:
        path = limited(3)
        jobs = [inanet.connect(f"job{i}", rank=0, world=1, local_world=1, socket=path) for i in range(3)]
        for _ in range(3):
            error = error_from(lambda: inanet.connect("more", rank=0, world=1, local_world=1, socket=path))
            assert isinstance(error, inanet.FabricError)
            assert "no file descriptors left; raise its limit" in str(error)
        for job in jobs:
            job.close()
        with self.once_there_is_room(path) as again:
            assert again.stats() == {"rounds": 0, "rounds_agent": 0, "rounds_shared_memory": 0}

    def once_there_is_room(self, path: Path) -> inanet.Job:
        """Connected when the agent has noticed that others have left."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return inanet.connect("again", rank=0, world=1, local_world=1, socket=path)
            except inanet.FabricError:
                assert time.monotonic() < deadline

    def test_shared_memory_that_cannot_be_taken(self, limited: Callable[[int], Path]) -> None:
        path = limited(1)
        with inanet.connect("train", rank=0, world=1, local_world=1, socket=path) as job:
            error = error_from(job.barrier)
        assert "no file descriptors left; raise its limit" in str(error)


def served(job: inanet.Job) -> bool:
    """Whether its agent takes part in a collective; a refusal is raised."""
    one = np.ones(1, np.float32)
    job.all_reduce(one)
    return one.tolist() == [1.0]


class TestAdmission:
    """Who may connect."""

    def test_the_socket_is_private_unless_told_otherwise(self, start: Callable[..., Agent]) -> None:
        assert stat.S_IMODE(start().path.stat().st_mode) == 0o600

    def test_a_mode_is_not_cut_by_the_umask(self, start: Callable[..., Agent]) -> None:
        previous = os.umask(0o077)
        try:
            assert stat.S_IMODE(start(mode=0o666).path.stat().st_mode) == 0o666
        finally:
            os.umask(previous)

    @pytest.mark.parametrize(("mode", "users"), [(0o600, []), (0o666, [4711])])
    def test_other_users_are_refused(
        self, start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch, mode: int, users: list[int]
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        error = error_from(start(mode=mode, users=users).connect)
        assert isinstance(error, inanet.JoinRefused)
        assert f"user id {os.getuid()} may not use this agent; add it to local.allow_users" in str(error)

    def test_a_mode_for_everybody_lets_everybody_in_unless_there_is_a_list(
        self, start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with start(mode=0o666).connect() as job:
            assert served(job)

    def test_users_on_the_list_are_served(
        self, start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with start(users=[os.getuid()]).connect() as job:
            assert served(job)

    @pytest.mark.parametrize("group", ["own", "supplementary", "foreign"])
    def test_members_of_groups_on_the_list_are_served(
        self, start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch, group: str
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        others = [number for number in os.getgroups() if number != os.getgid()]
        if group == "supplementary" and not others:
            pytest.skip("this process is in no group but its own")
        number = {"own": os.getgid(), "supplementary": next(iter(others), 0), "foreign": 4711}[group]
        agent = start(mode=0o666, groups=[number])
        if group == "foreign":
            assert "or to a group of local.allow_groups" in str(error_from(agent.connect))
            return
        with agent.connect() as job:
            assert served(job)

    def test_an_empty_list_of_groups_lets_nobody_in_by_mode(
        self, start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert isinstance(error_from(start(mode=0o666, groups=[]).connect), inanet.JoinRefused)


class TestSocketFile:
    """The file is this server's, or it keeps its hands off it."""

    async def opened(self, path: Path) -> LocalServer:
        server = LocalServer(path, LoopbackBackend())
        await server.start()
        return server

    async def test_it_is_made_with_its_directory_and_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "run" / "worker.sock"
        server = await self.opened(path)
        assert path.is_socket()
        assert list(path.parent.iterdir()) == [path]
        await server.close()
        await server.close()
        assert list(path.parent.iterdir()) == []

    async def test_a_live_one_is_not_stolen(self, tmp_path: Path) -> None:
        path = tmp_path / "worker.sock"
        server = await self.opened(path)
        with pytest.raises(OSError, match="a running process listens there"):
            await self.opened(path)
        assert path.is_socket()
        await server.close()

    async def test_a_stale_one_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "worker.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        server = await self.opened(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            assert client.getpeername() == str(path)
        await server.close()
        assert not path.exists()

    async def test_a_file_of_another_kind_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "worker.sock"
        path.write_text("precious")
        with pytest.raises(OSError, match="exists and is no socket"):
            await self.opened(path)
        assert path.read_text() == "precious"

    async def test_one_that_took_its_place_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "worker.sock"
        server = await self.opened(path)
        path.unlink()
        other = await self.opened(path)
        await server.close()
        assert path.is_socket()
        await other.close()

    async def test_nobody_replaces_it_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two servers that find one stale socket, and each replace it, would both believe to listen."""
        listen = local_listener._listen
        alone = []

        def watched(path: Path, mode: int) -> socket.socket:
            directory = os.open(tmp_path, os.O_RDONLY)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone.append(True)
            finally:
                os.close(directory)
            return listen(path, mode)

        monkeypatch.setattr(local_listener, "_listen", watched)
        server = await self.opened(tmp_path / "worker.sock")
        assert alone == [True]
        await server.close()

    async def test_a_directory_that_may_not_be_written_is_named_with_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path, mode: int) -> socket.socket:
            # as bind does: without a path
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(local_listener, "_listen", refuse)
        with pytest.raises(PermissionError) as refused:
            await self.opened(tmp_path / "worker.sock")
        code, text = explain(refused.value)
        assert code is Exit.PERMISSION
        assert text.startswith(
            f"permission denied: {tmp_path}: Permission denied: cannot make worker.sock there"
        )
        assert "set local.socket" in text

    async def test_a_path_where_no_file_can_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match=r"Not a directory|File exists"):
            await self.opened(tmp_path / "file" / "worker.sock")
