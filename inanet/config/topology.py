"""``[topology]``: the fabric's trees as plain data, or what a planner makes of the same nodes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError

from inanet.config.fields import Bytes, Name, Parents, Rate, between
from inanet.config.file import SeveralErrors
from inanet.config.sections import Section

if TYPE_CHECKING:
    # imported where they are used: they bring numpy, which ``--help`` of a daemon need not wait for
    from inanet.planning.plans import Downlink
    from inanet.planning.selection import Selection
    from inanet.planning.topology import Topology as Fabric


class Aggregator(Section):
    """An aggregator, by name. Its address comes with its first message."""

    name: Name = Field(description="the node's name, as in its own [node] section")
    parent: Name = Field(description="name of the aggregator or PS it sends to")


class Worker(Section):
    """A worker, by name. Its address comes with its first message."""

    name: Name = Field(description="the node's name, as in its own [node] section")
    #: several parents, one in each tree, if there are several roots
    parent: Parents = Field(description="name of the aggregator or PS it sends to")


class Topology(Section):
    """``[topology]``: the fabric's trees as plain data; :meth:`fabric` gives them their meaning."""

    #: names of the parameter servers; empty: this one
    roots: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    #: those on the way, each with the node it sends to
    aggregators: Annotated[tuple[Aggregator, ...], Field(strict=False)] = ()
    workers: Annotated[tuple[Worker, ...], Field(strict=False)] = Field(
        description="the worker nodes, e.g. [{ name = 'w0', parent = 'ps' }]"
    )
    #: names of switches that jobs may choose a system on, in order of preference
    switches: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    #: pairs of nodes that are plugged into each other, e.g. [["s0", "ps"], ["s0", "s1"], ["s1", "w0"]], for systems that sum
    #: in several switches; empty: everything is at the first switch
    links: Annotated[tuple[Annotated[tuple[Name, Name], Field(strict=False)], ...], Field(strict=False)] = ()
    #: ``configured``: the trees as they stand here; else the planner's cheapest of a kind, over the same nodes
    plan: Literal["configured", "auto", "ps", "sharded", "tree", "sharded-tree"] = "configured"
    #: the size of a tensor that the planner reckons with
    tensor: Annotated[Bytes, between(1, 1 << 40)] = 100 << 20
    #: of links that ``rates`` does not name, for the planner
    rate: Rate = 10 * 10**9
    #: of the links of nodes by name, for the planner
    rates: dict[Name, Rate] = Field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes that stand here, each once: roots, aggregators, workers, switches."""
        named: tuple[Aggregator | Worker, ...] = (*self.aggregators, *self.workers)
        return tuple(dict.fromkeys((*self.roots, *(node.name for node in named), *self.switches)))

    def fabric(self, ps: str) -> "Fabric":
        """The fabric with the PS named ``ps`` among its roots: as configured, or as the planner would have it.

        Raises :class:`SeveralErrors`.
        """
        fabric = self._configured(ps)
        return fabric if self.plan == "configured" else self.selection(ps).plan.topology()

    def selection(self, ps: str, downlinks: "Sequence[Downlink]" = ("unicast",)) -> "Selection":
        """What the planner chooses for :attr:`plan`, and why. Raises :class:`SeveralErrors`."""
        from inanet.planning.costs import load as load_costs
        from inanet.planning.selection import select

        fabric = self._configured(ps)
        names = {*fabric.roots, *fabric.aggregators, *fabric.workers}
        if unknown := sorted(set(self.rates) - names):
            raise SeveralErrors([f"rates: there is no node {unknown[0]!r}; allowed: nodes of this section"])
        try:
            return select(
                fabric,
                ps,
                self.plan,
                rates=self.rates,
                default_rate=self.rate,
                size=self.tensor,
                downlinks=downlinks,
                costs=load_costs(),
            )
        except ValueError as error:
            raise SeveralErrors([str(error)]) from None

    def _configured(self, ps: str) -> "Fabric":
        from inanet.planning.topology import Topology as Fabric
        from inanet.planning.topology import TopologyError

        roots = self.roots or (ps,)
        problems = [] if ps in roots else [f"this node, {ps!r}, is not among the roots {', '.join(roots)}"]
        for nodes in (self.aggregators, self.workers):
            names = [node.name for node in nodes]
            repeated = sorted({name for name in names if names.count(name) > 1})
            problems += [f"{name!r} stands there twice; names are used once" for name in repeated]
        if not self.workers and not self.switches:
            # ranks of sparse jobs are at a switch, and in no tree
            problems.append("no workers; allowed: at least one { name, parent }")
        try:
            fabric = Fabric(
                roots=roots,
                aggregators={node.name: node.parent for node in self.aggregators},
                workers={node.name: node.parent for node in self.workers},
            )
            fabric.trees([worker.name for worker in self.workers])
        except TopologyError as error:
            problems += error.problems
        except ValidationError as error:
            for item in error.errors(include_url=False):
                found = item.get("ctx", {}).get("error")
                problems += found.problems if isinstance(found, TopologyError) else [item["msg"]]
        if problems:
            raise SeveralErrors(problems)
        return fabric
