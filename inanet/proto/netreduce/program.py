"""NetReduce on a switch. It looks at whole IPv4 packets and lets everything pass that is not of a ring it knows.

Unlike the programs whose packets are addressed to the switch, this one stands in the middle of other people's connections:
packets of a ring are absorbed, and what they make leaves through :meth:`NetReduceProgram.spilled`, in the order of each
connection's sequence numbers, because a receiver takes a packet out of order for a loss.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.icrc import is_sound
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.netreduce import policy, tables
from inanet.proto.netreduce.policy import FIRST_HEAD, new_out, transmissions, virtual_headers
from inanet.proto.netreduce.ring import Child, Connection, RingAt
from inanet.proto.netreduce.tables import (
    CONNECTIONS,
    NOTICE,
    PLACES,
    TEMPLATE_BYTES,
    Count,
    Kind,
    Memory,
    Shape,
    State,
    claim,
    classify,
    new_memory,
    new_table,
)
from inanet.proto.slots.registers import DEFAULT_BUDGET, OutOfRegisters
from inanet.wire.batch import I64, U8, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.netreduce import TAG, NoHeader, decode

#: packets that may leave between two looks at how much room there is
ROOM_PACKETS = 512


@dataclass(slots=True)
class _Ring:
    plan: RingAt
    memory: Memory
    shape: I64
    #: int64: rows of the children or, below another switch, of the connections that end here
    rows: I64
    #: headers of virtual connections: to the switch above, then to each below
    virtual: U8
    #: all rows of the table that are this ring's
    mine: list[int]
    bytes: int


class NetReduceProgram:
    """Rings within ``budget`` bytes of packet memory."""

    name = "netreduce"

    def __init__(self, *, budget: int = DEFAULT_BUDGET) -> None:
        self.budget = budget
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.counts: NDArray[np.int64] = np.zeros(len(Count), np.int64)
        self._table = new_table()
        self._places: I64 = np.full(PLACES, -1, np.int64)
        self._ring_of: I64 = np.full(CONNECTIONS, -1, np.int64)
        self._hashed: I64 = np.zeros(CONNECTIONS, np.int64)
        self._rings: dict[int, _Ring] = {}
        #: uint64: source and destination of connections that end here and begin on another rack
        self._distant: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._spilled: list[Transmission] = []
        self._packets = 0

    # ---------------------------------------------------------------- rings

    def add_ring(self, plan: RingAt) -> None:
        """Serve a ring from now on.

        Raises ``ValueError`` for one that is served already, for connections that are another's, and for more of them than
        the table holds; :class:`~inanet.proto.slots.registers.OutOfRegisters` when the packet memory is short.
        """
        if plan.ring in self._rings:
            raise ValueError(f"ring {plan.ring} is served already; remove it first")
        ends = len(plan.hosts) if plan.above is not None and not plan.over_switches else 0
        memory = new_memory(
            2 * plan.sizes.window, plan.sizes.length, len(plan.children), plan.sizes.packet_bytes, ends
        )
        size = sum(array.nbytes for array in memory)
        if self.register_bytes() + size > self.budget:
            raise OutOfRegisters(
                f"ring {plan.ring} takes {size} B of packet memory and {self.budget - self.register_bytes()} of"
                f" {self.budget} B are free: make its messages or its window smaller, or raise the budget"
            )
        ring = _Ring(plan, memory, _shape(plan, ends), np.zeros(0, np.int64), virtual_headers(plan), [], size)
        self._check(plan)
        self._rings[plan.ring] = ring
        rows = [
            self._row(ring, child.connection, Kind.CHILD, number, child.ranks, child.rank)
            for number, child in enumerate(plan.children)
        ]
        if plan.above is not None:
            self._row(ring, plan.above.back, Kind.PARENT, 0, plan.ranks, 0)
        if ends:
            for row, child in zip(rows, plan.children, strict=True):
                if child.connection.destination in plan.hosts:
                    self._table.end[row] = plan.hosts.index(child.connection.destination)
            rows = [self._end(ring, host) for host in plan.hosts]
        ring.rows = np.array(rows, np.int64)
        self._hash()

    def remove_ring(self, ring: int) -> None:
        """Forget a ring: its packets are foreign from now on. Raises ``KeyError`` if it is not served."""
        gone = self._rings.pop(ring)
        self._ring_of[gone.mine] = -1
        self._hashed[gone.mine] = 0
        self._hash()

    def serves(self, connection: Connection) -> bool:
        """Whether a connection brings packets of a ring here, from its ranks, from other racks or from other switches."""
        pair = np.uint64(connection.source << 32 | connection.destination)
        table = self._table
        row = tables.find(
            self._places, table.addresses, table.queue_pairs, pair, np.int64(connection.queue_pair)
        )
        return int(row) >= 0 or any(
            child.connection == connection for ring in self._rings.values() for child in ring.plan.distant
        )

    def _check(self, plan: RingAt) -> None:
        wanted = [child.connection for child in plan.children]
        wanted += [plan.above.back] if plan.above is not None else []
        known = {self._connection(row) for row in np.flatnonzero(self._hashed).tolist()}
        for connection in wanted:
            if connection in known:
                raise ValueError(f"ring {plan.ring}: connection {connection} is another ring's")
        free = int(np.count_nonzero(self._ring_of < 0))
        if len(wanted) + len(plan.hosts) > free:
            raise ValueError(
                f"ring {plan.ring} has {len(wanted)} connections and the table has room for {free}"
            )

    def _connection(self, row: int) -> Connection:
        pair = int(self._table.addresses[row])
        return Connection(pair >> 32, pair & 0xFFFFFFFF, int(self._table.queue_pairs[row]))

    def _take(self, ring: _Ring) -> int:
        row = int(np.flatnonzero(self._ring_of < 0)[0])
        self._ring_of[row] = ring.plan.ring
        ring.mine.append(row)
        table = self._table
        table.state[row], table.end[row] = State.UNKNOWN, -1
        return row

    def _row(
        self, ring: _Ring, connection: Connection, kind: Kind, child: int, weight: int, rank: int
    ) -> int:
        row, table = self._take(ring), self._table
        self._name(row, connection)
        table.kind[row], table.child[row] = kind, child
        table.weight[row], table.rank[row] = weight, rank
        self._hashed[row] = 1
        return row

    def _end(self, ring: _Ring, host: int) -> int:
        """A row for the connection that ends at a host, whichever it is: first packets tell."""
        row = self._take(ring)
        self._name(row, Connection(0, host, 0))
        return row

    def _name(self, row: int, connection: Connection) -> None:
        self._table.addresses[row] = connection.source << 32 | connection.destination
        self._table.queue_pairs[row] = connection.queue_pair

    def _hash(self) -> None:
        """Lay the hash table over the rows anew, and note between which hosts there may be notices."""
        distant = [child.connection for ring in self._rings.values() for child in ring.plan.distant]
        self._distant = np.array([one.source << 32 | one.destination for one in distant], np.uint64)
        self._places[:] = -1
        for row in np.flatnonzero(self._hashed).tolist():
            at = int(tables.place_of(self._table.addresses[row], self._table.queue_pairs[row]))
            while self._places[at] >= 0:
                at = (at + 1) & (PLACES - 1)
            self._places[at] = row

    # ---------------------------------------------------------------- packets

    def process(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None:
        """Judge whole IPv4 packets: pass, absorb or drop; see :class:`~inanet.proto.common.program.Program`."""
        count = len(batch)
        self._packets += count
        verdicts.action[:count] = Action.PASS
        verdicts.length[:count] = batch.lengths
        verdicts.reason[:count] = Drop.OK
        verdicts.mark[:count] = congested[:count]
        verdicts.passes[:count] = 1
        rows = np.empty(count, np.int64)
        table, reasons = self._table, verdicts.reason
        found = classify(
            batch.arena,
            batch.offsets,
            batch.lengths,
            self._places,
            table.addresses,
            table.queue_pairs,
            rows,
            reasons,
        )
        if found:
            passed: U8 = np.zeros(count, np.uint8)
            self._notices(batch, rows, passed)
            mine = np.flatnonzero(rows >= 0)
            rings = self._ring_of[rows[mine]]
            for number in np.unique(rings).tolist():
                chosen = mine if (rings == number).all() else mine[rings == number]
                self._run(self._rings[number], batch, chosen, rows, passed, reasons)
            verdicts.action[:count][(rows != tables.FOREIGN) & (passed == 0)] = Action.DROP
        refused = reasons[:count] != Drop.OK
        if refused.any():
            verdicts.action[:count][refused] = Action.DROP
            self.drops += np.bincount(reasons[:count][refused], minlength=DROP_CODES)

    def _run(self, ring: _Ring, batch: PacketBatch, chosen: I64, rows: I64, passed: U8, reasons: U8) -> None:
        start = 0
        while start < len(chosen):
            most = max(len(ring.rows), ring.plan.ranks_below) + 2
            left = len(chosen) - start
            room = min(max(ROOM_PACKETS, left), left * most) + most
            out = new_out(room, ring.plan.sizes.packet_bytes)
            start = int(
                policy.run(
                    ring.memory,
                    self._table,
                    ring.shape,
                    ring.virtual,
                    ring.rows,
                    batch.arena,
                    batch.offsets,
                    batch.lengths,
                    chosen,
                    rows,
                    start,
                    passed,
                    reasons,
                    out,
                    self.counts,
                )
            )
            made = int(out.used[0])
            self._spilled += transmissions(out.arena, out.offsets[:made], out.lengths[:made], out.ways[:made])

    def _notices(self, batch: PacketBatch, rows: I64, passed: U8) -> None:
        """Look at what may be notices. Anybody can send such packets, many of them, and a look at one is slow: those between
        other hosts than a ring's pass unseen.
        """
        found = np.flatnonzero(rows == NOTICE)
        if not len(found):
            return
        passed[found] = 1
        ats = batch.offsets[found][:, None] + np.arange(12, 20)
        pairs = np.ascontiguousarray(batch.arena[ats]).view(">u8")[:, 0]
        right = (batch.lengths[found] == TEMPLATE_BYTES + 4) & np.isin(pairs, self._distant)
        for i in found[right].tolist():
            passed[i] = not self._notice(batch.packet(i))

    def _notice(self, packet: bytes) -> bool:
        """Headers of a first packet whose receiver may be here; whether it is."""
        array = np.frombuffer(bytearray(packet), np.uint8)
        if not is_sound(array, 0, len(packet)):
            return False
        try:
            header = decode(packet[FIRST_HEAD:TEMPLATE_BYTES])
        except NoHeader:
            return False
        source, destination = (int.from_bytes(packet[at : at + 4], "big") for at in (12, 16))
        connection = Connection(source, destination, int.from_bytes(packet[33:36], "big"))
        ring = self._rings.get(header.ring)
        # anybody can write such a packet: it counts for a connection of the ring alone, and for a message that is due
        if ring is None or Child(connection, header.rank) not in ring.plan.distant:
            return False
        if (header.tag, header.epoch, header.length, header.aggregated) != (
            *(TAG, ring.plan.epoch, ring.plan.sizes.length, 0),
        ):
            return False
        if _ahead(ring.memory, header.message) > ring.plan.sizes.window:
            return False
        slot = header.message & (2 * ring.plan.sizes.window - 1)
        held = claim(
            ring.memory, ring.shape, slot, np.uint32(header.message), int(header.operation), self.counts
        )
        if held:
            end = ring.plan.hosts.index(destination)
            self._name(int(ring.rows[end]), connection)
            known = slot * len(ring.plan.hosts) + end
            ring.memory.templates[known * TEMPLATE_BYTES : (known + 1) * TEMPLATE_BYTES] = array[
                :TEMPLATE_BYTES
            ]
            ring.memory.known[known] = 1
        return True

    def spilled(self) -> list[Transmission]:
        """What rings' packets made since the last call, each connection's in the order of its sequence numbers."""
        spilled, self._spilled = self._spilled, []
        return spilled

    # ---------------------------------------------------------------- time, figures

    def timer(self) -> float | None:
        """Never: places are taken over by newer messages and freed by nothing else (message takeover)."""
        return None

    def on_timer(self, now: float) -> None:
        """Nothing waits here."""

    def register_bytes(self) -> int:
        """Bytes of packet memory that rings take."""
        return sum(ring.bytes for ring in self._rings.values())

    def translations(self, ring: int) -> list[tuple[str, Connection, Connection]]:
        """The connection translation table of a ring (Table 3): direction, connection it comes on, connection it leaves on.

        A switch over hosts knows a connection once its first packet, or a notice of that, has come. Raises ``KeyError``.
        """
        one = self._rings[ring]
        plan, above = one.plan, one.plan.above
        table: list[tuple[str, Connection, Connection]] = []
        if plan.over_switches and above is None:
            return [
                ("aggregation and multicast", child.connection, down)
                for child in plan.children
                for down in plan.below
            ]
        if above is None:
            return []
        for number, child in enumerate(plan.children):
            if self._table.state[one.mine[number]] == State.TAGGED:
                table.append(("aggregation", child.connection, above.to))
        if plan.over_switches:
            return table + [("multicast", above.back, down) for down in plan.below]
        ends = len(plan.hosts)
        ever = one.memory.known.reshape(-1, ends).any(axis=0)
        for end in np.flatnonzero(ever).tolist():
            source = [c.connection for c in plan.children if c.connection.destination == plan.hosts[end]]
            table.append(
                ("multicast", above.back, source[0] if source else self._connection(int(one.rows[end])))
            )
        return table

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``occupied_<ring>`` is how many messages' places a ring holds."""
        return {
            "packets": self._packets,
            **{count.name.lower(): int(self.counts[count]) for count in Count},
            "contributions_summed": int(self.counts[Count.CONTRIBUTIONS] - self.counts[Count.FIRST]),
            **{f"drop_{r.label}": int(self.drops[r]) for r in Drop if r is not Drop.OK and self.drops[r]},
            **{f"occupied_{number}": int(ring.memory.held.sum()) for number, ring in self._rings.items()},
        }


def _ahead(memory: Memory, message: int) -> int:
    """How many messages ``message`` is beyond the newest that has a place; 0 if none has one."""
    held = memory.message[memory.held == 1]
    return int((np.uint32(message) - held).view(np.int32).min()) if len(held) else 0


def _shape(plan: RingAt, ends: int) -> I64:
    shape: I64 = np.zeros(len(Shape), np.int64)
    shape[Shape.RING], shape[Shape.EPOCH] = plan.ring, plan.epoch
    shape[Shape.LENGTH], shape[Shape.WINDOW], shape[Shape.PACKET] = (
        plan.sizes.length,
        plan.sizes.window,
        plan.sizes.packet_bytes,
    )
    shape[Shape.CHILDREN], shape[Shape.RANKS] = len(plan.children), plan.ranks
    shape[Shape.BELOW] = plan.ranks_below
    if plan.above is not None:
        shape[Shape.UP], shape[Shape.NUMBER] = 1, plan.above.number
    shape[Shape.OVER_SWITCHES] = plan.over_switches
    shape[Shape.ENDS] = ends
    return shape
