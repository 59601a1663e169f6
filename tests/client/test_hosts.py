"""The promises of the API across hosts: two agents with two local ranks each, as real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inanet.launch.fabric import Fabric
from inanet.launch.process import python_environment

SCRIPT = """
import json, sys
import numpy as np
import inanet

rank = int(sys.argv[1])
seen = {}

def failing(job, array, **options):
    try:
        job.all_reduce(array, **options)
    except inanet.InaError as error:
        return [type(error).__name__, str(error), error.round]
    return None

with inanet.connect("hosts", rank=rank, world=4, local_world=2, socket=sys.argv[2]) as job:
    for op, expected in (("sum", 10), ("mean", 2.5), ("max", 4), ("min", 1)):
        array = np.full(3000, rank + 1, np.float32)
        job.all_reduce(array, op)
        seen[op] = bool((array == expected).all())
    poisoned = np.ones(500, np.float32)
    if rank == 2:
        poisoned[77] = np.nan
    seen["nan"] = failing(job, poisoned, name="gradient")
    seen["one host"] = failing(job, np.ones(500 if rank != 3 else 501, np.float32))
    seen["two hosts"] = failing(job, np.ones(500, np.float32 if rank < 2 else np.float16))
    seen["factor"] = failing(job, np.ones(5, np.float32), mode="fixed", factor=1e40)
    seen["overflow"] = failing(job, np.full(5, 2**30, np.int32))
    wrapped = job.all_reduce(np.full(5, 2**30, np.int32), overflow="wrap")
    seen["wrapped"] = bool((wrapped == 0).all())
    seen["empty"] = failing(job, np.ones(0, np.float32))
    strided = np.full((30, 10), rank + 1, np.int64).T[::2]
    job.all_reduce(strided)
    seen["strided"] = bool((strided == 10).all())
    wanted = np.random.default_rng(rank).standard_normal(70000).astype(np.float32)
    job.all_reduce(wanted, mode="prologue")
    seen["bits"] = wanted.tobytes().hex()[:64] + str(wanted.sum())
print(json.dumps(seen))
"""


@pytest.mark.processes
def test_collectives_and_refusals_are_the_same_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    topology = [("ps", None), ("worker0", "ps"), ("worker1", "ps")]
    with Fabric(topology=topology) as fabric:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(fabric.worker_socket(rank // 2))],
                env=python_environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]
        try:
            seen = [json.loads(rank.communicate(timeout=90)[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for one in seen:
        assert all(one[name] is True for name in ("sum", "mean", "max", "min", "strided"))
        assert one["empty"] is None
        kind, text, round_ = one["nan"]
        assert (kind, round_) == ("NonFiniteError", 5)
        assert "rank 2" in text
        assert "element 77" in text
        assert "'gradient'" in text
        kind, text, _ = one["one host"]
        assert kind == "MismatchError"
        assert "(500,)" in text
        assert "(501,)" in text
        kind, text, _ = one["two hosts"]
        assert kind == "MismatchError"
        assert "f32" in text
        assert "f16" in text
        assert one["factor"][0] == "FabricError"
        kind, text, _ = one["overflow"]
        assert kind == "OverflowRefused"
        assert "element 0" in text
        assert one["wrapped"]
    assert len({one["bits"] for one in seen}) == 1
