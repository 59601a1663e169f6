"""Gradients of a PS shard's open iteration, and their sum, which does not depend on when they came."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.membership import F32, HotSet, Job
from inanet.wire.batch import I64, U64


@dataclass(slots=True)
class Pile:
    """Parts with the order they count in, int64[n], keys or ranks, uint64[n], and words, uint32[n, width]."""

    order: list[I64] = field(default_factory=list)
    names: list[U64] = field(default_factory=list)
    words: list[NDArray[np.uint32]] = field(default_factory=list)

    def add(self, order: I64, names: U64, words: NDArray[np.uint32]) -> None:
        """Put something on the pile."""
        self.order.append(order)
        self.names.append(names)
        self.words.append(words)

    def sorted(self, width: int) -> tuple[U64, NDArray[np.uint32]]:
        """Names and words in their order."""
        if not self.order:
            return np.zeros(0, np.uint64), np.zeros((0, width), np.uint32)
        place = np.argsort(np.concatenate(self.order), kind="stable")
        return np.concatenate(self.names)[place], np.concatenate(self.words)[place]


def added(job: Job, hot: HotSet, cold: Pile, sums: Pile) -> tuple[U64, F32, I64]:
    """Distinct keys, ascending, the sums of their gradients, added in float64, and how many of these came by themselves."""
    keys, words = cold.sorted(job.width)
    ranks, words_of_sums = sums.sorted(job.width)
    at = ranks.astype(np.int64)
    values = words.view(np.float32).astype(np.float64)
    if job.floats:
        totals = words_of_sums.view(np.float32).astype(np.float64)
    else:
        totals = (
            words_of_sums.view(np.int32) / hot.scale[at][:, None] if len(at) else np.zeros((0, job.width))
        )
    every, place = np.unique(np.concatenate([keys, hot.keys[at]]), return_inverse=True)
    gradients = np.zeros((len(every), job.width), np.float32)
    both = np.concatenate([values, totals])
    # a sum beyond float32 is infinite, as it would be anywhere
    with np.errstate(over="ignore"):
        for column in range(job.width):
            gradients[:, column] = np.bincount(place, weights=both[:, column], minlength=len(every))
    updates = np.bincount(place[: len(keys)], minlength=len(every)).astype(np.int64)
    return every, gradients, updates
