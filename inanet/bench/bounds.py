"""The least time that a topology's links allow, in bytes as on the wire. Only names and numbers: no network here.

Shapers count Ethernet, IPv4 and transport headers, so bounds do. Links are full duplex.
"""

from collections.abc import Mapping

from inanet.lab.model import Host, Topology
from inanet.wire.netreduce_sizes import PACKET_BYTES
from inanet.wire.xagg import PAYLOAD_BYTES, ROW_BYTES

_ETHERNET, _IPV4, _UDP, _TCP, _BTH, _ICRC = 14, 20, 8, 32, 12, 4
#: What a shaper counts for one byte of payload: a fragment in a row of its own,
FRAGMENT = (ROW_BYTES + _UDP + _IPV4 + _ETHERNET) / PAYLOAD_BYTES
#: a packet of an RDMA WRITE (BTH and ICRC around the values), at NetReduce's path MTU,
ROCE = (PACKET_BYTES + _BTH + _ICRC + _UDP + _IPV4 + _ETHERNET) / PACKET_BYTES
#: and TCP's largest segment on ordinary Ethernet (MTU 1500), time stamps included.
SEGMENT = 1514 / (1500 - _IPV4 - _TCP)


def transmission(host: Host, size: int) -> float:
    """Seconds that ``size`` bytes take on the way out of a host, as fragments; 0 without a limit."""
    return size * FRAGMENT * 8 / host.link.sends if host.link.sends else 0.0


def lateness(topology: Topology, size: int) -> list[float]:
    """Seconds by which each worker has its tensor of ``size`` bytes later than the others, in the file's order.

    A topology states it in transmission times of an unhindered worker: one with the greatest rate.
    """
    workers = topology.workers()
    unit = min((transmission(host, size) for host in workers if host.link.sends), default=0.0)
    return [host.lateness * unit for host in workers]


def tree(topology: Topology, size: int) -> float:
    """Seconds for contributions up the topology's trees and results down, once per hop, ``size`` bytes per rank.

    The busiest direction of the busiest link, or the last worker's tensor, whichever takes longer. The best case for
    results is counted: each parent sends them once (multicast), while the last contributions still arrive.
    """
    hosts = {host.name: host for host in topology.hosts()}
    share = 1 / len(topology.roots())
    received = dict.fromkeys(hosts, 0.0)
    sent = dict.fromkeys(hosts, 0.0)
    for host in hosts.values():
        if host.role == "ps":
            sent[host.name] += share
        if host.role not in ("worker", "aggregator"):
            continue
        parents = topology.parents(host)
        received[host.name] += len(parents) * share
        sent[host.name] += len(parents) * share * (1 if host.role == "worker" else 2)
        for parent in parents:
            received[parent] += share
    return max(_busiest(hosts, sent, received, size * FRAGMENT * 8), _last(topology, size, FRAGMENT))


def spliced(topology: Topology, size: int) -> float:
    """Seconds for a ring whose messages are summed on their way: every host sends its tensor once and receives the sum."""
    hosts = {host.name: host for host in topology.workers()}
    once = dict.fromkeys(hosts, 1.0)
    return max(_busiest(hosts, once, once, size * ROCE * 8), _last(topology, size, ROCE))


def server(topology: Topology, size: int) -> float:
    """Seconds for one server that takes every worker's tensor over TCP and sends each the sum."""
    hosts = {host.name: host for host in topology.hosts()}
    workers = [host.name for host in topology.workers()]
    received = dict.fromkeys(workers, 1.0) | {topology.roots()[0]: float(len(workers))}
    return max(_busiest(hosts, received, received, size * SEGMENT * 8), _last(topology, size, SEGMENT))


def ring(topology: Topology, size: int) -> float:
    """Seconds for a ring over TCP: 2(n-1)/n tensors through every worker's link.

    A worker that is late sends all of its share after it has joined. Others can have passed at most the first half of
    theirs by then; the bound counts that half as free.
    """
    workers = topology.workers()
    n = len(workers)
    whole, half = 2 * (n - 1) / n, (n - 1) / n
    hosts = {host.name: host for host in workers}
    bits = size * SEGMENT * 8
    late = dict(zip(hosts, lateness(topology, size), strict=True))
    times = [_busiest(hosts, dict.fromkeys(hosts, whole), dict.fromkeys(hosts, whole), bits)]
    for name, wait in late.items():
        if wait:
            times.append(wait + _busiest(hosts, {name: whole}, {name: whole}, bits))
            times.append(wait + _busiest(hosts, dict.fromkeys(hosts, half), dict.fromkeys(hosts, half), bits))
    return max(times)


def synchronous(topology: Topology, size: int) -> float:
    """Seconds for a switch that cannot hold what is early: begins with the last worker, at the rate of the slowest."""
    rates = [host.link.sends for host in topology.workers() if host.link.sends]
    slowest = size * SEGMENT * 8 / min(rates) if rates else 0.0
    return max(lateness(topology, size)) + slowest


def _last(topology: Topology, size: int, overhead: float) -> float:
    """When the last worker can have sent everything, seconds."""
    return max(
        wait + (size * overhead * 8 / host.link.sends if host.link.sends else 0.0)
        for wait, host in zip(lateness(topology, size), topology.workers(), strict=True)
    )


def _busiest(
    hosts: Mapping[str, Host], sent: Mapping[str, float], received: Mapping[str, float], bits: float
) -> float:
    """Longest time over both directions of all links, loads being multiples of ``bits``."""
    times = [load * bits / hosts[name].link.sends for name, load in sent.items() if hosts[name].link.sends]  # type: ignore[operator]
    times += [
        load * bits / hosts[name].link.receives  # type: ignore[operator]
        for name, load in received.items()
        if hosts[name].link.receives
    ]
    return max(times, default=0.0)
