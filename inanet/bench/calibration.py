"""``ina plan --calibrate``: what nodes of this machine cost, from all-reduces of real daemons over the loopback."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from inanet.bench import contestants  # noqa: F401  registers them
from inanet.bench.kernels import Bench
from inanet.bench.measure import interleave
from inanet.bench.registry import peers
from inanet.bench.runs import Run, interleaved, started
from inanet.bench.stage import LocalStage
from inanet.planning.costs import Costs, save
from inanet.wire.xagg import PAYLOAD_BYTES

#: Ranks; sizes in bytes of a tensor that shows the cost per fragment, and of one that is one fragment.
WORLD = 4
LARGE, SMALL = 32 << 20, 1 << 10
_REPETITIONS = 5
_OURS, _RING = "xagg-udp", "gloo"


def calibrate(say: Callable[[str], None] = lambda text: None, *, large: int = LARGE) -> Costs:
    """Measure and keep the result; ``say`` hears what happens. Without Gloo the default costs of a ring stay.

    Raises :class:`inanet.service.exits.Failure` if daemons do not start.
    """
    mine = [peer for peer in peers("local") if peer.name in (_OURS, _RING) and not peer.lacking()]
    say(f"measuring {' and '.join(peer.name for peer in mine)} with {WORLD} ranks on this machine")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inanet-calibrate-")))
        teams = stack.enter_context(started(mine, LocalStage(WORLD, directory, stack)))
        small = interleaved(teams, SMALL, 4 * _REPETITIONS)
        big = interleaved(teams, large, _REPETITIONS)
    say("measuring the kernels")
    bench = Bench(large // PAYLOAD_BYTES, WORLD)
    seconds = min(interleave({"aggregate": bench.aggregate}, _REPETITIONS)["aggregate"])
    fold_ns = seconds / (large / PAYLOAD_BYTES * WORLD) * 1e9
    costs = derive(small, big, WORLD, large, fold_ns)
    say(f"kept in {save(costs)}")
    return costs


def derive(
    small: dict[str, Sequence[Run]] | dict[str, list[Run]],
    big: dict[str, Sequence[Run]] | dict[str, list[Run]],
    world: int,
    size: int,
    fold_ns: float,
) -> Costs:
    """Costs from runs of one fragment and of ``size`` bytes by ``world`` ranks of "xagg-udp" and, if it took part,
    "gloo". The least of all repetitions counts: everything else is what disturbed them. ``fold_ns``: the kernel's part of summing a contribution; what a server spends beside it is half receiving and
    half sending, as it sends as many results as it gets contributions.
    """
    rows = size / PAYLOAD_BYTES * world
    ours = big[_OURS]
    served = min(run.sample.served for run in ours) / rows * 1e9
    worker = min(run.sample.cpu - run.sample.served for run in ours) / rows * 1e9
    passing = max((served - fold_ns) / 2, 1.0)
    round_s = min([run.sample.seconds for run in small[_OURS]])
    default = Costs()
    ring_ns, step_s = default.ring_ns, default.step_s
    steps = 2 * (world - 1)
    if big.get(_RING):
        ring_ns = min([run.sample.cpu for run in big[_RING]]) / (rows * steps / world) * 1e9
        step_s = min([run.sample.seconds for run in small[_RING]]) / steps
    return Costs(
        worker_ns=worker,
        sum_ns=min(fold_ns, served) + passing,
        result_ns=passing,
        ring_ns=ring_ns,
        round_s=round_s,
        # a round is up and down through one server; another one on the way adds half of that on each
        hop_s=round_s / 2,
        step_s=step_s,
        measured=True,
    )
