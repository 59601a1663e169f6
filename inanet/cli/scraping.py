"""A single daemon by the metrics that it serves at ``[metrics] listen``, without a coordinator."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from inanet.service.exits import Failure

#: The longest answer that is read, in bytes.
_MOST = 16 << 20


@dataclass(frozen=True, slots=True)
class Value:
    """One sample: a metric's name as it is exposed, its labels and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scraped:
    """What a daemon has counted, from ``url``."""

    url: str
    values: tuple[Value, ...]
    _sums: dict[tuple[str, str], float] = field(default_factory=dict)

    def get(self, name: str, label: str = "") -> float:
        """The sum of all samples of a metric, or of those one of whose labels has this value; 0 if there is none."""
        key = (name, label)
        if key not in self._sums:
            self._sums[key] = sum(
                one.value
                for one in self.values
                if one.name == name and (not label or label in one.labels.values())
            )
        return self._sums[key]

    @property
    def role(self) -> str:
        """What the daemon is; empty if it does not say."""
        return next(
            (one.labels.get("role", "") for one in self.values if one.name == "inanet_build_info"), ""
        )

    @property
    def reasons(self) -> dict[str, float]:
        """Dropped packets by reason, without those that had none."""
        dropped = [one for one in self.values if one.name == "inanet_packets_dropped_total" and one.value]
        return {one.labels["reason"]: one.value for one in dropped}


def scrape(where: str, seconds: float) -> Scraped:
    """Ask the daemon whose metrics are at ``host:port``, or at a URL. Raises :class:`Failure` if none answers."""
    from prometheus_client.parser import text_string_to_metric_families

    url = where if "://" in where else f"http://{where}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            text = answer.read(_MOST).decode()
        families = list(text_string_to_metric_families(text))
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Failure(
            f"no metrics from {url} ({reason}): is metrics.listen set, and the daemon running?"
        ) from None
    return Scraped(
        url,
        tuple(
            Value(sample.name, dict(sample.labels), sample.value)
            for family in families
            for sample in family.samples
            if sample.name.startswith("inanet_")
        ),
    )


@dataclass(frozen=True, slots=True)
class Pulse:
    """A daemon now: gradient in bits per second, contributions ``summed`` per second (in the network, or by a PS at the root),
    ``loss`` the share of fragments that were sent again, and ``dropped`` packets by reason, all since the look before: None
    and empty without one. ``slots``: the share that is taken, None if it has none.
    """

    role: str
    jobs: int
    send_bps: float | None
    receive_bps: float | None
    summed: float | None
    loss: float | None
    slots: float | None
    dropped: Mapping[str, int]


def pulse(before: Scraped | None, now: Scraped, seconds: float) -> Pulse:
    """Two looks at a daemon, ``seconds`` apart; if its counters have fallen, it was started anew: as without the first."""

    def gained(name: str, label: str = "") -> float | None:
        if before is None:
            return None
        gain = now.get(name, label) - before.get(name, label)
        return gain if gain >= 0 else None

    def rate(name: str, label: str = "") -> float | None:
        gain = gained(name, label)
        return None if gain is None else gain / max(seconds, 1e-3)

    sent = gained("inanet_packets_sent_total", "fragment")
    again = gained("inanet_retransmissions_total")
    taken, free = (now.get("inanet_aggregator_slots", state) for state in ("taken", "free"))
    up, down = (rate("inanet_gradient_bytes_total", direction) for direction in ("sent", "received"))
    earlier = before.reasons if before is not None else now.reasons
    lost = {reason: round(count - earlier.get(reason, 0)) for reason, count in now.reasons.items()}
    return Pulse(
        role=now.role,
        jobs=round(now.get("inanet_jobs")),
        send_bps=None if up is None else up * 8,
        receive_bps=None if down is None else down * 8,
        summed=rate("inanet_contributions_total"),
        loss=None if sent is None or again is None else min(1.0, again / sent) if sent else 0.0,
        slots=taken / (taken + free) if taken + free else None,
        dropped={reason: count for reason, count in sorted(lost.items()) if count > 0},
    )
