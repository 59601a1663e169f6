"""Probes of a fabric that answers: whether names and ranks are used once, and whether multicast gets here from it."""

from collections.abc import Iterator

from inanet.cli.coordinators import Target
from inanet.cli.findings import Finding
from inanet.messages.registration import Overview
from inanet.service.addresses import is_loopback, owners
from inanet.service.exits import Failure

#: Seconds that a probe of multicast may take in all.
SECONDS = 2.0
_ONCE = "give every node its own node.name, and every process its own RANK below WORLD_SIZE (torchrun does)"
_REFUSED = "what each node that was turned away needs is in its reason, and in its own log"


def names(seen: Overview, own: str, listen: str) -> Iterator[Finding]:
    """Whether every node has a name and an address of its own, and every rank one host; first, if anybody, who was turned away.

    ``own`` and ``listen`` are the name and the IPv4 address of this machine's node, empty if it has none.
    """
    if seen.refused:
        # a bad certificate as well as a name that is taken: the fix of the finding below is not theirs
        yield Finding("turned away", "FAIL", "; ".join(seen.refused), _REFUSED)
    wrong: list[str] = []
    places: dict[str, str] = {}
    for node in seen.nodes:
        if node.name == own and node.address and listen and node.address.rpartition(":")[0] != listen:
            wrong.append(
                f"{own!r} is registered at {node.address}, and this machine's file has it at {listen}"
            )
        if node.address and not node.address.endswith(":0"):
            if node.address in places:
                wrong.append(f"{places[node.address]!r} and {node.name!r} both receive at {node.address}")
            places[node.address] = node.name
    for job in seen.jobs:
        hosts: dict[int, str] = {}
        for host, ranks in job.ranks.items():
            for rank in ranks:
                if rank in hosts:
                    wrong.append(f"rank {rank} of job {job.name} is on {hosts[rank]} and on {host}")
                hosts[rank] = host
    if wrong:
        yield Finding("names and ranks", "FAIL", "; ".join(wrong), _ONCE)
    else:
        count = sum(len(ranks) for job in seen.jobs for ranks in job.ranks.values())
        yield Finding("names and ranks", "OK", f"{len(seen.nodes)} names, {count} ranks, each once")


def path(asked: Target) -> Iterator[Finding]:
    """Whether a multicast datagram that the coordinator sends gets here, on the way that results would take."""
    try:
        found = asked.reach(SECONDS)
    except (Failure, OSError) as error:
        detail, fix = f"could not be tried: {error}", "'ina status' says whether the coordinator answers"
        yield Finding("multicast path", "WARN", detail, fix)
        return
    if not found.local or is_loopback(found.local):
        yield Finding("multicast path", "OK", f"{asked.address} is on this machine: no network between")
        return
    interface = owners().get(found.local, found.local)
    way = f"from {asked.address} to {interface} ({found.local}), group {found.group}"
    if found.heard:
        yield Finding("multicast path", "OK", f"arrives {way}")
    elif found.downlink == "multicast":
        yield Finding(
            "multicast path",
            "FAIL",
            f"nothing arrives {way}, and results are to take this way (downlink = 'multicast')",
            "set control.downlink = 'auto' or 'unicast' at the coordinator; or let the switches forward it "
            "(sudo ip link set BRIDGE type bridge mcast_querier 1) and firewalls pass it "
            f"(sudo nft add rule inet filter input iifname {interface} udp dport {found.group.rpartition(':')[2]} accept)",
        )
    else:
        # nothing needs it
        detail = f"nothing arrives {way}; results go by unicast (downlink = '{found.downlink}')"
        yield Finding("multicast path", "OK", detail)
