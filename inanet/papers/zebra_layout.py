"""Zebra's Fig. 10: recirculations per packet, counted by the emulated switch, under three orchestrations.

*random*: parameters anywhere in the registers, gradients packed in the order of their ranks. *layout*: rank i + m j in register
i, packed in the same order. *layout and packaging*: Algorithm 1. A packet recirculates once for every parameter beyond the
first that it has in its fullest register.

The paper gives neither the pairs of a packet nor the registers, so both are swept. Its packets have about 192 B; the
released program puts at most 10 pairs into one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from inanet.data.clicks import Samples, corpus
from inanet.papers.claims import Claim, ratio
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.papers.zebra_hot import OA, SE, Generated
from inanet.proto.common.program import Verdicts
from inanet.proto.zebra.hot import ranking, stop_rule
from inanet.proto.zebra.job import Job, fixed
from inanet.proto.zebra.layout import Layout, at_random, by_heat, in_sequence, orchestrate
from inanet.proto.zebra.packets import EncodedPackets, Header
from inanet.proto.zebra.switch import ZebraProgram
from inanet.wire.batch import I64, PacketBatch
from inanet.wire.zebra import EMPTY_BYTES, Kind, entry_bytes

PAIRS = (10, 20, 40)
REGISTERS = (4, 8, 16, 32, 64, 128)
#: the cell that claims are judged by: the registers that jobs have here unless told otherwise
CELL = (20, 32)
#: batches of one worker, and hot gradients in a batch of a generated model
BATCHES, HOT = 6, 3000
SCHEMES = ("random", "layout", "layout and packaging")
_SEED = 10


@dataclass(frozen=True, slots=True)
class Load:
    """``batches`` of ranks (int64, ascending) of ``hot`` parameters."""

    name: str
    hot: int
    batches: tuple[I64, ...]


def generated(model: Generated) -> Load:
    """A parameter is in a batch unless none of its updates is: e^(-its share of them)."""
    rng = np.random.default_rng(_SEED)
    expected = model.expected()[0][: model.hot]
    low, high = 0.0, 1.0
    for _ in range(60):
        part = (low + high) / 2
        low, high = (part, high) if -np.expm1(-expected * part).sum() < HOT else (low, part)
    present = -np.expm1(-expected * low)
    return Load(
        model.name,
        model.hot,
        tuple(np.flatnonzero(rng.random(model.hot) < present) for _ in range(BATCHES)),
    )


def of_samples(samples: Samples, size: int) -> Load:
    """Batches of ``size`` samples."""
    ranked = ranking(samples.keys)
    hot = ranked.top(stop_rule(ranked)).keys
    order = np.argsort(hot)
    batches = []
    for batch, _ in zip(samples.shuffled(_SEED).batches(size), range(BATCHES), strict=False):
        keys = np.unique(batch.keys)
        keys = keys[np.isin(keys, hot)]
        batches.append(np.sort(order[np.searchsorted(hot[order], keys)]))
    return Load(samples.name, len(hot), tuple(batches))


def count(load: Load, pairs: int, registers: int, scheme: str) -> float:
    """Recirculations per packet, by the switch's own counters."""
    place: Callable[[int, int], Layout] = by_heat
    if scheme == "random":
        place = _randomly
    job = Job(
        1, (1,), (2,), 3, packet_bytes=EMPTY_BYTES + pairs * entry_bytes(Kind.HOT, 1), registers=registers
    )
    program = ZebraProgram(place=place)
    program.add_job(job, 1)
    program.prepare(1, fixed(1, np.arange(load.hot, dtype=np.uint64)))
    verdicts = Verdicts(load.hot + 1)
    for iteration, ranks in enumerate(load.batches, 1):
        order, counts = np.arange(len(ranks)), in_sequence(len(ranks), pairs)
        if scheme == "layout and packaging":
            order, counts = orchestrate(by_heat(load.hot, registers).register[ranks], registers, pairs)
        words = np.ones((len(ranks), 1), np.uint32)
        encoded = EncodedPackets(
            Kind.HOT, Header(1, 0, 0, 1, iteration, 1), counts, ranks[order].astype(np.uint64), words
        )
        batch = PacketBatch(encoded.arena, encoded.offsets, encoded.lengths, np.ones(len(encoded), np.uint64))
        program.process(batch, np.zeros(len(encoded), np.uint8), verdicts, 0.0)
    stats = program.stats()
    if stats["iterations"] != len(load.batches):
        raise RuntimeError(
            f"the switch finished {stats['iterations']} of {len(load.batches)} iterations: {stats}"
        )
    return stats["recirculations"] / stats["packets"]


def _randomly(number: int, registers: int) -> Layout:
    return at_random(number, registers, np.random.default_rng(_SEED))


def sweep(loads: tuple[Load, ...]) -> Mapping[tuple[str, int, int, str], float]:
    """Recirculations per packet by data, pairs, registers and scheme."""
    return {
        (load.name, pairs, registers, scheme): count(load, pairs, registers, scheme)
        for load in loads
        for pairs in PAIRS
        for registers in REGISTERS
        for scheme in SCHEMES
    }


def fig10() -> Outcome:
    """The sweep, and the claims at one cell of it and over all."""
    return judge((generated(OA), generated(SE), of_samples(corpus(), 512)))


def judge(loads: tuple[Load, ...]) -> Outcome:
    """Claims about a sweep over ``loads``."""
    found = sweep(loads)
    claims = []
    for load in loads:
        random, layout, ours = (found[load.name, *CELL, scheme] for scheme in SCHEMES)
        claims += [
            Claim(f"{load.name}: random over layout and packaging", 10.0, ratio(random, ours), ">=")
            if ours
            else Claim(f"{load.name}: recirculations with layout and packaging", 0.1 * random, ours, "<="),
            Claim(f"{load.name}: layout alone is no worse than random", random, layout, "<="),
            Claim(f"{load.name}: packaging is no worse than layout alone", layout, ours, "<="),
        ]
    cells = [(load.name, pairs, registers) for load in loads for pairs in PAIRS for registers in REGISTERS]
    highest = sum(
        found[*cell, "random"] >= max(found[*cell, "layout"], found[*cell, SCHEMES[2]]) for cell in cells
    )
    claims.append(Claim("cells of the sweep where random is highest", 1.0, highest / len(cells), ">="))
    if {"OA", "SE"} <= {load.name for load in loads}:
        claims.append(
            Claim(
                "OA's recirculations over SE's, layout alone",
                1.0,
                ratio(found["OA", *CELL, "layout"], found["SE", *CELL, "layout"]),
                ">=",
            )
        )
    nearest = min((key for key in found if key[3] == "random"), key=lambda key: abs(found[key] - 10.0))
    rows = tuple((*cell, *(found[*cell, scheme] for scheme in SCHEMES)) for cell in cells)
    panels = tuple(
        Panel(
            f"{load.name}, {CELL[0]} pairs per packet",
            "registers",
            "recirculations per packet",
            {scheme: [(m, found[load.name, CELL[0], m, scheme]) for m in REGISTERS] for scheme in SCHEMES},
        )
        for load in loads
    )
    return Outcome(
        tuple(claims),
        (Table("recirculations per packet", ("data", "pairs", "registers", *SCHEMES), rows),),
        panels,
        (
            f"claims are judged at {CELL[0]} pairs and {CELL[1]} registers",
            f"random needs the paper's 10 recirculations most nearly with {nearest[1]} pairs and {nearest[2]} registers "
            f"({nearest[0]}: {found[nearest]:.1f})",
            "a packet with more pairs than there are registers must recirculate; Algorithm 1 then sends smaller packets first",
        ),
    )
