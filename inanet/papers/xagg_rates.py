"""XAgg's Fig. 21: the aggregator's receiving bandwidth drops from 60 to 20 Gbit/s; what the worker sends, every 10 ms.

The negotiator is the one that the coordinator runs. Around it stands a port with a queue, which drops what it cannot
hold; the worker reports every period what it lost, and follows the grant a delay later. TCP beside it is Reno with one
loss event per round trip, and a timeout when most of a window is lost, after which it starts slowly again.
"""

from collections.abc import Sequence

from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.planning.rates import Capacity, Negotiator
from inanet.planning.topology import Topology

#: Gbit/s before and while the bandwidth is low, and seconds: length of a period, of the run, when it drops and returns.
WIDE, NARROW = 60.0, 20.0
PERIOD, LENGTH, DROPS, RETURNS = 0.01, 1.5, 0.3, 0.9
#: Gbit of a fragment on the wire, and of a receive ring of 1024 of them: where packets are lost (section VI-B).
FRAGMENT = 1094 * 8e-9
QUEUE = 1024 * FRAGMENT
#: Seconds from a loss to the new rate: the paper's own delay for an update.
UPDATE = 2e-3
#: Seconds of TCP's round trip, and its least retransmission timeout.
ROUND_TRIP, TIMEOUT = 1e-3, 0.2
_STEP = 1e-3


def bandwidth(now: float) -> float:
    """Gbit/s that the aggregator takes."""
    return NARROW if DROPS <= now < RETURNS else WIDE


class Port:
    """What arrives at a port with a queue, in steps of time."""

    def __init__(self) -> None:
        self._queued = 0.0

    def offer(self, gbit: float, now: float, step: float) -> float:
        """Take what comes in a step; returns what of it was dropped."""
        self._queued = max(0.0, self._queued + gbit - bandwidth(now) * step)
        dropped = max(0.0, self._queued - QUEUE)
        self._queued -= dropped
        return dropped


def negotiated() -> list[tuple[float, float]]:
    """(seconds, Gbit/s sent) of a worker under rate negotiation, by the period."""
    negotiator = Negotiator()
    for name in ("w", "ps"):
        negotiator.node(name, Capacity(WIDE * 1e9, WIDE * 1e9))
    fabric = Topology(roots=("ps",), workers={"w": ("ps",)})
    negotiator.plan(0, fabric.trees(["w"]))
    negotiator.ready(0, "w", 0)
    rate = _granted(negotiator)
    port = Port()
    trace = []
    steps, late = round(PERIOD / _STEP), round(UPDATE / _STEP)
    for period in range(round(LENGTH / PERIOD)):
        began, sent, lost = period * PERIOD, 0.0, 0.0
        for step in range(steps):
            if step == late:
                # the grant that follows from the last period's loss
                rate = _granted(negotiator)
            gbit = rate * _STEP
            sent += gbit
            lost += port.offer(gbit, began + step * _STEP, _STEP)
        negotiator.loss(0, "w", period + 1, round(sent / FRAGMENT), round(lost / FRAGMENT))
        trace.append((began, sent / PERIOD))
    return trace


def _granted(negotiator: Negotiator) -> float:
    """Gbit/s that the worker may send."""
    return next(rate for key, rate in negotiator.rates().items() if key[4] == "up") / 1e9


def reno() -> list[tuple[float, float]]:
    """(seconds, Gbit/s sent) of a TCP connection, by the period."""
    port = Port()
    window, threshold = WIDE * ROUND_TRIP, WIDE * ROUND_TRIP
    segment = 1448 * 8e-9
    idle = 0.0
    trace = []
    for period in range(round(LENGTH / PERIOD)):
        sent = 0.0
        for trip in range(round(PERIOD / ROUND_TRIP)):
            now = period * PERIOD + trip * ROUND_TRIP
            if now < idle:
                continue
            most = min(window, WIDE * ROUND_TRIP)
            dropped = port.offer(most, now, ROUND_TRIP)
            sent += most
            if dropped > most / 2:
                # too few duplicates come back: the timer has to find out
                threshold, window, idle = most / 2, segment, now + TIMEOUT
            elif dropped > 0:
                threshold = window = most / 2
            else:
                window = 2 * window if window < threshold else window + segment
        trace.append((period * PERIOD, sent / PERIOD))
    return trace


def _between(trace: Sequence[tuple[float, float]], begin: float, end: float) -> list[float]:
    return [rate for at, rate in trace if begin <= at < end - 1e-9]


def run() -> Outcome:
    """Both senders through the drop and the recovery."""
    ours, tcp = negotiated(), reno()
    settled = DROPS + 5 * PERIOD
    low = _between(ours, DROPS, RETURNS)
    steady = _between(ours, settled, RETURNS)
    back = _between(ours, RETURNS + 0.2, LENGTH)
    mean = sum(steady) / len(steady)
    claims = (
        Claim("least rate sent while the bandwidth is low, Gbit/s", NARROW / 2, min(low), ">="),
        Claim("mean rate from 50 ms after the drop, Gbit/s", NARROW, mean, "~", 0.1),
        Claim("largest swing of the rate in that time, Gbit/s", NARROW / 2, max(steady) - min(steady), "<="),
        Claim("mean rate from 200 ms after the return, Gbit/s", WIDE, sum(back) / len(back), "~", 0.05),
        Claim(
            "TCP's least rate after the drop, Gbit/s", 0.05 * NARROW, min(_between(tcp, DROPS, RETURNS)), "<="
        ),
    )
    moments = (DROPS - PERIOD, DROPS, DROPS + PERIOD, DROPS + 2 * PERIOD, settled, RETURNS, RETURNS + 0.2)
    periods = [round(at / PERIOD) for at in moments]
    rows = tuple((f"{ours[i][0]:.2f}", bandwidth(ours[i][0]), ours[i][1], tcp[i][1]) for i in periods)
    notes = (
        "The paper shows curves without numbers: that its rate falls smoothly and TCP's to zero. The numbers beside 'paper' "
        "are what is made of that here.",
        "A model of the port; the negotiator is the coordinator's own.",
    )
    return Outcome(
        claims,
        (Table("Gbit/s sent", ("seconds", "bandwidth", "negotiated", "TCP"), rows),),
        (Panel("a drop from 60 to 20 Gbit/s", "seconds", "Gbit/s sent", {"negotiated": ours, "TCP": tcp}),),
        notes,
    )
