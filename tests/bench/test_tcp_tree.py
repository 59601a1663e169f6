"""TCP-Agg in a tree: sums pass through a server on the way, and its processes are started where they belong."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.bench.peers.tcp import TcpRank, run_server
from inanet.bench.stage import Place, Stage
from inanet.bench.trees import tcp_tree
from inanet.planning.plans import tree_of

PATIENCE = 60.0
HERE = "127.0.0.1"


def begun(file: Path, work: Callable[[], None]) -> tuple[threading.Thread, int]:
    """A server in a thread, and its port once that is written."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    waiting = threading.Event()
    while not file.exists():
        assert thread.is_alive()
        waiting.wait(0.005)
    return thread, int(file.read_text())


def test_a_server_on_the_way_adds_and_passes_on(tmp_path: Path) -> None:
    """Two ranks below it, one beside it at the root; one of them is late by its own doing."""
    root, inner = tmp_path / "root", tmp_path / "inner"
    above, at = begun(root, lambda: run_server(root, 2, 1000, HERE, False))
    below, under = begun(inner, lambda: run_server(inner, 2, 1000, HERE, False, (HERE, at)))
    ranks = [TcpRank(HERE, port, 1000) for port in (under, under, at)]
    for count in (1, 999, 250_001):
        arrays = [np.arange(count, dtype=np.float32) % 1000 * (rank + 1) for rank in range(3)]
        expected = np.sum(arrays, axis=0)
        reduce_all(ranks, arrays)
        for array in arrays:
            np.testing.assert_array_equal(array, expected)
    for rank in ranks:
        rank._socket.close()
    for server in (below, above):
        server.join(PATIENCE)
        assert not server.is_alive()


def reduce_all(ranks: list[TcpRank], arrays: list[NDArray[np.float32]]) -> None:
    """One all-reduce of all ranks at once."""
    problems: list[BaseException] = []

    def one(rank: TcpRank, array: NDArray[np.float32]) -> None:
        try:
            rank.all_reduce(array, 0.0)
        except BaseException as error:
            problems.append(error)

    threads = [
        threading.Thread(target=one, args=pair, daemon=True) for pair in zip(ranks, arrays, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert problems == []


class Recording:
    """A stage that starts nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.world = 3
        self.spawned: list[tuple[str, tuple[str, ...]]] = []

    def address(self, host: str) -> str:
        return f"10.0.0.{len(host)}"

    def spawn(self, host: str, command: Any, env: Any) -> Any:
        self.spawned.append((host, tuple(command)))
        return type("Process", (), {"pid": len(self.spawned)})()

    def appears(self, file: Path, process: Any) -> str:
        return str(7000 + process.pid)

    def per_rank(self, command: Callable[[Place], Any]) -> list[Any]:
        places = [Place(f"w{rank}", rank) for rank in range(self.world)]
        return [self.spawn(place.host, command(place), {}) for place in places]


@pytest.mark.parametrize("name", ["t"])
def test_servers_start_before_those_below_them(tmp_path: Path, name: str) -> None:
    stage = Recording(tmp_path)
    tree = tree_of(0, "root", {"w0": "s", "w1": "s", "w2": "root", "s": "root"})
    team = tcp_tree(name, cast(Stage, stage), tree)
    assert team.servers == [1, 2]
    hosts = [host for host, _ in stage.spawned]
    assert hosts == ["root", "s", "w0", "w1", "w2"]
    commands = [command[command.index("-m") + 1 :] for _, command in stage.spawned]
    assert commands[0][1:] == ("server", f"{tmp_path}/t-root", "2", "1048576", "10.0.0.4", "stream")
    assert commands[1][1:] == (
        *("server", f"{tmp_path}/t-s", "2", "1048576", "10.0.0.1", "stream"),
        *("10.0.0.4", "7001"),
    )
    assert commands[2][1:] == ("rank", "0", "3", "10.0.0.1", "7002", "1048576", "0")
    assert commands[4][1:] == ("rank", "2", "3", "10.0.0.4", "7001", "1048576", "0")
