"""XAgg's Fig. 1: one slow link and one late worker, under a PS, a programmable switch, and servers that aggregate.

Four workers with gradients of 10 Gbit; everybody has 10 Gbit/s but W2, who has 5; W3 is two seconds late. Told is when the
PS (or the switch) has the whole sum. The arithmetic is a fluid one; beside it the real machines run on a simulated
network, sizes and rates divided by 1,000, which leaves times as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.switchml.worker import switchml_worker
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.worker import Membership
from inanet.sim.fabric import SimulatedFabric
from inanet.sim.link import UDP_OVERHEAD, LinkSpec
from inanet.sim.network import Network
from inanet.testing.fabric import float_arrays
from inanet.wire.endpoint import endpoint
from inanet.wire.switchml import frame_bytes
from inanet.wire.xagg import ROW_BYTES, VALUES

WORKERS = ("w1", "w2", "w3", "w4")
#: Gbit, and Gbit/s
GRADIENT, RATE, SLOW = 10.0, 10.0, 5.0
#: Seconds that W3 is late.
LATE = 2.0
#: What sizes and rates are divided by in the simulation.
SCALE = 1000
#: Fragments that each neighbour may have in flight. With few of them (64 and less) a fast worker's packets fill the queue
#: in front of S1, the slow one's window waits behind them, and XAgg takes 3.2 s instead of 3.0.
WINDOW = 512
_BITS = GRADIENT * 1e9 / SCALE
_LINK = LinkSpec(rate=RATE * 1e9 / SCALE, grain=8)
_SLOW_LINK = LinkSpec(rate=SLOW * 1e9 / SCALE, grain=8)


@dataclass(frozen=True, slots=True)
class Flow:
    """``size`` Gbit from time ``begin``, at ``limit`` Gbit/s at most."""

    begin: float
    size: float
    limit: float


def shared(flows: Mapping[str, Flow], capacity: float) -> dict[str, float]:
    """When each flow ends if a port of ``capacity`` Gbit/s is shared max-min fairly by those that are under way."""
    left = {name: flow.size for name, flow in flows.items()}
    ends: dict[str, float] = {}
    now = 0.0
    while len(ends) < len(flows):
        running = [name for name, flow in flows.items() if flow.begin <= now and name not in ends]
        rates = _fair({name: flows[name].limit for name in running}, capacity)
        coming = [flow.begin for flow in flows.values() if flow.begin > now]
        until = min([now + left[name] / rates[name] for name in running] + coming)
        for name in running:
            left[name] -= rates[name] * (until - now)
            if left[name] <= 1e-12 * flows[name].size:
                ends[name] = until
        now = until
    return ends


def _fair(limits: Mapping[str, float], capacity: float) -> dict[str, float]:
    rates: dict[str, float] = {}
    for name in sorted(limits, key=lambda its: limits[its]):
        share = (capacity - sum(rates.values())) / (len(limits) - len(rates))
        rates[name] = min(limits[name], share)
    return rates


def arithmetic() -> dict[str, float]:
    """Seconds until everything is summed, by scheme."""
    begin = {name: LATE if name == "w3" else 0.0 for name in WORKERS}
    limit = {name: SLOW if name == "w2" else RATE for name in WORKERS}
    direct = shared({name: Flow(begin[name], GRADIENT, limit[name]) for name in WORKERS}, RATE)
    # without room for a gradient the switch sums in step: from the last one's begin, at the slowest one's rate
    switch = max(begin.values()) + GRADIENT / min(limit.values())
    # S1 sums W1 and W2 and passes the sum on as it comes
    through = {
        "s1": Flow(0.0, GRADIENT, min(limit["w1"], limit["w2"])),
        "w3": Flow(begin["w3"], GRADIENT, limit["w3"]),
        "w4": Flow(begin["w4"], GRADIENT, limit["w4"]),
    }
    return {
        "PS": max(direct.values()),
        "programmable switch": switch,
        "XAgg": max(shared(through, RATE).values()),
    }


def simulate_tree(parents: Mapping[str, str | None]) -> float:
    """Seconds until the root of XAgg's machines has the whole sum."""
    fragments = round(_BITS / 8 / (ROW_BYTES + UDP_OVERHEAD))
    fabric = SimulatedFabric(
        parents,
        {name: [rank] for rank, name in enumerate(WORKERS)},
        link=_LINK,
        links={"w2": _SLOW_LINK},
        capacity=fragments,
        window=WINDOW,
        # links that are a thousand times slower: what waits for packets waits longer
        timing=Timing(reorder=0.05, retransmit=0.5, retransmit_max=2.0, silent=60.0),
        downlink="multicast",
    )
    spec = TensorSpec("gradient", "f32", (fragments * VALUES,), "sum", ExponentMode.FIXED, 1e6)
    arrays = float_arrays(fragments * VALUES, len(WORKERS))
    began = fabric.network.now
    fabric.begin(spec, arrays, [name for name in WORKERS if name != "w3"])
    fabric.network.at(began + LATE, lambda: _begin_late(fabric, spec, arrays))
    root = fabric.plans.nodes["ps"]
    fabric.network.run(lambda: root.stats()["fragments_completed"] == fragments, deadline=60.0)
    return fabric.network.now - began


def _begin_late(fabric: SimulatedFabric, spec: TensorSpec, arrays: dict[int, np.ndarray]) -> None:
    fabric.begin(spec, arrays, ["w3"])


def simulate_switch(pool: int = 32) -> float:
    """Seconds until SwitchML's slots have summed everything; ``pool`` of them, far fewer than there are fragments."""
    switch = endpoint("10.0.0.254", 0xBEE0)
    addresses = {name: endpoint(f"10.0.0.{number}", 4000) for number, name in enumerate(WORKERS, 1)}
    members = {address: 1 << index for index, address in enumerate(addresses.values())}
    program, network = SwitchMLProgram(values=256, age=60.0), Network()
    program.add_job(Tenant(1, members, 1, slots=pool))
    network.add_switch("switch", program, switch).groups[1] = tuple(members)
    # exact sums of int32 travel in two halves
    elements = round(_BITS / 8 / (frame_bytes(256) + UDP_OVERHEAD)) * 256 // 2
    spec = TensorSpec("gradient", "i32", (elements,), "sum", ExponentMode.NONE)
    machines = {}
    for index, (name, address) in enumerate(addresses.items()):
        timing = Timing(retransmit=1.0, retransmit_max=4.0, silent=60.0)
        machine = switchml_worker(
            Membership(1, index, len(WORKERS), len(WORKERS), switch), pool, timing=timing
        )
        machine.add_tensor(0, spec)
        network.add_host(name, address, machine, send_buffer=4 << 10)
        network.connect(name, "switch", _SLOW_LINK if name == "w2" else _LINK)
        machines[name] = machine

    def begin(name: str) -> None:
        machines[name].begin(0, 1, [np.ones(elements, np.int32)], network.now)
        network.wake(name)

    for name in WORKERS:
        network.at(LATE if name == "w3" else 0.0, partial(begin, name))
    fragments = elements * 2 // 256
    network.run(lambda: program.stats()["completed"] == fragments, deadline=60.0)
    return network.now


def run() -> Outcome:
    """The three schemes of the figure, by arithmetic and by simulation."""
    direct: dict[str, str | None] = {"ps": None, **dict.fromkeys(WORKERS, "ps")}
    tree = direct | {"s1": "ps", "w1": "s1", "w2": "s1"}
    computed = arithmetic()
    simulated = {
        "PS": simulate_tree(direct),
        "programmable switch": simulate_switch(),
        "XAgg": simulate_tree(tree),
    }
    paper = {"PS": 4.0, "programmable switch": 4.0, "XAgg": 3.0}
    claims = [Claim(f"{name}: seconds, arithmetic", paper[name], computed[name], "~", 1e-9) for name in paper]
    claims += [
        Claim(f"{name}: seconds, simulated", paper[name], simulated[name], "~", 0.05) for name in paper
    ]
    rows = tuple((name, paper[name], computed[name], simulated[name]) for name in paper)
    notes = (
        f"Simulated with the machines that the daemons run, sizes and rates divided by {SCALE}; the switch runs SwitchML.",
    )
    panel = Panel(
        "until everything is summed",
        "scheme",
        "seconds",
        {
            "paper": list(paper.items()),
            "arithmetic": list(computed.items()),
            "simulated": list(simulated.items()),
        },
    )
    return Outcome(
        tuple(claims),
        (Table("seconds", ("scheme", "paper", "arithmetic", "simulated"), rows),),
        (panel,),
        notes,
    )
