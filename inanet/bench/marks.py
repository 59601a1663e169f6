"""The marks that ``ina bench`` holds its figures against: each with what was measured, and whether it is met.

A mark that the rows do not cover is listed as not measured; one that is missed is listed as missed. Nothing is left
out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

#: The tensor that marks speak of: 97 MiB, a ResNet-50's gradients.
TENSOR = 97 << 20
SMALL = 4 << 10


@dataclass(frozen=True, slots=True)
class Mark:
    """``least`` <= row[``key``] x ``scale`` <= ``most``; either may be open."""

    name: str
    key: str
    #: keys and values of the row that has it
    where: Mapping[str, object]
    least: float | None = None
    most: float | None = None
    scale: float = 1.0
    unit: str = "ratio"

    def judge(self, rows: Iterable[Row]) -> dict[str, Any]:
        """What was measured; ``met`` is ``None`` where the rows do not have it. A value that was measured while its
        processes were short of processors says so."""
        row = find(rows, **self.where)
        value = row.get(self.key) if row is not None else None
        met = None
        if value is not None:
            value *= self.scale
            met = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return {
            "name": self.name,
            "value": value,
            "least": self.least,
            "most": self.most,
            "unit": self.unit,
            "met": met,
            "short_of_cpu": row.get("short_of_cpu") if row is not None else None,
        }


def find(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The first row with these values."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def _ingest(system: str, what: str) -> list[Mark]:
    where = {"table": "ingest", "system": system, "n": 4, "bytes": TENSOR}
    place = f"ingest of one core, {what}"
    return [
        Mark(place, "algbw_bps", where, least=20.0, scale=1e-9, unit="Gbit/s"),
        Mark(f"{place}: over TCP-Agg's with 1 KB messages", "ratio_to_tcp_agg_1k", where, least=3.3),
        Mark(f"{place}: over TCP-Agg's with 1 MB messages", "ratio_to_tcp_agg_1m", where, least=0.5),
    ]


def _local(system: str, size: int) -> Mapping[str, object]:
    return {"table": "local", "system": system, "n": 4, "bytes": size}


def _star(topology: str, system: str) -> Mapping[str, object]:
    return {"table": "star", "system": system, "topology": topology, "bytes": TENSOR}


def _hetero(system: str) -> Mapping[str, object]:
    return {"table": "hetero", "system": system, "topology": "xagg-fig1-push", "bytes": TENSOR}


#: systems of the star table, by how results go
_WAYS = {"unicast": "xagg-udp", "multicast": "xagg-udp-multicast"}


def _four_hosts(topology: str, what: str, way: str) -> list[Mark]:
    place, where = f"4 hosts, 1 Gbit/s, 97 MiB, {what}, {way}", _star(topology, _WAYS[way])
    return [
        Mark(f"{place}: time over the plan's bound in wire bytes", "ratio_to_limit", where, most=1.05),
        Mark(f"{place}: payload over wire bytes of a worker", "payload_per_wire", where, least=0.93),
        Mark(f"{place}: time over Gloo's", "ratio_to_gloo", where, most=1 / 1.4),
        Mark(f"{place}: time over Open MPI's", "ratio_to_openmpi", where, most=1.0),
    ]


def _eight_hosts(way: str) -> list[Mark]:
    place, where = f"8 hosts, 500 Mbit/s, 97 MiB, {way}", _star("star8-fast-aggregator", _WAYS[way])
    return [
        Mark(f"{place}: time over the plan's bound in wire bytes", "ratio_to_limit", where, most=1.05),
        Mark(f"{place}: time over Gloo's", "ratio_to_gloo", where, most=1 / 1.6),
    ]


def _loss(share: float, most: float, way: str) -> list[Mark]:
    marks = []
    for size in (16 << 20, TENSOR):
        where = {"table": "loss", "system": _WAYS[way], "loss": share, "bytes": size}
        place = f"4 hosts, 1 Gbit/s, {size >> 20} MiB, {share:.1%} of packets lost, {way}"
        marks.append(Mark(f"{place}: mean time over Gloo's", "mean_ratio_to_gloo", where, most=most))
        marks.append(Mark(f"{place}: resent over lost", "resent_per_lost", where, most=1.3))
    return marks


#: Marks of ``ina bench compare``.
COMPARE: tuple[Mark, ...] = (
    *_ingest("xagg-udp", "results to each rank by itself"),
    *_ingest("xagg-udp-multicast", "results once by multicast"),
    Mark(
        "4 ranks on one host, 97 MiB, tensors of job.empty: time over Gloo's",
        "ratio_to_gloo",
        _local("xagg-shm", TENSOR),
        most=1 / 3,
    ),
    Mark(
        "4 ranks on one host, 97 MiB, private tensors: time over Gloo's",
        "ratio_to_gloo",
        _local("xagg-shm-private", TENSOR),
        most=1 / 2,
    ),
    Mark(
        "4 ranks on one host, 4 KiB: time over Gloo's",
        "ratio_to_gloo",
        _local("xagg-shm", SMALL),
        most=1 / 20,
    ),
    *_four_hosts("star4-fast-aggregator", "a server with a faster NIC", "unicast"),
    *_four_hosts("star4-fast-aggregator", "a server with a faster NIC", "multicast"),
    *_four_hosts("star4-four-aggregators", "four servers", "unicast"),
    *_four_hosts("star4-four-aggregators", "four servers", "multicast"),
    *_eight_hosts("unicast"),
    *_eight_hosts("multicast"),
    *(
        mark
        for way in _WAYS
        for share, most in ((0.001, 0.85), (0.01, 0.95), (0.05, 1.0))
        for mark in _loss(share, most, way)
    ),
    Mark(
        "XAgg Fig. 1, carried exponents: time over the PS's", "ratio_to_ps", _hetero("xagg-udp"), 0.70, 0.80
    ),
    Mark(
        "XAgg Fig. 1, fixed exponents: time over the PS's",
        "ratio_to_ps",
        _hetero("xagg-udp-fixed"),
        0.70,
        0.80,
    ),
)


def judge(marks: Sequence[Mark], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every mark, in order."""
    return [mark.judge(rows) for mark in marks]


def lines(judged: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """One comment line per mark, for the end of a table."""
    for mark in judged:
        ends = ((">=", mark["least"]), ("<=", mark["most"]))
        target = " and ".join(f"{sign} {end:.3g}" for sign, end in ends if end is not None)
        unit = "" if mark["unit"] == "ratio" else f" {mark['unit']}"
        if mark["met"] is None:
            yield f"# mark not measured: {mark['name']} ({target}{unit})"
        else:
            verdict = "met" if mark["met"] else "MISSED"
            short = ", short of CPU" if mark["short_of_cpu"] else ""
            yield f"# mark {verdict}: {mark['name']}: {mark['value']:.3f}{unit} ({target}{unit}{short})"
