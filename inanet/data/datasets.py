"""Sparse data by name: corpora and interactions, which are on every machine, or a file."""

from collections.abc import Callable, Iterator

from inanet.data import sample_files
from inanet.data.clicks import CORPORA, Samples, corpus
from inanet.data.interactions import interactions

INTERACTIONS = "interactions"
#: names that need no file
NAMES = (*CORPORA, INTERACTIONS)


def _named(source: str) -> Samples:
    return interactions() if source == INTERACTIONS else corpus(CORPORA[source])


def load(source: str, tell: Callable[[str], None] = lambda text: None) -> Samples:
    """One of :data:`NAMES`, or the file of that name; see :func:`inanet.data.sample_files.load`.

    Raises :class:`~inanet.data.clicks.BadData`.
    """
    return _named(source) if source in NAMES else sample_files.load(source, tell)


def blocks(source: str, progress: sample_files.Progress) -> Iterator[Samples]:
    """The same some samples at a time, with a file's own labels; see :func:`inanet.data.sample_files.blocks`."""
    return iter([_named(source)]) if source in NAMES else sample_files.blocks(source, progress)
