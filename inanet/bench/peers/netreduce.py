"""A host of a NetReduce ring with RoCE packets of its own making, on a raw socket: one argument, a :class:`Place` as JSON."""

import json
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.bench.peers.rank import serve
from inanet.client.ringhost import RingHost, join_ring
from inanet.phy.device import Device
from inanet.phy.pcap import PcapWriter
from inanet.phy.whole import RawWholeDevice
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.ring import Member, Mode, Sizes
from inanet.proto.roce import Attributes
from inanet.wire.netreduce_sizes import PACKET_BYTES

#: messages in flight: what a switch in user space needs for its round trip
WINDOW = 8
#: code of the acknowledgement timeout: a second, so that processes that wait for a processor are not taken for loss
_TIMEOUT = 18
#: share of the link's rate that a host paces its IPv4 packets to, so that frames just fill it: shapers that hold packets back one
#: by one cost more than the packets do
_PACE = 0.986
#: packets that are taken together, and the longest pause for them, seconds: eight messages last many of those
_TOGETHER, _LONGEST = 24, 0.008
#: seconds that a rank may be late, and that a round may take
_SKEW, _DEADLINE = 8.0, 170.0


def pause(rate: float | None) -> float:
    """Seconds between two turns of a host, or reads of a switch, on links of this rate in bits per second."""
    return 0.0 if rate is None else min(_LONGEST, _TOGETHER * PACKET_BYTES * 8 / rate)


@dataclass(frozen=True, slots=True)
class Place:
    """A host's place on its ring; ``mode`` ``ring`` is ring all-reduce on the same queue pairs, which no switch touches.

    ``rate`` is that of its link, bits per second, and ``capture`` a file for all packets that the host sends and receives.
    """

    rank: int
    addresses: tuple[str, ...]
    mode: Mode
    ring: int
    rate: float | None = None
    capture: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Place":
        """The reverse of :meth:`to_json`."""
        values = json.loads(text)
        return cls(**{**values, "addresses": tuple(values["addresses"])})

    @property
    def sizes(self) -> Sizes:
        """What the hosts and switches of the ring agree on."""
        return Sizes(window=WINDOW)

    def member(self) -> Member:
        """The worker's place; it waits for late neighbours longer than a queue pair can, where a switch holds packets."""
        sizes = self.sizes
        packets = 2 * sizes.window * sizes.length
        return Member(
            1,
            self.ring,
            self.rank,
            len(self.addresses),
            len(self.addresses),
            sizes,
            mode=self.mode,
            skew=_DEADLINE if self.mode == "switch" else _SKEW,
            patient=self.mode == "switch",
            attributes=Attributes(
                timeout=_TIMEOUT,
                window=packets,
                ack_every=sizes.length,
                line_rate=None if self.rate is None else self.rate * _PACE,
            ),
        )


class NetReduce:
    """A host; tensors are summed as int32 under block exponents, with the bits of every other system."""

    def __init__(self, host: RingHost) -> None:
        self._host = host
        self._tensors: dict[int, int] = {}
        self._nothing = np.zeros(1, np.int32)
        host.add_tensor(0, TensorSpec("barrier", "i32", (1,), "sum", ExponentMode.NONE))

    def barrier(self) -> None:
        self._host.all_reduce(0, [self._nothing], _DEADLINE)

    def all_reduce(self, array: NDArray[np.float32], late: float) -> NDArray[np.float32]:
        time.sleep(late)
        tensor = self._tensors.get(array.size)
        if tensor is None:
            tensor = self._tensors[array.size] = len(self._tensors) + 1
            spec = TensorSpec(f"{array.size}", "f32", array.shape, "sum", ExponentMode.CARRIED)
            self._host.add_tensor(tensor, spec)
        self._host.all_reduce(tensor, [array], _DEADLINE)
        return array


def main(place: Place) -> None:
    """Serve until standard input ends."""
    address = place.addresses[place.rank]
    device: Device = RawWholeDevice(address)
    if place.capture is not None:
        device = PcapWriter(device, place.capture, time.time, whole=True)
    host = RingHost(join_ring(place.member(), place.addresses), device, pause=pause(place.rate))
    try:
        serve(place.rank, len(place.addresses), NetReduce(host))
    finally:
        host.close()


if __name__ == "__main__":
    main(Place.from_json(sys.argv[1]))
