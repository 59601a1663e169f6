"""XAgg's delays (section VI-C, "Evaluation of Delays"): rates at the start and later, by role, and an aggregator's start.

What ``ina bench control`` measures, as claims: on this machine's loopback, and with half a millisecond on each link.
"""

from inanet.bench import control
from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table

REPETITIONS = 30


def run(repetitions: int = REPETITIONS) -> Outcome:
    """Every delay that the paper gives, in both places."""
    rows = control.run(repetitions, lambda _: None)["rows"]
    claims = tuple(
        Claim(f"{row['quantity']}, {row['role']}, {row['place']}: ms", row["paper_ms"], row["ms"], "<=")
        for row in rows
        if row["holds"] is not None
    )
    columns = ("place", "what", "role", "paper ms", "ms", "worst ms")
    table = tuple(
        (row["place"], row["quantity"], row["role"], row["paper_ms"] or "-", row["ms"], row["worst_ms"])
        for row in rows
    )
    series = {
        place: [(f"{row['quantity']}, {row['role']}", row["ms"]) for row in rows if row["place"] == place]
        for place in dict.fromkeys(row["place"] for row in rows)
    }
    return Outcome(
        claims,
        (Table("delays", columns, table),),
        (Panel("delays", "what", "ms", series),),
        (
            f"Medians of {repetitions}, means over roles. The paper's aggregator is deployed in 340 ms, precompiled; here slots "
            f"for {control.DEPLOYED >> 20} MiB are made in a daemon that runs, and the kernel's program, which ina bench xdp "
            "times, is loaded with it.",
        ),
    )
