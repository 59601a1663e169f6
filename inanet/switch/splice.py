"""NetReduce in a switch of frames: a bump in the wire of RoCE connections.

Frames of RoCE (UDP port 4791, whole, one packet each) are shown to the program before anything else looks at them. What it
absorbs leaves no trace; the sums that it makes leave under the link headers that its connections' frames came with, so
neither hosts nor the switches around see that they were away. Everything else goes on as it came.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.phy.vnet import (
    ETHERTYPE_IPV4,
    GSO_NONE,
    HEADER_BYTES,
    IP_BYTES,
    UDP,
    UDP_BYTES,
    FrameBatch,
    big16,
)
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.netreduce.program import NetReduceProgram
from inanet.proto.netreduce.ring import Connection, RingAt
from inanet.switch.local import Local, batch_of
from inanet.switch.tables import FLOOD, Tables
from inanet.wire.batch import I64, U8, PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.roce import PORT


@njit(
    "int64(uint8[::1], int64[::1], int64[::1], int64, int64[::1], int64[::1], int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def find_roce(arena: U8, offsets: I64, lengths: I64, link: int, chosen: I64, starts: I64, sizes: I64) -> int:
    """Find the frames with one RoCE packet: their indices, where their IPv4 header begins, and its total length.

    ``link`` is the length of link headers. Returns how many there are.
    """
    found = np.int64(0)
    for i in range(len(offsets)):
        head = offsets[i]
        ip, end = head + HEADER_BYTES + link, head + lengths[i]
        if end - ip < IP_BYTES + UDP_BYTES or arena[head + 1] & 0x7F != GSO_NONE:
            continue
        if link and big16(arena, ip - 2) != ETHERTYPE_IPV4:
            continue
        if arena[ip] != 0x45 or arena[ip + 9] != UDP or big16(arena, ip + 6) & 0x3FFF:
            continue
        size = big16(arena, ip + 2)
        if big16(arena, ip + IP_BYTES + 2) != PORT or ip + size > end:
            continue
        chosen[found], starts[found], sizes[found] = i, ip, size
        found += 1
    return int(found)


class Splice:
    """The program between the ports of a switch with these ``tables`` and link headers of ``link`` bytes (14, or 0 on TUN).

    ``rings`` are what it serves from the start. ``placed`` are the ports of hosts, by address, that speak from there alone: a
    packet of a ring that comes in elsewhere is somebody else's (bound endpoints). Raises as
    :meth:`~inanet.proto.netreduce.program.NetReduceProgram.add_ring`.
    """

    def __init__(
        self,
        tables: Tables,
        link: int,
        rings: Sequence[RingAt] = (),
        *,
        budget: int | None = None,
        placed: Mapping[int, int] | None = None,
    ) -> None:
        self.program = NetReduceProgram() if budget is None else NetReduceProgram(budget=budget)
        for ring in rings:
            self.program.add_ring(ring)
        self._tables = tables
        self._link = link
        #: asks for hosts and switches that sums are for and that nothing has been heard of
        self._local = Local(tables, link)
        self._placed = dict(placed or {})
        self._verdicts = Verdicts(64)
        #: link headers of a connection's frames, by source and destination
        self._headers: dict[int, bytes] = {}
        #: sums that nobody knows the way for, and packets of rings that came in at a port where their host is not
        self.unroutable = self.misplaced = 0

    def take(
        self, frames: FrameBatch, ingress: int, now: float
    ) -> tuple[FrameBatch, list[tuple[int, FrameBatch]]]:
        """Frames that go on of those that came in at port ``ingress``, and frames that leave (sums, questions for their
        receivers) with their port, or :data:`~inanet.switch.tables.FLOOD`.
        """
        count = len(frames)
        chosen, starts, sizes = (np.empty(count, np.int64) for _ in range(3))
        found = int(
            find_roce(frames.arena, frames.offsets, frames.lengths, self._link, chosen, starts, sizes)
        )
        if not found:
            return frames, []
        chosen, starts, sizes = chosen[:found], starts[:found], sizes[:found]
        stays = np.ones(count, np.bool_)
        if self._placed:
            away = self._elsewhere(frames.arena, starts, ingress)
            self.misplaced += int(np.count_nonzero(away))
            stays[chosen[away]] = False
            chosen, starts, sizes = chosen[~away], starts[~away], sizes[~away]
            found = len(chosen)
        if found > len(self._verdicts.action):
            self._verdicts = Verdicts(found)
        verdicts = self._verdicts
        batch = PacketBatch(frames.arena, starts, sizes, np.zeros(found, np.uint64))
        self.program.process(batch, np.zeros(found, np.uint8), verdicts, now)
        absorbed = verdicts.action[:found] == Action.DROP
        stays[chosen[absorbed]] = False
        if stays.all():
            return frames, []
        taken = starts[absorbed & (verdicts.reason[:found] == Drop.OK)]
        if len(taken):
            self._learn(frames.arena, taken)
        made = [out for one in self.program.spilled() for out in self._frames(one, now)]
        return frames.select(np.flatnonzero(stays)), made

    def _elsewhere(self, arena: U8, starts: I64, ingress: int) -> NDArray[np.bool_]:
        """Which packets are of a ring's connection and of a host that is at another port."""
        away = np.zeros(len(starts), np.bool_)
        sources = np.ascontiguousarray(arena[starts[:, None] + np.arange(12, 16)]).view(">u4")[:, 0]
        for source in np.unique(sources).tolist():
            if self._placed.get(source, ingress) == ingress:
                continue
            for i in np.flatnonzero(sources == source).tolist():
                at = int(starts[i])
                destination, number = (
                    int.from_bytes(arena[at + begin : at + end].tobytes(), "big")
                    for begin, end in ((16, 20), (33, 36))
                )
                away[i] = self.program.serves(Connection(source, destination, number))
        return away

    def _learn(self, arena: U8, starts: I64) -> None:
        """Note the link headers of frames that were taken."""
        if not self._link:
            return
        fields = np.ascontiguousarray(arena[starts[:, None] + np.arange(12, 20)]).view(">u8")[:, 0]
        # what comes in at one port is of one connection, mostly
        alike = bool((fields == fields[0]).all())
        pairs = [(fields[0], 0)] if alike else zip(*np.unique(fields, return_index=True), strict=True)
        for pair, index in pairs:
            at = int(starts[index])
            self._headers[int(pair)] = arena[at - self._link : at].tobytes()

    def _way(self, pair: int, now: float) -> tuple[int, bytes] | None:
        """Port and link header for a connection's packets; ``None``: nobody knows where its receiver is."""
        own, known = int(self._tables.own_hardware), self._headers.get(pair)
        if known is not None and int.from_bytes(known[:6], "big") != own:
            port = self._tables.port_of(int.from_bytes(known[:6], "big"), now)
            return FLOOD if port is None else port, known
        host = self._tables.host(pair & 0xFFFFFFFF)
        if host is None:
            return None
        if not self._link:
            return host[1], b""
        ethernet = host[0].to_bytes(6, "big") + own.to_bytes(6, "big") + ETHERTYPE_IPV4.to_bytes(2, "big")
        return host[1], ethernet

    def _frames(self, packets: Transmission, now: float) -> list[tuple[int, FrameBatch]]:
        """Packets of one connection as frames, and where they go. Instead of packets that nobody knows the way for, which
        are lost and come again, the question who has their destination.
        """
        first, length = int(packets.offsets[0]), packets.length
        way = self._way(int.from_bytes(packets.arena[first + 12 : first + 20].tobytes(), "big"), now)
        if way is None:
            self.unroutable += len(packets)
            question = self._local.question(packets.destination >> 16, now)
            return [] if question is None else [(FLOOD, batch_of(question))]
        port, header = way
        head = HEADER_BYTES + self._link
        rows = np.zeros((len(packets), head + length), np.uint8)
        rows[:, HEADER_BYTES:head] = np.frombuffer(header, np.uint8)
        rows[:, head:] = packets.arena[packets.offsets[:, None] + np.arange(length)]
        at = np.arange(len(packets), dtype=np.int64) * (head + length)
        return [(port, FrameBatch(rows.reshape(-1), at, np.full(len(packets), head + length, np.int64)))]

    def add_to(self, figures: dict[str, Any]) -> dict[str, object]:
        """A switch's figures with the program's."""
        drops, stats = dict(figures["drops"]), self.program.stats()
        own = {Drop.NO_ROUTE: self.unroutable, Drop.FOREIGN_HOST: self.misplaced}
        for reason in Drop:
            count = int(self.program.drops[reason]) + own.get(reason, 0)
            if count:
                drops[reason.label] = drops.get(reason.label, 0) + count
        return {**figures, "drops": drops, "programs": {**figures["programs"], self.program.name: stats}}
