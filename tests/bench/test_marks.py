"""Marks say what was measured and whether that is enough, and leave nothing out."""

from typing import Any

import pytest

from inanet.bench.marks import COMPARE, TENSOR, Mark, judge, lines

MARK = Mark("speed", "gbps", {"system": "a"}, least=2.0, most=3.0, scale=1e-9, unit="Gbit/s")


def figures(value: float | None, **more: Any) -> list[dict[str, Any]]:
    return [{"system": "b", "gbps": 2.5e9}, {"system": "a", "gbps": value, **more}]


@pytest.mark.parametrize(
    ("value", "met", "line"),
    [
        (2.5e9, True, "# mark met: speed: 2.500 Gbit/s (>= 2 and <= 3 Gbit/s)"),
        (2e9, True, "# mark met: speed: 2.000 Gbit/s (>= 2 and <= 3 Gbit/s)"),
        (1.9e9, False, "# mark MISSED: speed: 1.900 Gbit/s (>= 2 and <= 3 Gbit/s)"),
        (3.1e9, False, "# mark MISSED: speed: 3.100 Gbit/s (>= 2 and <= 3 Gbit/s)"),
        (None, None, "# mark not measured: speed (>= 2 and <= 3 Gbit/s)"),
    ],
)
def test_a_mark_is_met_missed_or_not_measured(value: float | None, met: bool | None, line: str) -> None:
    judged = MARK.judge(figures(value))
    assert judged["met"] is met
    assert list(lines([judged])) == [line]


def test_a_figure_of_a_busy_machine_is_marked_as_such() -> None:
    judged = MARK.judge(figures(2.5e9, short_of_cpu=True))
    assert judged["short_of_cpu"] is True
    assert list(lines([judged])) == ["# mark met: speed: 2.500 Gbit/s (>= 2 and <= 3 Gbit/s, short of CPU)"]


def test_every_mark_finds_its_row_among_those_of_a_whole_run() -> None:
    rows = [
        *(
            {"table": "ingest", "system": system, "n": 4, "bytes": TENSOR, "algbw_bps": speed}
            | {"ratio_to_tcp_agg_1k": 3.4, "ratio_to_tcp_agg_1m": 0.4}
            for system, speed in (("xagg-udp", 19e9), ("xagg-udp-multicast", 21e9))
        ),
        {"table": "local", "system": "xagg-shm", "n": 4, "bytes": TENSOR, "ratio_to_gloo": 0.3},
        {"table": "local", "system": "xagg-shm", "n": 4, "bytes": 4096, "ratio_to_gloo": 0.01},
        {"table": "local", "system": "xagg-shm-private", "n": 4, "bytes": TENSOR, "ratio_to_gloo": 0.6},
        *(
            {"table": "star", "system": system, "topology": name, "bytes": TENSOR, "ratio_to_limit": 1.02}
            | {"payload_per_wire": 0.935, "ratio_to_gloo": 0.6, "ratio_to_openmpi": 0.9}
            for system in ("xagg-udp", "xagg-udp-multicast")
            for name in ("star4-fast-aggregator", "star4-four-aggregators", "star8-fast-aggregator")
        ),
        *(
            {
                "table": "hetero",
                "system": system,
                "topology": "xagg-fig1-push",
                "bytes": TENSOR,
                "ratio_to_ps": 0.81,
            }
            for system in ("xagg-udp", "xagg-udp-fixed")
        ),
        *(
            {"table": "loss", "system": system, "loss": loss, "bytes": size}
            | {"mean_ratio_to_gloo": 0.9, "resent_per_lost": 1.2}
            for system in ("xagg-udp", "xagg-udp-multicast")
            for loss in (0.001, 0.01, 0.05)
            for size in (16 << 20, TENSOR)
        ),
    ]
    judged = judge(COMPARE, rows)
    missed = [mark["name"] for mark in judged if not mark["met"]]
    assert missed == [
        "ingest of one core, results to each rank by itself",
        "ingest of one core, results to each rank by itself: over TCP-Agg's with 1 MB messages",
        "ingest of one core, results once by multicast: over TCP-Agg's with 1 MB messages",
        "4 ranks on one host, 97 MiB, private tensors: time over Gloo's",
        *(
            f"4 hosts, 1 Gbit/s, {size} MiB, 0.1% of packets lost, {way}: mean time over Gloo's"
            for way in ("unicast", "multicast")
            for size in (16, 97)
        ),
        "XAgg Fig. 1, carried exponents: time over the PS's",
        "XAgg Fig. 1, fixed exponents: time over the PS's",
    ]
    assert len(judged) == len(COMPARE)
