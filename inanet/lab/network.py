"""A topology file as the planner's network and fleet."""

import math
import re

from inanet.config.topology import Topology as Trees
from inanet.lab.model import Topology
from inanet.planning.candidates import Fleet
from inanet.planning.network import Network, Port
from inanet.planning.prices import FRAGMENT
from inanet.planning.topology import Tree
from inanet.planning.trees import Server
from inanet.units import parse_rate

#: What a lab's host counts as if nothing says how many cores and how much memory it has to spare.
CORES, MEMORY = 64, 1 << 40


def network(topology: Topology) -> Network:
    """Links of a topology. One switch that floods, floods them all: groups cross trunks."""
    ports = {
        host.name: Port(host.switch, host.link.sends or math.inf, host.link.receives or math.inf)
        for host in topology.hosts()
    }
    trunks = {trunk.between: trunk.link.rate or math.inf for trunk in topology.trunks()}
    flooding = any(
        switch.kind == "ina" or not (switch.snooping and switch.querier) for switch in topology.switch
    )
    return Network(ports, trunks, flooding, topology.fabric == "routed")


def fleet(topology: Topology, size: int, *, shared_cores: int | None = None) -> Fleet:
    """Workers and servers of a topology, and its own trees. ``size``: bytes of a tensor, in which lateness is counted.

    ``shared_cores``: for a lab, whose hosts share this machine's. Servers without a rate count as the fastest there is.
    """
    net = network(topology)
    workers = topology.workers()
    unit = min((size * FRAGMENT * 8 / host.link.sends for host in workers if host.link.sends), default=0.0)
    rates = [
        rate for port in net.ports.values() for rate in (port.sends, port.receives) if math.isfinite(rate)
    ]
    fastest = max(rates, default=1e9)
    servers = tuple(
        Server(
            host.name,
            min(net.ports[host.name].sends, net.ports[host.name].receives, fastest),
            CORES,
            MEMORY,
        )
        for host in topology.hosts()
        if host.role in ("ps", "aggregator")
    )
    return Fleet(
        net,
        tuple(host.name for host in workers),
        servers,
        {host.name: host.lateness * unit for host in workers},
        configured(topology),
        shared_cores,
    )


def configured(topology: Topology) -> tuple[Tree, ...]:
    """The trees that the file states, over all workers; none without a PS."""
    roots = topology.roots()
    if not roots:
        return ()
    fabric = Trees.model_validate(topology.trees()).fabric(roots[0])
    return fabric.trees(fabric.workers)


#: Workers, and servers behind a plus: how many, and the rate of each.
_SHORTHAND = re.compile(r"(\d+)x([^+]+)(?:\+(\d+)x([^+]+))?", re.ASCII)


def shorthand(text: str) -> Fleet | None:
    """Workers and servers on one switch from ``"4x1Gbit/s+2x10Gbit/s"``: four with 1 Gbit/s, two with 10.

    ``None`` if the text is something else. Raises ``ValueError`` for rates that are none.
    """
    found = None if text.endswith(".toml") else _SHORTHAND.fullmatch(text)
    if found is None:
        return None
    many, rate, more, fast = found.groups()
    workers = [f"w{index}" for index in range(int(many))]
    servers = [f"s{index}" for index in range(int(more or 0))]
    slow = parse_rate(rate)
    speed = parse_rate(fast) if fast else slow
    if not slow > 0 or not speed > 0:
        raise ValueError(f"{text!r} has a link without a rate; allowed: e.g. '4x1Gbit/s+2x10Gbit/s'")
    ports = {name: Port("switch", slow, slow) for name in workers}
    ports |= {name: Port("switch", speed, speed) for name in servers}
    able = tuple(Server(name, speed, CORES, MEMORY) for name in servers)
    return Fleet(Network(ports, {}), tuple(workers), able)
