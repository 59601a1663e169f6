"""Real daemons that send results once, by multicast on the loopback interface."""

from contextlib import ExitStack

import numpy as np
import pytest

import inanet
from inanet.launch.fabric import Fabric
from inanet.wire.xagg import ROW_BYTES
from tests.client.agent import run_all
from tests.daemons.test_fabric import Expected

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
WORKERS = 4
COUNT = 256 * 4000


def test_results_leave_the_parameter_server_once(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    topology = [("ps", None), *((f"worker{index}", "ps") for index in range(WORKERS))]
    expected = Expected(COUNT)
    with Fabric(topology=topology, downlink="multicast") as fabric:
        with ExitStack() as stack:

            def connect(rank: int) -> inanet.Job:
                return inanet.connect(
                    "train", rank=rank, world=WORKERS, socket=fabric.worker_socket(rank), timeout=60.0
                )

            jobs = [stack.enter_context(job) for job in run_all(connect, WORKERS)]
            for round_ in range(3):
                values = [
                    np.random.default_rng((round_, rank)).standard_normal(COUNT).astype(np.float32)
                    for rank in range(WORKERS)
                ]
                bits = expected.after(values)
                handles = [job.all_reduce_async(v) for job, v in zip(jobs, values, strict=True)]
                for handle in handles:
                    handle.wait()
                assert {value.tobytes() for value in values} == {bits}
        assert fabric.shutdown() == []
        ps = fabric.stats()["ps"]
    results = 3 * 4000 * ROW_BYTES
    # a child that a busy machine has held up gets them by itself for a while, and time decides how often; to each of four
    # it would be four times as much
    assert results < ps.tx_bytes < WORKERS * results
    assert ps.results_multicast > 3 * 4000 // 2
