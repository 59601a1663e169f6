"""GOAT's testbed with real daemons: what reaches the PS with eight workers and three ``ina-switch`` in namespaces.

Every bridge of the testbed has an ``ina-switch`` beside it, whose link is not limited; what it passes on crosses the trunks, which
are. So packets go where they would go through switches that sum themselves. ATP's and ESA's jobs have one switch here, the PS's;
Geryon is GOAT's data plane without memory: switches pass on, the PS sums.

Daemons count. What the PS has added does not depend on how busy the machine is; what it has received, with what was sent twice,
and round times do.
"""

import json
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inanet.config.daemons import Role
from inanet.coordinator.goat.fabric import upwards, ways
from inanet.lab import credentials
from inanet.lab.fabric import LabFabric, unix_configurations
from inanet.lab.model import Host, HostLink, Link, Switch, Topology, Trunk
from inanet.lab.session import Lab
from inanet.launch.process import python, python_environment
from inanet.papers.claims import Claim, reduction
from inanet.papers.outcome import Outcome, Table
from inanet.planning.goat.publication import SLOT_BYTES, Memory, Publisher
from inanet.wire import atp, goat

SCHEMES: Mapping[str, str] = {"GOAT": "goat", "ESA": "esa", "ATP": "atp", "Geryon": "goat"}
#: values of a system's packets
_VALUES = {"goat": goat.VALUES, "esa": atp.VALUES, "atp": atp.VALUES}
WORKERS = 8
#: bits per second of hosts and trunks: what stands for 100 Gbit/s
RATE = 100_000_000
#: float32 of a round
ELEMENTS = 1 << 15
#: bytes of a round that a switch has slots for, as 20 MB are of ResNet-18's 44
SHARE = 20 / 44
ROUNDS = 8
#: bridges, and the ina-switch beside each: the PS's first
PLUGS: Mapping[str, str] = {"x1": "s1", "x2": "s2", "x3": "s3"}
_RACKS = ("s2", "s3")
#: bits per second of an ina-switch's own link: the trunks are what limits it
_FREE = 10_000_000_000


def topology(rate: int = RATE, workers: int = WORKERS) -> Topology:
    """The testbed of the paper's Fig. 4, with an ``ina-switch`` beside every bridge."""
    free = HostLink.model_construct(rate=_FREE)
    hosts = [Host(name="ps", role="ps", switch="s1")]
    hosts += [Host(name=name, role="idle", switch=bridge, link=free) for name, bridge in PLUGS.items()]
    hosts += [
        Host(name=f"w{index}", role="worker", switch=_RACKS[index * 2 // workers]) for index in range(workers)
    ]
    return Topology(
        name="goat-fig10",
        summary="GOAT's testbed with ina-switch beside every bridge",
        link=Link.model_construct(rate=rate),
        switch=tuple(Switch(name=bridge) for bridge in PLUGS.values()),
        host=tuple(hosts),
        trunk=tuple(Trunk(between=("s1", rack)) for rack in _RACKS),
    )


def links(lab: Topology) -> list[list[str]]:
    """Who is plugged into which ``ina-switch``."""
    beside = {bridge: name for name, bridge in PLUGS.items()}
    pairs = [["x1", "ps"], *(["x1", beside[rack]] for rack in _RACKS)]
    return pairs + [[beside[host.switch], host.name] for host in lab.workers()]


class Testbed(LabFabric):
    """The daemons in a lab of :func:`topology` while the ``with`` block lasts; ``memory`` bytes of registers each."""

    def __init__(self, lab: Lab, system: str, memory: int) -> None:
        self.system, self.memory = system, memory
        # ATP's and ESA's jobs have one switch
        self.switches = list(PLUGS) if system == "goat" else ["x1"]
        roles: dict[str, Role] = {"ps": "ps", **dict.fromkeys(self.switches, "switch")}
        roles |= dict.fromkeys((host.name for host in lab.topology.workers()), "worker")

        def texts(directory: Path) -> dict[str, str]:
            credentials.prepare(directory, roles, insecure=True)
            return unix_configurations(lab, directory, roles, self._sections)

        super().__init__(lab, roles, texts)

    def _sections(self, name: str, role: Role) -> dict[str, dict[str, Any]]:
        if role == "switch":
            program = {"system": self.system, "memory": self.memory, "udp_ports": "0"}
            return {"switch": {"address": self.lab.address(name), "programs": [program]}}
        if role == "worker":
            return {}
        its = self.lab.topology
        trees = {**its.trees(), "switches": self.switches}
        return {"topology": trees | ({"links": links(its)} if self.system == "goat" else {})}

    def run(self, rounds: int, elements: int) -> list[float]:
        """So many rounds on all workers; seconds of each at rank 0. Raises ``RuntimeError`` if a rank failed."""
        hosts = [host.name for host in self.lab.topology.workers()]
        ranks = [
            self.lab.spawn(
                host,
                python(
                    "inanet.papers.goat_rank", *map(str, (rank, len(hosts), self.system, rounds, elements))
                ),
                env={**python_environment(), "INA_SOCKET": str(self.socket_path(host))},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            self.require_alive()
            raise RuntimeError(f"ranks ended with {[rank.returncode for rank in ranks]}")
        times: list[float] = json.loads(outputs[0])
        return times


@dataclass(frozen=True, slots=True)
class Run:
    """One scheme, for a round: bytes of gradients that the PS added up, and bytes that it received, everything counted; seconds;
    fragments that each switch summed in all rounds; packets that workers sent again, as a share of those sent.
    """

    added: float
    received: float
    seconds: float
    sums: Mapping[str, int]
    again: float


def measure(
    scheme: str,
    *,
    rounds: int = ROUNDS,
    rate: int = RATE,
    workers: int = WORKERS,
    elements: int = ELEMENTS,
) -> Run:
    """So many rounds. Needs root; raises :class:`~inanet.lab.namespaces.Unprivileged`, or
    :class:`~inanet.launch.nodes.FabricError` when a daemon ends.
    """
    memory = 1024 if scheme == "Geryon" else round(SHARE * elements / 64) * SLOT_BYTES
    with Lab(topology(rate, workers)) as lab:
        with Testbed(lab, SCHEMES[scheme], memory) as testbed:
            times = testbed.run(rounds, elements)
        figures = testbed.stats()
    sent = sum(its.get("rows_sent", 0) for name, its in figures.items() if name.startswith("w"))
    again = sum(its.get("retransmissions", 0) for name, its in figures.items() if name.startswith("w"))
    return Run(
        figures["ps"]["contributions_in"] * 4 * _VALUES[SCHEMES[scheme]] / len(times),
        figures["ps"]["rx_bytes"] / len(times),
        statistics.median(times),
        {name: figures[name]["programs"][SCHEMES[scheme]]["completed"] for name in testbed.switches},
        again / sent if sent else 0.0,
    )


NOTES = (
    f"Measured: three ina-switch, ina-ps, {WORKERS} ina-worker and as many ranks in namespaces; {RATE / 1e6:.0f} Mbit/s links, "
    f"{4 * ELEMENTS / 1e3:.0f} kB a round, registers for {SHARE:.0%} of a round in every switch.",
    "ATP and ESA have one switch, the PS's, and their windows. Received bytes include exponents and what was sent twice; these, and "
    "round times, are this machine's.",
)


@dataclass(frozen=True, slots=True)
class Planned:
    """What the schedule itself puts at the PS: ``copies`` of a gradient, and its bytes times links (``cost``, in gradients).

    ``doubled``, ``direct`` and ``parts`` are fragments of which both racks have a sum, those that no switch sums, and all.
    ``single`` is the cost if every fragment had one switch, as far as memory goes, the one at the PS first: one copy then.
    """

    copies: float
    cost: float
    doubled: int
    direct: int
    parts: int
    single: float

    @property
    def reduction(self) -> float:
        """Per cent below all workers' gradients."""
        return 100 * (1 - self.copies / WORKERS)


def planned(elements: int = ELEMENTS) -> Planned:
    """The schedule that the coordinator publishes to the testbed for a tensor of so many elements, as its first job's."""
    lab = topology()
    parents = ways([(one, other) for one, other in links(lab)], "ps", set(PLUGS))
    names = sorted(host.name for host in lab.workers())
    slots = round(SHARE * elements / goat.VALUES)
    fragments = -(-elements // goat.VALUES)
    publisher = Publisher(
        1, parents, "ps", tuple(PLUGS), names, dict.fromkeys(PLUGS, slots), Memory(), seed=1
    )
    nodes = ("ps", *PLUGS)
    copies = cost = doubled = direct = 0
    for part in publisher.publish("g", fragments):
        used = {node for node in part.nodes if node}
        alone = part.nodes.count(0)
        copies += part.count * (len(used) + alone)
        hops = sum(_links(parents, name, nodes[node]) for name, node in zip(names, part.nodes, strict=True))
        cost += part.count * (hops + sum(_links(parents, nodes[node], "ps") for node in used))
        doubled += part.count * (len(used) > 1)
        direct += part.count * (alone == len(names))
    single, left = 0, fragments
    for switch in PLUGS:
        its = min(left, slots)
        hops = sum(_links(parents, name, switch) for name in names) + _links(parents, switch, "ps")
        single, left = single + its * hops, left - its
    return Planned(copies / fragments, cost / fragments, doubled, direct, fragments, single / fragments)


def _links(parents: Mapping[str, str], here: str, there: str) -> int:
    """Links between two nodes of a tree."""
    one, other = ([node, *upwards(parents, node)] for node in (here, there))
    meeting = next(node for node in one if node in other)
    return one.index(meeting) + other.index(meeting)


def _why(schedule: Planned) -> str:
    return (
        f"the schedule puts {schedule.copies:.2f} gradients at the PS, {schedule.reduction:.1f} per cent less: of "
        f"{schedule.doubled} of {schedule.parts} fragments both racks have a sum, and {schedule.direct} are summed by nobody. One "
        f"switch for each fragment would put one gradient there, and memory would allow it; it costs {schedule.single:.1f} "
        f"gradients times links instead of {schedule.cost:.1f}, and that is what GINA minimises."
    )


def judge(runs: Mapping[str, Run]) -> Outcome:
    """What was measured, by scheme, beside what the schedule says."""
    rows = tuple(
        (
            scheme,
            run.added / 1e3,
            run.received / 1e3,
            1e3 * run.seconds,
            ", ".join(f"{name} {count}" for name, count in run.sums.items()),
            100 * run.again,
        )
        for scheme, run in runs.items()
    )
    columns = (
        "scheme",
        "kB added at the PS a round",
        "kB received",
        "ms a round",
        "fragments summed",
        "sent again, %",
    )
    schedule = planned()
    # the paper's 93.8 % with 16 workers are one gradient instead of 16
    least = 100 * (1 - 1 / WORKERS)
    ours = reduction(runs["GOAT"].added, runs["Geryon"].added)
    claim = Claim(
        "8 workers: gradients added at the PS below Geryon's, per cent",
        least,
        ours,
        ">=",
        reason="" if ours >= least else _why(schedule),
    )
    as_planned = Claim(
        "8 workers: the same as the schedule has it", schedule.reduction, ours, "==", tolerance=0.01
    )
    sums = runs["GOAT"].sums
    spread = Claim("switches that sum for GOAT", 3, sum(count > 0 for count in sums.values()), "==")
    plans = Table(
        "gradients at the PS, and bytes times links in gradients",
        ("schedule", "at the PS", "times links"),
        (("KRGS", schedule.copies, schedule.cost), ("one switch for each fragment", 1.0, schedule.single)),
    )
    return Outcome((claim, as_planned, spread), (Table("eight workers", columns, rows), plans), (), NOTES)


def fig10() -> Outcome:
    """Bytes at the PS under GOAT, ESA, ATP and Geryon in turn."""
    return judge({scheme: measure(scheme) for scheme in SCHEMES})
