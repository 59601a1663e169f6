"""Anything may happen in any order: nothing hangs, all ranks hear the same, ids are never issued too early.

Hosts here follow the rules of the messages; a result exists when every member has begun a round with the same
spec and has the tensor's layout, which is what the data plane promises.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.messages.control import (
    Begin,
    Finished,
    Held,
    Hold,
    JobEnded,
    JobFailed,
    Known,
    Layout,
    LayoutDrop,
    LayoutReady,
    Leave,
    Message,
    Ping,
    Plan,
    Pong,
    Refuse,
    Reject,
    Resume,
    RoundFailed,
    Welcome,
)
from inanet.planning.topology import Topology
from inanet.proto.common.plan import NodePlan, TensorLayout, TensorSpec
from tests.coordinator.nodes import Nodes, spec, two_level

DEEP = Topology(
    roots=("ps",),
    aggregators={"top": "ps", "a0": "top", "a1": "top"},
    workers={"w0": ("a0",), "w1": ("a0",), "w2": ("a1",)},
)
TREES = Topology(
    roots=("ps", "ps2"),
    aggregators={"a0": "ps", "b0": "ps2"},
    workers={"w0": ("a0", "b0"), "w1": ("a0", "ps2"), "w2": ("ps", "b0")},
)
SPECS = [spec("u"), spec("v", 256 * 5000), spec("x", 7, dtype="i32")]


@dataclass
class Held_:
    """What a process holds of its job, or of each of its jobs."""

    plan: NodePlan
    layouts: dict[int, TensorLayout] = field(default_factory=dict)


@dataclass
class Process:
    """A node's process: what it keeps when its connection breaks."""

    name: str
    jobs: dict[int, Held_] = field(default_factory=dict)
    job: int | None = None
    next_round: int = 1
    opened: dict[int, TensorSpec] = field(default_factory=dict)
    before: int | None = None
    waiting: list[TensorSpec] = field(default_factory=list)


class Chaos(Nodes):
    """Nodes that act by the book, and records of what they went through."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology, join=30.0, round=20.0, resume=8.0, silence=9.0)
        self.processes: dict[str, Process] = {}
        #: (key, round) to outcome by host
        self.outcomes: dict[tuple[int, int], dict[str, str]] = {}
        self.failed_jobs: set[int] = set()
        #: (key, tree, parent, bit) to child and rounds its retirement may still matter in
        self.owners: dict[tuple[int, int, str, int], tuple[str, set[int]]] = {}
        self.over: dict[int, set[int]] = {}

    # ---------- what happens to processes

    def up(self, name: str) -> None:
        """Connect; with what the process still holds, if it has lived on."""
        process = self.processes.setdefault(name, Process(name))
        self.join(
            name,
            resume=tuple(
                Resume(
                    job=job,
                    key=held.plan.key,
                    plan=held.plan,
                    next_round=process.next_round,
                    layouts=len(held.layouts),
                    open=len(process.opened),
                )
                for job, held in process.jobs.items()
            ),
        )
        for job, held in list(process.jobs.items()):
            for layout in list(held.layouts.values()):
                self.say(name, Known(job=job, layout=layout))
            for number, wanted in sorted(process.opened.items()):
                self.say(name, Begin(job=job, round=number, spec=wanted))

    def die(self, name: str) -> None:
        self._forget(name)
        self.kill(name)

    def _forget(self, name: str) -> None:
        self.processes.pop(name, None)
        # with its slots, what its children's ids meant there is gone
        self.owners = {key: owner for key, owner in self.owners.items() if key[2] != name}

    def cut(self, name: str) -> None:
        """The connection breaks, the process lives."""
        self.kill(name)

    def crash(self) -> None:
        """The coordinator dies, and the parameter server beside it."""
        self.restart()
        self._forget("ps")

    def start_round(self, name: str, wanted: TensorSpec) -> None:
        process = self.processes[name]
        if process.job is None or process.job not in process.jobs:
            return
        process.waiting.append(wanted)
        self._begin_waiting(process)

    def _begin_waiting(self, process: Process) -> None:
        while process.waiting and (process.before is None or process.next_round < process.before):
            number, process.next_round = process.next_round, process.next_round + 1
            process.opened[number] = process.waiting.pop(0)
            assert process.job is not None
            self.say(process.name, Begin(job=process.job, round=number, spec=process.opened[number]))
            if process.job is None:
                return

    def results(self) -> list[tuple[str, int]]:
        """(host, round) for which the data plane could hand out a result now."""
        ready = []
        for name, process in self.processes.items():
            held = process.jobs.get(process.job) if process.job is not None else None
            if held is None:
                continue
            family = [
                p for p in self.processes.values() if p.job == process.job and held.plan.key in _keys(p)
            ]
            if sum(1 for p in family if p.name in self.topology.workers) < held.plan.ranks:
                continue
            for number, wanted in process.opened.items():
                has = any(layout.spec == wanted for layout in held.layouts.values())
                begun = all(
                    p.opened.get(number) == wanted
                    or self.outcomes.get((held.plan.key, number), {}).get(p.name) == "done"
                    for p in family
                    if p.name in self.topology.workers
                )
                if has and begun and name in self.ids:
                    ready.append((name, number))
        return ready

    def finish_one(self, name: str, number: int) -> None:
        process = self.processes[name]
        assert process.job is not None
        self._outcome(process, number, "done")
        self.say(name, Finished(job=process.job, round=number))

    def confirm(self) -> None:
        """Parameter servers have heard that everybody has everything."""
        for (key, number), outcome in list(self.outcomes.items()):
            jobs = [job for job in self.coordinator.jobs.values() if job.plans.current.key == key]
            if jobs and list(outcome.values()).count("done") == jobs[0].plans.current.ranks:
                for root in self.topology.roots:
                    if root in self.ids:
                        self.say(root, Finished(job=jobs[0].number, round=number))

    def _outcome(self, process: Process, number: int, what: str) -> None:
        process.opened.pop(number, None)
        assert process.job is not None
        key = process.jobs[process.job].plan.key
        self.outcomes.setdefault((key, number), {})[process.name] = what

    # ---------- what nodes are told

    def _note(self, name: str, message: Message) -> None:
        process = self.processes.get(name)
        if process is None:
            return
        if isinstance(message, Plan):
            held = process.jobs.get(message.plan.job)
            if held is not None and held.plan.key == message.plan.key:
                newer = message.plan.version > held.plan.version
                assert newer or message.plan == held.plan, "versions only grow"
                held.plan = message.plan
            else:
                process.jobs[message.plan.job] = Held_(message.plan)
            process.before = None
            self._check_ids(name, message.plan)
        elif isinstance(message, Layout):
            if message.job in process.jobs:
                process.jobs[message.job].layouts[message.layout.tensor] = message.layout
        elif isinstance(message, LayoutDrop):
            if message.job in process.jobs:
                process.jobs[message.job].layouts.pop(message.tensor, None)
        elif isinstance(message, JobEnded):
            process.jobs.pop(message.job, None)
        elif isinstance(message, Welcome):
            process.job = message.job
        elif isinstance(message, RoundFailed) and name in self.topology.workers:
            key = process.jobs[message.job].plan.key
            if self.outcomes.get((key, message.round), {}).get(name) != "done":
                self._outcome(process, message.round, message.message)
        elif isinstance(message, JobFailed | Reject):
            self.failed_jobs |= {held.plan.key for held in process.jobs.values()}
            if name in self.topology.workers:
                self.processes[name] = Process(name)

    def _answer(self, name: str, message: Message) -> None:
        answer: Message | None = None
        if isinstance(message, Ping):
            answer = Pong(nonce=message.nonce)
        elif isinstance(message, Hold):
            self.processes[name].before = message.before
            answer = Held(job=message.job, nonce=message.nonce)
        elif isinstance(message, Layout) and name not in self.topology.workers:
            answer = LayoutReady(job=message.job, tensor=message.layout.tensor)
        elif isinstance(message, Reject):
            self.ids.pop(name, None)
        elif isinstance(message, Plan) and name in self.topology.workers:
            self._begin_waiting(self.processes[name])
        if answer is not None and name in self.ids:
            self.coordinator.receive(self.ids[name], answer, self.now)

    def _check_ids(self, parent: str, plan: NodePlan) -> None:
        """An id changes hands only when all rounds begun before it was given up are over (child ids)."""
        opened = {
            number
            for process in self.processes.values()
            if plan.key in _keys(process) and process.job == plan.job
            for number in process.opened
        }
        for place in plan.placements:
            live = {child.bit: child.name for child in place.children}
            retired = {gone.bit for gone in place.retired}
            assert not live.keys() & retired
            for key, (child, rounds) in list(self.owners.items()):
                if key[:3] != (plan.key, place.tree, parent):
                    continue
                bit = key[3]
                if live.get(bit) == child:
                    continue
                if bit in retired:
                    self.owners[key] = ("", opened if child else rounds)
                elif bit in live:
                    before = rounds if not child else set()
                    assert not before & opened, f"id {bit} of {parent} issued again in an open round"
            for bit, child in live.items():
                self.owners[plan.key, place.tree, parent, bit] = (child, set())


def _keys(process: Process) -> set[int]:
    return {held.plan.key for held in process.jobs.values()}


@pytest.mark.parametrize("topology", [two_level(3, 2), DEEP, TREES], ids=["wide", "deep", "trees"])
@settings(max_examples=80)
@given(data=st.data())
def test_chaos(topology: Topology, data: st.DataObject) -> None:
    nodes = Chaos(topology)
    everybody = [*topology.roots, *topology.aggregators, *topology.workers]
    for name in everybody:
        nodes.up(name)
    kinds = st.sampled_from(
        ["begin"] * 4 + ["all begin"] * 3 + ["finish"] * 8 + ["confirm"] * 2
        + ["kill aggregator"] * 2 + ["up"] * 4 + ["wait"] * 3
        + ["kill worker", "cut", "crash", "refuse", "leave", "odd"]
    )  # fmt: skip
    for kind in data.draw(st.lists(kinds, max_size=60)):
        up = sorted(nodes.ids)
        workers = [name for name in up if name in topology.workers]
        if kind in ("begin", "odd") and workers:
            which = data.draw(st.sampled_from(SPECS if kind == "odd" else SPECS[:1]))
            nodes.start_round(data.draw(st.sampled_from(workers)), which)
        elif kind == "all begin":
            which = data.draw(st.sampled_from(SPECS))
            for name in workers:
                if name in nodes.ids:
                    nodes.start_round(name, which)
        elif kind == "finish" and (ready := nodes.results()):
            nodes.finish_one(*data.draw(st.sampled_from(ready)))
        elif kind == "confirm":
            nodes.confirm()
        elif kind == "kill aggregator" and (alive := [n for n in up if n in topology.aggregators]):
            nodes.die(data.draw(st.sampled_from(alive)))
        elif kind == "kill worker" and workers:
            nodes.die(data.draw(st.sampled_from(workers)))
        elif kind == "cut" and up:
            nodes.cut(data.draw(st.sampled_from(up)))
        elif kind == "crash":
            nodes.crash()
        elif kind == "up" and (down := [n for n in everybody if n not in nodes.ids]):
            nodes.up(data.draw(st.sampled_from(down)))
        elif kind == "wait":
            nodes.wait(data.draw(st.sampled_from([0.5, 4.0, 12.0])))
        elif kind == "refuse" and workers:
            process = nodes.processes[data.draw(st.sampled_from(workers))]
            for number in list(process.opened)[:1]:
                rank = nodes.hello(process.name).ranks[0]
                refuse = Refuse(
                    job=process.job or 0, round=number, rank=rank, tensor="u", index=0, reason="nonfinite"
                )
                nodes.say(process.name, refuse)
        elif kind == "leave" and workers:
            name = data.draw(st.sampled_from(workers))
            nodes.say(name, Leave())
            nodes.ids.pop(name, None)
            nodes.processes[name] = Process(name)

    for name in everybody:
        if name not in nodes.ids:
            nodes.up(name)
    nodes.wait(120)
    for process in nodes.processes.values():
        assert process.opened == {}, "somebody waits for ever"
    for (key, number), outcome in nodes.outcomes.items():
        if key not in nodes.failed_jobs:
            assert len(set(outcome.values())) == 1, f"ranks differ about round {number}"
