import json
import threading

import numpy as np
import pytest

import inanet
from inanet.data.digits import fetch, save
from inanet.demo import audit, trainer
from inanet.demo.trainer import Task
from inanet.training.descent import Recipe
from tests.demo.emulation import EmulatedFabric

RECIPE = Recipe(parts=3, steps=6, seed=4, units=8)


class Meeting:
    """Three ranks in threads, averaged by the emulated fabric."""

    def __init__(self):
        self.fabric = EmulatedFabric(carried=False)
        self.contributions = [None] * RECIPE.parts
        self.average = None
        self.barrier = threading.Barrier(RECIPE.parts, self._fold, timeout=60)

    def _fold(self):
        if self.contributions[0] is not None:
            self.average = self.fabric.average(np.stack(self.contributions))
            self.contributions = [None] * RECIPE.parts

    def connect(self, job, *, rank, world, local_world, socket, system):
        assert (job, world, local_world, socket) == ("demo", RECIPE.parts, 1, f"socket{rank}")
        return FakeJob(self, rank)


class FakeJob:
    def __init__(self, meeting, rank):
        self.meeting = meeting
        self.rank = rank

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def all_reduce(self, array, *, op, name, mode):
        assert (op, name, mode) == ("mean", "gradient", "prologue")
        self.meeting.contributions[self.rank] = array.copy()
        self.meeting.barrier.wait()
        array[:] = self.meeting.average
        self.meeting.barrier.wait()


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    save(fetch(), tmp_path / "digits.npz")
    monkeypatch.setattr(inanet, "connect", Meeting().connect, raising=False)
    averages = str(tmp_path / "averages.npy")
    return [
        Task(
            RECIPE,
            rank,
            f"socket{rank}",
            str(tmp_path / "digits.npz"),
            averages=None if rank else averages,
        )
        for rank in range(RECIPE.parts)
    ]


def test_trainers_report_and_the_audit_confirms(tasks, monkeypatch, capsys):
    said = {}
    monkeypatch.setattr(
        trainer, "say", lambda **line: said.setdefault(threading.current_thread().name, []).append(line)
    )
    threads = [
        threading.Thread(target=trainer.run, args=(Task.from_json(task.to_json()),), name=f"rank{task.rank}")
        for task in tasks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finals = [said[f"rank{rank}"][-1] for rank in range(RECIPE.parts)]
    assert len({final["weights"] for final in finals}) == 1
    assert all(final["seconds"] > 0 for final in finals)
    assert said["rank0"][0]["step"] == 0

    monkeypatch.setattr(
        "sys.argv", ["audit", json.dumps(RECIPE.to_dict()), tasks[0].digits, tasks[0].averages]
    )
    audit.main()
    verdict = audit.Verdict(**json.loads(capsys.readouterr().out))
    assert verdict.weights == finals[0]["weights"]
    assert verdict.within_bound


def test_a_task_survives_the_command_line(tasks):
    assert [Task.from_json(task.to_json()) for task in tasks] == tasks
