"""Labs whose switches are ina-switches in the middle of RoCE connections, and rings of hosts on labs. Needs root."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from inanet.bench.labs import LabStage
from inanet.bench.peers import netreduce
from inanet.bench.peers.rank import Team
from inanet.bench.registry import Peer, register
from inanet.bench.stage import Stage
from inanet.client.ringhost import ring_of
from inanet.lab.fabric import LabFabric
from inanet.lab.library import topology as find_topology
from inanet.lab.model import Topology
from inanet.lab.session import Lab
from inanet.lab.switches import ring_entry, switches
from inanet.launch.process import python
from inanet.proto.netreduce.ring import Mode
from inanet.service.exits import Failure

#: numbers of the two rings in INA headers, and further addresses of hosts that each has
_RINGS: dict[Mode, int] = {"switch": 1, "ring": 2}


class RingStage(LabStage):
    """A lab with ina-switches, of which ``switches`` are the running daemons."""

    switches: LabFabric


@contextmanager
def ring_stage(topology: str | Topology) -> Iterator[RingStage]:
    """A lab of a topology's hosts and links, with ina-switch for every switch unless it has one as a detour; they serve the
    ring of all hosts.

    Raises :class:`inanet.service.exits.Failure` for hosts with several ranks, and as :func:`inanet.lab.switches.ring_entry`.
    """
    chosen = topology if isinstance(topology, Topology) else find_topology(topology)
    if chosen.detour is None:
        chosen = chosen.with_switches("ina")
    with Lab(chosen) as lab, ExitStack() as stack:
        directory = lab.directory / "peers"
        directory.mkdir()
        stage = RingStage(lab, directory, stack)
        addresses = addresses_of(stage, "switch")
        place = netreduce.Place(0, tuple(addresses), "switch", _RINGS["switch"])
        hosts = [one.host for one in stage.places]
        entry = ring_entry(lab.topology, place.ring, hosts, ring_of(addresses), place.sizes)
        rates = [host.link.sends for host in lab.topology.workers() if host.link.sends]
        # event loops know no shorter time
        rest = max(0.001, netreduce.pause(min(rates, default=None)))
        stage.switches = stack.enter_context(switches(lab, [entry], rest))
        yield stage


def addresses_of(stage: LabStage, mode: Mode) -> list[str]:
    """Addresses of a lab's hosts on the ring of a mode, by rank: two rings of a host are two hosts to RoCE."""
    hosts = [place.host for place in stage.places]
    if len(set(hosts)) < len(hosts):
        raise Failure(f"topology {stage.topology.name!r} has several ranks on a host, and a ring has one")
    return [stage.lab.alias(host, _RINGS[mode]) for host in hosts]


def ring_team(stage: LabStage, name: str, mode: Mode, capture: Path | None = None) -> Team:
    """A ring of all hosts of a lab. What the first of them sends and receives goes to ``capture``."""
    addresses = tuple(addresses_of(stage, mode))
    rates = [host.link.sends for host in stage.topology.workers()]

    def place(rank: int) -> netreduce.Place:
        captured = None if capture is None or rank else str(capture.resolve())
        return netreduce.Place(rank, addresses, mode, _RINGS[mode], rates[rank], captured)

    ranks = stage.per_rank(lambda one: python("inanet.bench.peers.netreduce", place(one.rank).to_json()))
    pids = []
    if isinstance(stage, RingStage):
        pids = [process.pid for process in stage.switches.processes.values()]
    return Team(name, ranks, pids, pids)


def _netreduce(stage: Stage) -> Team:
    assert isinstance(stage, RingStage)
    return ring_team(stage, "netreduce", "switch")


NETREDUCE = register(Peer("netreduce", ("star",), _netreduce, "spliced"))
