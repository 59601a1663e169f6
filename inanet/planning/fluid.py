"""How long a plan takes on a network: tensors as fluids through links that their flows share fairly.

Whoever sums holds what comes early (whole-model memory), so a flow runs as far behind as the slowest part of it and
catches up at its own rate. Times are seconds, sizes bytes on the wire.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from inanet.planning.fair_shares import Flow, share
from inanet.planning.network import Link, Network
from inanet.planning.plans import Plan

#: Rate of what crosses no limited link: from a process to another on the same host.
_AT_ONCE = 1e15
#: Progress closer than this share of a shard is equal.
_NEAR = 1e-9


@dataclass(frozen=True, slots=True)
class Stream:
    """A shard on its way over one hop: ``size`` bytes, from ``ready`` on if it follows nothing."""

    uses: tuple[Link, ...]
    size: float
    follows: tuple[int, ...] = ()
    ready: float = 0.0


def streams(plan: Plan, network: Network, size: float, late: Mapping[str, float]) -> list[Stream]:
    """Everything that a plan sends for one tensor of ``size`` bytes, sources before what is made of them.

    ``late``: seconds after which a worker's host has its tensor. Flows of a node to itself use no link.
    """
    found: list[Stream] = []
    part = size / len(plan.trees)
    for tree in plan.trees:
        sent: dict[str, int] = {}
        for name in reversed(tree.nodes):
            parent = tree.parents.get(name)
            if parent is None:
                continue
            below = tuple(sent[child] for child in tree.children.get(name, ()))
            here, there = plan.host(name), plan.host(parent)
            sent[name] = len(found)
            found.append(Stream(network.path(here, there, len(found)), part, below, late.get(name, 0.0)))
        made = {tree.root: tuple(sent[child] for child in tree.children.get(tree.root, ()))}
        for name in tree.nodes:
            children = tree.children.get(name, ())
            here = plan.host(name)
            away = [child for child in children if plan.host(child) != here]
            together = plan.downlink == "multicast" and len(away) > 1
            group = len(found)
            if together:
                uses = network.spread(here, [plan.host(child) for child in away])
                found.append(Stream(uses, part, made[name]))
            for child in children:
                made[child] = (group,)
                if not together or child not in away:
                    made[child] = (len(found),)
                    found.append(Stream(network.path(here, plan.host(child), len(found)), part, made[name]))
    return found


def finish(flows: list[Stream], limits: Mapping[Link, float]) -> float:
    """Seconds until the last stream has arrived, all sharing the links max-min fairly at every moment."""
    finite: dict[Hashable, float] = {link: rate / 8 for link, rate in limits.items() if math.isfinite(rate)}
    progress = [0.0] * len(flows)
    now = 0.0
    while any(done < flow.size for done, flow in zip(progress, flows, strict=True)):
        running = _running(flows, progress, now)
        rates = share(running, finite)
        ahead = [flow.ready - now for flow in flows if flow.ready > now and not flow.follows]
        step = _next(flows, progress, rates, ahead)
        now += step
        for key, rate in sorted(rates.items()):
            flow = flows[key]
            # sources stand before, so they have come as far as they come in this step
            most = min((progress[source] for source in flow.follows), default=flow.size)
            reached = progress[key] + rate * step
            progress[key] = min(most, flow.size if reached >= flow.size * (1 - _NEAR) else reached)
    return now


def _running(flows: list[Stream], progress: list[float], now: float) -> dict[int, Flow]:
    """Streams that have something to send, each tied to the sources that it has caught up with."""
    running: dict[int, Flow] = {}
    for key, flow in enumerate(flows):
        if progress[key] >= flow.size or (not flow.follows and flow.ready > now):
            continue
        near = tuple(s for s in flow.follows if progress[s] <= progress[key] + _NEAR * flow.size)
        # sources stand before: one that does not run has nothing to give
        if all(source in running for source in near):
            running[key] = Flow(flow.uses, _AT_ONCE, near)
    return running


def _next(
    flows: list[Stream], progress: list[float], rates: Mapping[int, float], ahead: list[float]
) -> float:
    """Seconds until something changes: a stream ends, catches up with a source, or begins."""
    times = list(ahead)
    for key, rate in rates.items():
        flow = flows[key]
        if rate > 0:
            times.append((flow.size - progress[key]) / rate)
        for source in flow.follows:
            lead = progress[source] - progress[key]
            closing = rate - rates.get(source, 0.0)
            if lead > _NEAR * flow.size and closing > _NEAR * rate:
                times.append(lead / closing)
    return min(times)
