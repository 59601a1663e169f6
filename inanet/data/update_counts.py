"""How often keys are updated in training with batches of samples, counted in bounded memory.

An update is a key in a batch, however often it is there, and batches are drawn from all samples. So pairs of key and sample go to
temporary files by a hash of the key, and each is counted by itself once it is known how many samples there are.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.data.clicks import Samples
from inanet.proto.zebra.hot import Ranking, ranking, sample

#: files, and the bytes up to which one stays in memory
_FILES, _IN_MEMORY = 64, 1 << 18
_PAIR = np.dtype([("key", "<u8"), ("sample", "<i8")])
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Updates:
    """``samples`` there are, ``all`` their updates by key, and those of the ``sampled`` batches, if some were."""

    samples: int
    all: Ranking
    sampled: Ranking | None


def count_updates(blocks: Iterable[Samples], size: int, seed: int, rate: float | None = None) -> Updates:
    """Updates of batches of ``size`` samples (all, if there are fewer) in an order drawn from ``seed``, and of a share ``rate`` of
    the batches, drawn as well. Raises ``ValueError`` for a rate outside (0, 1].
    """
    files = [tempfile.SpooledTemporaryFile(_IN_MEMORY) for _ in range(_FILES)]  # noqa: SIM115
    try:
        count = 0
        for block in blocks:
            pairs = np.empty(len(block.keys), _PAIR)
            pairs["key"] = block.keys
            pairs["sample"] = count + np.repeat(np.arange(len(block)), np.diff(block.start))
            count += len(block)
            place = block.keys * _MIX >> np.uint64(58)
            order = np.argsort(place, kind="stable")
            ends = np.cumsum(np.bincount(place.astype(np.int64), minlength=_FILES))[:-1]
            for file, part in zip(files, np.split(pairs[order], ends), strict=True):
                file.write(part.tobytes())
        size = min(size, count) or 1
        batch = np.empty(count, np.int64)
        batch[np.random.default_rng(seed).permutation(count)] = np.arange(count) // size
        rows = None if rate is None else sample(count // size, rate, np.random.default_rng(seed))
        found = [_counted(file, batch, count // size, rows) for file in files]
    finally:
        for file in files:
            file.close()
    return Updates(count, _ranked(found, 0), None if rows is None else _ranked(found, 1))


_Counts = tuple[NDArray[np.uint64], NDArray[np.int64]]


def _counted(
    file: "tempfile.SpooledTemporaryFile[bytes]",
    batch: NDArray[np.int64],
    batches: int,
    rows: NDArray[np.int64] | None,
) -> list[_Counts]:
    """Keys of one file and their updates: of all batches, and of those in ``rows``. Samples that make no batch have none."""
    file.seek(0)
    pairs = np.frombuffer(file.read(), _PAIR)
    number = batch[pairs["sample"]]
    keys, number = pairs["key"][number < batches], number[number < batches]
    order = np.lexsort((number, keys))
    keys, number = keys[order], number[order]
    fresh = np.ones(len(keys), np.bool_)
    fresh[1:] = (keys[1:] != keys[:-1]) | (number[1:] != number[:-1])
    keys, number = keys[fresh], number[fresh]
    parts = [keys] if rows is None else [keys, keys[np.isin(number, rows)]]
    return [np.unique(part, return_counts=True) for part in parts]


def _ranked(found: list[list[_Counts]], which: int) -> Ranking:
    keys, counts = zip(*(parts[which] for parts in found), strict=True)
    return ranking(np.concatenate(keys), np.concatenate(counts))
