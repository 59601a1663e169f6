"""What GOAT is compared with: Geryon (no aggregation), and ATP and ESA, whose slots are shared by fragments.

**The model.** All workers begin at once and send their fragments in order, each at a constant rate of its own (GOAT,
section VII-D: no windows, no losses). Fragment *i* maps to slot *i* mod N of every programmable switch on the way along
a shortest path to the PS. Queues and propagation take no time beside the transfer. A free slot is claimed; the same fragment is
added; anything else collides, and

- ATP lets the newcomer pass on, to the next programmable switch and in the end to the PS;
- ESA lets it evict the occupant if its priority is higher; the partial sum travels on.

A sum leaves when every worker behind the switch has contributed or passed by, and is added again further up, as ATP's
two levels do (``again=False``: only where it is first aggregated, as GOAT describes its baseline). Its
slot is free when the PS has the whole fragment (``release="ack"``, the protocol as published) or at once
(``release="instant"``, better than any protocol can do). Windows are left out on purpose: with a window of at most N
fragments nobody is ever N ahead, nothing collides, and the fast wait for the slow; that is the case of equal rates.

As everything is linear in *i*, a sample of slots stands for all of them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from inanet.planning.goat.instance import F64, SLOT_BYTES
from inanet.planning.goat.topologies import distances

if TYPE_CHECKING:
    from inanet.planning.goat.topologies import Graph

Policy = Literal["none", "atp", "esa"]
#: ``late``: fragments sent later win, as layers near the input are sent last and needed first; ``early``: the reverse
Priority = Literal["late", "early"]
Release = Literal["ack", "instant"]

#: Slots that stand for all of a switch's.
SAMPLES = 48
#: Slowest rate that is drawn, as a share of the line's.
LEAST_RATE = 0.05


def sending_rates(workers: int, deviation: float, seed: int, mean: float = 1.0) -> F64:
    """Rates relative to the line's, float64[W]: normal around ``mean``, redrawn until they lie in
    [:data:`LEAST_RATE`, 1].

    The paper draws ratios in [0, 1] with a standard deviation of 0.2 and calls the line rate their average; both can only
    be so if the mean is 1 and the upper half is cut off, which is the default here. Raises ``ValueError`` for a mean
    outside of the range or a negative deviation.
    """
    if not LEAST_RATE <= mean <= 1.0 or deviation < 0:
        raise ValueError(
            f"mean {mean}, deviation {deviation}: the mean lies in {LEAST_RATE} to 1, the deviation is not negative"
        )
    rng = np.random.default_rng(seed)
    rates = np.full(workers, mean)
    again = np.arange(workers if deviation else 0)
    while len(again):
        rates[again] = rng.normal(mean, deviation, len(again))
        again = again[(rates[again] < LEAST_RATE) | (rates[again] > 1.0)]
    return rates


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one round. ``links``: byte-links in the network; ``ps``: what reaches the PS, of which ``direct`` was
    aggregated nowhere; ``sent``: what the workers sent.
    """

    links: float
    ps: float
    direct: float
    sent: float

    @property
    def in_network(self) -> float:
        """Bytes that switches have taken off the PS: sent less received."""
        return self.sent - self.ps


@dataclass(frozen=True, slots=True)
class Routes:
    """Paths of the workers and of every programmable switch to the PS, as (links done, programmable switch) stops;
    ``length`` is the number of links of each path.
    """

    stops: tuple[tuple[tuple[int, int], ...], ...]
    length: tuple[int, ...]
    switch_stops: tuple[tuple[tuple[int, int], ...], ...]
    switch_length: tuple[int, ...]
    slots: int


def routes(
    graph: "Graph",
    ps: str,
    workers: Sequence[str],
    seed: int,
    *,
    favour_programmable: bool = False,
    slot_bytes: int = SLOT_BYTES,
) -> Routes:
    """A tree of shortest paths to the PS: every node has one next hop, drawn at random from the equally near ones, or,
    with ``favour_programmable``, from those with most programmable switches ahead.

    Paths that meet stay together. Drawn for each flow, they would part again, and a switch could not know whom to wait
    for. Raises ``ValueError`` if programmable switches have different amounts of memory, which the model does not have.
    """
    rng = np.random.default_rng(seed)
    left = distances(graph, ps)
    switches = [name for name, memory in graph.nodes(data="memory") if memory and name in left]
    memory = {int(graph.nodes[name]["memory"]) for name in switches}
    if len(memory) > 1:
        raise ValueError(
            f"programmable switches have {sorted(memory)} B; the model of shared slots needs one size"
        )
    number = {name: index for index, name in enumerate(switches)}
    # stops of every node's path, nearest the PS first so that what lies ahead is known
    stops: dict[str, tuple[tuple[int, int], ...]] = {ps: ()}
    for name in sorted(left, key=lambda node: (left[node], node)):
        if name == ps:
            continue
        ahead = [
            tuple((hop + 1, switch) for hop, switch in _with_self(near, stops[near], number))
            for near in sorted(graph[name])
            # servers do not forward
            if left[near] == left[name] - 1 and (near == ps or graph.nodes[near]["kind"] == "switch")
        ]
        if not ahead:
            raise ValueError(f"node {name!r} has no switch on its way to the PS {ps!r}")
        if favour_programmable:
            most = max(len(its) for its in ahead)
            ahead = [its for its in ahead if len(its) == most]
        stops[name] = ahead[int(rng.integers(len(ahead)))]
    return Routes(
        tuple(stops[name] for name in workers),
        tuple(left[name] for name in workers),
        tuple(stops[name] for name in switches),
        tuple(left[name] for name in switches),
        memory.pop() // slot_bytes if memory else 0,
    )


def _with_self(
    name: str, stops: tuple[tuple[int, int], ...], number: dict[str, int]
) -> tuple[tuple[int, int], ...]:
    return ((0, number[name]), *stops) if name in number else stops


@dataclass(slots=True)
class _Slot:
    fragment: int = -1
    workers: int = 0
    sent: bool = False
    #: workers that have passed by, or were flushed, by fragment
    gone: dict[int, int] = field(default_factory=dict)


class _Network:
    """One slot of every switch, and the fragments that map to it."""

    def __init__(
        self, routes: Routes, policy: Policy, priority: Priority, release: Release, again: bool
    ) -> None:
        self.routes = routes
        self.again = again
        self.esa = policy == "esa"
        self.late_wins = priority == "late"
        self.hold = release == "ack"
        self.everyone = (1 << len(routes.stops)) - 1
        self.slots = [_Slot() for _ in routes.switch_stops]
        self.behind = [0] * len(routes.switch_stops)
        for worker, stops in enumerate(routes.stops):
            for _, switch in stops:
                self.behind[switch] |= 1 << worker
        self.at_ps: dict[int, int] = {}
        self.links = self.arrivals = self.direct = 0

    def send(self, fragment: int, worker: int) -> None:
        """A worker sends a fragment."""
        self._travel(fragment, 1 << worker, self.routes.stops[worker], self.routes.length[worker])

    def _travel(
        self,
        fragment: int,
        workers: int,
        stops: tuple[tuple[int, int], ...],
        length: int,
        left_slot: bool = False,
    ) -> None:
        for hop, switch in stops:
            slot = self.slots[switch]
            if left_slot and not self.again:
                slot.gone[fragment] = slot.gone.get(fragment, 0) | workers
                if slot.fragment == fragment and not slot.sent:
                    self._complete(switch)
                continue
            if slot.fragment not in (-1, fragment):
                higher = (fragment > slot.fragment) == self.late_wins
                if not (self.esa and higher):
                    slot.gone[fragment] = slot.gone.get(fragment, 0) | workers
                    continue
                self._evict(switch)
            slot.fragment = fragment
            slot.workers |= workers
            self.links += hop
            self._complete(switch)
            return
        self.links += length
        self.arrivals += 1
        self.direct += workers & (workers - 1) == 0
        self._arrive(fragment, workers)

    def _evict(self, switch: int) -> None:
        slot = self.slots[switch]
        fragment, workers, sent = slot.fragment, slot.workers, slot.sent
        slot.fragment, slot.workers, slot.sent = -1, 0, False
        if not sent:
            slot.gone[fragment] = slot.gone.get(fragment, 0) | workers
            self._leave(switch, fragment, workers)

    def _complete(self, switch: int) -> None:
        slot = self.slots[switch]
        if self.behind[switch] & ~(slot.workers | slot.gone.get(slot.fragment, 0)):
            return
        fragment, workers = slot.fragment, slot.workers
        slot.gone[fragment] = slot.gone.get(fragment, 0) | workers
        if self.hold:
            slot.sent = True
        else:
            slot.fragment, slot.workers = -1, 0
        self._leave(switch, fragment, workers)

    def _leave(self, switch: int, fragment: int, workers: int) -> None:
        its = self.routes
        self._travel(fragment, workers, its.switch_stops[switch], its.switch_length[switch], True)

    def _arrive(self, fragment: int, workers: int) -> None:
        if self.at_ps.get(fragment, 0) & workers:
            raise RuntimeError(f"fragment {fragment}: workers {workers:b} were counted twice")
        self.at_ps[fragment] = self.at_ps.get(fragment, 0) | workers
        if self.at_ps[fragment] != self.everyone:
            return
        for slot in self.slots:
            if slot.fragment == fragment and slot.sent:
                slot.fragment, slot.workers, slot.sent = -1, 0, False


def share(
    routes: Routes,
    size: float,
    rates: F64,
    policy: Policy,
    *,
    priority: Priority = "late",
    release: Release = "ack",
    again: bool = True,
    samples: int = SAMPLES,
    slot_bytes: int = SLOT_BYTES,
) -> Traffic:
    """Traffic of one round in which every worker sends ``size`` bytes at its rate (relative, float64[W]).

    ``none`` is Geryon. Raises ``ValueError`` for rates that do not match the routes or are not positive.
    """
    workers = len(routes.stops)
    if len(rates) != workers or not (rates > 0).all():
        raise ValueError(f"{len(rates)} rates for {workers} workers; one positive rate for each is needed")
    sent = size * workers
    if policy == "none" or not routes.slots:
        return Traffic(size * sum(routes.length), sent, sent, sent)
    fragments = int(np.ceil(size / slot_bytes))
    slots = min(routes.slots, fragments)
    counted = links = arrivals = direct = 0
    for sample in range(samples):
        first = int((sample + 0.5) * slots / samples)
        network = _Network(routes, policy, priority, release, again)
        # (when, fragment, worker); the heap holds each worker's next fragment only
        queue = [(first / float(rate), first, worker) for worker, rate in enumerate(rates)]
        heapq.heapify(queue)
        while queue:
            _, fragment, worker = queue[0]
            network.send(fragment, worker)
            counted += 1
            after = fragment + slots
            if after < fragments:
                heapq.heapreplace(queue, (after / float(rates[worker]), after, worker))
            else:
                heapq.heappop(queue)
        if any(its != network.everyone for its in network.at_ps.values()):
            raise RuntimeError("a fragment did not reach the PS whole: the model is wrong")
        links, arrivals, direct = (
            links + network.links,
            arrivals + network.arrivals,
            direct + network.direct,
        )
    scale = sent / counted
    return Traffic(links * scale, arrivals * scale, direct * scale, sent)
