"""The demo of asynchronous training: what a run has to show, and one through real processes."""

import json
import re
import subprocess

import pytest

from inanet.demo import report
from inanet.demo.epochs_demo import Step, judge
from inanet.launch.process import python, python_environment


def steps_of(*epochs: tuple[int, tuple[int, ...]], awaited: int = 2) -> list[Step]:
    return [Step(worker, epoch, workers, awaited, 0) for epoch, workers in epochs for worker in workers]


def test_a_run_in_which_everybody_was_told_the_same_is_good() -> None:
    steps = steps_of((1, (0, 1, 2)), (2, (0, 2)), (3, (1, 2)))
    assert judge(steps, 3, 0.3, 0.3, 0.5) == []
    # half-way through the epochs of a single process is near enough while it still learns fast
    assert judge(steps, 3, 0.49, 0.3, 0.5) == []


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([*steps_of((1, (0, 1))), Step(1, 2, (1, 2), 2, 0), Step(2, 2, (0, 2), 2, 0)], "different things"),
        ([*steps_of((1, (0, 1))), Step(1, 2, (1, 2), 2, 0)], r"\(1, 2\) .* \[1\] got"),
        (steps_of((1, (0, 1)), (2, (1,))), "1 took part, 2 were waited for"),
        (steps_of((1, (0, 1))), r"epochs \[2\]"),
    ],
)
def test_a_run_that_breaks_a_promise_is_said_to(steps: list[Step], says: str) -> None:
    (problem,) = judge(steps, 2, 0.3, 0.3, 0.5)
    assert re.search(says, problem)


def test_a_loss_that_is_out_of_the_neighbourhood_is_a_problem() -> None:
    (problem,) = judge(steps_of((1, (0, 1))), 1, 0.6, 0.3, 0.5)
    assert "0.6000" in problem


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_command_trains_asynchronously_through_three_switches() -> None:
    options = ["--system", "goat-async", "--workers", "2", "--steps", "12", "--impair", "0.01", "--json"]
    done = subprocess.run(
        python("inanet.cli.main", "demo", *options), env=python_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    answer = json.loads(done.stdout)
    assert set(report.KEYS) <= set(answer)
    assert len(answer["participants"]) == len(answer["awaited"]) == 12
    # all at first; from then on as many as Algorithm 2 says
    assert answer["awaited"][:2] == [2, 2]
    assert all(
        len(its) >= least for its, least in zip(answer["participants"], answer["awaited"], strict=True)
    )
    assert set(answer["sums_by_switch"]) == {"switch0", "switch1", "switch2"}
    assert all(answer["sums_by_switch"].values())
    assert answer["drops"]["injected"] > 0
