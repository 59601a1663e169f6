"""A worker's gradients, divided: hot ones to the switch by rank and as integers, cold ones to their shards by key, as floats."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.cache import HotCache
from inanet.proto.zebra.layout import in_sequence, orchestrate
from inanet.proto.zebra.membership import F32, Job
from inanet.proto.zebra.packets import Head, Sheaf
from inanet.wire.batch import I64, U64
from inanet.wire.zebra import Flag, Kind


@dataclass(frozen=True, slots=True)
class Divided:
    """``sheaves`` are for each shard and, last, for the switch, ``None`` without one. ``hot`` of the gradients go there;
    ``misfits`` would, but are too large.
    """

    sheaves: list[Sheaf | None]
    hot: int
    misfits: int


def divided(job: Job, cache: HotCache, head: Head, keys: U64, values: F32) -> Divided:
    """Divide ``values`` float32[n, width] of ``keys`` uint64[n] and make packets of them, which begin with ``head``."""
    ranks = cache.ranks(keys)
    words, fits = _quantised(job, cache, values, ranks)
    hot = ranks >= 0
    misfits = int((hot & ~fits).sum())
    hot &= fits
    cold = np.flatnonzero(~hot)
    shards = job.shard_of(keys[cold])
    sheaves: list[Sheaf | None] = []
    for shard in range(len(job.shards)):
        mine = cold[shards == shard]
        counts = in_sequence(len(mine), job.capacity(Kind.COLD))
        sheaves.append(Sheaf(Kind.COLD, head, counts, keys[mine], values[mine].view(np.uint32)))
    sheaves.append(_packed(job, cache, head, ranks[hot], words[hot]) if job.switch else None)
    return Divided(sheaves, int(hot.sum()), misfits)


def _quantised(
    job: Job, cache: HotCache, values: F32, ranks: I64
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Words of all values for the switch, and which keys' fit; those that do not go to the PS as they are."""
    if job.floats or not len(cache.hot):
        return values.view(np.uint32), np.ones(len(values), np.bool_)
    scaled = np.rint(values.astype(np.float64) * cache.hot.scale[ranks][:, None])
    fits: NDArray[np.bool_] = np.asarray((np.abs(scaled) <= job.limit).all(axis=1))
    scaled[~fits] = 0
    return scaled.astype(np.int32).view(np.uint32), fits


def _packed(job: Job, cache: HotCache, head: Head, ranks: I64, words: NDArray[np.uint32]) -> Sheaf:
    heat = np.argsort(ranks)
    ranks, words = ranks[heat], words[heat]
    order, counts = orchestrate(cache.layout.register[ranks], job.registers, job.capacity(Kind.HOT))
    flags = Flag.FLOAT if job.floats else Flag.NONE
    mine = Head(head.job, head.key, head.sender, head.version, head.iteration, head.width, flags)
    return Sheaf(Kind.HOT, mine, counts, ranks[order].astype(np.uint64), words[order])
