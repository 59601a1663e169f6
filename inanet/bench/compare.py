"""``ina bench compare``: every peer and every system on one machine in one run, repetitions interleaved.

Tables: ``local``, ranks on one host; ``ingest``, what one core of an aggregator carries, every check on and results
sent; ``star``, hosts behind a switch; ``hetero``, XAgg's Fig. 1. Who takes part is in :mod:`inanet.bench.registry`.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inanet.bench import contestants  # noqa: F401  registers them
from inanet.bench.local import local
from inanet.bench.marks import COMPARE, judge, lines
from inanet.bench.registry import Peer, Table, peers
from inanet.service.exits import Exit, Failure

#: Of what ``--json`` prints.
SCHEMA = 1
TABLES: tuple[Table, ...] = ("local", "star", "hetero")


class NoSuchPeer(Failure):
    """A system was asked for that takes part in none of the tables."""

    code = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to run. Empty: all that can be had on this machine. ``sizes`` in bytes per rank."""

    tables: Sequence[Table] = ()
    systems: Sequence[str] = ()
    #: of the star table; hetero has its own
    topologies: Sequence[str] = ()
    workers: int = 4
    sizes: Sequence[int] = (1 << 12, 1 << 20, 97 << 20)
    repetitions: int = 5
    say: Callable[[str], None] = field(default=lambda text: None)


def run(wanted: Wanted) -> dict[str, Any]:
    """Every table asked for, one after the other. Returns what ``--json`` prints.

    Raises :class:`inanet.lab.namespaces.Unprivileged` if a table was asked for that needs root,
    ``ModuleNotFoundError`` if one needs pyroute2, :class:`NoSuchPeer`, and
    :class:`inanet.config.file.ConfigError` for a topology.
    """
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "ok": True,
        "rows": [],
        "skipped": [],
        "cores": os.cpu_count(),
    }
    tables = list(wanted.tables) or list(_possible(result["skipped"]))
    if any(table != "local" for table in tables):
        # also registers who takes part in labs only
        from inanet.bench import labs, rings  # noqa: F401
        from inanet.lab import library
        from inanet.lab.namespaces import require_privileges

        require_privileges()
        # a wrong name is refused now, not after the tables before it
        for name in wanted.topologies:
            library.topology(name)
    _check_names(wanted.systems, tables)
    for table in tables:
        result["rows"] += _table(table, wanted, result["skipped"])
    result["load"] = os.getloadavg()[0]
    result["marks"] = judge(COMPARE, result["rows"])
    return result


def _possible(skipped: list[str]) -> Sequence[Table]:
    """The tables that this machine and user can have."""
    if os.geteuid() != 0 or importlib.util.find_spec("pyroute2") is None:
        skipped.append("star, hetero: need root and the 'net' extra")
        return TABLES[:1]
    return TABLES


def _check_names(systems: Sequence[str], tables: Sequence[Table]) -> None:
    there = {peer.name for table in tables for peer in peers(table)}
    unknown = sorted(set(systems) - there)
    if unknown:
        raise NoSuchPeer(
            f"no system {', '.join(map(repr, unknown))} in {', '.join(tables)}; allowed: {', '.join(sorted(there))}"
        )


def _table(table: Table, wanted: Wanted, skipped: list[str]) -> list[dict[str, Any]]:
    present = []
    for peer in peers(table):
        if wanted.systems and peer.name not in wanted.systems:
            continue
        reason = peer.lacking()
        if reason:
            skipped.append(f"{table}: {peer.name}: {reason}")
        else:
            present.append(peer)
    if not present:
        skipped.append(f"{table}: nobody is left to run")
        return []
    if table == "local":
        wanted.say(f"local: {wanted.workers} ranks on this host")
        return local(present, wanted.workers, wanted.sizes, wanted.repetitions)
    return list(_on_labs(table, present, wanted))


def _on_labs(table: Table, present: Sequence[Peer], wanted: Wanted) -> Iterator[dict[str, Any]]:
    from inanet.bench.hetero import TOPOLOGIES, hetero
    from inanet.bench.star import STARS, star

    topologies, measure = (wanted.topologies or STARS, star) if table == "star" else (TOPOLOGIES, hetero)
    for topology in topologies:
        wanted.say(f"{table}: {topology}")
        yield from measure(present, topology, max(wanted.sizes), wanted.repetitions)


def table(result: dict[str, Any]) -> Iterator[str]:
    """Rows for people, then marks."""
    yield f"# {result['cores']} cores, load {result['load']:.1f}; medians of interleaved repetitions"
    yield "# ingest: processor time of the process that adds up, its ms and Gbit/s those of one core"
    yield "# star, hetero: limits in bytes on the wire; * processes were short of processors"
    yield "# table  system              n        bytes        ms   Gbit/s  vs gloo vs limit    vs PS  CPU s/GB"
    topology = None
    for row in result["rows"]:
        if row.get("topology") != topology:
            topology = row.get("topology")
            yield f"# {topology or 'this host'}"
        yield (
            f"  {row['table']:<7}{row['system']:<17}{row['n']:4d} {row['bytes']:12d} {row['seconds'] * 1e3:9.2f} "
            f"{row['algbw_bps'] / 1e9:8.2f} {_ratio(row['ratio_to_gloo'])} {_ratio(row['ratio_to_limit'])} "
            f"{_ratio(row.get('ratio_to_ps'))} {row['cpu_s_per_gb']:9.2f}{' *' if row['short_of_cpu'] else ''}"
        )
    for reason in result["skipped"]:
        yield f"# skipped {reason}"
    yield from lines(result["marks"])


def _ratio(value: float | None) -> str:
    return f"{value:8.3f}" if value is not None else "       -"
