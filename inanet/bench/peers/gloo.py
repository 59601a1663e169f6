"""torch.distributed with Gloo: the ring all-reduce that CPU training uses today. ``RANK WORLD FILE``."""

import sys
import time

import numpy as np
from numpy.typing import NDArray

from inanet.bench.peers.rank import serve


class Gloo:
    """All-reduce in place over torch tensors that share memory with the arrays."""

    def __init__(self, rank: int, world: int, rendezvous: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)

    def barrier(self) -> None:
        self._dist.barrier()

    def all_reduce(self, array: NDArray[np.float32], late: float) -> NDArray[np.float32]:
        time.sleep(late)
        self._dist.all_reduce(self._torch.from_numpy(array))
        return array


if __name__ == "__main__":
    number, total = int(sys.argv[1]), int(sys.argv[2])
    serve(number, total, Gloo(number, total, sys.argv[3]))
