"""A2TP's Fig. 2 on the real daemons: two jobs in a star of namespaces, one of them with a slow worker.

Eight hosts and a PS around ``ina-switch``, which is the star's switch: its ports forward, and its programs sum. Jobs come from
the coordinator and loop over rounds in processes of their own. A host's link sends what stands for the 53 Gbit/s of the
testbed's hosts, the last worker's of B the 13 Gbit/s that background traffic leaves there; the port to the PS has the ratio
of 100 to 53, twice, since one PS serves both jobs. Occupancy is what the switch daemon has sampled.

Two processors run eighteen daemons and ranks, so round trips are milliseconds where the testbed's are microseconds. The rate is
the first of some at which processors have time to spare while both jobs run: what they did is in the outcome, for otherwise
it is them that would be measured.
"""

import json
import socket
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from inanet.bench.measure import idle_share, ticks
from inanet.bench.peers.rank import cpu_seconds
from inanet.config.daemons import Role
from inanet.lab import credentials, namespaces
from inanet.lab.fabric import LabFabric, unix_configurations
from inanet.lab.layout import ports, switch_addresses
from inanet.lab.model import Host, HostLink, Switch, Topology
from inanet.lab.session import Lab
from inanet.launch.process import python, python_environment
from inanet.papers.a2tp_testbed import HOST, LINE, STRAGGLER, WORKERS, A, B
from inanet.papers.claims import Claim, ratio, reduction
from inanet.papers.outcome import Outcome, Panel, Table

#: Bits per second that a host's link carries, headers counted: the first at which processors still have time to spare.
RATES = (20_000_000, 10_000_000, 5_000_000)
#: As many as a worker may have in flight, which two jobs share; and the receive buffer that grants such a window. Larger windows
#: would wait at their own host, which A2TP could not tell from a straggler.
SLOTS, BUFFER = 64, "96 KiB"
#: Bytes of a packet on the wire: Ethernet, IPv4 and UDP around ATP's or A2TP's.
PACKET = 14 + 20 + 8 + 275
#: The switch leaves a port alone for this share of the time that all slots take on a host's link. Packets wait there twice in a
#: round trip, so that the slots are one bandwidth-delay product, as the testbed's are; and batches are large, which is what
#: makes processors keep up.
PAUSE = 0.6
#: Register bytes of a slot: ATP's and A2TP's 62 values, and SwitchML's two sets of 64, each with what stands beside them.
_SLOT, _PAIR = 62 * 4 + 24, 2 * (64 * 4 + 24)
#: Bytes in the queue to the PS from which fragments are marked, a little more than a window of sums, because these come in one
#: burst here; and the queue's depth.
ECN, DEPTH = 20_000, 1 << 20
#: Seconds that a round takes at a host's full rate.
ROUND = 0.15
#: Seconds: A alone, with B, alone again; not counted after every change; between two samples of the switch.
ALONE, BOTH, AFTER, SETTLED, SAMPLE = 3.0, 6.0, 2.0, 1.0, 0.05
NAMES = {A: "A", B: "B"}
#: where nobody listens (RFC 863)
_DISCARD = 9


def elements_of(rate: int) -> int:
    """float32 of a round of :data:`ROUND` seconds; each travels as an int32."""
    return round(rate * ROUND * 248 / PACKET / 32)


def topology(rate: int = RATES[0], workers: int = WORKERS) -> Topology:
    """The star: workers of A, then of B, and the PS; only what a host sends is limited, the last worker of B most."""
    slow = round(rate * STRAGGLER / HOST)
    hosts = [
        Host(
            name=f"{NAMES[job].lower()}{index}",
            role="worker",
            switch="s0",
            link=HostLink.model_construct(up=slow if job == B and index == workers - 1 else rate),
        )
        for job in NAMES
        for index in range(workers)
    ]
    ps = Host(name="ps", role="ps", switch="s0")
    return Topology(
        name="a2tp-fig2",
        summary="two jobs and a PS around ina-switch",
        switch=(Switch(name="s0", kind="ina"),),
        host=(ps, *hosts),
    )


class Testbed(LabFabric):
    """The daemons in a lab of :func:`topology` while the ``with`` block lasts.

    The control plane is a Unix socket: the switch has no address of its own on the wires, and its frames are the data's.
    """

    def __init__(self, lab: Lab, system: str, rate: int = RATES[0]) -> None:
        self.system = system
        self._rate = rate
        roles: dict[str, Role] = {"ps": "ps", "s0": "switch"}
        roles |= dict.fromkeys((host.name for host in lab.topology.workers()), "worker")

        def texts(directory: Path) -> dict[str, str]:
            credentials.prepare(directory, roles, insecure=True)
            return unix_configurations(lab, directory, roles, self._sections)

        super().__init__(lab, roles, texts)

    def __enter__(self) -> Self:
        super().__enter__()
        self._introduce()
        return self

    def _introduce(self) -> None:
        """Have every host send a packet to the PS and the PS to it, so that the switch knows where all of them are."""

        def greet(address: str) -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
                channel.sendto(b"", (address, _DISCARD))

        for name, role in self.roles.items():
            if role == "worker":
                for here, there in ((name, "ps"), ("ps", name)):
                    namespaces.inside(self.lab.namespace(here), partial(greet, self.lab.address(there)))

    def _sections(self, name: str, role: Role) -> dict[str, dict[str, Any]]:
        if role == "switch":
            return {"switch": self._switch()}
        if role == "worker":
            return {"node": {"receive_buffer": BUFFER}}
        return {"topology": {**self.lab.topology.trees(), "switches": ["s0"]}}

    def _switch(self) -> dict[str, Any]:
        own = self.system == "switchml"
        program = {"system": self.system, "memory": SLOTS * (_PAIR if own else _SLOT), "age": "5 s"}
        if own:
            program |= {"values": 64, "job_slots": SLOTS // len(NAMES)}
        wire = round(self._rate * len(NAMES) * LINE / HOST)
        queue = {"rate": f"{wire} bit/s", "depth": DEPTH, "ecn": ECN}
        return {
            "transport": "packet",
            "address": switch_addresses(self.lab.topology)["s0"],
            "ports": [
                {"name": one, **(queue if one == "ps" else {})} for one in ports(self.lab.topology, "s0")
            ],
            "programs": [program],
            "sample": f"{round(SAMPLE * 1e3)} ms",
            "pause": f"{round(PAUSE * SLOTS * PACKET * 8e6 / self._rate)} us",
        }


class Ranks:
    """The processes of a job. They have joined when it is made; :meth:`go` lets them begin."""

    def __init__(self, testbed: Testbed, job: int, elements: int) -> None:
        name = NAMES[job]
        hosts = [host.name for host in testbed.lab.topology.workers() if host.name.startswith(name.lower())]
        self._children: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(hosts):
            words = (name, rank, len(hosts), testbed.system, elements)
            self._children.append(
                testbed.lab.spawn(
                    host,
                    python("inanet.papers.a2tp_rank", *map(str, words)),
                    env={**python_environment(), "INA_SOCKET": str(testbed.socket_path(host))},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for child in self._children:
            assert child.stdout is not None
            if child.stdout.readline() != "joined\n":
                testbed.require_alive()
                raise RuntimeError(f"a rank of job {name} did not join")

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [child.pid for child in self._children]

    def go(self) -> None:
        """Begin."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()

    def stop(self) -> list[float]:
        """End the job after the rounds under way. Returns when rank 0 had each round's result, monotonic seconds. Raises
        ``RuntimeError`` if a rank failed.
        """
        outputs = [child.communicate()[0] for child in self._children]
        if any(child.returncode for child in self._children):
            raise RuntimeError(f"ranks ended with {[child.returncode for child in self._children]}")
        times: list[float] = json.loads(outputs[0])
        return times


class Load:
    """What processors do from now on."""

    def __init__(self, testbed: Testbed, jobs: Sequence[Ranks]) -> None:
        agents = [testbed.processes[host.name].pid for host in testbed.lab.topology.workers()]
        self._roles = {
            "switch": [testbed.processes["s0"].pid],
            "PS": [testbed.processes["ps"].pid],
            "agents": agents,
            "ranks": [pid for job in jobs for pid in job.pids],
        }
        self._at, self._spent, self._ticks = time.monotonic(), self._seconds(), ticks()

    def _seconds(self) -> dict[str, float]:
        return {role: sum(map(cpu_seconds, pids)) for role, pids in self._roles.items()}

    def since(self) -> tuple[dict[str, float], float]:
        """Processor seconds in a second by role, and the share of all processors that was idle, others' work included."""
        passed, spent = time.monotonic() - self._at, self._seconds()
        busy = {role: (seconds - self._spent[role]) / passed for role, seconds in spent.items()}
        return busy, idle_share(self._ticks, ticks()) or 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One system: results of both jobs and the switch's samples, by monotonic seconds; when B began."""

    began: float
    times: Mapping[int, Sequence[float]]
    #: by job, share of the slots
    held: Sequence[tuple[float, Mapping[int, float]]]
    counters: Mapping[str, int]
    round_bytes: int
    #: of a host's link, bits per second
    rate: int = RATES[0]
    #: processor seconds in a second while both jobs ran, by role; and the share of all processors that was idle meanwhile
    busy: Mapping[str, float] = field(default_factory=dict)
    idle: float = 1.0

    def throughput(self, job: int, begin: float, end: float) -> float:
        """Mbit/s of gradient that a worker of the job got between the first and the last result in a time; 0 if there are
        not two.
        """
        inside = [at for at in self.times[job] if begin <= at <= end]
        if len(inside) < 2:
            return 0.0
        return (len(inside) - 1) * self.round_bytes * 8 / (inside[-1] - inside[0]) / 1e6

    def figures(self, settled: float = SETTLED) -> dict[str, float]:
        """Mbit/s of A before B, of A and of B while both ran, of A after B; and the share of slots that B held meanwhile."""
        joined, left, never = self.began, self.times[B][-1], float("inf")
        held = [held.get(B, 0.0) for at, held in self.held if joined + settled <= at <= left]
        return {
            "alone": self.throughput(A, self.times[A][0] + settled, joined),
            "A": self.throughput(A, joined + settled, left),
            "B": self.throughput(B, joined + settled, left),
            "after": self.throughput(A, left + settled, never),
            "occupied": statistics.fmean(held) if held else 0.0,
        }


def measure(
    system: str,
    phases: tuple[float, float, float] = (ALONE, BOTH, AFTER),
    *,
    rate: int = RATES[0],
    workers: int = WORKERS,
    elements: int | None = None,
) -> Run:
    """A alone, beside B, and alone again, for so many seconds each. Needs root; raises
    :class:`~inanet.lab.namespaces.Unprivileged`, or :class:`~inanet.launch.nodes.FabricError` when a daemon ends.
    """
    (alone, both, after), elements = phases, elements or elements_of(rate)
    with Lab(topology(rate, workers)) as lab:
        with Testbed(lab, system, rate) as testbed:
            first, second = Ranks(testbed, A, elements), Ranks(testbed, B, elements)
            first.go()
            time.sleep(alone)
            second.go()
            began = time.monotonic()
            load = Load(testbed, (first, second))
            time.sleep(both)
            busy, idle = load.since()
            times = {B: second.stop()}
            time.sleep(after)
            times[A] = first.stop()
        figures = testbed.stats()["s0"]
    counters = figures["programs"][system]
    return Run(began, times, _held(figures, system), counters, 4 * elements, rate, busy, idle)


def _held(figures: Mapping[str, Any], system: str) -> list[tuple[float, dict[int, float]]]:
    """Shares of the slots by job. The coordinator has numbered the jobs in the order in which they joined."""
    found = []
    for sample in figures["occupancy"]:
        held = {int(key.rpartition("/")[2]): value / SLOTS for key, value in sample["slots"].items()}
        found.append((float(sample["at"]), held))
    return found


SYSTEMS_RUN = ("switchml", "atp", "a2tp")
#: Share of all processors that must be idle while both jobs run, or it is them that is measured.
ENOUGH = 0.25
#: of a row of the table by time, seconds
BIN = 0.5


def _why(run: Run, figures: Mapping[str, float]) -> str:
    """What a loss that is not the paper's has to do with."""
    idle = f"processors were idle for {100 * run.idle:.0f} per cent of the time while both ran"
    if run.idle < ENOUGH:
        return f"{idle}: {_BUSY}"
    return f"{idle}, so it is not they that were short. B held {100 * figures['occupied']:.0f} per cent of the slots; {_COARSE}"


def _claims(runs: Mapping[str, Run], its: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    loss = {system: reduction(figures["A"], figures["alone"]) for system, figures in its.items()}
    faster = ratio(its["a2tp"]["A"], its["atp"]["A"])
    held = ratio(its["a2tp"]["occupied"], its["atp"]["occupied"])
    halved = reduction(its["switchml"]["alone"], its["atp"]["alone"])
    return [
        Claim(
            "A2TP: A's loss beside B, per cent",
            2.0,
            loss["a2tp"],
            "<=",
            reason="" if loss["a2tp"] <= 2.0 else _why(runs["a2tp"], its["a2tp"]),
        ),
        Claim(
            "ATP: A's loss beside B, per cent",
            28.0,
            loss["atp"],
            "~",
            0.25,
            "" if abs(loss["atp"] - 28) <= 7 else _why(runs["atp"], its["atp"]),
        ),
        Claim(
            "SwitchML: A alone below ATP's, per cent",
            50.0,
            halved,
            "~",
            0.25,
            "" if abs(halved - 50) <= 12.5 else _ROOM,
        ),
        Claim(
            "A beside B: A2TP's throughput over ATP's",
            1.0,
            faster,
            ">=",
            reason="" if faster >= 1.0 else _why(runs["a2tp"], its["a2tp"]),
        ),
        Claim(
            "slots that B holds: A2TP's share over ATP's",
            1.0,
            held,
            "<=",
            reason="" if held <= 1.0 else _why(runs["a2tp"], its["a2tp"]),
        ),
    ]


_BUSY = (
    "all daemons and ranks share this machine's processors, B's join those of A, and round trips are as long as it takes until "
    "each has run; see the simulation of this figure for the systems alone"
)
_COARSE = f"windows have {SLOTS} packets at most, so that a single one is {100 / SLOTS:.1f} per cent of them"
_ROOM = (
    "half of the slots halve a job where they are less than what is under way in a round trip; at this rate and with answers "
    "from the switch, they are not"
)


def _bins(run: Run) -> list[tuple[float, float, float, float, float]]:
    """Every :data:`BIN` seconds since A's first result: Mbit/s of A and B, mean shares of slots of A and B."""
    begin = run.times[A][0]
    rows = []
    for index in range(1, round((run.times[A][-1] - begin) / BIN) + 1):
        low, high = begin + (index - 1) * BIN, begin + index * BIN
        rates = [
            sum(low < at <= high for at in run.times[job]) * run.round_bytes * 8 / BIN / 1e6 for job in NAMES
        ]
        inside = [held for at, held in run.held if low < at <= high]
        shares = [statistics.fmean(held.get(job, 0.0) for held in inside) if inside else 0.0 for job in NAMES]
        rows.append((index * BIN, rates[0], rates[1], shares[0], shares[1]))
    return rows


def judge(runs: Mapping[str, Run], settled: float = SETTLED) -> Outcome:
    """What was measured, by system, as tables, panels and claims."""
    its = {system: run.figures(settled) for system, run in runs.items()}
    means = tuple(
        (s, f["alone"], f["A"], f["B"], f["after"], reduction(f["A"], f["alone"]), f["occupied"])
        for s, f in its.items()
    )
    columns = ("system", "A alone", "A with B", "B", "A after B", "A's loss, %", "slots of B")
    by_time = {system: _bins(run) for system, run in runs.items()}
    series = Table(
        "by time",
        ("system", "s", "A, Mbit/s", "B, Mbit/s", "slots of A", "slots of B"),
        tuple((system, *row) for system, rows in by_time.items() for row in rows),
    )
    titles = (
        ("job A", "Mbit/s"),
        ("job B", "Mbit/s"),
        ("slots that A holds", "share"),
        ("slots that B holds", "share"),
    )
    panels = tuple(
        Panel(title, "s", unit, {s: [(row[0], row[column]) for row in rows] for s, rows in by_time.items()})
        for column, (title, unit) in enumerate(titles, 1)
    )
    roles = tuple(dict.fromkeys(role for run in runs.values() for role in run.busy))
    load = Table(
        "processor seconds in a second while both ran, all processes of a role; share of all processors that was idle",
        ("system", *roles, "idle"),
        tuple(
            (system, *(run.busy.get(role, 0.0) for role in roles), run.idle) for system, run in runs.items()
        ),
    )
    tables = Table("Mbit/s of gradient", columns, means), load, series
    return Outcome(tuple(_claims(runs, its)), tables, panels, _notes(next(iter(runs.values())).rate))


def _notes(rate: int) -> tuple[str, ...]:
    tried = ", ".join(f"{one / 1e6:.0f}" for one in RATES)
    return (
        f"Measured: ina-switch, ina-ps, eight ina-worker and as many ranks in namespaces. Hosts send {rate / 1e6:.0f} Mbit/s, the "
        f"first of {tried} at which ATP leaves processors idle for {100 * ENOUGH:.0f} per cent of the time, or the last; B's last "
        f"{STRAGGLER / HOST:.2f} of that; the port to the PS has {2 * LINE / HOST:.1f} times as much, since one PS serves both jobs.",
        f"{SLOTS} slots and windows as large; frames are marked where {ECN // 1000} kB wait; the switch looks at a port every "
        f"{PAUSE * SLOTS * PACKET * 8e3 / rate:.1f} ms, so that the slots are about what is under way in a round trip. SwitchML has "
        "half of the slots for each.",
        f"A alone for {ALONE:.0f} s, with B for {BOTH:.0f}, alone for {AFTER:.0f}; {SETTLED:.0f} s after every change not counted.",
        "Slots are what the switch daemon has sampled, throughput what rank 0 has got, from the first result to the last.",
    )


def fig2(rates: Sequence[int] = RATES) -> Outcome:
    """Throughput and slots over time of A, and of a straggling B beside it, under SwitchML, ATP and A2TP in turn, at the first
    rate that leaves processors time to spare.
    """
    for rate in rates:
        atp = measure("atp", rate=rate)
        if atp.idle >= ENOUGH:
            break
    return judge({s: atp if s == "atp" else measure(s, rate=atp.rate) for s in SYSTEMS_RUN})
