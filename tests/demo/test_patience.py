"""Deadlines on busy machines."""

import os

import pytest

from inanet.demo import patience


@pytest.mark.parametrize(
    ("load", "processors", "seconds"), [(0.3, 2, 10.0), (2.0, 2, 10.0), (16.0, 2, 80.0), (500.0, 1, 160.0)]
)
def test_everything_may_take_as_many_times_longer_as_processes_want_a_processor(
    monkeypatch: pytest.MonkeyPatch, load: float, processors: int, seconds: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert patience.patient(10.0) == seconds
