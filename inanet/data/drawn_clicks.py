"""Click logs that are drawn, with the shape of the paper's industrial models, and with something to learn in them.

What the paper says of those models is how many parameters they have and which share of all updates the hot ones have (section
III-A); the logs themselves are a company's. Here batches are as :func:`~inanet.data.key_batches.generated` draws them: a parameter is
in a batch once, hot ones the likelier the hotter. Every key has a true weight, and a click is as likely as the logistic function
of the weights' sum says.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.data.clicks import Samples
from inanet.data.key_batches import PAIRS, SCALE, Model, generated
from inanet.proto.zebra.store import Uniform

#: samples of a batch; its keys are dealt to them
SAMPLES = 100
_SEED = 21


def drawn(
    model: Model,
    batches: int,
    *,
    scale: int = SCALE,
    pairs: int = PAIRS,
    size: int = SAMPLES,
    strength: float = 6.0,
) -> Samples:
    """``batches`` of ``size`` samples each, one behind the other: batches are to be taken as they come, not shuffled.

    The model is divided by ``scale``, a batch has about ``pairs`` keys. True weights have a standard deviation of ``strength``
    over the root of the keys of a sample, so that samples are as easy to tell apart whatever their number.
    """
    load = generated(model, 1, batches, scale, pairs)
    rng = np.random.default_rng(_SEED)
    keys = [rng.permutation(batch[0]) for batch in load.batches]
    counts = np.concatenate([_dealt(len(part), size) for part in keys])
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    every = np.concatenate(keys)
    # uniform numbers in [-1, 1) have a deviation of the root of a third
    weight = Uniform(1.0, _SEED)(every, 1)[:, 0].astype(np.float64) * np.sqrt(3.0)
    score = np.add.reduceat(weight, start[:-1]) * strength / np.sqrt(np.maximum(counts, 1))
    labels = rng.random(len(counts)) < 1 / (1 + np.exp(-score))
    return Samples(model.name, start, every, np.ones(len(every), np.float32), labels.astype(np.float32))


def _dealt(keys: int, size: int) -> NDArray[np.int64]:
    """How many of a batch's keys each sample has: as nearly the same number as can be."""
    return np.diff(np.arange(size + 1) * keys // size)
