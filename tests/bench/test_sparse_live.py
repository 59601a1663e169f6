"""Real processes' parts, as threads: ranks that measure, machines that are served, the file that joins them."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inanet.bench.sparse_live import Live, _file
from inanet.bench.sparse_rank import take_part
from inanet.data.key_batches import Model, generated
from inanet.papers.zebra_live import judge
from inanet.sparse.job_file import SparseFile, serve
from inanet.sparse.member import join_sparse


class Over(BaseException):
    """Ends a machine that is served."""


def machine(file: Path, name: str, over: threading.Event, told: Callable[[str], None]) -> None:
    def check() -> None:
        if over.is_set():
            raise Over

    with pytest.raises(Over):
        serve(SparseFile(file), name, told, check)


@pytest.mark.parametrize("zebra", [True, False])
def test_ranks_measure_and_sums_are_right(tmp_path: Path, zebra: bool) -> None:
    load = generated(Model("toy", 100_000, 3000, 0.6), 2, 3, pairs=100)
    file = _file(tmp_path, 3, 1e9, load.hot if zebra else None)
    over, said = threading.Event(), list[str]()
    names = ("switch", "shard0") if zebra else ("shard0",)
    machines = [threading.Thread(target=machine, args=(file, name, over, said.append)) for name in names]
    found: dict[int, dict[str, float]] = {}

    def rank(number: int) -> None:
        batches = [keys[number] for keys in load.of(2)]
        found[number] = take_part(file, number, batches, timeout=60.0)

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    try:
        for thread in (*machines, *ranks):
            thread.start()
        nothing = np.zeros(0, np.uint64)
        with join_sparse(file, 2) as member:
            for _ in range(3):
                member.job.push(nothing, nothing)
            for thread in ranks:
                thread.join(timeout=60)
            pushed = np.concatenate([keys for iteration in load.of(2) for keys in iteration])
            keys, count = np.unique(pushed, return_counts=True)
            assert (member.job.pull(keys)[:, 0] == count).all()
    finally:
        over.set()
        for thread in machines:
            thread.join(timeout=60)
    assert sorted(line.split(" at ")[0] for line in said) == sorted(f"ready: {name}" for name in names)
    assert sum(its["hot"] + its["cold"] for its in found.values()) == len(pushed)
    assert (found[0]["hot"] > 0) is zebra
    assert all(its["seconds"] > 0 for its in found.values())


def test_claims_of_the_live_figure() -> None:
    def live(seconds: float, wrong: int = 0) -> Live:
        return Live(seconds, 1000, 0.5, 3, wrong)

    outcome = judge({"OA": ([live(1.0), live(1.0)], [live(1.7), live(1.7)])})
    assert all(claim.holds for claim in outcome.claims)
    assert outcome.tables[0].rows[0][3] == pytest.approx(1.7)
    slow = judge({"OA": ([live(1.0)], [live(1.2, wrong=2)])})
    assert [claim.holds for claim in slow.claims] == [True, False, False]
    assert "1.67" in slow.claims[1].reason
