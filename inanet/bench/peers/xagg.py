"""inanet itself, through the client library. ``RANK WORLD LOCAL_WORLD SOCKET shared|private MODE JOB``."""

import sys
import time

import numpy as np
from numpy.typing import NDArray

import inanet
from inanet.bench.peers.rank import serve
from inanet.client.job import Job


class Xagg:
    """A job; ``mode`` is how its exponents are agreed on."""

    def __init__(self, job: Job, mode: str) -> None:
        self.job = job
        self.mode = mode

    def barrier(self) -> None:
        self.job.barrier()

    def all_reduce(self, array: NDArray[np.float32], late: float) -> NDArray[np.float32]:
        time.sleep(late)
        self.job.all_reduce(array, name=f"{array.size}", mode=self.mode, factor=_FACTOR)
        return array


#: of the fixed mode: exact for the small integers that ranks of a benchmark sum
_FACTOR = 2.0**16

if __name__ == "__main__":
    number, total, local = (int(text) for text in sys.argv[1:4])
    with inanet.connect(
        sys.argv[7], rank=number, world=total, local_world=local, socket=sys.argv[4]
    ) as joined:
        peer = Xagg(joined, sys.argv[6])
        if sys.argv[5] == "shared":
            serve(number, total, peer, lambda count: joined.empty(count))
        else:
            serve(number, total, peer)
