"""Sparse data by name: corpora and interactions, which are on every machine, or a file."""

from inanet.data.clicks import CORPORA, Samples
from inanet.data.clicks import load as read
from inanet.data.interactions import interactions

INTERACTIONS = "interactions"
#: names that need no file
NAMES = (*CORPORA, INTERACTIONS)


def load(source: str) -> Samples:
    """One of :data:`NAMES`, or the file of that name; see :func:`inanet.data.clicks.load`.

    Raises :class:`~inanet.data.clicks.BadData`.
    """
    return interactions() if source == INTERACTIONS else read(source)
