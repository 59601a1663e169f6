"""Processes that are the ranks of one test: torch is imported once, by the server that forks them."""

import itertools
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

#: seconds that a test's function may take in the ranks; nothing here takes a tenth of it
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Rank:
    """What the function of a test learns about its place."""

    rank: int
    world: int
    #: the agent's socket of this rank's host
    socket: str
    #: shared by the ranks
    directory: Path

    @contextmanager
    def group(self, backend: str = "gloo", seconds: float = 30.0, **options: Any) -> Iterator[None]:
        """A default process group, as launchers make it.

        Gloo's is not destroyed: with torch 2.13 that hangs now and then while a model still refers to it.
        """
        import torch.distributed as dist

        dist.init_process_group(
            backend,
            store=dist.FileStore(str(self.directory / f"store-{backend}"), self.world),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=seconds),
            **options,
        )
        yield
        if backend != "gloo":
            dist.destroy_process_group()


#: environment: "1" makes Gloo the faster of the two that a group or a hook compares
GLOO_IS_FASTER = "INA_TEST_GLOO_IS_FASTER"


def _let_gloo_win() -> None:
    from inanet.torch import verdict

    verdict.compare = lambda ina, ring, exchange: verdict.on_times(2.0, 1.0)


def _call(connection: Connection, rank: Rank, pickled: bytes, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    os.environ["INA_SOCKET"] = rank.socket
    if os.environ.get(GLOO_IS_FASTER):
        _let_gloo_win()
    try:
        function, arguments = pickle.loads(pickled)
        answer = True, function(rank, *arguments)
    except BaseException as error:
        answer = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    connection.send(answer)
    connection.close()
    # what torch does at the end of a process is not what is tested
    os._exit(0)


class Team:
    """A function that runs in every rank."""

    def __init__(
        self,
        sockets: Sequence[str],
        environment: Mapping[str, str],
        function: Callable[..., Any],
        arguments: Sequence[Any],
        directory: Path,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.torch.preload"])
        self.directory = directory
        self._connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        pickled = pickle.dumps((function, arguments))
        for number, socket in enumerate(sockets):
            mine, theirs = context.Pipe()
            rank = Rank(number, len(sockets), socket, self.directory)
            process = context.Process(target=_call, args=(theirs, rank, pickled, environment))
            process.start()
            theirs.close()
            self._connections.append(mine)
            self.processes.append(process)

    def results(self, among: Sequence[int] | None = None, patience: float = PATIENCE) -> list[Any]:
        """What the function returned, by rank (of those ``among``); fails with what went wrong there."""
        answers = {}
        for rank in range(len(self._connections)) if among is None else among:
            assert self._connections[rank].poll(patience), f"rank {rank} does not answer"
            answers[rank] = self._connections[rank].recv()
        wrong = {rank: text for rank, (fine, text) in answers.items() if not fine}
        assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())
        return [answer for _, answer in answers.values()]

    def close(self) -> None:
        """End what still runs."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
            process.close()


class Ranks:
    """Runs functions on ranks that sit at these agents' sockets, in new processes every time; what they share lies below
    ``directory``. ``environment`` is that of all of them."""

    def __init__(
        self,
        sockets: Sequence[str | os.PathLike[str]],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.sockets = [os.fspath(socket) for socket in sockets]
        self.directory = directory
        self.environment = dict(environment or {})
        self._teams = itertools.count()

    @contextmanager
    def started(
        self, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> Iterator[Team]:
        """``function(rank, *arguments)``, a module-level function, on its way in all ranks."""
        directory = self.directory / f"team{next(self._teams)}"
        directory.mkdir()
        team = Team(self.sockets, {**self.environment, **(environment or {})}, function, arguments, directory)
        try:
            yield team
        finally:
            team.close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
    ) -> list[Any]:
        """What ``function(rank, *arguments)`` returned within ``patience`` seconds, by rank."""
        with self.started(function, *arguments, environment=environment) as team:
            return team.results(patience=patience)
