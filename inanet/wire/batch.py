"""The unit of work: a batch of packets in one contiguous arena.

A batch is what one system call delivered or will send. Python code runs once per batch; kernels walk the packets.
Addresses are :mod:`inanet.wire.endpoint` integers so that kernels can compare them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(slots=True)
class PacketBatch:
    """Received packets.

    ``arena`` is 1-D, uint8, C-contiguous and only valid until the device is read again. Packet *i* occupies
    ``arena[offsets[i] : offsets[i] + lengths[i]]`` and came from endpoint ``sources[i]``. A device places packets at
    offsets divisible by 4 whenever the packets' own lengths allow it. All index arrays have one entry per packet.
    """

    arena: U8
    offsets: I64
    lengths: I64
    sources: U64

    def __len__(self) -> int:
        return len(self.offsets)

    def packet(self, index: int) -> bytes:
        """Copy of one packet; for tests and traces, never on the data path."""
        start = int(self.offsets[index])
        return self.arena[start : start + int(self.lengths[index])].tobytes()


@dataclass(slots=True)
class Transmission:
    """Packets for one destination, all ``length`` bytes long, gathered from ``arena`` at ``offsets``.

    ``arena`` is 1-D uint8 and must stay alive and unmoved until the device has taken the transmission. Consecutive
    offsets that are ``length`` apart let the device send straight from it with one segment per run.
    """

    destination: int
    arena: U8
    offsets: I64
    length: int

    def __len__(self) -> int:
        return len(self.offsets)

    def packet(self, index: int) -> bytes:
        """Copy of one packet; for tests and traces, never on the data path."""
        start = int(self.offsets[index])
        return self.arena[start : start + self.length].tobytes()
