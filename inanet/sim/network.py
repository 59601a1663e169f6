"""Nodes joined by links, and virtual time.

>>> network = Network(seed=1)
>>> network.add_switch("s")
>>> network.add_host("w0", endpoint("10.0.0.1", 4000), machine)
>>> network.connect("w0", "s", LinkSpec(rate=1e9))
>>> network.run(lambda: done, deadline=1.0)

Events of one instant are handled together, in the order in which they were scheduled: first appointments
(:meth:`Network.at`), then what arrived, then timers, then what the machines want to send. With a ``tick`` instants are its
multiples, and everything happens at the one that is nearest to its time: machines see larger batches less often, as
hosts that poll do. Delays are right on average as long as links delay by half a tick or more; throughput is not touched.
"""

import heapq
from collections.abc import Callable
from typing import Any

from inanet.phy.device import is_group
from inanet.proto.common.program import Program
from inanet.sim.burst import Burst
from inanet.sim.link import Link, LinkSpec
from inanet.sim.nodes import SEND_BUFFER, Host, Machine, Switch
from inanet.testing.clock import FakeClock
from inanet.testing.pump import Stuck
from inanet.wire.endpoint import show

#: Turns at one instant after which time is said to stand still.
_MOST_TURNS = 10_000


class Network:
    """An empty network. ``seed`` decides all losses; ``clock`` is moved along, for whoever reads it; ``tick`` in seconds,
    ``None`` for events at their exact times.
    """

    def __init__(self, seed: int = 0, clock: FakeClock | None = None, tick: float | None = None) -> None:
        self.clock = clock or FakeClock(0.0)
        self.tick = tick
        self.seed = seed
        self.hosts: dict[str, Host] = {}
        self.switches: dict[str, Switch] = {}
        #: (host, event) in the order in which machines reported them
        self.log: list[tuple[str, Any]] = []
        self._heap: list[tuple[float, int, str, str, Burst]] = []
        self._appointments: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._links = 0
        self._addresses: dict[int, str] = {}
        self._members: dict[int, dict[str, None]] = {}
        self._next_hops: dict[str, dict[str, list[str]]] = {}
        self._ways: dict[tuple[str, int, int], str | None] = {}
        self._woken: set[str] = set()
        #: timers of hosts' machines; they change only when something is done with a machine
        self._timers: dict[str, float | None] = {}
        #: (time, host) at which a host wants to be looked at; those that ``_armed`` does not have are out of date
        self._alarms: list[tuple[float, int, str]] = []
        self._armed: dict[str, float | None] = {}
        self._rank: dict[str, int] = {}

    @property
    def now(self) -> float:
        """Virtual time, seconds."""
        return self.clock.now

    # ------------------------------------------------------------ building

    def add_host(self, name: str, address: int, machine: Machine, *, send_buffer: int = SEND_BUFFER) -> Host:
        """A host with a machine at an address. Raises ``ValueError`` for a name or address that is taken."""
        self._claim(name, address)
        host = Host(name, self._launcher(name), address, machine, send_buffer)
        self.hosts[name] = host
        self._rank[name] = len(self._rank)
        self._woken.add(name)
        return host

    def add_switch(
        self,
        name: str,
        program: Program | None = None,
        address: int = 0,
        congestion: dict[int, int] | None = None,
        kind: type[Switch] = Switch,
    ) -> Switch:
        """A switch of some ``kind``; see :class:`~inanet.sim.nodes.Switch`. Raises as :meth:`add_host`."""
        self._claim(name, address)
        switch = kind(name, self._launcher(name), program, address, congestion)
        switch.route = lambda source, destination: self._route(name, source, destination)
        switch.fan_out = lambda source, group: self._fan_out(name, source, group)
        self.switches[name] = switch
        return switch

    def _claim(self, name: str, address: int) -> None:
        if name in self.hosts or name in self.switches:
            raise ValueError(f"there is a node {name!r} already")
        if address in self._addresses:
            raise ValueError(f"{show(address)} belongs to {self._addresses[address]!r} already")
        if address:
            self._addresses[address] = name

    def _launcher(self, name: str) -> Callable[[str, float, Burst], None]:
        def launch(neighbour: str, at: float, piece: Burst) -> None:
            self._order += 1
            heapq.heappush(self._heap, (at, self._order, name, neighbour, piece))

        return launch

    def connect(
        self, one: str, other: str, there: LinkSpec, back: LinkSpec | None = None
    ) -> tuple[Link, Link]:
        """A link in both directions; ``back`` is as ``there`` if left out.

        Raises ``KeyError`` for an unknown node, ``ValueError`` for a second link of a host or between the same two.
        """
        nodes = {**self.hosts, **self.switches}
        made = []
        for near, far, spec in ((one, other, there), (other, one, back or there)):
            if far in nodes[near].links:
                raise ValueError(f"{near!r} and {far!r} are connected already")
            if near in self.hosts and nodes[near].links:
                raise ValueError(f"host {near!r} has a link already")
            self._links += 1
            link = Link(f"{near}-{far}", spec, self.seed * 1_000_003 + self._links)
            nodes[near].links[far] = link
            made.append(link)
        self._forget_ways()
        return made[0], made[1]

    def share(self, name: str, beside: str) -> None:
        """Put a host behind the link that another one has: two machines on one computer.

        Raises ``ValueError`` if it has a link already, ``KeyError`` for an unknown host.
        """
        host, other = self.hosts[name], self.hosts[beside]
        if host.links:
            raise ValueError(f"host {name!r} has a link already")
        ((switch, link),) = other.links.items()
        host.links[switch] = link
        self.switches[switch].links[name] = self.switches[switch].links[beside]
        self._forget_ways()

    def _forget_ways(self) -> None:
        self._next_hops.clear()
        self._ways.clear()

    def join(self, group: int, host: str) -> None:
        """Deliver what is sent to a multicast group to this host as well. Raises ``ValueError`` for an address that is no
        group.
        """
        if not is_group(group):
            raise ValueError(f"{show(group)} is not a multicast group")
        self._members.setdefault(group, {})[host] = None

    def leave(self, group: int, host: str) -> None:
        """Undo :meth:`join`. Raises ``KeyError`` if it was not joined."""
        del self._members[group][host]

    def groups_of(self, host: str) -> frozenset[int]:
        """Groups that a host has joined."""
        return frozenset(group for group, members in self._members.items() if host in members)

    # ------------------------------------------------------------ ways

    def _hops(self, destination: str) -> dict[str, list[str]]:
        """For every switch its neighbours that are one link nearer to the switch ``destination``."""
        known = self._next_hops.get(destination)
        if known is not None:
            return known
        distance, queue = {destination: 0}, [destination]
        for node in queue:
            for near in self.switches[node].links:
                # hosts do not forward
                if near not in distance and near in self.switches:
                    distance[near] = distance[node] + 1
                    queue.append(near)
        hops = {
            node: [
                near
                for near in self.switches[node].links
                if distance.get(near, distance[node]) < distance[node]
            ]
            for node in distance
        }
        self._next_hops[destination] = hops
        return hops

    def _route(self, switch: str, source: int, destination: int) -> str | None:
        """The neighbour towards an address; of equal ones always the same for a pair of addresses, by their hash."""
        key = (switch, source, destination)
        if key not in self._ways:
            self._ways[key] = self._way(*key)
        return self._ways[key]

    def _way(self, switch: str, source: int, destination: int) -> str | None:
        name = self._addresses.get(destination)
        if name is None:
            return None
        if name in self.hosts:
            if name in self.switches[switch].links:
                return name
            (name,) = self.hosts[name].links or (None,)
        ways = self._hops(name).get(switch, []) if name is not None else []
        if not ways:
            return None
        return ways[_mix(source, destination) % len(ways)]

    def _fan_out(self, switch: str, source: int, group: int) -> list[str]:
        """Neighbours with members of a group behind them, each once. Networks with loops would see packets twice."""
        ways: dict[str, None] = {}
        for host in self._members.get(group, {}):
            address = self.hosts[host].address
            way = self._route(switch, group, address)
            if way is not None and address != source:
                ways[way] = None
        return list(ways)

    # ------------------------------------------------------------ time

    def run(self, until: Callable[[], bool], *, deadline: float) -> None:
        """Run until a condition holds, looked at after every instant.

        Raises :class:`~inanet.testing.pump.Stuck` when nothing is left to happen, after ``deadline`` virtual seconds, and
        when time stands still.
        """
        stop = self.now + deadline
        turns, instant = 0, -1.0
        self._stir(list(self.hosts))
        while not until():
            due = self._next()
            if due is None:
                raise Stuck(f"nothing on its way and no timer set at {self.now:.6f} s; {self.counters()}")
            if due > stop:
                raise Stuck(f"not done after {deadline} s of virtual time; {self.counters()}")
            self.clock.now = self._instant(due)
            turns = turns + 1 if self.now == instant else 0
            instant = self.now
            if turns > _MOST_TURNS:
                raise Stuck(f"time stands still at {self.now:.6f} s; {self.counters()}")
            self._advance()

    def wake(self, *names: str) -> None:
        """Look at these hosts at the next turn: somebody has given their machines something to do."""
        self._woken.update(names)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call ``action`` at this time, before anything else that happens then. Raises ``ValueError`` for the past."""
        if when < self.now:
            raise ValueError(f"{when} s is over, it is {self.now} s")
        self._order += 1
        heapq.heappush(self._appointments, (when, self._order, action))

    def _instant(self, due: float) -> float:
        """When what is due next happens."""
        if self.tick is None:
            return max(self.now, due)
        nearest, here = round(due / self.tick), round(self.now / self.tick)
        return max(nearest, here if self._woken else here + 1) * self.tick

    def _next(self) -> float | None:
        if self._woken:
            return self.now
        alarms = self._alarms
        while alarms and self._armed.get(alarms[0][2]) != alarms[0][0]:
            heapq.heappop(alarms)
        times = [its.program.timer() for its in self.switches.values() if its.program is not None]
        times += [queue[0][0] for queue in (alarms, self._heap, self._appointments) if queue]
        return min((at for at in times if at is not None), default=None)

    def _advance(self) -> None:
        now = self.now
        horizon = now if self.tick is None else now + self.tick / 2
        while self._appointments and self._appointments[0][0] <= horizon:
            heapq.heappop(self._appointments)[2]()
        at_hosts: dict[str, list[Burst]] = {}
        while at_switches := self._arrived(horizon, at_hosts):
            for name, arrivals in at_switches.items():
                self.switches[name].take(arrivals, now)
        for switch in self.switches.values():
            if switch.program is not None and _is_due(switch.program.timer(), horizon):
                switch.wake(now)
        stirred = self._woken
        self._woken = set()
        for name, bursts in at_hosts.items():
            self.hosts[name].take(bursts, self.groups_of(name), now)
            stirred.add(name)
        stirred.update(self._ring(horizon))
        self._stir(sorted(stirred, key=self._rank.__getitem__))

    def _arrived(
        self, horizon: float, at_hosts: dict[str, list[Burst]]
    ) -> dict[str, list[tuple[str, Burst]]]:
        """What has arrived at switches; within a tick it may cross several of them. What is for hosts is added there."""
        at_switches: dict[str, list[tuple[str, Burst]]] = {}
        while self._heap and self._heap[0][0] <= horizon:
            _, _, sender, name, piece = heapq.heappop(self._heap)
            if name in self.hosts:
                at_hosts.setdefault(name, []).append(piece)
            else:
                at_switches.setdefault(name, []).append((sender, piece))
        return at_switches

    def _ring(self, horizon: float) -> list[str]:
        """Tell machines whose time has come; returns the hosts to look at."""
        due: set[str] = set()
        while self._alarms and self._alarms[0][0] <= horizon:
            at, _, name = heapq.heappop(self._alarms)
            if self._armed.get(name) == at:
                self._armed[name] = None
                due.add(name)
        names = sorted(due, key=self._rank.__getitem__)
        for name in names:
            if _is_due(self._timers.get(name), horizon):
                self.hosts[name].machine.on_timer(self.now)
        return names

    def _stir(self, names: list[str]) -> None:
        for name in names:
            host = self.hosts[name]
            host.pump(self.now)
            self.log.extend((name, event) for event in host.machine.events())
            self._timers[name] = timer = host.machine.timer()
            due = min((at for at in (timer, host.resume_at) if at is not None), default=None)
            if due is not None and due != self._armed.get(name):
                heapq.heappush(self._alarms, (due, self._rank[name], name))
            self._armed[name] = due

    def counters(self) -> dict[str, dict[str, int]]:
        """Counters of every link that are not zero, by its name."""
        return {
            link.name: {key: value for key, value in link.counters().items() if value}
            for node in (*self.hosts.values(), *self.switches.values())
            for link in node.links.values()
        }


_WORD = (1 << 64) - 1


def _mix(source: int, destination: int) -> int:
    """A hash of two addresses that is the same in every process (the finaliser of splitmix64)."""
    word = (source * 0x9E37_79B9_7F4A_7C15 + destination) & _WORD
    word = (word ^ word >> 30) * 0xBF58_476D_1CE4_E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D0_49BB_1331_11EB & _WORD
    return word ^ word >> 31


def _is_due(at: float | None, now: float) -> bool:
    return at is not None and at <= now
