"""Machines with several ranks around a simulated switch, under the patterns of section 3.4 of NetReduce, packet by packet.

What happens within a machine takes the time that the model gives it, except for a flat ring, whose packets between the ranks of
a machine are packets as all others: there, a machine is a switch with a host for each rank. In the other patterns a machine
is one host, whose rings share its link.

>>> rig = SimulatedMachines("parallel-netreduce", 4, 2, link=LinkSpec(rate=10e9), inside=LinkSpec(rate=80e9))
>>> seconds = rig.all_reduce(spec, arrays)      # arrays[machine][rank] are overwritten with the result
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import TensorSpec
from inanet.proto.netreduce.parallel import Pattern, RankHost, parts
from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Member, Sizes, rack
from inanet.proto.netreduce.worker import NetReduceWorker
from inanet.proto.roce import Attributes
from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.testing.netreduce import connect, connections_of, host_address
from inanet.testing.ranks import rings_of, workers_of
from inanet.wire.roce import PORT

_CORE = "switch"


class SimulatedMachines:
    """``machines`` with ``each`` ranks: ``link`` from a machine to the switch, ``inside`` from a rank to its machine's."""

    def __init__(
        self,
        pattern: Pattern,
        machines: int,
        each: int,
        *,
        link: LinkSpec,
        inside: LinkSpec,
        sizes: Sizes | None = None,
        raw: bool = False,
        seed: int = 0,
    ) -> None:
        self.pattern, self.machines, self.each = pattern, machines, each
        self.network = Network(seed)
        self._sizes = sizes or Sizes()
        self._raw = raw
        self._round = 0
        #: machines by host of the network, and the ranks whose arrays each has: (machine, first, end)
        self._hosts: dict[str, tuple[NetReduceWorker | RankHost, tuple[int, int, int]]] = {}
        program = NetReduceProgram(budget=1 << 28) if pattern == "parallel-netreduce" else None
        self.network.add_switch(_CORE, program).through = PORT
        if pattern == "flat-ring":
            self._flat(link, inside)
        else:
            self._rings(link, program)

    def _attributes(self) -> Attributes:
        sizes = self._sizes
        return Attributes(
            path_mtu=sizes.packet_bytes, window=2 * sizes.window * sizes.length, ack_every=sizes.length
        )

    def _flat(self, link: LinkSpec, inside: LinkSpec) -> None:
        ranks, attributes, workers = self.machines * self.each, self._attributes(), []
        for machine in range(self.machines):
            self.network.add_switch(f"m{machine}")
            self.network.connect(f"m{machine}", _CORE, link)
        for rank in range(ranks):
            machine, local = divmod(rank, self.each)
            place = Member(1, 1, rank, ranks, ranks, self._sizes, mode="ring", attributes=attributes)
            workers.append(NetReduceWorker(place, host_address(rank) << 16 | 0xC000, raw=self._raw))
            self._add(f"m{machine}r{local}", rank, workers[-1], (machine, local, local + 1))
            self.network.connect(f"m{machine}r{local}", f"m{machine}", inside)
        connect(workers)

    def _rings(self, link: LinkSpec, program: NetReduceProgram | None) -> None:
        options = {"sizes": self._sizes, "attributes": self._attributes()}
        workers = workers_of(self.pattern, self.machines, self.each, raw=self._raw, **options)
        for machine, mine in enumerate(workers):
            ranks = RankHost(parts(self.pattern, mine, self.each))
            self._add(f"m{machine}", machine, ranks, (machine, 0, self.each))
            self.network.connect(f"m{machine}", _CORE, link)
        if program is not None:
            for ring in rings_of(self.pattern, workers):
                program.add_ring(rack(ring[0].member.ring, connections_of(ring), self._sizes))

    def _add(
        self, name: str, number: int, machine: NetReduceWorker | RankHost, ranks: tuple[int, int, int]
    ) -> None:
        self._hosts[name] = machine, ranks
        self.network.add_host(name, host_address(number) << 16 | PORT, machine)

    def all_reduce(
        self, spec: TensorSpec, arrays: Sequence[Sequence[NDArray[Any]]], *, deadline: float = 60.0
    ) -> float:
        """One round, until it is done everywhere; virtual seconds of what the network carries. ``arrays`` hold the result."""
        began = self.network.now
        self._round += 1
        for name, (machine, (number, low, high)) in self._hosts.items():
            machine.add_tensor(0, spec)
            machine.begin(0, self._round, arrays[number][low:high], began)
            self.network.wake(name)
        self.network.run(self._done, deadline=deadline)
        return self.network.now - began

    def _done(self) -> bool:
        done = {
            name
            for name, event in self.network.log
            if isinstance(event, RoundDone) and event.round == self._round
        }
        return len(done) == len(self._hosts)
