"""NetReduce without privileges: RoCE packets as the payload of UDP datagrams to the switch, which joins the rings' hosts.

Whole IPv4 packets need raw sockets. A job that the coordinator puts on a switch gets a network of its own inside datagrams
instead: addresses 10.number.0.rank + 1, queue pairs and keys that follow from number and rank. The packets themselves are
what they are on a wire, ICRC and all; a packet is taken only from the endpoint that its inner sender has (bound endpoints).

A job has one ring or, if its switch offers that and its hosts have several ranks, one for each rank of a host, with a piece of
every tensor each (:mod:`inanet.proto.netreduce.parallel`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent, PeerSilent
from inanet.proto.common.plan import Scheduled
from inanet.proto.common.program import Action, Neighbours, Offer, Verdicts
from inanet.proto.common.recovery import Timing
from inanet.proto.netreduce.job import WINDOW, NetReduceJob, rings_of
from inanet.proto.netreduce.parallel import Part, RankHost
from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Connection, Member, RingAt, Sizes, rack
from inanet.proto.netreduce.tables import stride
from inanet.proto.netreduce.worker import Broken, NetReduceWorker
from inanet.proto.roce import Attributes, Peer
from inanet.proto.slots.registers import DEFAULT_BUDGET, OutOfRegisters
from inanet.proto.slots.tenants import Tenant, members_of
from inanet.proto.slots.worker import Layout, Membership
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.netreduce_sizes import MESSAGE_PACKETS, PACKET_BYTES

#: contributions to a place that are reckoned with when slots are offered to jobs whose size is not known
_RECKONED = 16
#: code of the shortest acknowledgement timeout, 34 ms: agents and switch may have to wait for a processor for longer, and that
#: is no loss
_TIMEOUT = 13
#: seconds that training processes may be late: the coordinator knows how long a round may last, and ends it if one is later
_SKEW = inf
_SOURCE_PORT = 0xC000


def sizes_of(slots: int) -> Sizes:
    """What a job with so many slots, places of packets in the switch, agrees on. Raises ``ValueError`` for too few."""
    length = min(MESSAGE_PACKETS, slots // (2 * WINDOW))
    if length < 2:
        raise ValueError(
            f"{slots} slots: NetReduce needs {4 * WINDOW} at least; give the program more memory"
        )
    return Sizes(length, WINDOW, PACKET_BYTES)


def _ring_number(job: int, ring: int) -> int:
    """The RingID of one of a job's rings; twice that, and the next one, are the numbers of its queue pairs."""
    return ring << 8 | job


def address_of(number: int, rank: int) -> int:
    """A host's inner IPv4 address, as an integer."""
    return 10 << 24 | number << 16 | rank + 1


def _ends(job: int, ring: int, rank: int, psn: int, key: int) -> tuple[Peer, Peer]:
    """Inlet and outlet of a rank on a ring."""
    endpoint, number = address_of(job, rank) << 16 | _SOURCE_PORT, 2 * _ring_number(job, ring)
    return Peer(endpoint, number, psn, key), Peer(endpoint, number + 1, psn)


def _plan(job: int, ring: int, hosts: int, sizes: Sizes) -> RingAt:
    """A ring of a job as its switch sees it."""
    number = _ring_number(job, ring)
    connections = [
        Connection(address_of(job, rank), address_of(job, (rank + 1) % hosts), 2 * number)
        for rank in range(hosts)
    ]
    return rack(number, connections, sizes)


class TunnelProgram:
    """:class:`~inanet.proto.netreduce.program.NetReduceProgram` behind UDP, for ``budget`` bytes. Places do not age. A job
    has ``rings`` at most, one for each rank of a host."""

    name = "netreduce"
    passes = 1

    def __init__(self, *, budget: int = DEFAULT_BUDGET, age: float = 0.0, rings: int = 1) -> None:
        self._most_rings = rings
        self.inner = NetReduceProgram(budget=budget)
        self.budget = budget
        self._endpoints: dict[int, int] = {}
        self._addresses: dict[int, int] = {}
        #: RingIDs by job
        self._rings: dict[int, list[int]] = {}
        self._strangers = 0

    def offer(self, limit: int | None, most_passes: int) -> Offer:
        """What is left, for jobs of up to 16 hosts; what more hosts need is known when they come."""
        left = self.budget - self.inner.register_bytes()
        free = left // (_RECKONED * stride(PACKET_BYTES) + 2 * PACKET_BYTES)
        return Offer(min(free, limit or free), rings=self._most_rings)

    def add_job(self, tenant: Tenant) -> None:
        """Serve a job with one ring. Raises as the program does."""
        self._add(tenant, 1)

    def serve(self, job: NetReduceJob, key: int, here: int) -> Neighbours:
        """Serve a job of a plan. Raises as the program does."""
        tenant = Tenant(job.number, members_of(job.workers), job.number, slots=job.slots)
        self._add(tenant, job.rings)
        return tenant.neighbours

    def follow(self, job: NetReduceJob) -> None:
        """Later versions of a plan have nothing that concerns rings."""

    def hold(self, job: int, scheduled: Sequence[Scheduled]) -> None:
        """Tensors have no places of their own."""

    def _add(self, tenant: Tenant, rings: int) -> None:
        if tenant.slots is None:
            raise ValueError(f"job {tenant.job}: NetReduce shares no slots; the job needs some of its own")
        rings = rings_of(tenant.slots, rings)
        made: list[int] = []
        try:
            for ring in range(rings):
                plan = _plan(tenant.job, ring, len(tenant.members), sizes_of(tenant.slots // rings))
                self.inner.add_ring(plan)
                made.append(plan.ring)
        except (ValueError, OutOfRegisters):
            for number in made:
                self.inner.remove_ring(number)
            raise
        self._rings[tenant.job] = made
        for endpoint, bit in tenant.members.items():
            address = address_of(tenant.job, bit.bit_length() - 1)
            self._endpoints[address], self._addresses[endpoint] = endpoint, address

    def remove_job(self, job: int) -> None:
        """Forget a job. Raises ``KeyError`` if it is not served."""
        for number in self._rings.pop(job):
            self.inner.remove_ring(number)
        for address in [one for one in self._endpoints if one >> 16 == address_of(job, 0) >> 16]:
            self._addresses.pop(self._endpoints.pop(address), None)

    def process(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None:
        """Judge datagrams' payloads; what passes goes to the endpoint of its inner destination."""
        count = len(batch)
        pairs = self._pairs(batch)
        known = np.zeros(count, np.bool_)
        for source in np.unique(batch.sources).tolist():
            known |= (batch.sources == source) & (pairs[:, 0] == self._addresses.get(source, -1))
        if known.all():
            self.inner.process(batch, congested, verdicts, now)
        else:
            self._sift(batch, np.flatnonzero(known), congested, verdicts, now)
        for i in np.flatnonzero(verdicts.action[:count] == Action.PASS).tolist():
            source, destination = pairs[i].tolist()
            # the network inside is the job's own
            own = known[i] and source >> 16 == destination >> 16
            target = self._endpoints.get(destination) if own else None
            if target is None:
                verdicts.action[i], verdicts.reason[i] = Action.DROP, Drop.FOREIGN_HOST
                self._strangers += 1
            else:
                verdicts.action[i], verdicts.target[i] = Action.UNICAST, target

    @staticmethod
    def _pairs(batch: PacketBatch) -> NDArray[np.int64]:
        """int64[n, 2]: inner source and destination, 0 where there are none."""
        ats = batch.offsets[:, None] + np.arange(12, 20)
        fields = np.ascontiguousarray(batch.arena[np.minimum(ats, len(batch.arena) - 1)])
        pairs: NDArray[np.int64] = fields.view(">u4").astype(np.int64)
        pairs[batch.lengths < 20] = 0
        return pairs

    def _sift(
        self,
        batch: PacketBatch,
        chosen: NDArray[np.int64],
        congested: NDArray[np.uint8],
        verdicts: Verdicts,
        now: float,
    ) -> None:
        """Judge some of the packets; the others are left to pass."""
        count, judged = len(batch), Verdicts(len(batch))
        part = PacketBatch(batch.arena, batch.offsets[chosen], batch.lengths[chosen], batch.sources[chosen])
        self.inner.process(part, congested[chosen], judged, now)
        verdicts.action[:count] = Action.PASS
        verdicts.length[:count], verdicts.reason[:count] = batch.lengths, Drop.OK
        for name in ("action", "length", "reason", "mark", "passes"):
            getattr(verdicts, name)[chosen] = getattr(judged, name)[: len(chosen)]

    def spilled(self) -> list[Transmission]:
        """Sums, to the endpoints of their receivers."""
        return [
            replace(one, destination=self._endpoints[one.destination >> 16])
            for one in self.inner.spilled()
            if one.destination >> 16 in self._endpoints
        ]

    def timer(self) -> float | None:
        """Never."""
        return None

    def on_timer(self, now: float) -> None:
        """Nothing waits here."""

    def register_bytes(self) -> int:
        """All of its share: jobs come and go."""
        return self.budget

    def stats(self) -> dict[str, int]:
        return self.inner.stats() | ({"drop_foreign_host": self._strangers} if self._strangers else {})


class TunnelWorker:
    """A host of a NetReduce job whose packets are datagrams to and from the switch; what hosts of switched systems expect.

    ``sizes`` are those of each of ``rings``, ``peers`` the endpoints of all hosts.
    """

    def __init__(
        self,
        member: Membership,
        sizes: Sizes,
        timing: Timing,
        peers: Collection[int] = (),
        *,
        rings: int = 1,
    ) -> None:
        self.member = member
        self.sizes = sizes
        #: where packets come from: the switch, which may show who they are from
        self._senders: NDArray[np.uint64] = np.array([member.switch, *peers], np.uint64)
        self.layout = Layout(PACKET_BYTES // 4, stride(PACKET_BYTES), 0, 24)
        self._silent = timing.silent
        self.strangers: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        workers = [_worker(member, ring, sizes, timing) for ring in range(rings)]
        self.inner: NetReduceWorker | RankHost = (
            workers[0]
            if rings == 1
            else RankHost([Part(worker, 0, None, piece, rings) for piece, worker in enumerate(workers)])
        )
        self.add_tensor, self.drop_tensor = self.inner.add_tensor, self.inner.drop_tensor
        self.begin, self.give_up = self.inner.begin, self.inner.give_up
        self.timer, self.on_timer = self.inner.timer, self.inner.on_timer

    def schedule(self, tensor: int, scheduled: Sequence[Scheduled]) -> None:
        """Nothing: a ring of datagrams has one switch."""

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take datagrams that have come through the switch."""
        theirs = np.isin(batch.sources, self._senders)
        if not theirs.all():
            self.strangers[Drop.FOREIGN_HOST] += int(np.count_nonzero(~theirs))
            batch = PacketBatch(
                batch.arena, batch.offsets[theirs], batch.lengths[theirs], batch.sources[theirs]
            )
        self.inner.receive(batch, now)

    def transmit(self, now: float) -> list[Transmission]:
        """Everything goes through the switch."""
        return [replace(one, destination=self.member.switch) for one in self.inner.transmit(now)]

    def events(self) -> list[NodeEvent]:
        """A ring that is broken shows as a switch that says nothing any more."""
        return [
            PeerSilent(self.member.job, "switch", self._silent) if isinstance(event, Broken) else event
            for event in self.inner.events()
        ]

    @property
    def drops(self) -> NDArray[np.int64]:
        """Packets dropped, by reason."""
        drops: NDArray[np.int64] = self.strangers.copy()
        for label, count in self.inner.drops_by_reason().items():
            drops[Drop[label.upper()]] += count
        return drops

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``results_in`` are packets' worth of results, padding included."""
        stats = self.inner.stats()
        return {
            "rows_sent": stats.get("packets_sent", 0),
            "retransmissions": 0,
            "results_in": stats["messages_received"] * self.sizes.length,
            **stats,
        }


def _worker(member: Membership, ring: int, sizes: Sizes, timing: Timing) -> NetReduceWorker:
    """This host's place on one of the job's rings, connected."""
    psn, count = member.key & 0xFFFFFF, member.workers
    place = Member(
        member.job,
        _ring_number(member.job, ring),
        member.index,
        count,
        member.ranks,
        sizes,
        mode="switch",
        skew=_SKEW,
        patient=True,
        attributes=Attributes(
            path_mtu=PACKET_BYTES,
            timeout=_TIMEOUT,
            adaptive=True,
            window=2 * WINDOW * sizes.length,
            ack_every=sizes.length,
        ),
    )
    inlet, outlet = _ends(member.job, ring, member.index, psn, 0)
    worker = NetReduceWorker(
        place, inlet.endpoint, numbers=(inlet.number, outlet.number), psn=psn, silent=timing.silent
    )
    successor, _ = _ends(member.job, ring, (member.index + 1) % count, psn, worker.inlet.key)
    _, predecessor = _ends(member.job, ring, (member.index - 1) % count, psn, worker.inlet.key)
    worker.connect(successor, predecessor)
    return worker


def join(member: Membership, job: NetReduceJob, timing: Timing) -> TunnelWorker:
    """The host's part in a job as its plan describes it."""
    rings = rings_of(job.slots, job.rings)
    return TunnelWorker(member, sizes_of(job.slots // rings), timing, job.workers, rings=rings)
