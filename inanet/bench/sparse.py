"""``ina bench sparse``: keys summed per second by Zebra, by a PS alone, and by SwitchML forced to send whole models.

Two tables. *rack* is in virtual time: hosts with links of a rate around a switch, with the machines that also run on real
sockets; a PS alone is the same job with nothing hot. *live* is by the clock on the wall: a whole job in this process over UDP
sockets, each rank and shard behind a link of its own (:mod:`inanet.phy.access`), slow enough for the links, and not this
machine's processors, to be what is in the way. Systems take turns within each repetition, over the same batches.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inanet.bench.marks import Mark, judge, lines
from inanet.bench.tables import Column, aligned
from inanet.data.clicks import Samples
from inanet.data.datasets import load
from inanet.data.key_batches import OA, SE, Load, generated, of_samples
from inanet.sim.link import LinkSpec
from inanet.sim.rack import SYSTEMS, Rack
from inanet.sim.sparse import SparseRack
from inanet.sparse.group import sparse_group

SCHEMA = 1
#: bytes of registers for SwitchML, and of one of its slots: two sets of 64 values and their state
MEMORY, SLOT = 1 << 20, 2 * (64 * 4 + 24)


def _mark(table: str, data: str, workers: int) -> Mark:
    where = {"table": table, "data": data, "system": "zebra", "workers": workers}
    return Mark(f"{table}, {data}, {workers} workers: over the PS", "ratio_to_ps", where, least=1.5)


#: the paper's least gain, which it has with 32 workers
MARKS = (_mark("rack", "OA", 32), _mark("rack", "SE", 32), _mark("live", "SE", 8))


@dataclass(frozen=True, slots=True)
class Options:
    """``data`` is "OA", "SE", "corpus" or a file; ``rate`` bits per second of every host's link; ``samples`` of real data in a
    worker's batch; ``live`` workers of the live table, 0 for none, with links of ``live_rate`` bits per second.
    """

    data: tuple[str, ...] = ("OA", "SE", "corpus")
    workers: tuple[int, ...] = (8, 32)
    shards: int = 1
    rate: float = 1e9
    samples: int = 64
    iterations: int = 3
    live: int = 8
    live_rate: float = 4e6
    repetitions: int = 2


def loads(options: Options, say: Callable[[str], None]) -> list[Load]:
    """What is pushed. Raises :class:`~inanet.data.clicks.BadData`."""
    most = max(*options.workers, options.live)
    models = {model.name: model for model in (OA, SE)}
    found = []
    for name in options.data:
        if name in models:
            found.append(generated(models[name], most, options.iterations))
        else:
            found.append(
                of_samples(_enough(load(name, say), most, options), most, options.samples, options.iterations)
            )
    return found


def _enough(samples: Samples, workers: int, options: Options) -> Samples:
    """Repeat a small data set until it has a batch for everybody."""
    needed = workers * options.samples * options.iterations
    rows = np.arange(max(needed, len(samples))) % max(len(samples), 1)
    return samples if len(samples) >= needed else samples.take(rows)


def run(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Both tables and the marks, as ``--json`` prints them. The figures at the top are those of the first data set with the
    most workers.
    """
    rows: list[dict[str, Any]] = []
    found = loads(options, say)
    for workers in options.workers:
        goodput = dense_goodput(workers, options.rate)
        for data in found:
            say(f"{data.name}, {workers} workers in virtual time")
            rows += rack_rows(data, workers, options, goodput)
    for data in found if options.live else ():
        say(f"{data.name}, {options.live} workers live")
        rows += live_rows(data, options)
    best = next(r for r in rows if r["system"] == "zebra" and r["workers"] == max(options.workers))
    return {
        "schema": SCHEMA,
        "ok": not any(row["wrong"] for row in rows),
        "keys_per_second": best["keys_per_second"],
        "ratio_to_ps": best["ratio_to_ps"],
        "in_network_share": best["in_network_share"],
        "rate": options.rate,
        "live_rate": options.live_rate,
        "rows": rows,
        "marks": judge(MARKS, rows),
    }


def rack_rows(data: Load, workers: int, options: Options, goodput: float) -> list[dict[str, Any]]:
    """Zebra, the PS and SwitchML on a rack."""
    rows: list[dict[str, Any]] = []
    for system, hot in (("zebra", data.hot), ("ps", None)):
        rack = SparseRack(workers, options.shards, LinkSpec(rate=options.rate), hot)
        batches = data.of(workers)
        measured = rack.measure(batches)
        rows.append(
            _row("rack", data, system, workers, measured.keys_per_second)
            | {
                "in_network_share": measured.in_network_share,
                "ms": 1000 * measured.seconds / measured.iterations,
                "repeated": measured.repeated,
                "wrong": _wrong(batches, *rack.model()),
            }
        )
    pairs = sum(len(keys) for keys in data.of(workers)[-1])
    seconds = 4 * data.parameters / goodput
    rows.append(
        _row("rack", data, "switchml-dense", workers, pairs / seconds)
        | {"in_network_share": 1.0, "ms": 1000 * seconds, "repeated": None, "wrong": None}
    )
    return _compared(rows)


def dense_goodput(workers: int, rate: float, memory: int = MEMORY, link: LinkSpec | None = None) -> float:
    """Bytes of model per second that SwitchML sums on a rack with ``memory`` bytes of registers, once it has got going.
    ``link`` is one of ``rate`` bits per second, with other delays than usual.
    """
    slots = memory // SLOT
    link = link or LinkSpec(rate=rate)
    rack = Rack(SYSTEMS["switchml"], slots=slots, link=link)
    rack.add_job(1, workers, slots)
    rack.loop(1, 1_000_000)
    window = 8 * 332 * slots / rate + 4 * link.delay
    rack.run(4 * window)
    begin, before = rack.network.now, rack.answered(1)
    rack.run(4 * window)
    return (rack.answered(1) - before) / (rack.network.now - begin)


def live_rows(data: Load, options: Options) -> list[dict[str, Any]]:
    """Zebra and the PS, each a job of its own in this process, taking turns; every sum is checked."""
    workers = options.live
    rates: dict[str, list[float]] = {"zebra": [], "ps": []}
    shares, wrong, repeated = dict.fromkeys(rates, 0.0), dict.fromkeys(rates, 0), dict.fromkeys(rates, 0)
    batches = data.of(workers)
    pushed = sum(len(keys) for iteration in batches[1:] for keys in iteration)
    for _ in range(options.repetitions):
        for system, seconds in rates.items():
            with sparse_group(
                workers, options.shards, switch=system == "zebra", phy="udp", rate=options.live_rate
            ) as group:
                if system == "zebra":
                    group.use_hot(data.hot)
                begin = 0.0
                for number, keys in enumerate(batches):
                    if number == 1:
                        begin = time.perf_counter()
                    group.push_all([(k, np.ones(len(k), np.float32)) for k in keys])
                    group.pull_all(keys)
                seconds.append(pushed / (time.perf_counter() - begin))
                shares[system] = group.in_network_share()
                wrong[system] += _wrong(batches, *group.model())
                repeated[system] += sum(its.get("repeated", 0) for its in group.stats().values())
    return _compared(
        [
            _row("live", data, system, workers, statistics.median(measured))
            | {
                "in_network_share": shares[system],
                "ms": 1000 * statistics.median(pushed / rate for rate in measured) / (len(batches) - 1),
                "repeated": repeated[system],
                "wrong": wrong[system],
            }
            for system, measured in rates.items()
        ]
    )


def _wrong(batches: Sequence[Sequence[Any]], keys: Any, values: Any) -> int:
    """Parameters that are not the number of pushes to them: every gradient was 1."""
    pushed = np.concatenate([keys for iteration in batches for keys in iteration])
    unique, count = np.unique(pushed, return_counts=True)
    if len(unique) != len(keys) or (unique != keys).any():
        return abs(len(unique) - len(keys)) or len(unique)
    return int((values[:, 0] != count).sum())


def _row(table: str, data: Load, system: str, workers: int, rate: float) -> dict[str, Any]:
    return {
        "table": table,
        "data": data.name,
        "system": system,
        "workers": workers,
        "keys_per_second": rate,
    }


def _compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ps = next(row["keys_per_second"] for row in rows if row["system"] == "ps")
    return [row | {"ratio_to_ps": row["keys_per_second"] / ps} for row in rows]


def table(result: dict[str, Any]) -> list[str]:
    """The rows as text."""
    head = f"# rack: virtual time; live: wall time, over UDP, behind links of {result['live_rate'] / 1e6:g} Mbit/s"
    columns: dict[str, Column] = {
        "table": "",
        "data": "",
        "system": "",
        "workers": "d",
        "keys/s": ("keys_per_second", ".3e"),
        "over PS": ("ratio_to_ps", ".2f"),
        "in network": ("in_network_share", ".1%"),
        "repeated": "d",
        "wrong": "d",
    }
    return [head, *aligned(columns, result["rows"]), *lines(result["marks"])]
