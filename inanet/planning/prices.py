"""The planner: what plans there are for a network, what each costs, which is the cheapest, and why.

Prices are link rates (:mod:`inanet.planning.fluid`) plus measured costs of the nodes (:mod:`inanet.planning.costs`). A
ring, which needs no aggregation, is one of the plans: where it is as fast, it is what the planner says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inanet.kernels.layout import PROLOGUE_BLOCK
from inanet.planning.candidates import Fleet, candidates
from inanet.planning.costs import Costs
from inanet.planning.fair_shares import Flow, share
from inanet.planning.fluid import finish, streams
from inanet.planning.network import Link
from inanet.planning.plans import Plan
from inanet.planning.trees import WORTHWHILE, worthwhile
from inanet.units import show_rate
from inanet.wire.xagg import PAYLOAD_BYTES, ROW_BYTES, VALUES

_ETHERNET, _IPV4, _UDP, _TCP = 14, 20, 8, 32
#: What a byte of payload takes on a link: a fragment in a row of its own, and TCP's largest segment (MTU 1500).
FRAGMENT = (ROW_BYTES + _UDP + _IPV4 + _ETHERNET) / PAYLOAD_BYTES
SEGMENT = 1514 / (1500 - _IPV4 - _TCP)
#: A super-frame of 62 fragments, bytes on the wire: what a hop takes in before it passes anything on.
SUPERFRAME = 62 * PAYLOAD_BYTES * FRAGMENT
#: What exact exponents, agreed on before the data, add to a tensor's bytes: one for eight values of four bytes.
PROLOGUE = VALUES // PROLOGUE_BLOCK / PAYLOAD_BYTES
#: How much faster than a ring a plan must be predicted to be, before a fabric is worth setting up.
MARGIN = 0.05
#: Where nodes share cores they wait for each other, and only a part of a fabric's processor time is hidden behind its links
#: (or of links' time behind processors). This part is not, for every hop that a contribution takes to its root, as nine labs
#: on two cores had it (``ina bench plan``).
UNHIDDEN = 0.5
#: Plans that differ by less than this are equal: the one with the fewest nodes is taken.
ALIKE = 0.01


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds for one all-reduce, and what they are made of.

    ``seconds`` is the larger of what links and processors need, latency, and where nodes share cores
    :data:`UNHIDDEN` of the smaller for every hop, all of it at most.
    """

    plan: Plan
    seconds: float
    #: what the links need
    links: float
    #: what the processors need
    processors: float
    #: what a round takes however small it is
    latency: float
    #: in words: what it is bound by
    bound: str
    #: how exponents are agreed on; "" for a ring, which has none
    mode: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """``prices`` of all candidates, the cheapest first; ``chosen`` is one of them. ``helps``: it is no ring."""

    prices: tuple[Price, ...]
    chosen: Price
    ring: Price
    reasons: tuple[str, ...] = field(default=())

    @property
    def helps(self) -> bool:
        """Whether aggregation is what the planner advises."""
        return self.chosen.plan.kind != "ring"


def price(plan: Plan, fleet: Fleet, size: int, costs: Costs) -> Price:
    """What an all-reduce of ``size`` bytes per host costs by a plan, in the mode that suits it.

    That is the exact one, "prologue", unless workers that are late would make all others wait for more than :data:`MARGIN`.
    """
    if plan.kind == "ring":
        return _price_ring(plan, fleet, size, costs)
    exact = _price_trees(plan, fleet, size, costs, "prologue")
    if not any(fleet.late.values()):
        return exact
    carried = _price_trees(plan, fleet, size, costs, "carried")
    return carried if carried.seconds < exact.seconds * (1 - MARGIN) else exact


def _price_trees(plan: Plan, fleet: Fleet, size: int, costs: Costs, mode: str) -> Price:
    """``mode``: with "prologue" nobody's data leave before the last worker's exponents have come; with "carried" they do."""
    wire, late = size * FRAGMENT, dict(fleet.late)
    if mode == "prologue":
        wire *= 1 + PROLOGUE
        late = dict.fromkeys(fleet.workers, max(late.values(), default=0.0))
    flows = streams(plan, fleet.network, wire, late)
    limits = fleet.network.limits()
    links = finish(flows, limits)
    loads: dict[Link, float] = {}
    for flow in flows:
        for link in flow.uses:
            loads[link] = loads.get(link, 0.0) + flow.size
    work = _work(plan, fleet, size, costs)
    processors, busiest_host = _processors(work, fleet)
    depth = max(_depth(plan, worker) for worker in fleet.workers)
    slowest = min((rate for rate in limits.values() if math.isfinite(rate)), default=math.inf)
    latency = costs.round_s + (depth - 1) * costs.hop_s + (2 * depth - 1) * SUPERFRAME * 8 / slowest
    if processors > links:
        bound = f"processors: {processors:.3f} s of work on {busiest_host}"
    else:
        bound = _busiest(loads, limits, wire, fleet.late, links)
    seconds = max(links, processors) + latency
    if fleet.shared_cores:
        seconds += min(1.0, UNHIDDEN * depth) * min(links, processors)
    return Price(plan, seconds, links, processors, latency, bound, mode)


def _price_ring(plan: Plan, fleet: Fleet, size: int, costs: Costs) -> Price:
    """2 (n - 1) steps of a chunk each; a rank sends on what it has received, so a late or slow one holds all."""
    ring = fleet.workers
    n = len(ring)
    if n < 2:
        return Price(plan, 0.0, 0.0, 0.0, 0.0, "one worker has nothing to send")
    limits = fleet.network.limits()
    flows = {
        name: Flow(fleet.network.path(name, ring[(index + 1) % n], index), 1e15)
        for index, name in enumerate(ring)
    }
    finite = {link: rate / 8 for link, rate in limits.items() if math.isfinite(rate)}
    rates = share(flows, finite)  # type: ignore[arg-type]
    chunk = size * SEGMENT / n
    done = [fleet.late.get(name, 0.0) for name in ring]
    for _ in range(2 * (n - 1)):
        before = list(done)
        done = [max(before[i], before[i - 1]) + chunk / rates[name] for i, name in enumerate(ring)]
    steps = 2 * (n - 1)
    # every rank sends and receives 2 (n - 1) / n of its tensor
    fragments = size / PAYLOAD_BYTES * steps / n
    processors, busiest_host = _processors(dict.fromkeys(ring, fragments * costs.ring_ns * 1e-9), fleet)
    latency = steps * costs.step_s
    links = max(done)
    slowest = min(ring, key=lambda name: rates[name])
    bound = f"{steps / n:.3g} tensors through the link of {slowest} at {show_rate(round(rates[slowest] * 8))}"
    if any(fleet.late.values()):
        bound += "; every step waits for the worker that is late"
    if processors > links:
        bound = f"processors: {processors:.3f} s of work on {busiest_host}"
    return Price(plan, max(links, processors) + latency, links, processors, latency, bound)


def _work(plan: Plan, fleet: Fleet, size: int, costs: Costs) -> dict[str, float]:
    """Seconds of processor time by node."""
    fragments = size / PAYLOAD_BYTES
    work = dict.fromkeys(fleet.workers, fragments * costs.worker_ns * 1e-9)
    part = fragments / len(plan.trees)
    for tree in plan.trees:
        for name, children in tree.children.items():
            copies = 1 if plan.downlink == "multicast" and len(children) > 1 else len(children)
            copies += name in tree.parents
            spent = part * (len(children) * costs.sum_ns + copies * costs.result_ns) * 1e-9
            work[name] = work.get(name, 0.0) + spent
    return work


def _processors(work: Mapping[str, float], fleet: Fleet) -> tuple[float, str]:
    """Least seconds that the work takes, a node being one thread, and where: on one node, or on cores all share."""
    if not work:
        return 0.0, ""
    node = max(work, key=lambda name: work[name])
    together = sum(work.values()) / fleet.shared_cores if fleet.shared_cores else 0.0
    if together > work[node]:
        return together, f"{fleet.shared_cores} cores that all nodes share"
    return work[node], node


def _depth(plan: Plan, worker: str) -> int:
    """Hops from a worker to the farthest of its roots."""
    depths = []
    for tree in plan.trees:
        depth, name = 0, worker
        while name in tree.parents:
            name = tree.parents[name]
            depth += 1
        depths.append(depth)
    return max(depths)


def _busiest(
    loads: Mapping[Link, float],
    limits: Mapping[Link, float],
    wire: float,
    late: Mapping[str, float],
    total: float,
) -> str:
    """In words: the link that takes longest for what it carries."""
    times = {link: load * 8 / limits[link] for link, load in loads.items() if math.isfinite(limits[link])}
    if not times:
        return "no link has a limit"
    link = max(times, key=lambda one: times[one])
    tensors = f"{loads[link] / wire:.3g}"
    rate = show_rate(round(limits[link]))
    where = {
        "up": f"out of {link[1]}",
        "down": f"into {link[1]}",
        "trunk": f"from {link[1]} to {link[-1]}",
    }[link[0]]
    what = f"{tensors} tensor{'' if tensors == '1' else 's'} {where} at {rate}"
    if times[link] < 0.99 * total and any(late.values()):
        who = max(late, key=lambda name: late[name])
        return f"{who}, which has its tensor {late[who]:.3f} s late; then {what}"
    return what


def choose(
    fleet: Fleet, size: int, costs: Costs, *, compute: float | None = None, ks: Sequence[int] = range(2, 6)
) -> Choice:
    """Price every candidate for tensors of ``size`` bytes and choose.

    ``compute``: seconds of a step without communication; then XAgg's 10 % rule applies (section V). Raises
    ``ValueError`` without workers.
    """
    if not fleet.workers:
        raise ValueError("there are no workers to plan for")
    plans = candidates(fleet, ks=ks, model=size, core_bps=costs.core_bps)
    prices = tuple(sorted((price(plan, fleet, size, costs) for plan in plans), key=lambda p: p.seconds))
    ring = next(found for found in prices if found.plan.kind == "ring")
    best = min(
        (found for found in prices if found.seconds <= prices[0].seconds * (1 + ALIKE)),
        key=lambda found: (len(found.plan.servers), len(found.plan.hosts), found.seconds),
    )
    gain = 1 - best.seconds / ring.seconds if ring.seconds > 0 else 0.0
    if compute is not None and not worthwhile(part := _share(ring.seconds, compute)):
        why = (
            f"communication by a ring is {part:.1%} of a step ({ring.seconds:.3f} s beside {compute:.3f} s of "
            f"computing), less than {WORTHWHILE:.0%}: aggregation cannot make steps noticeably shorter"
        )
        return Choice(prices, ring, ring, (why,))
    if best.plan.kind == "ring" or gain < MARGIN:
        why = _why_a_ring(prices, ring)
        if best.plan.kind != "ring":
            why = (
                f"the best plan with aggregation, {best.plan.name}, gains {gain:.1%}, less than {MARGIN:.0%}"
            )
        return Choice(prices, ring, ring, (f"use ring: {why}", f"ring is bound by {ring.bound}"))
    reasons = [
        f"{best.plan.name} takes {best.seconds / ring.seconds:.2f} of the time of a ring",
        f"it is bound by {best.bound}",
        f"ring is bound by {ring.bound}",
        _why_the_mode(best, fleet, size, costs),
    ]
    return Choice(prices, best, ring, tuple(reasons))


def _why_the_mode(best: Price, fleet: Fleet, size: int, costs: Costs) -> str:
    other = _price_trees(
        best.plan, fleet, size, costs, "prologue" if best.mode == "carried" else "carried"
    ).seconds
    if best.mode == "carried":
        who = max(fleet.late, key=lambda name: fleet.late[name])
        return (
            f"mode carried: {who} has its tensor {fleet.late[who]:.3f} s late, and with exact exponents (prologue) all would "
            f"wait for it: {other / best.seconds:.2f} times as long"
        )
    return (
        f"mode prologue: exact exponents take {PROLOGUE:.1%} more bytes; without them (carried) it would take "
        f"{other / best.seconds:.2f} of the time, for training that differs from float32"
    )


def _why_a_ring(prices: Sequence[Price], ring: Price) -> str:
    """What keeps every plan with aggregation from being cheaper: links mostly, or processors where links would do."""
    least = min((found for found in prices if found.plan.kind != "ring"), key=lambda p: p.links, default=ring)
    if least.links >= ring.links * (1 - MARGIN):
        return "no plan with aggregation moves less through the busiest link than a ring does"
    return (
        f"{least.plan.name} moves less through the busiest link, but takes {least.seconds / ring.seconds:.2f} of the time of "
        f"a ring; it is bound by {least.bound}"
    )


def _share(communication: float, compute: float) -> float:
    total = communication + compute
    return communication / total if total > 0 else 0.0
