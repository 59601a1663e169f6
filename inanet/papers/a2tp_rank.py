"""A rank of a micro-benchmark job: rounds one after the other, without a computation between, until rank 0 is told to stop.

``python -m inanet.papers.a2tp_rank JOB RANK WORLD SYSTEM ELEMENTS``, with INA_SOCKET in the environment. When it has
joined and done one round it prints ``joined`` and waits for a line on standard input; the end of standard input at rank 0 ends the job. It then
prints, as JSON, the monotonic times in seconds at which it had the results. Two rounds are under way at a time, so that the
network is never idle.
"""

import json
import select
import sys
import time
from collections import deque

import numpy as np

from inanet.client.handle import Handle
from inanet.client.job import connect

#: rounds under way at a time, and seconds to wait for one
AHEAD, PATIENCE = 2, 60.0


def main() -> None:
    """Join, wait for the line, and repeat."""
    name, rank, world, system, elements = sys.argv[1:]
    with connect(
        name, rank=int(rank), world=int(world), local_world=1, system=system, timeout=PATIENCE
    ) as job:
        arrays = [job.empty(int(elements), np.float32) for _ in range(AHEAD)]
        # agents load kernels with their first round, which is not what is measured
        job.all_reduce(arrays[0], name="g0", mode="fixed", factor=1e6)
        print("joined", flush=True)
        sys.stdin.readline()
        times = []
        waiting: deque[tuple[int, Handle]] = deque()
        number, last = 0, None
        while last is None or number < last:
            index = number % AHEAD
            arrays[index][:] = 1.0
            # everybody stops after the same round: what rank 0 says comes with the sums
            over = rank == "0" and bool(select.select([sys.stdin], [], [], 0)[0])
            arrays[index][0] = float(over)
            waiting.append(
                (index, job.all_reduce_async(arrays[index], name=f"g{index}", mode="fixed", factor=1e6))
            )
            number += 1
            if len(waiting) == AHEAD:
                index, handle = waiting.popleft()
                handle.wait(PATIENCE)
                times.append(time.monotonic())
                if last is None and arrays[index][0] > 0.5:
                    last = number
        for _, handle in waiting:
            handle.wait(PATIENCE)
            times.append(time.monotonic())
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
