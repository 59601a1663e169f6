"""XAgg's Figs. 13 to 15: seven workers, two servers and a PS (Fig. 12), rates divided by a hundred, models at their sizes.

The smaller models, and in an entry of their own the larger ones, run in a lab made for the entry (``xagg-fig12``, root): XAgg's daemons, TCP-Agg in the same tree, a ring
(Gloo, for NCCL), a PS that streams over TCP (for BytePS), and a switch that sums synchronously from 128 KB of slots of every
worker, which stands for SwitchML. The planner's model has all of them; where both are there, the report compares them. The paper tells times of epochs of some sixteen steps, so what is compared is how schemes stand to XAgg.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from inanet.bench import bounds, contestants  # noqa: F401  registers them
from inanet.bench.labs import LabStage, lab_stage
from inanet.bench.measure import median
from inanet.bench.peers.rank import Team
from inanet.bench.registry import Peer, peers
from inanet.bench.runs import DEADLINE, started
from inanet.bench.stage import Stage
from inanet.bench.trees import tcp_tree
from inanet.lab.library import topology as find
from inanet.lab.model import Host, HostLink, Topology
from inanet.lab.network import configured, fleet
from inanet.papers.claims import Claim, ratio, reduction
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.planning.candidates import Fleet
from inanet.planning.costs import Costs
from inanet.planning.costs import load as load_costs
from inanet.planning.fluid import finish, streams
from inanet.planning.plans import Plan, star
from inanet.planning.prices import SEGMENT, price
from inanet.service.exits import Exit, Failure

#: The five models, MB; those that run in the lab side by side and those that run one scheme after the other, since what
#: seven workers of five schemes hold of them is more memory than a machine has; and the one that the paper gives numbers of.
MODELS = {"Inception-V3": 25, "ResNet50": 97, "AlexNet": 233, "VGG16": 528, "BERT-LSTM": 542}
RUN = ("Inception-V3", "ResNet50")
LARGE = ("AlexNet", "VGG16", "BERT-LSTM")
TOLD = "ResNet50"
REPETITIONS = 3
#: Schemes, and who stands for them in the lab, beside TCP-Agg in a tree.
XAGG, TCP_AGG, SWITCHML, RING, PS = "XAgg", "TCP-Agg", "SwitchML", "ring (NCCL)", "PS (BytePS)"
STANDS_FOR = {XAGG: "xagg-udp-multicast", SWITCHML: "switch-sync", RING: "gloo", PS: "tcp-agg"}
OTHERS = (TCP_AGG, SWITCHML, RING, PS)
#: Seconds per epoch of ResNet50 (Fig. 13), of VGG16 in all of 200 epochs (Fig. 19), and workers' peaks in Gbit/s (Fig. 15).
PAPER_SECONDS = {XAGG: 0.31, TCP_AGG: 0.61, SWITCHML: 1.66, RING: 1.03, PS: 0.93}
PAPER_TRAINING = {XAGG: 1116.0, TCP_AGG: 1334.0, SWITCHML: 1688.0, RING: 1622.0, PS: 1530.0}
PAPER_PEAK = {XAGG: 45.7, TCP_AGG: 16.6, SWITCHML: 11.6, RING: 14.6, PS: 16.0}
#: What rates are divided by, the switch's own link, which is none in truth, and seconds between two looks at a worker's link.
SCALE = 100
_SWITCH_LINK = "20 Gbit/s"
_GLANCE = 0.1
#: What connections and kernels are warmed up with.
_WARM_BYTES = 1 << 20
_WATCHED = ("slow0", "fast0", "w7")
_SWITCH = "tofino"
_SCALED = f"Rates are the paper's divided by {SCALE}, and seven workers share this machine's processors."
_WHY = {
    TCP_AGG: "on scaled links both are bound by the same port of the PS: what the paper's gain comes from, processor time per "
    "byte at 100 Gbit/s, is in xagg-fig7 and fig9",
    SWITCHML: "the switch of this model waits for the slowest worker's link and for nothing else; the paper's workers got "
    "11.6 of 40 Gbit/s out of it",
    RING: "two of seven links in a row are not slower here than the paper's NCCL was: 2(n - 1)/n tensors through 400 Mbit/s",
    PS: "seven tensors into one port, against three",
}


@dataclass(slots=True)
class Measured:
    """One scheme and model in the lab: seconds of every repetition, and the highest rates out of a worker, bits per second."""

    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)


Found = Mapping[str, Mapping[str, Measured]]


def testbed() -> Topology:
    """Fig. 12 with the switch that SwitchML has, as a host whose link is no limit."""
    plain = find("xagg-fig12")
    switch = Host(name=_SWITCH, role="idle", switch="sw", link=HostLink(rate=_SWITCH_LINK))  # type: ignore[arg-type]
    return plain.model_copy(update={"host": (*plain.host, switch)})


def _tcp_tree(stage: Stage) -> Team:
    assert isinstance(stage, LabStage)
    (tree,) = configured(stage.topology)
    return tcp_tree("tcp-tree", stage, tree)


def taking_part() -> dict[str, Peer]:
    """Contestants by scheme. Raises :class:`inanet.service.exits.Failure` if one is not installed."""
    known = {peer.name: peer for peer in (*peers("star"), *peers("hetero"))}
    found = {scheme: known[name] for scheme, name in STANDS_FOR.items()}
    found[TCP_AGG] = Peer("tcp-tree", (), _tcp_tree, "tree")
    for peer in found.values():
        if lacking := peer.lacking():
            failure = Failure(f"{peer.name} cannot take part: {lacking}")
            failure.code = Exit.MISSING
            raise failure
    return found


@contextmanager
def watching(sent: Callable[[str], int], hosts: Sequence[str], peaks: list[float]) -> Iterator[None]:
    """Note, at the end of the block, the highest rate in bits per second at which one of ``hosts`` sent in between."""
    over = threading.Event()
    best = [0.0]

    def watch() -> None:
        before = {host: sent(host) for host in hosts}
        while not over.wait(_GLANCE):
            now = {host: sent(host) for host in hosts}
            best[0] = max([best[0], *((now[host] - before[host]) * 8 / _GLANCE for host in hosts)])
            before = now

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        peaks.append(best[0])


def measure(models: Sequence[str], repetitions: int = REPETITIONS) -> Found:
    """Every scheme that runs, by model: all alive at once, one all-reduce of each in turn. Needs root."""
    who = taking_part()
    found: dict[str, dict[str, Measured]] = {
        model: {scheme: Measured() for scheme in who} for model in models
    }
    with lab_stage(testbed()) as stage, started(list(who.values()), stage) as teams:
        for model in models:
            for repetition in range(repetitions + 1):
                for scheme, peer in who.items():
                    mine = found[model][scheme] if repetition else Measured()
                    _reduce(stage, teams[peer.name], model, mine)
    return found


def measure_alone(models: Sequence[str]) -> Found:
    """The same with a lab for every scheme and model, and one all-reduce in it, after a small one. Needs root."""
    found: dict[str, dict[str, Measured]] = {model: {} for model in models}
    for scheme, peer in taking_part().items():
        for model in models:
            mine = found[model][scheme] = Measured()
            with lab_stage(testbed()) as stage, started([peer], stage) as teams:
                teams[peer.name].run(_WARM_BYTES, DEADLINE)
                _reduce(stage, teams[peer.name], model, mine)
    return found


def _reduce(stage: LabStage, team: Team, model: str, mine: Measured) -> None:
    """One all-reduce of a model."""
    with watching(lambda host: _sent(stage, host), _WATCHED, mine.peaks):
        sample = team.run(MODELS[model] * 10**6, DEADLINE)
    mine.seconds.append(sample.seconds)


def _sent(stage: LabStage, host: str) -> int:
    shape = stage.lab.uplink(host)
    return 0 if shape is None else shape.sent_bytes


def modelled(model: str, costs: Costs, cores: int | None) -> dict[str, float]:
    """Seconds of an all-reduce by scheme, by the planner's model; all hosts share ``cores``."""
    size = MODELS[model] * 10**6
    topology = find("xagg-fig12")
    hosts = fleet(topology, size, shared_cores=cores)
    tree = Plan("configured", "as configured", hosts.configured, "multicast")
    by_tcp = replace(tree, downlink="unicast")
    flat = Plan("ps", "PS", (star(0, topology.roots()[0], hosts.workers),))
    return {
        XAGG: price(tree, hosts, size, costs).seconds,
        TCP_AGG: _over_tcp(by_tcp, hosts, size),
        SWITCHML: bounds.synchronous(topology, size),
        RING: price(Plan("ring", "ring"), hosts, size, costs).seconds,
        PS: _over_tcp(flat, hosts, size),
    }


def _over_tcp(plan: Plan, hosts: Fleet, size: int) -> float:
    """What links need for a plan whose tensors go over TCP; sums leave while contributions come."""
    return finish(streams(plan, hosts.network, size * SEGMENT, hosts.late), hosts.network.limits())


def _seconds(found: Found, model: str, predicted: Mapping[str, float], scheme: str) -> float:
    """Measured where it was, else modelled."""
    mine = found.get(model, {}).get(scheme)
    return median(mine.seconds) if mine is not None else predicted[scheme]


def fig13(models: Sequence[str] = RUN) -> Outcome:
    """Communication time by scheme and model."""
    costs, cores = load_costs(), os.cpu_count()
    found = measure(models)
    predicted = {model: modelled(model, costs, cores) for model in MODELS}
    seconds = {
        model: {scheme: _seconds(found, model, predicted[model], scheme) for scheme in predicted[model]}
        for model in MODELS
    }
    claims = [
        _below(
            f"per cent below {scheme}, {TOLD}",
            reduction(PAPER_SECONDS[XAGG], PAPER_SECONDS[scheme]),
            seconds[TOLD],
            scheme,
        )
        for scheme in OTHERS
    ]
    claims += _compared(seconds)
    claims += _as_modelled(found, predicted)
    return _shown(found, predicted, seconds, claims, costs)


def fig13_large(models: Sequence[str] = LARGE) -> Outcome:
    """The same for the larger models, all of them measured."""
    costs, cores = load_costs(), os.cpu_count()
    found = measure_alone(models)
    predicted = {model: modelled(model, costs, cores) for model in models}
    seconds = {
        model: {scheme: _seconds(found, model, predicted[model], scheme) for scheme in predicted[model]}
        for model in models
    }
    claims = [*_compared(seconds), *_as_modelled(found, predicted)]
    return _shown(found, predicted, seconds, claims, costs)


def _compared(seconds: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    """XAgg beside every other scheme."""
    return [
        Claim(
            f"times {scheme}'s time, {model}",
            1.0,
            ratio(its[XAGG], its[scheme]),
            "<=",
            reason=_why(its, scheme),
        )
        for model, its in seconds.items()
        for scheme in OTHERS
    ]


def _as_modelled(found: Found, predicted: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    """What was measured beside the planner's model."""
    return [
        Claim(
            f"{scheme}, {model}: measured over modelled",
            1.0,
            ratio(median(mine.seconds), predicted[model][scheme]),
            "~",
            0.15,
        )
        for model, its in found.items()
        for scheme, mine in its.items()
    ]


def _shown(
    found: Found,
    predicted: Mapping[str, Mapping[str, float]],
    seconds: Mapping[str, Mapping[str, float]],
    claims: Sequence[Claim],
    costs: Costs,
) -> Outcome:
    """Fig. 13 as a table and as bars."""
    rows = tuple(
        (
            model,
            scheme,
            median(found[model][scheme].seconds) if scheme in found.get(model, {}) else "-",
            predicted[model][scheme],
            PAPER_SECONDS[scheme] if model == TOLD else "-",
        )
        for model in predicted
        for scheme in predicted[model]
    )
    columns = ("model", "scheme", "measured s", "modelled s", "paper s per epoch")
    bars = {scheme: [(model, its[scheme]) for model, its in seconds.items()] for scheme in PAPER_SECONDS}
    return Outcome(
        tuple(claims),
        (Table("communication of a step, seconds", columns, rows),),
        (Panel("communication of a step", "model", "seconds", bars),),
        (
            _SCALED,
            "Costs of processors are measured."
            if costs.measured
            else "Costs of processors are the defaults: 'ina plan --calibrate' measures them.",
        ),
    )


def _below(name: str, paper: float, seconds: Mapping[str, float], scheme: str) -> Claim:
    ours = reduction(seconds[XAGG], seconds[scheme])
    return Claim(name, paper, ours, ">=", 0.1, "" if ours >= 0.9 * paper else _WHY[scheme])


def _why(seconds: Mapping[str, float], scheme: str) -> str:
    return "" if seconds[XAGG] <= seconds[scheme] else _WHY[scheme]


def fig14(models: Sequence[str] = (TOLD,)) -> Outcome:
    """Time of an epoch of VGG16: the paper's computing, and communication as schemes stand to XAgg here."""
    found = measure(models)
    predicted = {model: modelled(model, load_costs(), os.cpu_count()) for model in (TOLD, "VGG16")}
    # by the paper: an epoch under XAgg, and what of it is communication, which grows with the model
    epoch = PAPER_TRAINING[XAGG] / 200
    communication = PAPER_SECONDS[XAGG] * MODELS["VGG16"] / MODELS[TOLD]
    computing = epoch - communication
    told = {scheme: _seconds(found, TOLD, predicted[TOLD], scheme) for scheme in PAPER_SECONDS}
    ours = {scheme: computing + communication * told[scheme] / told[XAGG] for scheme in told}
    claims = tuple(
        _below(
            f"per cent below {scheme}'s epoch, VGG16",
            reduction(PAPER_TRAINING[XAGG], PAPER_TRAINING[scheme]),
            ours,
            scheme,
        )
        for scheme in OTHERS
    )
    rows = tuple((scheme, PAPER_TRAINING[scheme] / 200, ours[scheme]) for scheme in PAPER_TRAINING)
    return Outcome(
        claims,
        (Table("seconds of an epoch, VGG16", ("scheme", "paper", "here"), rows),),
        (
            Panel(
                "an epoch of VGG16",
                "scheme",
                "seconds",
                {"paper": [r[:2] for r in rows], "here": [(r[0], r[2]) for r in rows]},
            ),
        ),
        (
            _SCALED,
            f"A timing model: {computing:.2f} s of computing follow from the paper's times of VGG16 under XAgg and of "
            f"{TOLD}'s communication; how schemes stand to XAgg is measured with {TOLD}.",
        ),
    )


def fig15(models: Sequence[str] = (TOLD,)) -> Outcome:
    """The highest rate out of a worker."""
    found = measure(models)[TOLD]
    peaks = {scheme: max(mine.peaks) / 1e9 * SCALE for scheme, mine in found.items()}
    claims = [
        Claim(
            f"times the peak of {scheme}, {TOLD}",
            PAPER_PEAK[XAGG] / PAPER_PEAK[scheme],
            ratio(peaks[XAGG], peaks[scheme]),
            ">=",
            0.1,
            "peaks are of tenths of a second, in which a burst of TCP fills a link as well",
        )
        for scheme in peaks
        if scheme != XAGG
    ]
    rows = tuple((scheme, PAPER_PEAK[scheme], peaks.get(scheme, "-")) for scheme in PAPER_PEAK)
    return Outcome(
        (
            Claim(f"Gbit/s at most out of a worker, times {SCALE}", PAPER_PEAK[XAGG], peaks[XAGG], ">="),
            *claims,
        ),
        (Table(f"peak out of a worker, Gbit/s times {SCALE}", ("scheme", "paper", "here"), rows),),
        (
            Panel(
                "peak out of a worker",
                "scheme",
                "Gbit/s",
                {"here": list(peaks.items()), "paper": list(PAPER_PEAK.items())},
            ),
        ),
        (
            _SCALED,
            f"Bytes on the wire of {', '.join(_WATCHED)} in windows of {_GLANCE:g} s.",
        ),
    )
