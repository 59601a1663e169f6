"""The loop of a peer's rank, and how its parent talks to it."""

import contextlib
import json
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from inanet.launch.nodes import GLANCE
from inanet.launch.process import child, end, python_environment, tail
from inanet.service.exits import Failure

#: Elements that are compared at once: of a large tensor, intermediate arrays would be larger than it is.
_CHECKED = 1 << 20


class Collective(Protocol):
    """What a peer offers to its rank loop."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        ...

    def all_reduce(self, array: NDArray[np.float32], late: float) -> NDArray[np.float32]:
        """The sum over all ranks; may be the same array. This rank has its values ``late`` seconds from now; whatever
        can be done without them before that, a peer may do."""
        ...


def serve(
    rank: int,
    world: int,
    peer: Collective,
    allocate: Callable[[int], NDArray[np.float32]] = lambda count: np.empty(count, np.float32),
) -> None:
    """Answer lines on standard input until it ends. Every result is checked against the known sum.

    ``{"bytes": N, "late": [s, ...]}``: rank ``i`` has its tensor ``late[i]`` seconds after the others; its time counts
    from when the others had theirs.
    """
    arrays: dict[int, NDArray[np.float32]] = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        count = int(question["bytes"]) // 4
        late = float(question["late"][rank]) if "late" in question else 0.0
        array = arrays.setdefault(count, allocate(count))
        array[:] = rank + 1
        peer.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        result = peer.all_reduce(array, late)
        answer = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        expected = world * (world + 1) / 2
        if not all(
            np.allclose(result[at : at + _CHECKED], expected, rtol=1e-5) for at in range(0, count, _CHECKED)
        ):
            answer["wrong"] = True
        print(json.dumps(answer), flush=True)


class Sample(NamedTuple):
    """One all-reduce, as measured."""

    #: of the slowest rank, from the barrier on
    seconds: float
    #: processor time of all ranks, helpers and servers
    cpu: float
    #: that of the servers alone
    served: float


@dataclass(slots=True)
class Team:
    """All ranks of one peer, seen from the parent."""

    name: str
    processes: list[subprocess.Popen[str]]
    #: processes beside the ranks whose processor time counts as well
    helpers: Sequence[int] = ()
    #: and those of them that add up what all ranks send
    servers: Sequence[int] = ()
    #: where the ranks complain, if each has a file of its own
    logs: Sequence[Path] = ()
    #: called while answers are waited for; may raise to give up
    check: Callable[[], None] = lambda: None

    def wait_ready(self, deadline: float) -> None:
        """Raises :class:`Failure` naming the peer if a rank does not start."""
        self._answers(deadline, "starting")

    def run(self, size: int, deadline: float = 120.0, late: Sequence[float] = ()) -> Sample:
        """One all-reduce of ``size`` bytes; ``late``: seconds by which each rank has its tensor later. Raises :class:`Failure` for a wrong sum, or for a rank that ends or is
        not done in ``deadline`` seconds."""
        helped, served = self._spent(self.helpers), self._spent(self.servers)
        question = {"bytes": size} | ({"late": list(late)} if late else {})
        answers = self.ask(question, deadline, f"an all-reduce of {size} B")
        helped, served = self._spent(self.helpers) - helped, self._spent(self.servers) - served
        if any("wrong" in answer for answer in answers):
            raise Failure(f"{self.name}: wrong sum for {size} B")
        return Sample(
            max(a["seconds"] for a in answers), sum(a["cpu"] for a in answers) + helped + served, served
        )

    def ask(self, question: dict[str, Any], deadline: float, what: str) -> list[dict[str, Any]]:
        """Give a question to every process and collect their answers, in order. Raises :class:`Failure` for one that
        ends or is not done in ``deadline`` seconds with ``what``."""
        line = json.dumps(question) + "\n"
        for process in self.processes:
            assert process.stdin is not None
            # one that has ended is named below
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
        return self._answers(deadline, what)

    @staticmethod
    def _spent(processes: Sequence[int]) -> float:
        return sum(cpu_seconds(pid) for pid in processes)

    def _answers(self, deadline: float, what: str) -> list[dict[str, Any]]:
        stop = time.monotonic() + deadline
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self.processes):
                self.check()
                left = stop - time.monotonic()
                ready = selector.select(min(GLANCE, left)) if left > 0 else []
                if not ready and left <= 0:
                    raise Failure(
                        f"{self.name}: rank {self._missing(answers)} is not done with {what} in {deadline:g} s"
                    )
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise Failure(
                            f"{self.name}: rank {key.data} ended during {what}{self._last_words(key.data)}"
                        )
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self.processes))]

    def _last_words(self, rank: int) -> str:
        if not self.logs:
            return ""
        return f"; its log ends with:\n{tail(self.logs[rank])}"

    def _missing(self, answers: dict[int, Any]) -> int:
        return next(rank for rank in range(len(self.processes)) if rank not in answers)

    def close(self) -> None:
        for process in self.processes:
            if process.stdin is not None:
                # all at once; what was never read goes with a process that has ended
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self.processes:
            end(process, ask=False)


@contextlib.contextmanager
def team(
    name: str,
    directory: Path,
    commands: Sequence[Sequence[str]],
    patience: float,
    spawn: Callable[..., subprocess.Popen[Any]] = lambda rank, command, **options: child(
        command, python_environment(), **options
    ),
) -> Iterator[Team]:
    """A process for each command, their logs ``rank0.log`` and so on in a directory: ready within ``patience`` seconds when the
    block begins, closed at its end. ``spawn(rank, command, **options)`` starts one somewhere else; ``options`` are Popen's.
    """
    its = Team(name, [], logs=[directory / f"rank{rank}.log" for rank in range(len(commands))])
    try:
        for rank, command in enumerate(commands):
            with its.logs[rank].open("ab") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
                its.processes.append(spawn(rank, command, **pipes))
        its.wait_ready(patience)
        yield its
    finally:
        its.close()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process's threads so far, to the nanosecond; user and system time together."""
    return (
        sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    )
