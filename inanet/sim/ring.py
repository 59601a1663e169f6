"""A NetReduce ring on one simulated switch: workers, queue pairs and the program, on links with rates.

>>> ring = SimulatedRing(4, link=LinkSpec(rate=10e9, delay=1e-6, overhead=FRAME_OVERHEAD))
>>> seconds = ring.all_reduce(spec, arrays)      # arrays are overwritten with the result
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import TensorSpec
from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Member, Mode, Sizes, rack
from inanet.proto.netreduce.worker import NetReduceWorker
from inanet.proto.roce import Attributes
from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.testing.netreduce import connect, connections_of, host_address
from inanet.wire.roce import PORT

#: What Ethernet adds to a whole IPv4 packet on the wire: header, checksum, preamble and gap, bytes.
FRAME_OVERHEAD = 14 + 4 + 8 + 12


class SimulatedRing:
    """``hosts`` hosts around a switch, ``link`` to and from each. In mode ``ring`` the switch has no program, else it serves
    the ring. Queue pairs have room for two windows of messages, and acknowledge every message.
    """

    def __init__(
        self,
        hosts: int,
        *,
        link: LinkSpec,
        sizes: Sizes | None = None,
        mode: Mode = "switch",
        raw: bool = False,
        seed: int = 0,
        budget: int = 1 << 28,
    ) -> None:
        self.network = Network(seed)
        self.sizes = sizes or Sizes()
        self.program = NetReduceProgram(budget=budget) if mode != "ring" else None
        switch = self.network.add_switch("switch", self.program)
        switch.through = PORT
        attributes = Attributes(
            path_mtu=self.sizes.packet_bytes,
            window=2 * self.sizes.window * self.sizes.length,
            ack_every=self.sizes.length,
        )
        self.workers = []
        for rank in range(hosts):
            member = Member(1, 1, rank, hosts, hosts, self.sizes, mode=mode, attributes=attributes)
            worker = NetReduceWorker(member, host_address(rank) << 16 | 0xC000, raw=raw)
            self.workers.append(worker)
            self.network.add_host(f"w{rank}", host_address(rank) << 16 | PORT, worker)
            self.network.connect(f"w{rank}", "switch", link)
        connect(self.workers)
        if self.program is not None:
            self.program.add_ring(rack(1, connections_of(self.workers), self.sizes))
        self._round = 0

    def all_reduce(
        self, spec: TensorSpec, arrays: Sequence[NDArray[Any]], *, deadline: float = 60.0
    ) -> float:
        """One round from begin to done on every worker; returns its virtual seconds, the arrays hold the result."""
        began = self.network.now
        self._round += 1
        for rank, (worker, array) in enumerate(zip(self.workers, arrays, strict=True)):
            worker.add_tensor(0, spec)
            worker.begin(0, self._round, [array], began)
            self.network.wake(f"w{rank}")
        self.network.run(self._done, deadline=deadline)
        return self.network.now - began

    def _done(self) -> bool:
        done = {
            name
            for name, event in self.network.log
            if isinstance(event, RoundDone) and event.round == self._round
        }
        return len(done) == len(self.workers)
