"""XAgg's Figs. 6 to 11: the aggregator in the kernel, measured on this machine.

The paper measures with a packet generator and 100 Gbit/s cards. Here the program runs alone over packets that differ
(test runs), and between sockets over a virtual cable; processor time is that of the whole machine, sender included. These
are measurements: numbers differ from run to run, and a busy machine shows in them.
"""

import os
import time
from collections.abc import Callable
from itertools import pairwise

from inanet.bench import hop
from inanet.bench.measure import ticks
from inanet.bench.veth import Cable
from inanet.bench.xdp import (
    Children,
    Hop,
    available,
    in_kernel,
    kernel_hop,
    tcp_hop,
)
from inanet.bench.xdp_alone import SIZES, NotMeasured, program_alone
from inanet.bench.xdp_cores import kernel_losses, on_cores, tcp_retransmitted
from inanet.papers.claims import Claim, ratio, reduction
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.service.exits import Exit, Failure

#: MiB per child, seconds per path, samples of a latency, repetitions of a test run of which the shortest counts
MIB, SECONDS, SAMPLES, REPETITIONS = 16, 1.0, 1000, 9
#: Shares of the highest load at which the processors are looked at; losses beyond it as well.
LOADS = (0.25, 0.5, 0.75, 1.0)
BEYOND = 1.5
_FRAGMENTS = MIB * 1024
_TICK = 0.01
_ALONE = "The program alone: three of four packets add, the fourth adds and leaves; the paper's figures include the driver."
_CABLE = "Four senders, the aggregator and the receiver of the sums share this machine's processors; the paper counts one core."


class CompilerMissing(Failure):
    """Other packet sizes than the committed object's need a compiler."""

    code = Exit.MISSING


def _curve(fragments: int, repetitions: int) -> dict[int, float]:
    """Nanoseconds per packet by values."""
    available()
    try:
        found = program_alone(fragments, repetitions)
    except NotMeasured as reason:
        raise CompilerMissing(str(reason)) from None
    return {int(values): ns for values, ns in found.items()}


def fig6(fragments: int = 4096, repetitions: int = REPETITIONS) -> Outcome:
    """Packets per second of one core against values per packet."""
    mpps = {values: 1e3 / ns for values, ns in _curve(fragments, repetitions).items()}
    falls = all(mpps[small] > mpps[large] for small, large in pairwise(SIZES))
    claims = (
        Claim("million packets per second and core, 32 values", 4.19, mpps[32], ">="),
        Claim("million packets per second and core, 320 values", 1.11, mpps[320], ">="),
        Claim("the rate falls with every larger packet", 1, int(falls), "=="),
    )
    rows = tuple((values, rate, {32: 4.19, 320: 1.11}.get(values, "-")) for values, rate in mpps.items())
    return Outcome(
        claims,
        (Table("million packets per second and core", ("values", "here", "paper"), rows),),
        (Panel("packet rate", "values per packet", "Mpps", {"here": list(mpps.items())}),),
        (_ALONE,),
    )


def fig7(fragments: int = 4096, repetitions: int = REPETITIONS, seconds: float = SECONDS) -> Outcome:
    """Gradient throughput against values per packet; a hop of 256 values beside TCP."""
    gbps = {values: values * 32 / ns for values, ns in _curve(fragments, repetitions).items()}
    kernel = kernel_hop("generic", fragments, seconds, 2)
    tcp = tcp_hop(fragments, seconds, 2)
    claims = (
        Claim("Gbit/s of one core, 256 values", 13.03, gbps[256], ">="),
        Claim("Gbit/s over a cable, 256 values, sums sent", 13.03, kernel.gbps, ">="),
        Claim("times TCP-Agg", 3.3, ratio(kernel.gbps, tcp.gbps), ">="),
    )
    rows = tuple((values, rate, 13.03 if values == 256 else "-") for values, rate in gbps.items())
    paths = (("generic", kernel.gbps, 13.03), ("TCP-Agg, 1 KB messages", tcp.gbps, 4.12))
    return Outcome(
        claims,
        (
            Table("Gbit/s of gradient, the program alone", ("values", "here", "paper"), rows),
            Table("Gbit/s of gradient over a cable", ("path", "here", "paper"), paths),
        ),
        (Panel("throughput", "values per packet", "Gbit/s", {"here": list(gbps.items())}),),
        (_ALONE, _CABLE),
    )


def _cores_at(
    load: float, full: float, children: Children, again: Callable[[], None], seconds: float
) -> tuple[float, float]:
    """Gbit/s and busy processors when rounds start so often that ``load`` of the highest rate ``full`` comes in."""
    bits = hop.CHILDREN * children.fragments * 8192
    interval = bits / (full * load * 1e9)
    before, start = ticks(), time.perf_counter()
    rounds = 0
    while time.perf_counter() - start < seconds:
        again()
        children.round()
        rounds += 1
        time.sleep(max(0.0, start + rounds * interval - time.perf_counter()))
    elapsed, after = time.perf_counter() - start, ticks()
    busy = (after.total - after.idle) - (before.total - before.idle)
    return bits * rounds / elapsed / 1e9, busy * _TICK / elapsed


def fig8(fragments: int = 4096, repetitions: int = REPETITIONS, most: int = 10) -> Outcome:
    """Throughput of the program alone against cores, up to the paper's ten or as many as there are."""
    available()
    cores = sorted(os.sched_getaffinity(0))[:most]
    try:
        points = [(n, on_cores(cores[:n], fragments, repetitions)) for n in range(1, len(cores) + 1)]
    except NotMeasured as reason:
        raise CompilerMissing(str(reason)) from None
    one, last = points[0], points[-1]
    claims = [Claim("Gbit/s on 1 core", 13.0, one[1], ">=")]
    if len(points) > 1:
        claims += [
            Claim(f"Gbit/s on {last[0]} cores", min(13.0 * last[0], 99.5), last[1], ">="),
            Claim(f"times one core's, on {last[0]} cores", last[0], ratio(last[1], one[1]), "~", 0.15),
        ]
    rows = tuple((n, gbps, min(13.0 * n, 99.5)) for n, gbps in points)
    return Outcome(
        tuple(claims),
        (Table("Gbit/s of gradient, 256 values", ("cores", "here", "paper"), rows),),
        (Panel("throughput against cores", "cores", "Gbit/s", {"here": points}),),
        (
            _ALONE,
            "The paper gives 13 Gbit/s for one core and 99.5, its card's limit, for ten, and says that it grows linearly; "
            "TCP-Agg on several cores needs senders on others.",
        ),
    )


def fig9(fragments: int = _FRAGMENTS, seconds: float = SECONDS) -> Outcome:
    """Busy processors against throughput: the program works on demand."""
    available()
    full = kernel_hop("generic", fragments, seconds, 2)
    points = []
    with Cable() as cable, in_kernel(cable, fragments, "generic") as (memory, row):
        children = Children(cable, fragments)
        try:
            for load in LOADS:
                points.append(_cores_at(load, full.gbps, children, lambda: hop.reopen(memory, row), seconds))
        finally:
            children.close()
    tcp = tcp_hop(fragments, seconds, 2)
    low, high = points[0], points[-1]
    claims = (
        Claim(
            "processors busy at a quarter of the load, of those at full load",
            0.5,
            ratio(low[1], high[1]),
            "<=",
        ),
        Claim(
            "CPU seconds per GB of TCP-Agg over ours", 3.3, ratio(tcp.cpu_s_per_gb, full.cpu_s_per_gb), ">="
        ),
    )
    return Outcome(
        claims,
        (
            Table("load and processors", ("Gbit/s", "processors busy"), tuple(points)),
            Table(
                "CPU seconds per GB",
                ("path", "seconds"),
                (("generic", full.cpu_s_per_gb), ("TCP-Agg, 1 KB messages", tcp.cpu_s_per_gb)),
            ),
        ),
        (Panel("processors against load", "Gbit/s", "processors busy", {"generic": points}),),
        (
            _CABLE,
            "The paper gives curves; half at a quarter of the load is what is made of 'on demand' here.",
        ),
    )


def fig11(fragments: int = _FRAGMENTS, seconds: float = SECONDS) -> Outcome:
    """Contributions lost against throughput, nothing being sent again; TCP-Agg's retransmissions beside it."""
    available()
    full = kernel_hop("generic", fragments, seconds, 2)
    most = full.add_only["gbps"] if full.add_only is not None else full.gbps
    points = kernel_losses(fragments, (*LOADS, BEYOND), most, seconds)
    gbps, again = tcp_retransmitted(fragments, seconds)
    percent = [(at, 100 * share) for at, share in points]
    claims = (
        Claim("per cent lost at the highest load", 0.261, percent[-1][1], "<="),
        Claim(
            "per cent lost at three quarters of it and less, at most",
            0.261,
            max(lost for _, lost in percent[:3]),
            "<=",
        ),
        Claim(
            "per cent that TCP-Agg sends again, at least what is lost here", percent[-1][1], 100 * again, ">="
        ),
    )
    rows = (*(("generic", at, lost) for at, lost in percent), ("TCP-Agg, sent again", gbps, 100 * again))
    return Outcome(
        claims,
        (Table("lost", ("path", "Gbit/s", "per cent"), rows),),
        (Panel("loss against throughput", "Gbit/s", "per cent", {"generic": percent}),),
        (
            _CABLE,
            "A virtual cable has no ring of descriptors that runs over: a sender that shares the processors with the program is "
            "held up before anything is lost, as is TCP. The paper loses 0.261 and 1.5 per cent at 100 Gbit/s.",
        ),
    )


def fig10(fragments: int = 1024, samples: int = SAMPLES, seconds: float = 0.2) -> Outcome:
    """From the last contribution of a fragment until its sum is there."""
    available()
    paths: dict[str, Hop] = {
        "native": kernel_hop("native", fragments, seconds, samples),
        "generic": kernel_hop("generic", fragments, seconds, samples),
        "TCP-Agg": tcp_hop(fragments, seconds, samples),
    }
    tcp = paths["TCP-Agg"].latency
    claims = tuple(
        Claim(
            f"per cent below TCP-Agg, {mode}, {rank}",
            24.0,
            reduction(paths[mode].latency[rank], tcp[rank]),
            ">=",
        )
        for mode in ("native", "generic")
        for rank in ("p50", "p99")
    )
    rows = tuple((path, its.latency["p50"], its.latency["p99"]) for path, its in paths.items())
    return Outcome(
        claims,
        (Table("microseconds", ("path", "p50", "p99"), rows),),
        (),
        (
            _CABLE,
            "One fragment at a time on an idle cable; the paper's latencies are under 10 to 100 Gbit/s.",
        ),
    )
