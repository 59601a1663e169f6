"""Growth: its arithmetic, and one small run through real daemons."""

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from inanet.bench import growth
from inanet.bench.cli import bench
from inanet.bench.growth import MARKS, Options, line, ratios, run, table
from inanet.bench.marks import judge
from inanet.bench.peers.rank import Team
from inanet.service.exits import Failure


def test_default_sizes_are_those_of_the_mark() -> None:
    sizes = Options().sizes()
    assert (sizes[0], sizes[-1], len(sizes)) == (4 << 20, 512 << 20, 8)


def test_the_tensor_itself_is_no_part_of_what_a_worker_needs() -> None:
    gained = {"ps": 110, "agg0": 105, "worker0": 205, "rank0": 100, "worker1": 220, "rank1": 105}
    assert ratios(gained, 100, 2) == {
        "worker_memory": 1.25,
        "aggregator_memory": 1.05,
        "ps_memory": 1.1,
    }


def row(size: int, seconds: float) -> dict[str, object]:
    return {"table": "size", "bytes": size, "seconds": seconds, "short_of_cpu": False}


def test_times_that_are_no_line_miss_the_mark() -> None:
    straight = [row(size << 20, 0.01 + size / 100) for size in (4, 64, 512)]
    bent = [*straight[:-1], row(512 << 20, 10.0)]
    for rows, met in ((straight, True), (bent, False)):
        judged = judge(MARKS, [*rows, line(rows)])
        assert judged[0]["met"] is met
        assert [mark["met"] for mark in judged[1:]] == [None] * 4


def test_tensors_larger_than_the_machine_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth, "available", lambda: 1 << 30)
    with pytest.raises(
        growth.NotEnoughMemory, match=r"512 MiB for 2 workers need about .* use a smaller -e"
    ) as no:
        run(Options())
    assert no.value.code == 2


def test_a_wrong_mean_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team("inanet", [])
    monkeypatch.setattr(
        Team, "ask", lambda *_: [{"seconds": [1.0, 3.0], "wrong": 0}, {"seconds": [2.0, 1.0], "wrong": 0}]
    )
    here = growth.Subject(None, team)  # type: ignore[arg-type]
    assert here.reduce(8, 2) == [2.0, 3.0]
    monkeypatch.setattr(Team, "ask", lambda *_: [{"seconds": [1.0], "wrong": 1}])
    with pytest.raises(Failure, match="wrong mean"):
        here.reduce(8, 1)


def test_memory_of_a_process_as_the_kernel_counts_it() -> None:
    pid = os.getpid()
    growth.forget_peak(pid)
    before = growth.resident(pid)
    # from the kernel itself: an array might get pages that earlier tests have given back to the allocator
    with mmap.mmap(-1, 64 << 20) as pages:
        pages[:: mmap.PAGESIZE] = b"1" * (len(pages) // mmap.PAGESIZE)
        assert growth.peak(pid) >= before + (32 << 20)
    growth.forget_peak(pid)
    assert growth.peak(pid) < before + (32 << 20)
    assert growth.available() > 0


def test_the_last_tenth_of_the_rounds_is_held_against_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Scripted:
        def pids(self) -> dict[str, int]:
            return {"ps": os.getpid()}

        def reduce(self, size: int, rounds: int) -> list[float]:
            asked.append((size, rounds))
            return [1.0] * 10 if len(asked) == 1 else [2.0] * 80 + [1.5] * 10

    @contextmanager
    def subject(workers: int) -> Iterator[Scripted]:
        yield Scripted()

    sizes = iter([100, 90, 500, 495])
    monkeypatch.setattr(growth, "subject", subject)
    monkeypatch.setattr(growth, "resident", lambda pid: next(sizes))
    made = growth.of_rounds(Options(rounds=100))
    assert asked == [(growth.SMALL, 10), (growth.SMALL, 90)]
    assert (made["first_seconds"], made["last_seconds"], made["time_ratio"]) == (1.0, 1.5, 1.5)
    assert made["memory_growth"] == -10
    judged = judge(MARKS, [{**made, "rounds": 1000}])
    assert [mark["met"] for mark in judged[3:]] == [False, True]
    assert any(
        "100 rounds of 1048576 B" in text for text in table({"workers": 2, "rows": [made], "marks": []})
    )


@pytest.mark.processes
def test_a_small_run_through_daemons_measures_every_process() -> None:
    arguments = ["growth", "-b", "1M", "-e", "1M", "-n", "1", "--rounds", "0", "--json"]
    result = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    printed = json.loads(result.output)
    assert (printed["schema"], printed["ok"]) == (growth.SCHEMA, True)
    (size,) = printed["rows"]
    assert (size["table"], size["bytes"], len(size["samples"])) == ("size", 1 << 20, 1)
    # the agent has the tensor as integers, the nodes have its slots: less would mean that nothing was measured
    assert size["worker_memory"] >= 1
    assert size["aggregator_memory"] >= 1
    assert size["ps_memory"] >= 1
    assert set(size["gained_bytes"]) == {"ps", "agg0", "worker0", "worker1", "rank0", "rank1"}
    lines = list(table(printed))
    assert len([text for text in lines if not text.startswith("#")]) == 1
    assert len([text for text in lines if text.startswith("# mark not measured")]) == len(MARKS)
