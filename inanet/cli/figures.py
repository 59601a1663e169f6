"""Figures of a fabric for people: rates, losses and shares, from two looks at the counters of its nodes."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from inanet.messages.registration import JobState, NodeState, Overview
from inanet.messages.text import show_ranks
from inanet.wire.xagg import PAYLOAD_BYTES

#: A node whose last report is older, in seconds, is shown as late.
LATE = 15.0
SERVERS = ("ps", "aggregator")


@dataclass(frozen=True, slots=True)
class Row:
    """A node now. Rates are gradients in bits per second, ``loss`` the share of fragments that were sent again, both
    since the look before, None without one; ``slots`` the share that is taken, ``idle`` cores, ``used`` memory."""

    name: str
    role: str
    state: str
    send_bps: float | None = None
    receive_bps: float | None = None
    loss: float | None = None
    slots: float | None = None
    idle: float | None = None
    cores: int = 0
    used: float | None = None


def state(node: NodeState) -> str:
    """One word for a node."""
    if not node.registered:
        return "unregistered"
    if node.age > LATE:
        return "late"
    return "serving" if node.serves else "idle" if node.role in SERVERS else "registered"


def _gained(before: NodeState | None, after: NodeState, *names: str) -> int | None:
    """How much counters have grown together; None without a look before, or if the node was restarted since."""
    if before is None or not after.counters:
        return None
    gains = [after.counters.get(name, 0) - before.counters.get(name, 0) for name in names]
    return sum(gains) if min(gains) >= 0 else None


def rows(before: Overview | None, after: Overview, seconds: float) -> list[Row]:
    """All nodes; ``seconds`` are those between the two looks."""
    known = {node.name: node for node in before.nodes} if before is not None else {}
    return [_row(known.get(node.name), node, seconds) for node in after.nodes]


def _row(before: NodeState | None, node: NodeState, seconds: float) -> Row:
    bits = PAYLOAD_BYTES * 8 / max(seconds, 1e-3)
    sent = _gained(before, node, "rows_sent")
    received = _gained(before, node, "results_in", "contributions_in")
    again = _gained(before, node, "retransmissions")
    total = node.counters.get("slots_total", 0)
    return Row(
        name=node.name,
        role=node.role,
        state=state(node),
        send_bps=None if sent is None else sent * bits,
        receive_bps=None if received is None else received * bits,
        loss=None if sent is None or again is None else min(1.0, again / sent) if sent else 0.0,
        slots=1 - node.counters.get("slots_free", 0) / total if total else None,
        idle=node.idle_cores,
        cores=node.cores,
        used=node.memory_used / node.memory if node.memory and node.memory_used is not None else None,
    )


def share(before: Overview | None, after: Overview) -> float | None:
    """Share of the workers' contributions that did not reach a PS as such, having been added up on the way; since the
    look before or, without one, in all. None while there are none."""
    known = {node.name: node for node in before.nodes} if before is not None else {}
    arrived = sent = 0
    for node in after.nodes:
        earlier = known[node.name].counters if node.name in known else {}
        gains = {
            name: max(0, node.counters.get(name, 0) - earlier.get(name, 0))
            for name in ("contributions_in", "leaf_contributions")
        }
        arrived += gains["contributions_in"] if node.role == "ps" else 0
        sent += gains["leaf_contributions"] if node.role == "worker" else 0
    # reports of different nodes are not of one moment
    return max(0.0, 1 - arrived / sent) if sent else None


class Shares:
    """The share over the last looks, up to ten. Over two it may be anything, since nodes report at moments of their own."""

    def __init__(self) -> None:
        self._looks: deque[Overview] = deque(maxlen=10)

    def look(self, seen: Overview) -> float | None:
        """Take one more look; :func:`share` since the oldest of them."""
        found = share(self._looks[0] if self._looks else None, seen)
        self._looks.append(seen)
        return found


def ranks(job: JobState) -> str:
    """How many ranks of a job are there; if it runs without some, which those are."""
    here = {rank for its in job.ranks.values() for rank in its}
    gone = set(range(job.world)) - here
    without = f", without {show_ranks(gone)}" if gone and job.state == "running" else ""
    return f"{len(here)} of {job.world} ranks{without}"


def healthy(seen: Overview) -> bool:
    """Whether all expected nodes are there, none is late, and no job waits for anybody."""
    return (
        not seen.missing
        and all(state(node) not in ("late", "unregistered") for node in seen.nodes)
        and all(job.state == "running" for job in seen.jobs)
    )


def rate(bps: float | None) -> str:
    """Bits per second for a narrow column."""
    if bps is None:
        return "-"
    for unit in ("", "k", "M"):
        if bps < 1000:
            return f"{bps:.0f} {unit}bit/s"
        bps /= 1000
    return f"{bps:.2f} Gbit/s"


def short_rate(bps: float | None) -> str:
    """Bits per second in a column that says so: ``"1.23G"``."""
    if bps is None:
        return "-"
    for unit in ("", "k", "M"):
        if bps < 999.5:
            return f"{bps:.0f}{unit}"
        bps /= 1000
    return f"{bps:.2f}G"


def part(value: float | None) -> str:
    """A share for a narrow column."""
    return "-" if value is None else f"{value:.1%}"


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, right_first: bool = False
) -> Iterator[str]:
    """Lines of columns as wide as what is in them: the first ``left`` flush left, but for the very first if ``right_first``."""
    lines = [titles, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        cells = [
            text.ljust(width) if column < left and not (right_first and column == 0) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def quantity(name: str, value: float) -> str:
    """The value of a metric for people, with the unit that its name says."""
    stem = name.removesuffix("_total").removesuffix("_sum")
    if stem.endswith("_timestamp_seconds"):
        return f"{datetime.fromtimestamp(value).astimezone():%F %T}"
    if stem.endswith("_bytes"):
        return binary(value)
    if stem.endswith("_seconds"):
        return f"{value:,.3f} s"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"


def binary(count: float) -> str:
    """Bytes for people: rounded, in the largest unit of which there is one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
