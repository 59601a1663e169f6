"""Packets of a PS shard that answer others, one by one, and go to where those came from."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.packets import Column, Head, Judged, Sheaf, by_length
from inanet.wire.batch import I64, Transmission
from inanet.wire.zebra import Kind


def sent_back(sheaf: Sheaf, sources: NDArray[np.uint64]) -> list[Transmission]:
    """Packets to ``sources`` uint64[n], one each."""
    out: list[Transmission] = []
    for source in np.unique(sources).tolist():
        mine = sources == source
        out += by_length(int(source), sheaf.arena, sheaf.offsets[mine], sheaf.lengths[mine])
    return out


def refusals(judged: Judged, which: I64, head: Head) -> list[Transmission]:
    """Tell workers what packets can never be taken; once each for a batch."""
    sources = judged.batch.sources
    _, first = np.unique(sources[which], return_index=True)
    which = which[first]
    if not len(which):
        return []
    sheaf = Sheaf(Kind.REFUSAL, head, np.zeros(len(which), np.int64), None, None, end=False)
    sheaf.number(judged[Column.ITERATION][which], head.key)
    return sent_back(sheaf, sources[which])


def waiting(judged: Judged, questions: I64, head: Head, first: int) -> list[Transmission]:
    """Tell workers that ask for whom an iteration waits; once each for a batch."""
    sources = np.unique(judged.batch.sources[questions])
    sheaf = Sheaf(Kind.WAITING, head, np.zeros(len(sources), np.int64), None, None, end=False)
    sheaf.number(np.full(len(sources), first, np.int64), head.key)
    return sent_back(sheaf, sources)
