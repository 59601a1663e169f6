"""What stands at the ends of links: hosts with machines, switches with or without a program."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from inanet.phy.device import is_group
from inanet.proto.common.program import Action, Program, Verdicts
from inanet.sim.burst import Burst, batch_of, rows_of
from inanet.sim.link import Link
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop

#: Packets that a program sees at a time.
PROGRAM_BATCH = 256
#: Bytes that a host hands to its link before it waits, as a socket's send buffer does.
SEND_BUFFER = 128 << 10


class Machine(Protocol):
    """The core contract of machines in ``proto``."""

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch."""
        ...

    def transmit(self, now: float) -> Any:
        """An iterable of transmissions; left where it stands while the device is full."""
        ...

    def timer(self) -> float | None:
        """Next deadline."""
        ...

    def on_timer(self, now: float) -> None:
        """A deadline has come."""
        ...

    def events(self) -> Sequence[Any]:
        """What has happened."""
        ...


#: Puts a piece on its way: neighbour it goes to, time, piece.
Launch = Callable[[str, float, Burst], None]


class Node:
    """A node with links by neighbour; ``launch`` is the network's."""

    def __init__(self, name: str, launch: Launch) -> None:
        self.name = name
        self.links: dict[str, Link] = {}
        self._launch = launch

    def emit(self, neighbour: str, burst: Burst, now: float) -> None:
        """Put a burst on the link to a neighbour."""
        for at, piece in self.links[neighbour].carry(burst, now):
            self._launch(neighbour, at, piece)


class Host(Node):
    """A machine behind one link. What it cannot hand over yet stays in its iterator, as with a real device."""

    def __init__(
        self, name: str, launch: Launch, address: int, machine: Machine, send_buffer: int = SEND_BUFFER
    ) -> None:
        super().__init__(name, launch)
        self.address = address
        self.machine = machine
        self.send_buffer = send_buffer
        self.marked = self.misdelivered = 0
        self._out: Iterator[Transmission] | None = None
        #: when the link has room again, if something waits for it
        self.resume_at: float | None = None

    def take(self, bursts: Sequence[Burst], groups: frozenset[int], now: float) -> None:
        """Hand what has arrived to the machine, in one batch. Packets to other addresses are counted and dropped."""
        mine = [burst for burst in bursts if burst.destination == self.address or burst.destination in groups]
        if len(mine) < len(bursts):
            self.misdelivered += sum(map(len, bursts)) - sum(map(len, mine))
        if mine:
            self.marked += sum(int(np.count_nonzero(burst.marked)) for burst in mine)
            self.machine.receive(batch_of(mine), now)

    def pump(self, now: float) -> None:
        """Send until the machine has no more or the link's backlog reaches the send buffer."""
        ((neighbour, link),) = self.links.items()
        if self.resume_at is not None and now < self.resume_at:
            return
        self.resume_at = None
        # the machine may have more since an iterator was left: it is asked again behind what remains of that
        asked = self._out is None
        while link.backlog(now) < self.send_buffer:
            if self._out is None:
                self._out = iter(self.machine.transmit(now))
            transmission = next(self._out, None)
            if transmission is None:
                self._out = None
                if asked:
                    return
                asked = True
                continue
            self.emit(neighbour, Burst.of(self.address, transmission), now)
        self.resume_at = link.drained(now, self.send_buffer / 2)


class Switch(Node):
    """Forwards by destination. What is sent to ``address`` goes through ``program``, and so does, wherever it is bound, what
    is sent to UDP port :attr:`through`.

    ``congestion`` maps sources to the destination whose queue a program shall heed for their packets (for a worker of
    ATP: its PS); a packet that was marked before counts as congested as well.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        program: Program | None = None,
        address: int = 0,
        congestion: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(name, launch)
        self.program = program
        self.address = address
        self.congestion = dict(congestion or {})
        self.drops = np.zeros(DROP_CODES, np.int64)
        self.groups: dict[int, tuple[int, ...]] = {}
        #: addresses of other switches with programs: these know their neighbours, so what goes on to one of them comes
        #: from this switch
        self.peers: frozenset[int] = frozenset()
        self.unroutable = 0
        #: 0: none; packets to this port are whole IPv4 packets
        self.through = 0
        self._verdicts = Verdicts(PROGRAM_BATCH)
        #: neighbour towards a destination, and those towards the members of a multicast group; set by the network
        self.route: Callable[[int, int], str | None] = lambda source, destination: None
        self.fan_out: Callable[[int, int], Sequence[str]] = lambda source, group: ()

    def take(self, arrivals: Sequence[tuple[str, Burst]], now: float) -> None:
        """Forward, or send through the program, what has arrived; each with the neighbour it came from."""
        mine: list[Burst] = []
        for neighbour, burst in arrivals:
            bound = burst.destination
            if self.program is not None and (bound == self.address or bound & 0xFFFF == self.through != 0):
                mine.append(burst)
            else:
                self.forward(burst, now, neighbour)
        if mine:
            self._process(mine, now)

    def wake(self, now: float) -> None:
        """The program's deadline has come."""
        assert self.program is not None
        self.program.on_timer(now)
        self._spill(now)

    def forward(self, burst: Burst, now: float, came_from: str | None = None) -> None:
        """Send a burst on by the tables; a multicast to every neighbour with members behind it but where it came from."""
        if is_group(burst.destination):
            for neighbour in self.fan_out(burst.source, burst.destination):
                if neighbour != came_from:
                    self.emit(neighbour, burst, now)
            return
        way = self.route(burst.source, burst.destination)
        if way is None:
            self.unroutable += len(burst)
        else:
            self.emit(way, burst, now)

    def _process(self, bursts: list[Burst], now: float) -> None:
        assert self.program is not None
        whole = batch_of(bursts)
        marked = np.concatenate([burst.marked for burst in bursts])
        bound = np.repeat([burst.destination for burst in bursts], [len(burst) for burst in bursts])
        for first in range(0, len(whole), PROGRAM_BATCH):
            part = slice(first, first + PROGRAM_BATCH)
            batch = PacketBatch(whole.arena, whole.offsets[part], whole.lengths[part], whole.sources[part])
            verdicts, count = self._verdicts, len(batch)
            verdicts.action[:count] = Action.PASS
            verdicts.target[:count] = 0
            verdicts.length[:count] = batch.lengths
            verdicts.reason[:count] = Drop.OK
            verdicts.mark[:count] = 0
            verdicts.passes[:count] = 1
            self.program.process(batch, self._congested(batch, marked[part], now), verdicts, now)
            self._leave(batch, bound[part], marked[part] | (verdicts.mark[:count] == 1), now)
        self._spill(now)

    def _congested(self, batch: PacketBatch, marked: Any, now: float) -> Any:
        heed = marked.astype(np.uint8)
        for source, towards in self.congestion.items():
            way = self.route(source, towards)
            if way is not None and self.links[way].congested(now):
                heed[batch.sources == source] = 1
        return heed

    def _leave(self, batch: PacketBatch, bound: Any, marked: Any, now: float) -> None:
        """Send what was judged, packets with the same fate and length together."""
        verdicts, count = self._verdicts, len(batch)
        np.add.at(self.drops, verdicts.reason[:count][verdicts.action[:count] == Action.DROP], 1)
        action, target, length = verdicts.action[:count], verdicts.target[:count], verdicts.length[:count]
        fates = (action, target, length, batch.sources, bound)
        cuts = np.zeros(count, np.bool_)
        cuts[:1] = True
        for fate in fates:
            cuts[1:] |= fate[1:] != fate[:-1]
        starts = np.flatnonzero(cuts)
        ways = zip(*(fate[starts].tolist() for fate in fates), strict=True)
        ends = [*starts[1:].tolist(), count]
        for first, last, (does, to, size, source, destination) in zip(
            starts.tolist(), ends, ways, strict=True
        ):
            if does == Action.DROP:
                continue
            data = rows_of(batch.arena, batch.offsets[first:last], size)
            to = destination if does == Action.PASS else to
            self._send(does, to, source, data, marked[first:last].copy(), now)

    def _send(self, action: int, target: int, source: int, data: Any, marked: Any, now: float) -> None:
        if action == Action.REPLY:
            self.forward(Burst(self.address, source, data, marked), now)
        elif action in (Action.UNICAST, Action.PASS):
            shown = self.address if target in self.peers else source
            self.forward(Burst(shown, target, data, marked), now)
        elif action == Action.GROUP:
            members = self.groups[target]
            # results of the switch come from the switch, a PS's pass through as its own
            shown = self.address if source in members else source
            for member in members:
                to_peer = self.address if member in self.peers else shown
                self.forward(Burst(to_peer, member, data, marked), now)

    def _spill(self, now: float) -> None:
        assert self.program is not None
        for transmission in self.program.spilled():
            self.forward(Burst.of(self.address, transmission), now)
