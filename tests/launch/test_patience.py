"""Deadlines on busy machines."""

import os

import pytest

from inanet.launch import patience


@pytest.mark.parametrize(
    ("load", "processors", "seconds"), [(0.3, 2, 10.0), (2.0, 2, 10.0), (16.0, 2, 80.0), (500.0, 1, 160.0)]
)
def test_everything_may_take_as_many_times_longer_as_processes_want_a_processor(
    monkeypatch: pytest.MonkeyPatch, load: float, processors: int, seconds: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert patience.patient(10.0) == seconds


def test_who_compiles_kernels_gets_more_time_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "patient", lambda seconds: seconds)
    start = patience.Start(100.0)
    assert not start.is_ready(b"STATUS=warming up", 200.0)
    assert not start.compiling
    assert start.overdue(280.0) == ""
    assert start.overdue(281.0) == "180 s"
    assert not start.is_ready(b"STATUS=compiling kernel 7\nEXTEND_TIMEOUT_USEC=180000000", 270.0)
    assert start.compiling
    assert start.overdue(450.0) == ""
    assert start.overdue(451.0).startswith(
        "350 s; kernels were still being compiled; what is done is kept: run it again"
    )
    assert not start.is_ready(b"EXTEND_TIMEOUT_USEC=180000000", 699.0)
    assert start.overdue(701.0).startswith("600 s; ")
    assert start.is_ready(b"READY=1\nSTATUS=serving", 699.0)
