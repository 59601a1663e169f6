"""A2TP's Fig. 2 on the real daemons: two jobs in a star of namespaces, one of them with a slow worker.

Eight hosts and a PS around ``ina-switch``, which is the star's switch: its ports forward, and its programs sum. Jobs come from
the coordinator and loop over rounds in processes of their own. A host's link sends what stands for the 53 Gbit/s of the
testbed's hosts, the last worker's of B the 13 Gbit/s that background traffic leaves there; the port to the PS has the ratio
of 100 to 53, twice, since one PS serves both jobs. Occupancy is what the switch daemon has sampled.

This measures the machine: two processors run eighteen daemons and ranks, so round trips are milliseconds where the testbed's
are microseconds, and the rate is what they can carry.
"""

import json
import socket
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from inanet.control.config import MODELS, Role
from inanet.control.config_file import validate, write_toml
from inanet.demo.fabric import python, python_environment
from inanet.lab import credentials, namespaces
from inanet.lab.layout import ports, switch_addresses
from inanet.lab.model import Host, HostLink, Switch, Topology
from inanet.lab.nodes import Nodes
from inanet.lab.session import Lab
from inanet.papers.a2tp_testbed import HOST, LINE, STRAGGLER, WORKERS, A, B
from inanet.papers.claims import Claim, ratio, reduction
from inanet.papers.outcome import Outcome, Panel, Table

SYSTEMS_RUN = ("switchml", "atp", "a2tp")
#: bits per second that a host's link carries, headers counted; eight of them are what two processors can keep up with
RATE = 40_000_000
#: As many as a worker may have in flight, which two jobs share; and the receive buffer that grants such a window. Larger windows
#: would wait at their own host, which A2TP could not tell from a straggler.
SLOTS, BUFFER = 64, "96 KiB"
#: Register bytes of a slot: ATP's and A2TP's 62 values, and SwitchML's two sets of 64, each with what stands beside them.
_SLOT, _PAIR = 62 * 4 + 24, 2 * (64 * 4 + 24)
#: Bytes in the queue to the PS from which fragments are marked, a little more than a window of sums, because these come in one
#: burst here; and the queue's depth.
ECN, DEPTH = 20_000, 1 << 20
#: float32 of a round.
ELEMENTS = 1 << 17
#: Seconds: A alone, with B, alone again; not counted after every change; between two samples of the switch.
ALONE, BOTH, AFTER, SETTLED, SAMPLE = 3.0, 6.0, 2.0, 1.0, 0.05
#: of a row of the table by time, seconds
BIN = 0.5
NAMES = {A: "A", B: "B"}
#: where nobody listens (RFC 863)
_DISCARD = 9


def topology(rate: int = RATE, workers: int = WORKERS) -> Topology:
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


class Testbed(Nodes):
    """The daemons in a lab of :func:`topology` while the ``with`` block lasts.

    The control plane is a Unix socket: the switch has no address of its own on the wires, and its frames are the data's.
    """

    def __init__(self, lab: Lab, system: str, rate: int = RATE) -> None:
        super().__init__(lab, lab.directory)
        self.system = system
        self._rate = rate
        self._roles: dict[str, Role] = {
            host.name: "ps" if host.role == "ps" else "worker" for host in lab.topology.hosts()
        }

    def __enter__(self) -> Self:
        directory = self._directory
        credentials.prepare(directory, self._roles, insecure=True)
        for name, role in {**self._roles, "s0": "switch"}.items():
            file = directory / f"{name}.toml"
            file.write_text(write_toml(validate(MODELS[role], self._sections(name, role), file)))
        try:
            # the PS coordinates; if the kernels' cache is cold it fills it for the others
            self.start([("ps", "ps", "daemons.ps")])
            self.start([("s0", "s0", "daemons.switch")])
            self.start(
                [(name, name, "daemons.worker") for name, role in self._roles.items() if role == "worker"]
            )
        except BaseException:
            self.__exit__()
            raise
        self._introduce()
        return self

    def __exit__(self, *_: object) -> None:
        for role in ("worker", "ps"):
            self.end([name for name, its in self._roles.items() if its == role])
        self.end(["s0"])

    def _introduce(self) -> None:
        """Have every host send a packet to the PS and the PS to it, so that the switch knows where all of them are."""

        def greet(address: str) -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
                channel.sendto(b"", (address, _DISCARD))

        for name, role in self._roles.items():
            if role == "worker":
                for here, there in ((name, "ps"), ("ps", name)):
                    namespaces.inside(self.lab.namespace(here), partial(greet, self.lab.address(there)))

    def socket(self, host: str) -> Path:
        """Where the worker daemon of a host serves its rank."""
        return self._directory / f"{host}.sock"

    def _sections(self, name: str, role: Role) -> dict[str, dict[str, Any]]:
        control = f"unix:{self._directory / 'control.sock'}"
        sections: dict[str, dict[str, Any]] = {
            "node": {"name": name},
            "log": {"format": "plain"},
            "control": {
                **credentials.section(self._directory, name, insecure=True),
                "listen" if role == "ps" else "coordinator": control,
                "drain_timeout": "1 s",
            },
        }
        if role == "switch":
            return sections | {"switch": self._switch()}
        sections["node"]["listen"] = f"{self.lab.address(name)}:0"
        if role == "worker":
            sections["node"]["receive_buffer"] = BUFFER
            sections["local"] = {"socket": str(self.socket(name))}
        else:
            sections["topology"] = {**self.lab.topology.trees(), "switches": ["s0"]}
        return sections

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
        }


class Ranks:
    """The processes of a job. They have joined when it is made; :meth:`go` lets them begin."""

    def __init__(self, testbed: Testbed, job: int, elements: int = ELEMENTS) -> None:
        name = NAMES[job]
        hosts = [host.name for host in testbed.lab.topology.workers() if host.name.startswith(name.lower())]
        self._children: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(hosts):
            words = (name, rank, len(hosts), testbed.system, elements)
            self._children.append(
                testbed.lab.spawn(
                    host,
                    python("inanet.papers.a2tp_rank", *map(str, words)),
                    env={**python_environment(), "INA_SOCKET": str(testbed.socket(host))},
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


@dataclass(frozen=True, slots=True)
class Run:
    """One system: results of both jobs and the switch's samples, by monotonic seconds; when B began."""

    began: float
    times: Mapping[int, Sequence[float]]
    #: by job, share of the slots
    held: Sequence[tuple[float, Mapping[int, float]]]
    counters: Mapping[str, int]
    round_bytes: int

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
    rate: int = RATE,
    workers: int = WORKERS,
    elements: int = ELEMENTS,
) -> Run:
    """A alone, beside B, and alone again, for so many seconds each. Needs root; raises
    :class:`~inanet.lab.namespaces.Unprivileged`, or :class:`~inanet.lab.nodes.FabricError` when a daemon ends.
    """
    alone, both, after = phases
    with Lab(topology(rate, workers)) as lab:
        with Testbed(lab, system, rate) as testbed:
            first, second = Ranks(testbed, A, elements), Ranks(testbed, B, elements)
            first.go()
            time.sleep(alone)
            second.go()
            began = time.monotonic()
            time.sleep(both)
            times = {B: second.stop()}
            time.sleep(after)
            times[A] = first.stop()
        figures = testbed.stats_of(["s0"])["s0"]
    return Run(began, times, _held(figures, system), figures["programs"][system], 4 * elements)


def _held(figures: Mapping[str, Any], system: str) -> list[tuple[float, dict[int, float]]]:
    """Shares of the slots by job. The coordinator has numbered the jobs in the order in which they joined."""
    found = []
    for sample in figures["occupancy"]:
        held = {int(key.rpartition("/")[2]): value / SLOTS for key, value in sample["slots"].items()}
        found.append((float(sample["at"]), held))
    return found


def _claims(its: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    loss = {system: reduction(figures["A"], figures["alone"]) for system, figures in its.items()}
    halved = reduction(its["switchml"]["alone"], its["atp"]["alone"])
    return [
        Claim(
            "A2TP: A's loss beside B, per cent",
            2.0,
            loss["a2tp"],
            "<=",
            reason="" if loss["a2tp"] <= 2.0 else _BUSY,
        ),
        Claim(
            "ATP: A's loss beside B, per cent",
            28.0,
            loss["atp"],
            "~",
            0.25,
            "" if abs(loss["atp"] - 28) <= 7 else _BUSY,
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
            "A beside B: A2TP's throughput over ATP's", 1.0, ratio(its["a2tp"]["A"], its["atp"]["A"]), ">="
        ),
        Claim(
            "slots that B holds: A2TP's share over ATP's",
            1.0,
            ratio(its["a2tp"]["occupied"], its["atp"]["occupied"]),
            "<=",
        ),
    ]


_BUSY = (
    "measured on this machine: all daemons and ranks share its processors, B's join those of A, and round trips are as long as "
    "it takes until each has run; see the simulation of this figure for the systems alone"
)
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
    tables = Table("Mbit/s of gradient", columns, means), series
    return Outcome(tuple(_claims(its)), tables, panels, NOTES)


NOTES = (
    f"Measured: ina-switch, ina-ps, eight ina-worker and as many ranks in namespaces. Hosts send {RATE / 1e6:.0f} Mbit/s, B's last "
    f"{STRAGGLER / HOST:.2f} of that; the port to the PS has {2 * LINE / HOST:.1f} times as much, since one PS serves both jobs.",
    f"{SLOTS} slots and windows as large; frames are marked where {ECN // 1000} kB wait. SwitchML has half of the slots for each.",
    f"A alone for {ALONE:.0f} s, with B for {BOTH:.0f}, alone for {AFTER:.0f}; {SETTLED:.0f} s after every change not counted.",
    "Slots are what the switch daemon has sampled, throughput what rank 0 has got, from the first result to the last.",
)


def fig2() -> Outcome:
    """Throughput and slots over time of A, and of a straggling B beside it, under SwitchML, ATP and A2TP in turn."""
    return judge({system: measure(system) for system in SYSTEMS_RUN})
