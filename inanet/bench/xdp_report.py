"""How the figures of ``ina bench xdp`` are held against their marks and shown."""

import json
from collections.abc import Iterator
from typing import Any

from inanet.bench import hop

#: measured in every mode of the program
MODES = ("native", "generic")


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The marks, each with what was measured; ``met`` is ``None`` where it was not."""
    tcp = result["cpu_s_per_gb"].get("tcp_agg_1k")
    cpu, latency, gbps = result["cpu_s_per_gb"], result["latency_us"], result["gbps"]
    marks: list[tuple[str, float | None, str, float]] = [
        ("ns per packet, 256 values", result["ns_per_packet"].get("256"), "<=", 150.0),
        ("Gbps native", gbps.get("native"), ">=", 8.0),
        ("Gbps generic", gbps.get("generic"), ">=", 18.0),
        ("seconds to deploy, precompiled", result["deploy_seconds"]["precompiled"], "<=", 0.34),
        ("seconds to deploy, compiled", result["deploy_seconds"]["compiled"], "<=", 0.68),
    ]
    others = [seconds for path, seconds in cpu.items() if path != "generic"]
    lowest = cpu["generic"] / min(others) if others and "generic" in cpu else None
    marks.append(("CPU of generic over the lowest of the others", lowest, "<=", 1.0))
    for mode in MODES:
        ratio = tcp / cpu[mode] if tcp and cpu.get(mode) else None
        marks.append((f"CPU of TCP-Agg over {mode}", ratio, ">=", 3.3))
        for rank in ("p50", "p99"):
            if mode in latency and "tcp_agg_1k" in latency:
                share = latency[mode][rank] / latency["tcp_agg_1k"][rank]
            else:
                share = None
            marks.append((f"latency {rank}, {mode} over TCP-Agg", share, "<=", 0.76))
    return [
        {
            "name": name,
            "value": value,
            "bound": f"{sign} {bound:g}",
            "met": None if value is None else (value <= bound if sign == "<=" else value >= bound),
        }
        for name, value, sign, bound in marks
    ]


def table(result: dict[str, Any]) -> Iterator[str]:
    """For people; every line that is not data begins with '#'."""
    yield f"# {result['mib']} MiB per child, {hop.CHILDREN} children, one aggregator, sums to the parent's socket"
    yield "# values  ns/packet    Mpps   paper Mpps per core"
    for values, ns in result["ns_per_packet"].items():
        paper = result["paper_mpps"].get(values)
        yield f"  {values:>6}  {ns:9.0f}  {1e3 / ns:6.2f}   {paper if paper is not None else '-'}"
    yield "# path          Gbps   CPU s/GB   p50 us   p99 us"
    for path, gbps in result["gbps"].items():
        late = result["latency_us"].get(path)
        shown = f"{late['p50']:8.1f} {late['p99']:8.1f}" if late else "       -        -"
        yield f"  {path:<11} {gbps:7.2f}   {result['cpu_s_per_gb'][path]:8.3f} {shown}"
    for path, add in result["add_only"].items():
        yield f"  {path + ' add':<11} {add['gbps']:7.2f}   {add['cpu_s_per_gb']:8.3f}        -        -"
    for kind, paths in result["results_in"].items():
        yield f"# a worker's results, frames {kind}: path, Gbps, CPU s/GB"
        for path, its in paths.items():
            yield f"  {path:<11} {its['gbps']:7.2f}   {its['cpu_s_per_gb']:8.3f}        -        -"
    for note in result["notes"]:
        yield f"# {note}"
    for mark in result["marks"]:
        verdict = "not measured" if mark["met"] is None else "met" if mark["met"] else "MISSED"
        value = "" if mark["value"] is None else f": {mark['value']:.3f}"
        yield f"# mark {verdict}: {mark['name']}{value} ({mark['bound']})"


def show(result: dict[str, Any], as_json: bool) -> str:
    """What the command prints."""
    return json.dumps(result) if as_json else "\n".join(table(result))
