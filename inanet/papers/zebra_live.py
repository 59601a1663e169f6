"""Zebra's Fig. 6 on this machine: eight ranks, a switch and a PS as processes, over UDP.

Each rank and the PS is behind a link of its own, slow enough for the links, and not this machine's processors, to be what is in
the way; packets, processes and times are real. Zebra and the PS alone take turns over the same batches, and every sum is
checked. The industrial models are divided by ten as in the simulation.
"""

import statistics
from collections.abc import Sequence

from inanet.bench.sparse_live import Live, compared
from inanet.data.key_batches import OA, SE, generated
from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table

WORKERS, ITERATIONS, REPETITIONS = 8, 3, 2
RATE = 4e6
#: Fig. 6 of the simulation with eight workers
SIMULATED = {"OA": 1.67, "SE": 2.54}
_BUSY = (
    "so many processes want more of this machine's processors than it has: simulated links alone give {:.2f}"
)


def fig6() -> Outcome:
    """Both models."""
    loads = [generated(model, WORKERS, ITERATIONS) for model in (OA, SE)]
    return judge({load.name: compared(load, WORKERS, RATE, REPETITIONS) for load in loads})


def judge(found: dict[str, tuple[Sequence[Live], Sequence[Live]]]) -> Outcome:
    """Claims about runs with Zebra and runs with the PS alone, by data."""
    rows, claims = [], []
    for name, (zebra, ps) in found.items():
        ours, theirs = (statistics.median(one.keys_per_second for one in runs) for runs in (zebra, ps))
        runs = [*zebra, *ps]
        gain = ours / theirs
        rows.append(
            (
                name,
                ours,
                theirs,
                gain,
                zebra[0].in_network_share,
                sum(one.repeated for one in runs),
                sum(one.wrong for one in runs),
            )
        )
        reason = _BUSY.format(SIMULATED[name]) if gain < 0.9 * SIMULATED[name] else ""
        claims += [
            Claim(f"{name}: over the PS, {WORKERS} processes", 1.0, gain, ">="),
            Claim(f"{name}: as the simulation says", SIMULATED[name], gain, "~", 0.1, reason),
            Claim(f"{name}: sums that are wrong", 0.0, float(rows[-1][-1]), "=="),
        ]
    columns = ("data", "keys_per_second", "ps", "ratio_to_ps", "in_network_share", "repeated", "wrong")
    return Outcome(
        tuple(claims),
        (Table("keys summed per second, real processes", columns, tuple(rows)),),
        (
            Panel(
                "throughput",
                "data",
                "over Zebra's",
                {"Zebra": [(row[0], 1.0) for row in rows], "PS": [(row[0], 1 / row[3]) for row in rows]},
            ),
        ),
        (
            f"{WORKERS} ranks, links of {RATE / 1e6:g} Mbit/s, {REPETITIONS} runs of each, in turns; the median",
        ),
    )
