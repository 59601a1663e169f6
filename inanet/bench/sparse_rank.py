"""One rank of a measured sparse job, as a process: ``python -m inanet.bench.sparse_rank FILE RANK BATCHES``."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from inanet.sparse.member import join_sparse
from inanet.wire.batch import U64


def take_part(
    file: str | Path, rank: int, batches: Sequence[U64], timeout: float = 300.0
) -> dict[str, float]:
    """Push ones to each iteration's keys, and pull them; the first iteration is not measured, since it waits for ranks that are
    still starting. Gives ``seconds``, the pairs that went to the switch and to the PS, and packets ``repeated``.

    Raises what pushes and pulls raise.
    """
    with join_sparse(file, rank, timeout=timeout) as member:
        begin = time.perf_counter()
        for number, keys in enumerate(batches):
            if number == 1:
                begin = time.perf_counter()
            member.job.push_pull(keys, np.ones(len(keys), np.float32))
        seconds = time.perf_counter() - begin
        stats = member.worker.stats()
    return {
        "seconds": seconds,
        "hot": stats["hot_pairs"],
        "cold": stats["cold_pairs"],
        "repeated": stats["repeated"],
    }


def main() -> None:
    """Read the batches, take part, print one JSON object."""
    file, rank, stored = sys.argv[1:]
    with np.load(stored) as arrays:
        batches = [arrays[name] for name in sorted(arrays.files, key=int)]
    print(json.dumps(take_part(file, int(rank), batches)))


if __name__ == "__main__":
    main()
