"""Several ranks a machine, packet by packet: what Fig. 7's equations say of the network, with real queue pairs and programs."""

import numpy as np

from inanet.papers.claims import Claim, reduction
from inanet.papers.outcome import Table
from inanet.planning.patterns import Cluster, times
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.parallel import Pattern
from inanet.proto.netreduce.ring import Sizes
from inanet.sim.link import LinkSpec
from inanet.sim.machines import SimulatedMachines
from inanet.sim.ring import FRAME_OVERHEAD

#: machines, ranks of each, bits per second between and within, one-way delay, packets that move as one, messages of a tensor
MACHINES, EACH, RATE, INSIDE, DELAY, GRAIN, MESSAGES = 4, 2, 10e9, 80e9, 1e-6, 8, 24
#: packets of a message, a fifth of the usual: a ring that carries a piece has enough of them to fill its window
LENGTH = 34
PATTERNS: tuple[Pattern, ...] = ("flat-ring", "tencent", "parallel-ring", "parallel-netreduce")
#: a rate at which nothing takes any time
_ENDLESS = 1e30


def measured(pattern: Pattern, messages: int) -> tuple[float, float]:
    """Seconds of an all-reduce, and what the equations give. Within machines the equations count, but for a flat ring.

    Raises ``ArithmeticError`` for a sum that is wrong.
    """
    sizes = Sizes(LENGTH)
    link, inside = (LinkSpec(rate, DELAY, overhead=FRAME_OVERHEAD, grain=GRAIN) for rate in (RATE, INSIDE))
    rig = SimulatedMachines(pattern, MACHINES, EACH, link=link, inside=inside, sizes=sizes, raw=True)
    elements, ranks = messages * sizes.values, MACHINES * EACH
    arrays = [
        [np.full(elements, machine * EACH + rank + 1, np.float32) for rank in range(EACH)]
        for machine in range(MACHINES)
    ]
    spec = TensorSpec("t", "f32", (elements,), "sum", ExponentMode.PROLOGUE)
    seconds = rig.all_reduce(spec, arrays)
    if any((array != ranks * (ranks + 1) / 2).any() for machine in arrays for array in machine):
        raise ArithmeticError(f"{pattern}: a wrong sum")
    if pattern != "flat-ring":
        seconds += times(Cluster(ranks, EACH, INSIDE / 8, _ENDLESS, 0.0), 4 * elements)[pattern]
    return seconds, times(Cluster(ranks, EACH, INSIDE / 8, RATE / 8, DELAY), 4 * elements)[pattern]


def several(messages: int = MESSAGES) -> tuple[list[Claim], Table]:
    """All patterns: whether parallel NetReduce's lead in packets is that of the equations, and the times."""
    found = {pattern: measured(pattern, messages) for pattern in PATTERNS}
    fast, model = found["parallel-netreduce"]
    claims = []
    for other in PATTERNS[:3]:
        its, expected = found[other]
        claims.append(
            Claim(
                f"time below {other}'s, {MACHINES} machines of {EACH} ranks in packets, per cent",
                reduction(model, expected),
                reduction(fast, its),
                "~",
                0.15,
            )
        )
    rows = tuple((name, its * 1e3, expected * 1e3) for name, (its, expected) in found.items())
    title = f"in packets, {MACHINES} machines of {EACH} ranks, {RATE / 1e9:.0f} Gbit/s between and {INSIDE / 1e9:.0f} within"
    return claims, Table(title, ("pattern", "ms", "equation, ms"), rows)
