"""Sparse data: samples, and corpora of them that are on every machine, Python's standard library and more.

A sample has a label, 0 or 1, and features: 64-bit keys with values. Words of source code are distributed as words are, a few
very often and most hardly ever (Zipf), which is what Zebra lives on.
"""

import hashlib
import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from inanet.service.exits import Exit, Failure

#: lines of a sample of the corpus
LINES = 8
#: what a corpus is made of: the standard library; its tests as well; and the sources of the packages that this one needs
Scope = Literal["library", "tests", "packages"]
#: names by which commands take a corpus for a data set
CORPORA: dict[str, Scope] = {"corpus": "library", "corpus+tests": "tests", "corpus+packages": "packages"}
CORPUS = "corpus"
#: packages that this one cannot do without, so that every machine has their sources
_PACKAGES = (
    "click",
    "llvmlite",
    "msgpack",
    "numba",
    "numpy",
    "prometheus_client",
    "psutil",
    "pydantic",
    "structlog",
)
_WORD = re.compile(r"[A-Za-z_]\w*")
#: directories of the standard library that are not the library itself, and those that are not even its tests
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}


class BadData(Failure):
    """A data set cannot be read; the message names file and line."""

    code = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Samples:
    """``n`` samples: features of sample *i* are entries ``start[i]`` to ``start[i + 1]`` of ``keys`` uint64 and ``values``
    float32, its keys distinct; ``labels`` float32[n], 0 or 1.
    """

    name: str
    start: NDArray[np.int64]
    keys: NDArray[np.uint64]
    values: NDArray[np.float32]
    labels: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64]) -> "Samples":
        """Some samples, in the order of ``rows`` int64."""
        lengths = self.start[rows + 1] - self.start[rows]
        start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        entries = np.arange(start[-1]) + np.repeat(self.start[rows] - start[:-1], lengths)
        return Samples(self.name, start, self.keys[entries], self.values[entries], self.labels[rows])

    def batches(self, size: int) -> Iterator["Samples"]:
        """``size`` samples at a time, in order; what is left at the end makes no batch."""
        for first in range(0, len(self) - size + 1, size):
            yield self.take(np.arange(first, first + size))

    def shuffled(self, seed: int) -> "Samples":
        """The same in an order that is drawn."""
        return self.take(np.random.default_rng(seed).permutation(len(self)))


def hashed(words: list[str]) -> NDArray[np.uint64]:
    """64-bit keys of words, the same on every machine."""
    known: dict[str, int] = {}
    for word in words:
        if word not in known:
            known[word] = int.from_bytes(
                hashlib.blake2b(word.encode(errors="surrogateescape"), digest_size=8).digest(), "big"
            )
    return np.array([known[word] for word in words], np.uint64)


def _files(scope: Scope) -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    without = _NOT_LIBRARY if scope == "library" else _FOREIGN
    found = [path for path in sorted(root.rglob("*.py")) if not without & set(path.relative_to(root).parts)]
    for name in _PACKAGES if scope == "packages" else ():
        spec = importlib.util.find_spec(name)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            found += sorted(Path(place).rglob("*.py"))
    if not found:
        raise BadData(f"there are no sources in {root}; give a libsvm or CSV file instead")
    return found


@lru_cache(maxsize=1)
def sources(scope: Scope = "library") -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Words of the sources, hashed, uint64[n], and for each the sample and the file that it is in, int64[n]."""
    known: dict[str, int] = {}
    words, sample, file = [], [], []
    count = 0
    for place, path in enumerate(_files(scope)):
        numbers, at = [], []
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
            found = _WORD.findall(line)
            numbers += [known.setdefault(word, len(known)) for word in found]
            at += [count + number // LINES] * len(found)
        count = at[-1] + 1 if at else count
        words.append(np.array(numbers, np.int64))
        sample.append(np.array(at, np.int64))
        file.append(np.full(len(at), place, np.int64))
    return hashed(list(known))[np.concatenate(words)], np.concatenate(sample), np.concatenate(file)


@lru_cache(maxsize=2)
def corpus(scope: Scope = "library", *, pairs: bool = True) -> Samples:
    """Sources: a sample is 8 lines, its features are the words and, with ``pairs``, the pairs of neighbouring words in
    them; its label whether they have a ``return``, which is no feature itself. Raises :class:`BadData` without any.
    """
    return of_words(*sources(scope)[:2], pairs)


def of_words(words: NDArray[np.uint64], sample: NDArray[np.int64], pairs: bool) -> Samples:
    """Samples of hashed words uint64[n], which are in samples int64[n], ascending."""
    answer = words == hashed(["return"])[0]
    labelled = np.unique(sample[answer])
    words, sample = words[~answer], sample[~answer]
    keys, owner = words, sample
    if pairs:
        inside = sample[1:] == sample[:-1]
        mixed = (words[:-1] * np.uint64(0x9E3779B97F4A7C15) ^ words[1:]) * np.uint64(0xBF58476D1CE4E5B9)
        keys = np.concatenate([words, mixed[inside]])
        owner = np.concatenate([sample, sample[1:][inside]])
    order = np.lexsort((keys, owner))
    keys, owner = keys[order], owner[order]
    first = np.ones(len(keys), np.bool_)
    first[1:] = (keys[1:] != keys[:-1]) | (owner[1:] != owner[:-1])
    keys, owner = keys[first], owner[first]
    present, start = np.unique(owner, return_index=True)
    return Samples(
        CORPUS,
        np.concatenate([start, [len(keys)]]).astype(np.int64),
        keys,
        np.ones(len(keys), np.float32),
        np.isin(present, labelled).astype(np.float32),
    )
