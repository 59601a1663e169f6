"""A rank that repeats one round: ``python -m inanet.papers.goat_rank RANK WORLD SYSTEM ROUNDS ELEMENTS``, with INA_SOCKET in the
environment.

At the end it prints, as JSON, the seconds of every round. The first one, whose tensor has yet to be laid out, is among them.
"""

import json
import sys
import time

import numpy as np

from inanet.client.job import connect

#: seconds to wait for the others, and for a round
PATIENCE = 120.0


def main() -> None:
    """Join, and repeat. Ends with an exception if a sum is wrong."""
    rank, world, system, rounds, elements = sys.argv[1:]
    with connect(
        "goat", rank=int(rank), world=int(world), local_world=1, system=system, timeout=PATIENCE
    ) as job:
        array, times = job.empty(int(elements), np.float32), []
        for number in range(int(rounds)):
            array[:] = int(rank) + number
            began = time.monotonic()
            job.all_reduce_async(array, name="g", mode="fixed", factor=1e6).wait(PATIENCE)
            times.append(time.monotonic() - began)
            expected = int(world) * (int(world) - 1) / 2 + int(world) * number
            np.testing.assert_allclose(array, expected, rtol=1e-5)
        job.barrier()
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
