"""A fabric on this machine whose nodes can be asked for their counters and their processor time at any moment."""

import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from inanet.bench.peers.rank import cpu_seconds
from inanet.launch.fabric import Fabric, daemon_command
from inanet.launch.topology import NodeSpec
from inanet.proto.slots.systems import TREES
from inanet.service.exits import Failure

#: Seconds a node may take to answer.
_PATIENCE = 10.0
_SECTION = "[metrics]\n"


@dataclass(slots=True)
class Reading:
    """What all nodes had counted at one moment."""

    #: contributions of children that the root accepted
    into_root: int = 0
    retransmissions: int = 0
    #: packets dropped, by reason
    drops: dict[str, int] = field(default_factory=dict)
    #: seconds of processor time by role: worker, agg, switch, ps
    cpu: dict[str, float] = field(default_factory=dict)

    def since(self, before: "Reading") -> "Reading":
        """What was added; reasons and roles without any are left out."""
        return Reading(
            self.into_root - before.into_root,
            self.retransmissions - before.retransmissions,
            {
                reason: count - before.drops.get(reason, 0)
                for reason, count in sorted(self.drops.items())
                if count > before.drops.get(reason, 0)
            },
            {role: seconds - before.cpu.get(role, 0.0) for role, seconds in self.cpu.items()},
        )

    def add(self, role: str, metrics: str) -> None:
        """Add one node's metrics, in Prometheus' text format."""
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                value = int(sample.value)
                if sample.name == "inanet_packets_dropped_total":
                    reason = sample.labels["reason"]
                    self.drops[reason] = self.drops.get(reason, 0) + value
                elif sample.name == "inanet_retransmissions_total":
                    self.retransmissions += value
                elif (
                    role == "ps"
                    and sample.name == "inanet_packets_received_total"
                    and sample.labels["kind"] == "contribution"
                ):
                    self.into_root += value


class CountedFabric(Fabric):
    """A :class:`inanet.launch.fabric.Fabric` with a metrics endpoint for every node."""

    def __init__(
        self, workers: int, topology: Sequence[tuple[str, str | None]] | None = None, system: str = TREES
    ) -> None:
        super().__init__(workers, topology=topology, system=system, command=_with_metrics)

    def read(self) -> Reading:
        """Ask every node. Raises :class:`Failure` naming one that does not answer."""
        reading = Reading()
        for name, process in self.processes.items():
            role = self.nodes[name].role
            reading.cpu[role] = reading.cpu.get(role, 0.0) + cpu_seconds(process.pid)
            url = f"http://127.0.0.1:{metrics_port(process.log)}/metrics"
            try:
                with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
                    reading.add(role, answer.read().decode())
            except OSError as error:
                raise Failure(f"{name} does not tell its counters at {url}: {error}") from error
        return reading


def _with_metrics(node: NodeSpec, config: Path) -> Sequence[str]:
    """The daemon's command, its configuration completed: the kernel chooses the port, the log tells it."""
    head, section, rest = config.read_text().partition(_SECTION)
    if "listen = " not in rest.partition("[")[0]:
        config.write_text(f'{head}{section or _SECTION}listen = "127.0.0.1:0"\n{rest}')
    return daemon_command(node, config)


def metrics_port(log: Path) -> int:
    """The port on which a daemon says in its log that it serves metrics; of the last start. Raises :class:`Failure`."""
    found = re.findall(r"serving metrics.*\bport=(\d+)", log.read_text(errors="replace"))
    if not found:
        raise Failure(f"the log of {log.stem} names no port of its metrics")
    return int(found[-1])


def in_network_share(into_root: int, leaves: int) -> float | None:
    """Fraction of the workers' contributions that were summed on their way to the root; ``None`` if there were none."""
    return 1 - into_root / leaves if leaves else None


def per_gigabyte(seconds: Mapping[str, float], size: int) -> dict[str, float]:
    """Processor seconds by role over ``size`` bytes."""
    return {role: spent / (size / 1e9) for role, spent in seconds.items()}
