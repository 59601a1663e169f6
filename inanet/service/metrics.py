"""Prometheus metrics, read from plain counters at the moment of a scrape.

prometheus_client's own counters take a lock on every increment. The data path bumps integers in arrays
instead, and a callback turns them into samples when somebody asks. All metrics are declared here, so that
names, units and labels stay the same over all daemons; none has a label without a bound (no tensor ids, no
sequence numbers).
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inanet.service.addresses import Resolved
from inanet.service.http import Answer, HttpServer, Request


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its kind, what it measures, its labels."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


#: Every metric of every daemon, without the suffix ``_total`` of counters.
FAMILIES: Mapping[str, Family] = {
    "inanet_build_info": Family("gauge", "Always 1; the labels say what runs.", ("version", "role")),
    "inanet_device_packets_received": Family(
        "counter", "Packets that the data plane's sockets took.", ("role",)
    ),
    "inanet_device_packets_sent": Family("counter", "Packets that the data plane's sockets sent.", ("role",)),
    "inanet_packets_received": Family("counter", "Packets with values taken, by kind.", ("role", "kind")),
    "inanet_packets_sent": Family("counter", "Packets with values sent, by kind.", ("role", "kind")),
    "inanet_packets_dropped": Family("counter", "Packets dropped, by reason.", ("reason",)),
    "inanet_retransmissions": Family("counter", "Fragments sent again, by cause.", ("cause",)),
    "inanet_result_repairs": Family("counter", "Results sent again, by how they went out.", ("downlink",)),
    "inanet_gradient_bytes": Family("counter", "Payload bytes of fragments, by direction.", ("direction",)),
    "inanet_contributions": Family(
        "counter", "Contributions by where they were summed: in the network, or at the root.", ("place",)
    ),
    "inanet_aggregator_slots": Family("gauge", "Slots by state.", ("state",)),
    "inanet_kernel_refusals": Family("gauge", "1 for what the kernel refuses the data plane.", ("what",)),
    "inanet_rounds": Family(
        "counter", "Rounds that ended at a worker's agent, by outcome (done, failed).", ("outcome",)
    ),
    "inanet_local_rounds": Family(
        "counter",
        "Rounds of jobs that have all their ranks on this host, by where they were summed.",
        ("place",),
    ),
    "inanet_round_duration_seconds": Family("histogram", "From the start of a round to its result."),
    "inanet_jobs": Family("gauge", "Jobs this node takes part in."),
    "inanet_job_rounds": Family(
        "counter", "Rounds begun, by job: of 64 jobs at most, at the coordinator.", ("job",)
    ),
    "inanet_nodes": Family("gauge", "Nodes that are registered at this coordinator."),
    "inanet_registered": Family("gauge", "1 while this node is registered at its coordinator, else 0."),
    "inanet_switch_packets": Family("counter", "Frames or packets through a stage of a switch.", ("stage",)),
    "inanet_switch_recirculations": Family("counter", "Further passes of packets through a switch."),
    "inanet_switch_register_bytes": Family("gauge", "Registers that a switch program takes.", ("program",)),
    "inanet_switch_slots": Family("gauge", "Slots that a job holds at a switch.", ("program", "job")),
    "inanet_config_last_reload_successful": Family("gauge", "1 if the last reload was applied, else 0."),
    "inanet_config_last_reload_success_timestamp_seconds": Family(
        "gauge", "Unix time when the configuration was last applied."
    ),
    "inanet_watchdog_misses": Family("counter", "Proofs of life withheld because nothing moved."),
    "inanet_log_lines_unwritten": Family("counter", "Lines of the log that could not be written."),
}

#: Upper bounds of the duration buckets, in seconds.
DURATION_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(slots=True)
class Durations:
    """A histogram of durations in seconds, kept in plain integers. One writer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(DURATION_BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric in :data:`FAMILIES`. ``labels`` are in the order of the family's; a counter only
    grows.
    """

    name: str
    value: float | Durations
    labels: tuple[str, ...] = ()


#: Seconds for which a page is shown again as it is.
FRESH = 0.25

#: Called at every scrape, by the event loop: it may only read.
Source = Callable[[], Iterable[Sample]]


class Scrape(Collector):
    """prometheus_client's collector over the sources that were added."""

    def __init__(self) -> None:
        self._sources: list[Source] = []

    def add(self, source: Source) -> None:
        """Have ``source`` called at every scrape."""
        self._sources.append(source)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not call the sources."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family for every name that has samples. Raises ``KeyError`` for a name that is not declared."""
        gathered: dict[str, Any] = {}
        for source in list(self._sources):
            for sample in source():
                family = FAMILIES[sample.name]
                if sample.name not in gathered:
                    gathered[sample.name] = _metric(sample.name, family)
                _put(gathered[sample.name], family, sample)
        yield from gathered.values()


def _metric(name: str, family: Family) -> Metric:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    metric: Metric = kinds[family.kind](name, family.help, labels=family.labels)
    return metric


def _put(metric: Any, family: Family, sample: Sample) -> None:
    if len(sample.labels) != len(family.labels):
        raise ValueError(f"{sample.name} has the labels {family.labels}, not {sample.labels}")
    if not isinstance(sample.value, Durations):
        metric.add_metric(sample.labels, sample.value)
        return
    running, buckets = 0, []
    for bound, count in zip((*map(str, DURATION_BUCKETS), "+Inf"), sample.value.counts, strict=True):
        running += count
        buckets.append((bound, running))
    metric.add_metric(sample.labels, buckets, sample.value.total)


class MetricsPage:
    """``/metrics``, as Prometheus asks for it. What it shows is at most :data:`FRESH` seconds old."""

    def __init__(self, scrape: Scrape, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(scrape)
        ProcessCollector(registry=self._registry)
        self._clock = clock
        #: by format
        self._shown: dict[str, tuple[float, bytes]] = {}

    def __call__(self, request: Request) -> Answer:
        """The page in the format that the client would like."""
        encode, kind = choose_encoder(request.accept)
        at, body = self._shown.get(kind, (-FRESH, b""))
        now = self._clock()
        if now - at >= FRESH:
            # whoever asks all the time does not have everything counted all the time
            body = encode(self._registry)
            self._shown[kind] = now, body
        return Answer(kind, body)


async def serve_metrics(address: Resolved, scrape: Scrape) -> HttpServer:
    """Serve ``/metrics`` from the running loop. Raises :class:`~inanet.service.exits.Failure` naming the address if it cannot be had."""
    page = MetricsPage(scrape)
    return await HttpServer.open(address, "metrics", {"/metrics": page, "/": page})
