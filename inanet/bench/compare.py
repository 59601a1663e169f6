"""``ina bench compare``: every peer and every system on one machine in one run, repetitions interleaved.

Tables: ``local``, ranks on one host; ``ingest``, what one core of an aggregator carries, every check on and results
sent; ``star``, hosts behind a switch; ``hetero``, XAgg's Fig. 1. Who takes part is in :mod:`inanet.bench.registry`.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inanet.bench import contestants  # noqa: F401  registers them
from inanet.bench.local import local
from inanet.bench.marks import COMPARE, judge, lines
from inanet.bench.measure import Limit
from inanet.bench.registry import Table, peers
from inanet.service.exits import Exit, Failure

#: Of what ``--json`` prints.
SCHEMA = 1
TABLES: tuple[Table, ...] = ("local", "star", "loss", "hetero")


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
    #: told of every row as soon as it is there
    row: Callable[[dict[str, Any]], None] = field(default=lambda row: None)
    #: rows that are there count when it is over
    limit: Limit = field(default_factory=Limit)


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
        "failed": [],
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
    parts = {table: len(_places(table, wanted)) for table in tables}
    for index, table in enumerate(tables):
        if wanted.limit.is_over:
            result["skipped"].append(f"{table}: no time was left")
            continue
        left = sum(parts[other] for other in tables[index + 1 :])
        for row in _table(table, wanted, result, left):
            result["rows"].append(row)
            wanted.row(row)
    result["ok"] = not result["failed"]
    result["incomplete"] = wanted.limit.reason
    result["load"] = os.getloadavg()[0]
    result["marks"] = judge(COMPARE, result["rows"])
    return result


def _possible(skipped: list[str]) -> Sequence[Table]:
    """The tables that this machine and user can have."""
    if os.geteuid() != 0 or importlib.util.find_spec("pyroute2") is None:
        skipped.append("star, loss, hetero: need root and the 'net' extra")
        return TABLES[:1]
    return TABLES


def _check_names(systems: Sequence[str], tables: Sequence[Table]) -> None:
    there = {peer.name for table in tables for peer in peers(table)}
    unknown = sorted(set(systems) - there)
    if unknown:
        raise NoSuchPeer(
            f"no system {', '.join(map(repr, unknown))} in {', '.join(tables)}; allowed: {', '.join(sorted(there))}"
        )


def _places(table: Table, wanted: Wanted) -> Sequence[str]:
    """Topologies of a table; this host for one."""
    if table == "local":
        return ("",)
    if table == "star":
        from inanet.bench.star import STARS

        return wanted.topologies or STARS
    if table == "loss":
        from inanet.bench.loss import TOPOLOGIES as LOSSY

        return LOSSY
    from inanet.bench.hetero import TOPOLOGIES

    return TOPOLOGIES


def _table(table: Table, wanted: Wanted, result: dict[str, Any], left: int) -> Iterator[dict[str, Any]]:
    """Rows of a table, each of its topologies with a share of the time; so many are ``left`` in other tables."""
    present, skipped = [], result["skipped"]
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
        return
    limit, places = wanted.limit, _places(table, wanted)
    if table == "local":
        wanted.say(f"local: {wanted.workers} ranks on this host")
        share = limit.part(left + 1)
        rows: Iterable[dict[str, Any]] = local(
            present, wanted.workers, wanted.sizes, wanted.repetitions, share
        )
        yield from _kept(table, rows, result["failed"])
        return
    from inanet.bench.hetero import hetero
    from inanet.bench.loss import loss
    from inanet.bench.star import star

    measure = {"star": star, "loss": loss, "hetero": hetero}[table]
    for index, topology in enumerate(places):
        if limit.is_over:
            skipped.append(f"{table}: {topology}: no time was left")
            continue
        wanted.say(f"{table}: {topology}")
        share = limit.part(left + len(places) - index)
        rows = measure(present, topology, max(wanted.sizes), wanted.repetitions, share)
        yield from _kept(f"{table}: {topology}", rows, result["failed"])


def _kept(where: str, rows: Iterable[dict[str, Any]], failed: list[str]) -> Iterator[dict[str, Any]]:
    """Rows until a contestant fails, which is told and ends these, but not what comes after them."""
    try:
        yield from rows
    except Failure as failure:
        failed.append(f"{where}: {failure}")


class Printer:
    """Lines for people: what columns are, then rows as they come, with their topology before them."""

    def __init__(self) -> None:
        self._place: str | None = ""

    def heading(self) -> Iterator[str]:
        """Before all rows."""
        yield "# medians of interleaved repetitions; * processes were short of processors"
        yield "# ingest: processor time of the process that adds up, its ms and Gbit/s those of one core"
        yield "# star, loss, hetero: limits in bytes on the wire"
        yield "# table  system              n        bytes        ms   Gbit/s  vs gloo vs limit    vs PS  CPU s/GB"

    def row(self, row: dict[str, Any]) -> Iterator[str]:
        """One row."""
        place = row.get("topology") or "this host"
        if row.get("loss") is not None:
            place += f", {row['loss']:.1%} of packets lost"
        if place != self._place:
            self._place = place
            yield f"# {place}"
        resent = row.get("resent_per_lost")
        yield (
            f"  {row['table']:<7}{row['system']:<17}{row['n']:4d} {row['bytes']:12d} {row['seconds'] * 1e3:9.2f} "
            f"{row['algbw_bps'] / 1e9:8.2f} {_ratio(row['ratio_to_gloo'])} {_ratio(row['ratio_to_limit'])} "
            f"{_ratio(row.get('ratio_to_ps'))} {row['cpu_s_per_gb']:9.2f}{' *' if row['short_of_cpu'] else ''}"
            f"{'' if resent is None else f'  resent {resent:.2f} per packet lost'}"
        )

    def ending(self, result: dict[str, Any]) -> Iterator[str]:
        """Behind all rows: what is missing and why, then the marks."""
        yield f"# {result['cores']} cores, load {result['load']:.1f}"
        for reason in result["skipped"]:
            yield f"# skipped {reason}"
        for reason in result["failed"]:
            yield f"# FAILED {reason}"
        if result["incomplete"]:
            yield f"# INCOMPLETE: {result['incomplete']}; rows have the repetitions that were measured"
        yield from lines(result["marks"])


def table(result: dict[str, Any]) -> Iterator[str]:
    """Everything for people."""
    printer = Printer()
    yield from printer.heading()
    for row in result["rows"]:
        yield from printer.row(row)
    yield from printer.ending(result)


def _ratio(value: float | None) -> str:
    return f"{value:8.3f}" if value is not None else "       -"
