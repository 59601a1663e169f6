"""What a worker knows of hot parameters: their ranks, and the values that PSs have told."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.keyindex import KeyIndex
from inanet.proto.zebra.layout import by_heat
from inanet.proto.zebra.membership import EMPTY, F32, HotSet, Job
from inanet.wire.batch import I64, U64


class HotCache:
    """``hot`` is the set in use. A value is known from the first NEWS or pull on, and kept up to date by NEWS."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.hot = EMPTY
        self.layout = by_heat(0, job.registers)
        self._index = KeyIndex()
        self._values: F32 = np.zeros((0, job.width), np.float32)
        self._known: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def adopt(self, hot: HotSet) -> None:
        """Change the ranks. What is known of parameters that stay hot is kept."""
        values: F32 = np.zeros((len(hot), self._job.width), np.float32)
        known = np.zeros(len(hot), np.bool_)
        before = self._index.find(hot.keys)
        stay = before >= 0
        values[stay], known[stay] = self._values[before[stay]], self._known[before[stay]]
        self.hot, self._index, self._values, self._known = hot, KeyIndex(hot.keys), values, known
        self.layout = by_heat(len(hot), self._job.registers)

    def ranks(self, keys: U64) -> I64:
        """int64[n]: ranks of keys, -1 for cold ones; all of them without a switch."""
        return self._index.find(keys) if self._job.switch else np.full(len(keys), -1, np.int64)

    def read(self, keys: U64, out: F32) -> NDArray[np.bool_]:
        """Fill in the rows of ``out`` (float32[n, width]) that are known; says which, bool[n]."""
        ranks = self._index.find(keys)
        here = ranks >= 0
        here[here] = self._known[ranks[here]]
        out[here] = self._values[ranks[here]]
        return here

    def learn(self, ranks: I64, values: F32) -> None:
        """Values of ranks, from NEWS."""
        self._values[ranks] = values
        self._known[ranks] = True

    def learn_keys(self, keys: U64, values: F32) -> None:
        """Values of keys, from a pull; cold ones are not kept."""
        ranks = self._index.find(keys)
        hot = ranks >= 0
        self.learn(ranks[hot], values[hot])
