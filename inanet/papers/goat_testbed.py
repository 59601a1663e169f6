"""GOAT's testbed (its Fig. 4) in virtual time: Fig. 5, 6, 8, 9 and 10, with the machines of the real fabric.

Three switches, one with the PS, workers in two halves under the others; rates, gradients and register files are divided by
one :data:`SCALE`, which leaves times as they are. Workers, switch programs and PS of every system are those that daemons run.

**What the paper leaves open.** Its communication takes a hundred times longer than its links need (0.36 s for 44 MB at
100 Gbit/s), so its hosts decide; here links do. How long workers compute, it does not say: its Fig. 8 and 9 together give
1.84 s for ResNet-18, about as long as Geryon communicates, which is what is assumed here. Workers are ready at different
times, normal with a deviation of 0.2 of that. *Communication time* is counted from when the last worker is ready: what comes
before is nobody's communication.

**Windows decide the baselines.** In GOAT's paper fast workers of ATP and ESA run ahead, find slots taken, and their fragments go
to the PS. With ATP's own window a worker has at most as many fragments in flight as there are slots: nobody runs ahead, nothing
collides, and the fast wait for the slow. Claims are judged against ATP and ESA as published, with their windows, their own
two levels (the switch of a rack, then that of the PS) and nothing lost. Fig. 10 has what reaches the PS without windows beside
them: what has come before anybody repeats anything, so without sums that wait for each other in two slots.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from inanet.papers.claims import Claim, ratio, reduction
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.planning.goat.publication import Memory, Publisher
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.stream import words_of
from inanet.sim.collaborative import PLAIN, SLOT_BYTES, Collaborative, Tree
from inanet.sim.link import LinkSpec
from inanet.wire.goat import VALUES

SCALE = 1000
RATE = 100e9 / SCALE
#: register bytes of a switch
MEMORY = 20_000_000 // SCALE
#: gradients in MB; those of ResNet-18 and -50 are the paper's, the others parameters times 4 B with 100 classes
MODELS: Mapping[str, float] = {
    "ResNet-18": 44.0,
    "ResNet-34": 85.3,
    "ResNet-50": 98.0,
    "DenseNet-121": 28.2,
    "DenseNet-169": 50.6,
    "DenseNet-201": 73.1,
}
WORKERS = (4, 8, 12, 16)
DEVIATION = 0.2
#: seconds that a worker computes: as long as Geryon's eight workers take to send ResNet-18
COMPUTE = 8 * 44e6 * 8 / 100e9
BATCH = 64
SEEDS = (1, 2)
#: layers, sent one after the other; ESA's priorities rise with them, as those near the input are sent last
LAYERS = 8
#: bytes that a 32-bit integer takes on the wire: sums are exact, in two halves
_INTEGER = 8
_SCHEMES: Mapping[str, str] = {"GOAT": "goat", "ESA": "esa", "ATP": "atp", "Geryon": PLAIN}
SCHEMES = tuple(_SCHEMES)
_LINK = LinkSpec(rate=RATE, delay=5e-6, grain=4)
#: nothing is lost, so nobody has to send twice because somebody else is late
_TIMING = Timing(retransmit=1.0, retransmit_max=2.0, silent=60.0)
#: and with everything under way at once, not because something else has been answered
_OPEN = replace(_TIMING, gap=1 << 20)
#: seconds after which nothing moves any more, and before anything is sent twice
_QUIET = 0.9
_PULL = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a number of workers, a scheme; ``windows``: whether ATP's and ESA's workers have one; a deviation of when
    workers are ready.
    """

    model: str
    workers: int
    scheme: str
    windows: bool = True
    deviation: float = DEVIATION


@dataclass(frozen=True, slots=True)
class Epoch:
    """Seconds of an iteration, of which ``communication`` after the last worker was ready, and bytes of gradients that
    reached the PS, at the paper's scale.
    """

    seconds: float
    communication: float
    at_ps: float


def tree(workers: int) -> Tree:
    """The testbed with so many workers, in two halves."""
    names = tuple(f"w{index}" for index in range(workers))
    below = {name: "s2" if 2 * index < workers else "s3" for index, name in enumerate(names)}
    return Tree({"s1": "ps", "s2": "s1", "s3": "s1", **below}, "ps", ("s1", "s2", "s3"), names)


def delays(workers: int, deviation: float, seed: int) -> list[float]:
    """Seconds until each worker is ready: normal, cut off at 0."""
    drawn = np.random.default_rng(seed).normal(1.0, deviation, workers)
    return [float(COMPUTE * value) for value in np.maximum(drawn, 0.0)]


def once(case: Case, seed: int) -> Epoch:
    """One iteration: everybody computes, sends all layers, and has all results."""
    testbed, system = tree(case.workers), _SCHEMES[case.scheme]
    values = round(MODELS[case.model] * 1e6 / SCALE / LAYERS / _INTEGER)
    spec = TensorSpec("t", "i32", (values,), "sum", ExponentMode.NONE)
    fragments = -(-words_of(make_format(spec, case.workers)) // VALUES)
    slots = MEMORY // SLOT_BYTES
    shares = case.windows and system in ("atp", "esa")
    lab = Collaborative(
        testbed,
        system,
        slots=slots,
        # fragments of ATP are two values shorter
        window=slots if shares else LAYERS * (fragments + fragments // 31 + 1),
        link=_LINK,
        timing=_TIMING if case.windows else _OPEN,
        seed=seed,
        pull_after=_PULL,
    )
    memory = dict.fromkeys(testbed.switches, slots)
    published = Publisher(
        1, testbed.parents, testbed.ps, testbed.switches, testbed.workers, memory, Memory(), seed=seed
    )
    ready = delays(case.workers, case.deviation, seed)
    names = [f"t{layer}" for layer in range(LAYERS)]
    plans = published.publish_all([(name, fragments if system == "goat" else 0) for name in names])
    for layer, plan in enumerate(plans):
        lab.add_tensor(layer, replace(spec, name=names[layer]), plan, priority=layer)
        lab.begin(layer, [np.zeros(values, np.int32) for _ in testbed.workers], ready)
    seconds = lab.run(deadline=60.0) if case.windows else lab.pass_time(_QUIET)
    width = next(iter(lab.workers.values())).layout.width
    return Epoch(seconds, seconds - max(ready), lab.packets_into_ps() * 4.0 * width * SCALE)


@cache
def epoch(case: Case) -> Epoch:
    """Means over :data:`SEEDS`."""
    found = [once(case, seed) for seed in SEEDS]
    return Epoch(
        statistics.fmean(one.seconds for one in found),
        statistics.fmean(one.communication for one in found),
        statistics.fmean(one.at_ps for one in found),
    )


def throughput(case: Case) -> float:
    """Samples per second."""
    return case.workers * BATCH / epoch(case).seconds


NOTES = (
    f"{len(SEEDS)} seeds; rates, gradients and memory divided by {SCALE}; times are those of 100 Gbit/s links, where an "
    "iteration of ResNet-18 is tens of milliseconds, not seconds: compare ratios.",
    "ATP and ESA as published: windows no larger than the slots, sums at the switch of a rack and again at the PS's.",
)
#: why claims against them do not hold
_WINDOW = (
    "With windows nobody runs ahead of the slots, nothing collides, and the PS's switch sums what the racks' have: one "
    "sum reaches the PS. GOAT sums each fragment at one switch, and has memory for every fragment at once or sends it on."
)
_GERYON = (
    "A fragment of which both racks have a sum reaches the PS twice, and one that no switch has memory for reaches it from "
    "every worker: GINA minimises bytes times links, not the PS's load."
)


def _cases(model: str, workers: int) -> dict[str, Case]:
    return {scheme: Case(model, workers, scheme) for scheme in SCHEMES}


def _claims(
    found: Mapping[str, float],
    paper: Mapping[str, float],
    what: str,
    *,
    times: bool,
    reason: str = _WINDOW,
) -> list[Claim]:
    """GOAT against each baseline: a ratio (``times``) or per cent below."""
    claims = []
    for scheme, least in paper.items():
        ours = ratio(found["GOAT"], found[scheme]) if times else reduction(found["GOAT"], found[scheme])
        why = "" if ours >= least else reason if scheme != "Geryon" else _GERYON
        unit = "ratio" if times else "per cent"
        claims.append(Claim(f"{what}{scheme}'s, {unit}", least, ours, ">=", reason=why))
    return claims


def models() -> Outcome:
    """Fig. 5: throughput of eight workers by model; the paper's text has numbers for DenseNet-121."""
    found = {model: {name: throughput(case) for name, case in _cases(model, 8).items()} for model in MODELS}
    rows = tuple((model, *(its[name] for name in SCHEMES)) for model, its in found.items())
    paper = {"ESA": 276 / 240, "ATP": 276 / 219, "Geryon": 276 / 180}
    claims = _claims(found["DenseNet-121"], paper, "DenseNet-121: throughput over ", times=True)
    first = sum(its["GOAT"] >= max(its.values()) for its in found.values())
    why = "" if first == len(MODELS) else _WINDOW
    claims.append(
        Claim("models in which GOAT has the highest throughput", len(MODELS), first, "==", reason=why)
    )
    series = {scheme: [(model, its[scheme]) for model, its in found.items()] for scheme in SCHEMES}
    return Outcome(
        tuple(claims),
        (Table("samples per second, 8 workers", ("model", *SCHEMES), rows),),
        (Panel("8 workers", "model", "samples per second", series),),
        NOTES,
    )


def _growth(
    value: Callable[[Case], float], unit: str
) -> tuple[dict[tuple[str, int], dict[str, float]], tuple[Table, ...], tuple[Panel, ...]]:
    """A figure against the number of workers, for the paper's two models."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    tables, panels = [], []
    for model in ("ResNet-18", "ResNet-50"):
        rows = []
        for workers in WORKERS:
            its = {name: value(case) for name, case in _cases(model, workers).items()}
            found[model, workers] = its
            rows.append((workers, *(its[name] for name in SCHEMES)))
        tables.append(Table(f"{model}: {unit}", ("workers", *SCHEMES), tuple(rows)))
        series = {
            scheme: [(workers, found[model, workers][scheme]) for workers in WORKERS] for scheme in SCHEMES
        }
        panels.append(Panel(model, "workers", unit, series))
    return found, tuple(tables), tuple(panels)


def growth() -> Outcome:
    """Fig. 6: throughput against workers."""
    found, tables, panels = _growth(throughput, "samples per second")
    paper = {"ESA": 931 / 585, "ATP": 931 / 512, "Geryon": 931 / 465}
    claims = _claims(found["ResNet-18", 16], paper, "ResNet-18, 16 workers: throughput over ", times=True)
    return Outcome(tuple(claims), tables, panels, NOTES)


def epochs() -> Outcome:
    """Fig. 8: time of an iteration against workers."""
    found, tables, panels = _growth(lambda case: 1e3 * epoch(case).seconds, "milliseconds of an iteration")
    paper = {"ESA": 37.14, "ATP": 45.0, "Geryon": 52.7}
    claims = _claims(found["ResNet-18", 16], paper, "ResNet-18, 16 workers: iteration below ", times=False)
    return Outcome(tuple(claims), tables, panels, NOTES)


def communication() -> Outcome:
    """Fig. 9: time of communication against workers."""
    found, tables, panels = _growth(
        lambda case: 1e3 * epoch(case).communication, "milliseconds after the last worker was ready"
    )
    paper = {
        "ESA": reduction(0.36, 1.34),
        "ATP": reduction(0.36, 1.64),
        "Geryon": reduction(0.36, 1.95),
    }
    claims = _claims(
        found["ResNet-18", 16], paper, "ResNet-18, 16 workers: communication below ", times=False
    )
    return Outcome(tuple(claims), tables, panels, NOTES)


def at_the_ps() -> Outcome:
    """Fig. 10: what reaches the PS in an iteration."""
    found, tables, panels = _growth(lambda case: epoch(case).at_ps / 1e6, "MB of gradients into the PS")
    rows, free = [], {"GOAT": found["ResNet-18", 16]["GOAT"]}
    for model, workers in found:
        its = {
            scheme: epoch(Case(model, workers, scheme, windows=False)).at_ps / 1e6
            for scheme in ("ESA", "ATP")
        }
        rows.append((model, workers, found[model, workers]["GOAT"], *its.values()))
        if (model, workers) == ("ResNet-18", 16):
            free |= its
    table = Table("without windows", ("model", "workers", "GOAT", "ESA", "ATP"), tuple(rows))
    paper = {"ESA": 73.6, "ATP": 77.8, "Geryon": 93.8}
    claims = _claims(
        found["ResNet-18", 16], paper, "ResNet-18, 16 workers: bytes into the PS below ", times=False
    )
    claims += _claims(
        free,
        {scheme: paper[scheme] for scheme in ("ESA", "ATP")},
        "ResNet-18, 16 workers, no windows: bytes into the PS below ",
        times=False,
        reason=_GERYON,
    )
    return Outcome(tuple(claims), (*tables, table), panels, NOTES)
