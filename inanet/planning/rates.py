"""The rate negotiator (XAgg, section IV-C): who may send how fast, and when that changes.

Sans-IO, beside the coordinator, which is the root that all requests travel to. A worker that has a gradient says that
it is *ready*, with the most it can send; it says *done* when it has sent everything, and reports *loss*. Every change
makes new rates for everybody concerned: max-min fair under the ingress and egress of every node, over all jobs and both
directions (:mod:`inanet.planning.fair_shares`). Replies are numbered, so that of two that cross the later one counts.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from inanet.planning.fair_shares import Flow, share
from inanet.planning.topology import Tree

#: Loss beyond this share of what was sent in a period lowers a rate (section IV-C).
LOSS_THRESHOLD = 0.01
#: Step back up after a period without loss, as a share of the rate; doubles with every such period once the rate is
#: beyond what got through when there was loss by more than :data:`CAUTION`. A queue can hide for a while that it fills.
PROBE, CAUTION = 0.02, 1.25
#: A rate that rises by less than this share is not worth a message; one that falls always is.
WORTH_TELLING = 0.01
#: No rate is cut below this, in bits per second: a sender that sends nothing would not find out that it could.
LEAST = 1e7
#: Rates are sums of floats: closer than this share is equal.
_NEARLY = 1e-9

_Key: TypeAlias = tuple[int, int, str, str, str]
#: Directions of links that carry something from a node to others.
_Links: TypeAlias = Callable[..., tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a node's link carries, in bits per second and each direction."""

    send: float = math.inf
    receive: float = math.inf


@dataclass(frozen=True, slots=True)
class Grant:
    """What a node may send for a job: ``up`` to all its parents, ``down`` to all its children, in bits per second.

    Infinity: as fast as it can. A higher ``sequence`` is newer; there is one count for every job.
    """

    job: int
    sequence: int
    up: float
    down: float

    @property
    def total(self) -> float:
        """Both directions."""
        return self.up + self.down


@dataclass(slots=True)
class _Sender:
    """A worker in one job."""

    state: Literal["idle", "sending", "done"] = "idle"
    sequence: int = -1
    maximum: float = math.inf
    #: what loss has left of it
    ceiling: float = math.inf
    #: what got through of it
    through: float = math.inf
    step: float = PROBE


@dataclass(slots=True)
class _Job:
    trees: tuple[Tree, ...]
    multicast: bool
    senders: dict[str, _Sender] = field(default_factory=dict)
    sequence: int = 0
    told: dict[str, tuple[float, float]] = field(default_factory=dict)


class Negotiator:
    """See the module's documentation. Calls about jobs or nodes that are not known change nothing."""

    def __init__(self, threshold: float = LOSS_THRESHOLD) -> None:
        """``threshold``: share of loss in a period from which a rate is cut."""
        if not 0 <= threshold < 1:
            raise ValueError(f"a loss of {threshold} is no share; allowed: 0 up to but not including 1")
        self._threshold = threshold
        self._capacities: dict[str, Capacity] = {}
        self._hosts: dict[str, str] = {}
        self._known: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {}
        self._jobs: dict[int, _Job] = {}

    # ---------- what there is

    def node(self, name: str, capacity: Capacity, host: str = "") -> None:
        """The link of a node, whatever jobs it serves. Nodes on one ``host`` share it, and need none between them."""
        self._known.clear()
        self._hosts[name] = host or name
        self._capacities[host or name] = capacity

    def _uses(self, sender: str, *receivers: str) -> tuple[tuple[str, str], ...]:
        """What carries something from a node to others, each link once."""
        known = self._known.get((sender, *receivers))
        if known is not None:
            return known
        here = self._hosts.get(sender, sender)
        there = dict.fromkeys(self._hosts.get(name, name) for name in receivers)
        away = [host for host in there if host != here]
        links = ((here, "out"), *((host, "in") for host in away)) if away else ()
        self._known[sender, *receivers] = links
        return links

    def plan(self, job: int, trees: tuple[Tree, ...], *, multicast: bool = False) -> None:
        """The trees of a job, now or from now on. ``multicast``: every parent sends results once for all children."""
        found = self._jobs.setdefault(job, _Job(trees, multicast))
        found.trees, found.multicast = trees, multicast
        leaves = {name for tree in trees for name in tree.parents if name not in tree.children}
        found.senders = {name: found.senders.get(name, _Sender()) for name in sorted(leaves)}

    def end(self, job: int) -> None:
        """The job is over."""
        self._jobs.pop(job, None)

    # ---------- what workers say

    def _heard(self, job: int, name: str, sequence: int) -> _Sender | None:
        """The worker, unless something newer was heard from it: messages may overtake each other."""
        sender = self._jobs[job].senders.get(name) if job in self._jobs else None
        if sender is None or sequence <= sender.sequence:
            return None
        sender.sequence = sequence
        return sender

    def ready(self, job: int, name: str, sequence: int, maximum: float = math.inf) -> None:
        """A worker has a gradient and can send ``maximum`` bits per second."""
        sender = self._heard(job, name, sequence)
        if sender is not None:
            sender.state, sender.maximum = "sending", maximum

    def done(self, job: int, name: str, sequence: int) -> None:
        """A worker has sent everything; its share is for the others from now on."""
        sender = self._heard(job, name, sequence)
        if sender is not None:
            sender.state = "done"

    def rest(self, job: int) -> None:
        """No round of the job is on its way any more: nobody sends, and aggregators forward nothing."""
        for sender in self._jobs[job].senders.values() if job in self._jobs else ():
            sender.state = "idle"

    def loss(self, job: int, name: str, sequence: int, sent: int, lost: int) -> None:
        """Of ``sent`` fragments in the last period ``lost`` had to be sent again.

        Beyond the threshold the rate is cut by the share lost; without loss it is raised step by step, small ones where
        loss was and larger ones beyond, until the links' fair share is what limits it.
        """
        sender = self._heard(job, name, sequence)
        if sender is None or sent <= 0:
            return
        rate = sum(rate for key, rate in self.rates().items() if key[:1] + key[3:] == (job, name, "up"))
        part = min(1.0, lost / sent)
        if part > self._threshold:
            sender.step = PROBE
            if math.isfinite(rate):
                sender.ceiling = sender.through = max(LEAST, rate * (1 - part))
        elif math.isfinite(sender.ceiling):
            # what else limits it by now, does so without loss
            unlimited = 0 < rate < sender.ceiling * (1 - _NEARLY) or sender.ceiling >= sender.maximum
            sender.ceiling = math.inf if unlimited else sender.ceiling * (1 + sender.step)
            if sender.ceiling > sender.through * CAUTION:
                sender.step = min(1.0, 2 * sender.step)

    # ---------- what they get

    def flows(self) -> dict[_Key, Flow]:
        """Everything that is sent now, by (job, tree, receiver, sender, "up" or "down")."""
        found: dict[_Key, Flow] = {}
        for number, job in self._jobs.items():
            count = {name: sum(name in tree.parents for tree in job.trees) for name in job.senders}
            for tree in job.trees:
                _flows_of(number, tree, job, count, found, self._uses)
        return found

    def rates(self) -> dict[_Key, float]:
        """The rate of every flow: :meth:`flows` under the nodes' capacities."""
        limits: dict[Hashable, float] = {
            (name, side): limit
            for name, capacity in self._capacities.items()
            for side, limit in (("in", capacity.receive), ("out", capacity.send))
            if math.isfinite(limit)
        }
        return share(self.flows(), limits)

    def grants(self) -> list[tuple[str, Grant]]:
        """(node, grant) for every node whose rate in a job is no longer what it was told."""
        now: dict[tuple[int, str], list[float]] = {}
        for (job, _, _, name, direction), rate in self.rates().items():
            now.setdefault((job, name), [0.0, 0.0])[direction == "down"] += rate
        out: list[tuple[float, str, Grant]] = []
        for number, record in self._jobs.items():
            record.told = {name: told for name, told in record.told.items() if (number, name) in now}
            for name in sorted(name for job, name in now if job == number):
                up, down = now[number, name]
                before = record.told.get(name)
                if before is None or not (_kept(before[0], up) and _kept(before[1], down)):
                    record.sequence += 1
                    record.told[name] = (up, down)
                    rise = up + down - sum(before or (0.0, 0.0))
                    out.append((rise, name, Grant(number, record.sequence, up, down)))
        # those who give something up hear of it before those who get it
        return [(name, grant) for _, name, grant in sorted(out, key=lambda item: item[0])]


def _kept(before: float, after: float) -> bool:
    """Whether a rate may stay what it was told to be."""
    return before == after or before <= after <= before * (1 + WORTH_TELLING) < math.inf


def _flows_of(
    number: int,
    tree: Tree,
    job: _Job,
    trees_of: Mapping[str, int],
    found: dict[_Key, Flow],
    links: _Links,
) -> None:
    """Add the flows of one tree of a job, children before their parents."""
    order = tree.nodes
    #: what a node sends up, and nodes at or below which somebody has not begun
    upwards: dict[str, _Key] = {}
    waiting: set[str] = set()
    for name in reversed(order):
        children = tree.children.get(name, ())
        parent = tree.parents.get(name, "")
        if not children and parent:
            _worker_flow(number, tree, job, name, trees_of, found, links, upwards, waiting)
            continue
        sources = tuple(upwards[child] for child in children if child in upwards)
        if any(child in waiting for child in children):
            # nothing can be complete here: it holds what comes until the last child has begun
            waiting.add(name)
        elif parent:
            # without sources it forwards the rest of what it has
            key: _Key = (number, tree.tree, parent, name, "up")
            found[key] = Flow(links(name, parent), follows=sources, holds=bool(sources))
            upwards[name] = key
    root = tree.root
    if root not in waiting and root in tree.children:
        made = tuple(upwards[child] for child in tree.children.get(root, ()) if child in upwards)
        _downwards(number, tree, job, root, made, found, links)


def _worker_flow(
    number: int,
    tree: Tree,
    job: _Job,
    name: str,
    trees_of: Mapping[str, int],
    found: dict[_Key, Flow],
    links: _Links,
    upwards: dict[str, _Key],
    waiting: set[str],
) -> None:
    sender = job.senders[name]
    if sender.state == "idle":
        waiting.add(name)
    elif sender.state == "sending":
        parent = tree.parents[name]
        key: _Key = (number, tree.tree, parent, name, "up")
        ceiling = min(sender.maximum, sender.ceiling) / trees_of[name]
        found[key] = Flow(links(name, parent), ceiling)
        upwards[name] = key


def _downwards(
    number: int,
    tree: Tree,
    job: _Job,
    name: str,
    made: tuple[_Key, ...],
    found: dict[_Key, Flow],
    links: _Links,
) -> None:
    """Results from a node to its children, as fast as they come to it, and so on below."""
    children = tree.children.get(name, ())
    if job.multicast and len(children) > 1:
        key: _Key = (number, tree.tree, "", name, "down")
        found[key] = Flow(links(name, *children), follows=made)
        keys = dict.fromkeys(children, key)
    else:
        keys = {child: (number, tree.tree, child, name, "down") for child in children}
        for child, key in keys.items():
            found[key] = Flow(links(name, child), follows=made)
    for child, key in keys.items():
        if child in tree.children:
            _downwards(number, tree, job, child, (key,), found, links)


class Rates:
    """A node's own side: the newest grant of every job, and what they come to."""

    def __init__(self) -> None:
        self._grants: dict[int, Grant] = {}

    def granted(self, grant: Grant) -> bool:
        """Take a grant; False for one that a newer one has overtaken."""
        before = self._grants.get(grant.job)
        if before is not None and grant.sequence <= before.sequence:
            return False
        self._grants[grant.job] = grant
        return True

    def restart(self, job: int) -> None:
        """The coordinator counts anew, or the job is over: what it granted no longer stands."""
        self._grants.pop(job, None)

    @property
    def total(self) -> float:
        """Bits per second that this node may send for all jobs; infinity without any grant."""
        return sum(grant.total for grant in self._grants.values()) if self._grants else math.inf
