"""An iteration of the paper's testbed as a model: computing, then communication by equations (1) to (3).

Computing is what an iteration of Table 7 has beside its printed communication. The rate between machines is what the ring of
that table reached, for each model; two sets of parameters are taken for everything that it does not tell:

*printed*: NVLink's 150 GB/s within a machine, as in section 5.4, and steps of 1 us.
*fitted*: the rate that eight GPUs on one card leave of Table 7's, the rate within a machine and the time of a step for which
the nine communication times that follow from Table 9 are met best.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from inanet.planning.patterns import Cluster, flat_ring, parallel_netreduce, ring, tencent

#: section 5.4: machines of testbed 2, GPUs in each, bytes per second of NVLink, seconds of a step (section 3.4)
MACHINES, EACH, NVLINK, HOP = 4, 8, 150e9, 1e-6


@dataclass(frozen=True, slots=True)
class Printed:
    """A model in Tables 7 and 9, batches of 32, half precision. ``size`` in bytes; times in ms; gains in per cent."""

    size: float
    #: iteration, communication: ring all-reduce and NetReduce with four GPUs
    ring: tuple[float, float]
    netreduce: tuple[float, float]
    #: throughput gain and shorter communication
    gain: float
    shorter: float
    #: images per second and GPU with 32 GPUs: flat ring, Tencent all-reduce, parallel NetReduce
    images: tuple[float, float, float]
    #: gains over flat ring and Tencent all-reduce
    margins: tuple[float, float]

    @property
    def computing(self) -> float:
        """Seconds of an iteration that are not communication, in the ring's row."""
        return (self.ring[0] - self.ring[1]) * 1e-3

    @property
    def rate(self) -> float:
        """Bytes per second between machines at which equation (1) gives the ring's communication."""
        return ring(MACHINES, self.size, 1.0, 0.0) / (self.ring[1] * 1e-3)

    def waits(self) -> tuple[float, ...]:
        """Seconds of communication that Table 9's throughputs leave, by pattern."""
        return tuple(BATCH / images - self.computing for images in self.images)


BATCH = 32
MODELS = {
    "AlexNet": Printed(
        236e6, (60.62, 47.12), (44.69, 31.10), 35.6, 34.0, (307.5, 328.8, 519.2), (68.8, 57.9)
    ),
    "VGG16": Printed(
        528e6, (185.08, 111.98), (148.63, 74.64), 24.5, 33.3, (115.2, 122.2, 173.6), (50.7, 42.1)
    ),
    "ResNet50": Printed(98e6, (89.19, 23.04), (83.42, 19.29), 6.9, 16.3, (276.0, 282.8, 317.6), (15.1, 12.3)),
}
PATTERNS: Mapping[str, Callable[[Cluster, float], float]] = {
    "flat-ring": flat_ring,
    "tencent": tencent,
    "parallel-netreduce": parallel_netreduce,
}
PARALLEL = "parallel-netreduce"


@dataclass(frozen=True, slots=True)
class Parameters:
    """``slower``: by what the rate between machines is below Table 7's; ``inside`` in bytes per second, ``hop`` in seconds."""

    slower: float = 1.0
    inside: float = NVLINK
    hop: float = HOP

    def cluster(self, rate: float, machines: int = MACHINES) -> Cluster:
        """Machines with eight GPUs each."""
        return Cluster(EACH * machines, EACH, self.inside, rate / self.slower, self.hop)

    def seconds(self, rate: float, size: float, machines: int = MACHINES) -> dict[str, float]:
        """Communication by pattern."""
        return {name: its(self.cluster(rate, machines), size) for name, its in PATTERNS.items()}


#: a rate at which nothing takes any time
_ENDLESS = 1e30


@cache
def fit() -> Parameters:
    """Least squares over the nine communication times of Table 9, errors as shares of iterations.

    Equations (1) to (3) are linear in the three unknowns, so each has for its factor what it takes alone.
    """
    rows, wanted = [], []
    ranks = EACH * MACHINES
    for model in MODELS.values():
        alone = (
            Cluster(ranks, EACH, _ENDLESS, model.rate, 0.0),
            Cluster(ranks, EACH, 1.0, _ENDLESS, 0.0),
            Cluster(ranks, EACH, _ENDLESS, _ENDLESS, 1.0),
        )
        for its, seconds, images in zip(PATTERNS.values(), model.waits(), model.images, strict=True):
            weight = images / BATCH
            rows.append([its(cluster, model.size) * weight for cluster in alone])
            wanted.append(seconds * weight)
    matrix = np.array(rows)
    scale = matrix.max(axis=0)
    found, *_ = np.linalg.lstsq(matrix / scale, np.array(wanted), rcond=None)
    slower, inverse, hop = found / scale
    return Parameters(float(slower), float(1 / inverse), float(hop))


def gain(fast: float, slow: float) -> float:
    """Per cent by which throughput is higher with iterations of ``fast`` seconds than with ``slow`` ones."""
    return 100.0 * (slow / fast - 1.0)
