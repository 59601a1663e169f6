"""Users and items that every machine has: which words occur in which files of Python's standard library.

Implicit feedback, as in films seen or goods bought, is pairs of a user and an item that met, and models of it (He et al., NCF,
2017) learn to tell them from pairs that did not, which are drawn. Here files are the users and words the items: some words are
in nearly every file, and most in a few.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.data.clicks import BadData, Samples, sources

#: files that a word must be in to be an item
LEAST = 1
#: pairs that did not meet, for each that did
NEGATIVES = 2
_SEED = 17


def interactions() -> Samples:
    """Files and words: a sample has two features, its user and its item, and is positive if they met.

    Raises :class:`~inanet.data.clicks.BadData` without sources.
    """
    words, _, files = sources()
    return of_pairs(files, words)


def of_pairs(users: NDArray[np.int64], items: NDArray[np.uint64], least: int = LEAST) -> Samples:
    """Samples of meetings, int64[n] and uint64[n], in an order that is drawn. An item that fewer than ``least`` users met is
    left out. Items of negative samples are drawn alike from all, and may turn out to be ones that the user met: those are
    left out too. Raises :class:`~inanet.data.clicks.BadData` when nothing is left.
    """
    _, item = np.unique(items, return_inverse=True)
    met = np.unique(users << 32 | item)
    often = np.bincount(met & 0xFFFFFFFF) >= least
    met = met[often[met & 0xFFFFFFFF]]
    if not len(met):
        raise BadData(f"no item has met {least} users")
    rng = np.random.default_rng(_SEED)
    known = np.unique(met & 0xFFFFFFFF)
    drawn = np.repeat(met >> 32, NEGATIVES) << 32 | rng.choice(known, NEGATIVES * len(met))
    missed = np.unique(drawn[~np.isin(drawn, met)])
    pairs = np.concatenate([met, missed])
    labels = np.repeat([1.0, 0.0], [len(met), len(missed)]).astype(np.float32)
    order = rng.permutation(len(pairs))
    pairs, labels = pairs[order], labels[order]
    # users and items are different things and must not share keys
    keys = np.stack([pairs >> 32 << 1, (pairs & 0xFFFFFFFF) << 1 | 1], axis=1).astype(np.uint64)
    return Samples(
        "interactions",
        np.arange(0, 2 * len(pairs) + 1, 2, dtype=np.int64),
        (keys * np.uint64(0x9E3779B97F4A7C15)).reshape(-1),
        np.ones(2 * len(pairs), np.float32),
        labels,
    )
