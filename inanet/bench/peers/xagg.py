"""inanet itself, through the client library. ``RANK WORLD LOCAL_WORLD SOCKET shared|private``."""

import sys

import numpy as np
from numpy.typing import NDArray

import inanet
from inanet.bench.peers.rank import serve
from inanet.client.job import Job


class Xagg:
    """A job."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def barrier(self) -> None:
        """All ranks."""
        self.job.barrier()

    def all_reduce(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """In place."""
        self.job.all_reduce(array, name=f"{array.size}")
        return array


if __name__ == "__main__":
    number, total, local = (int(text) for text in sys.argv[1:4])
    with inanet.connect("compare", rank=number, world=total, local_world=local, socket=sys.argv[4]) as joined:
        if sys.argv[5] == "shared":
            serve(number, total, Xagg(joined), lambda count: joined.empty(count))
        else:
            serve(number, total, Xagg(joined))
