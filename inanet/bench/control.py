"""``ina bench control``: delays of the control plane, as XAgg reports them (section VI-C, "Evaluation of Delays").

A coordinator, an aggregator and two workers talk over TCP on this machine, directly and through relays that hold every
message for half a millisecond on each link of the tree: two between a worker and the coordinator's host, one between the
aggregator and that. A worker's first rate counts from when it asks until it has the answer, both ways included. A change
counts from when the root has heard of its cause until the node concerned holds its new rate, as does a server's or the
PS's first rate; how long it is from the word of the worker that causes a change is told beside that.
"""

import asyncio
import queue
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from inanet.aio.channel import Channel, connect
from inanet.aio.coordinator import Coordination
from inanet.aio.uplink import Uplink
from inanet.bench.tables import Column, aligned
from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.settings import Settings
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.messages.control import (
    PROTOCOL,
    Begin,
    Hello,
    Layout,
    Message,
    Ping,
    Plan,
    Pong,
    RateDone,
    RateGrant,
    RateReady,
)
from inanet.planning.rates import Grant
from inanet.planning.topology import Topology
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.tree.node import Node
from inanet.service.exits import Failure
from inanet.wire.endpoint import endpoint

#: Seconds that each link holds a message, and links between a worker, and an aggregator, and the coordinator.
LINK_DELAY, LINKS, SERVER_LINKS = 0.5e-3, 2, 1
#: A change, from the word of the worker that causes it: the paper has no number for that.
_WORD = "worker, from another's word"
#: The paper's delays in milliseconds, by quantity and role; "mean" is over workers' and others' requests together.
PAPER = {
    ("initialisation", "worker"): 12.0,
    ("initialisation", "server"): 5.0,
    ("initialisation", "ps"): 2.0,
    ("initialisation", "mean"): 9.6,
    ("update", "worker"): 2.0,
    ("update", "server"): 1.0,
    ("update", "mean"): 1.7,
    ("deployment", "server"): 340.0,
}
#: A tensor of ResNet50's size, for which an aggregator makes slots.
DEPLOYED = 97 << 20
_PATIENCE = 10.0
_MBPS = 10**6
_JOB = "delays"
_TOPOLOGY = Topology(roots=("ps",), aggregators={"a0": "ps"}, workers={"w0": ("a0",), "w1": ("a0",)})


class Relay:
    """Passes TCP connections on, every piece ``delay`` seconds later in both directions. Threads, which sleep to within
    a tenth of a millisecond."""

    def __init__(self, target: tuple[str, int], delay: float) -> None:
        self._target = target
        self._delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                for end in (source, sink):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(source, pieces), daemon=True).start()
                threading.Thread(target=self._write, args=(sink, pieces), daemon=True).start()

    def _read(self, source: socket.socket, pieces: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
        data = b"."
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            pieces.put((time.monotonic() + self._delay, data))

    @staticmethod
    def _write(sink: socket.socket, pieces: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
        while True:
            due, data = pieces.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        for handle in (self._listener, *self._sockets):
            handle.close()


class Recorder:
    """When a node was granted something last; stands where its pacer would."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._at = 0.0

    def granted(self, grant: Grant) -> None:
        """Note the time."""
        self._at = time.perf_counter()
        self._news.set()

    def released(self, job: int) -> None:
        """Nothing to do."""

    def forget(self) -> None:
        """What came so far does not count."""
        self._news.clear()

    async def arrival(self) -> float:
        """When the first grant since :meth:`forget` had come."""
        async with asyncio.timeout(_PATIENCE):
            await self._news.wait()
        return self._at


class Ear:
    """When the root last heard something about rates."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.heard = 0.0
        self._receive = coordinator.receive
        coordinator.receive = self._listen  # type: ignore[method-assign]

    def _listen(self, peer: int, message: Message, now: float) -> None:
        if isinstance(message, RateReady | RateDone):
            self.heard = time.perf_counter()
        self._receive(peer, message, now)


class Worker:
    """A worker's control connection, without a data plane."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.recorder = Recorder()
        self._channel = channel
        self._arrived: dict[type[Message], asyncio.Future[Message]] = {}
        self._sequence = 0
        self.job = 0
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        async for message in self._channel:
            if isinstance(message, Ping):
                self._channel.post(Pong(nonce=message.nonce))
            elif isinstance(message, RateGrant):
                self.recorder.granted(Grant(message.job, message.sequence, 0.0, 0.0))
            else:
                self._future(type(message)).set_result(message)
                if isinstance(message, Plan):
                    self.job = message.plan.job

    def _future(self, kind: type[Message]) -> "asyncio.Future[Message]":
        known = self._arrived.get(kind)
        if known is None or known.done():
            known = self._arrived[kind] = asyncio.get_running_loop().create_future()
        return known

    async def after(self, message: Message, kind: type[Message]) -> float:
        """Seconds from sending a message to the next of a kind."""
        wanted = self._future(kind)
        began = time.perf_counter()
        self._channel.post(message)
        async with asyncio.timeout(_PATIENCE):
            await wanted
        return time.perf_counter() - began

    def say(self, message: Message) -> None:
        """Send a message."""
        self._channel.post(message)

    def ready(self, maximum: int) -> None:
        """Ask for a rate."""
        self._sequence += 1
        self.say(RateReady(job=self.job, sequence=self._sequence, maximum=maximum))

    def done(self) -> None:
        """Give it back."""
        self._sequence += 1
        self.say(RateDone(job=self.job, sequence=self._sequence))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()


def _hello(name: str, rank: int) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        name=name,
        role="worker",
        token="",
        endpoint=endpoint("127.0.0.1", 40_000 + rank),
        rx_window=1000,
        job=_JOB,
        ranks=(rank,),
        world=2,
        send_bps=200 * _MBPS,
        receive_bps=200 * _MBPS,
    )


@asynccontextmanager
async def _fabric(delay: float, deployed: int) -> AsyncIterator[tuple[list[Worker], Recorder, Recorder, Ear]]:
    """Two workers, ``delay`` seconds from the coordinator, who records for the aggregator and the PS, and its ear."""
    slots = deployed // 1024 + 1024
    async with AsyncExitStack() as stack:
        members = {}
        for index, (name, role) in enumerate((("ps", "ps"), ("a0", "aggregator"))):
            who = Identity(
                name,
                role,
                "",
                endpoint("127.0.0.1", 41_000 + index),
                1000,
                send_bps=150 * _MBPS,
                receive_bps=150 * _MBPS,
            )
            members[name] = Member(Node(name, slots), who)
        recorders = {name: Recorder() for name in members}
        for name, member in members.items():
            member.paced_by(recorders[name])
        settings = Settings(_TOPOLOGY, "", silence=600.0, round=600.0, negotiate=True)
        coordination = Coordination(settings, members["ps"], lambda: None)
        await coordination.start("127.0.0.1:0")
        stack.push_async_callback(coordination.close, "measured")
        address = above = coordination.address
        if delay:
            host, _, port = address.rpartition(":")
            relay, half = (Relay((host, int(port)), delay * links / LINKS) for links in (LINKS, SERVER_LINKS))
            for one in (relay, half):
                stack.callback(one.close)
            address, above = relay.address, half.address
        uplink = Uplink(members["a0"], above, join=_PATIENCE, resume=_PATIENCE, wake=lambda: None)
        running = asyncio.get_running_loop().create_task(uplink.run())
        stack.push_async_callback(_ended, running)
        workers = []
        for rank in range(2):
            worker = Worker(f"w{rank}", await connect(address, _PATIENCE))
            stack.push_async_callback(worker.close)
            workers.append(worker)
        plans = [worker.after(_hello(worker.name, rank), Plan) for rank, worker in enumerate(workers)]
        await asyncio.gather(*plans)
        yield workers, recorders["a0"], recorders["ps"], Ear(coordination.coordinator)


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _timed(
    delay: float, ear: Ear, act: Callable[[], None], recorders: Mapping[str, Recorder]
) -> dict[str, tuple[float, float]]:
    """Seconds until each of these has a new rate, after a pause: since a worker has said something, and since the root has
    heard it."""
    await asyncio.sleep(5 * delay + 0.002)
    for recorder in recorders.values():
        recorder.forget()
    began = time.perf_counter()
    act()
    arrivals = {role: await recorder.arrival() for role, recorder in recorders.items()}
    return {role: (at - began, at - ear.heard) for role, at in arrivals.items()}


async def measure(
    delay: float, repetitions: int, deployed: int = DEPLOYED
) -> dict[tuple[str, str], list[float]]:
    """Delays in seconds by quantity and role, ``delay`` being the one-way time between a worker and the coordinator.

    ``deployed``: bytes of the tensor for which an aggregator makes slots.
    """
    found: dict[tuple[str, str], list[float]] = {}
    spec = TensorSpec("t", "f32", (deployed // 4,), "sum", ExponentMode.CARRIED)
    async with _fabric(delay, deployed) as (workers, server, ps, ear):
        first, second = workers
        found["deployment", "server"] = [await first.after(Begin(job=first.job, round=1, spec=spec), Layout)]
        second.say(Begin(job=second.job, round=1, spec=spec))
        second.ready(0)
        await second.recorder.arrival()
        second.done()
        for repetition in range(repetitions + 1):
            # the aggregator forwards 40 Mbit/s now; before, 50, as much as its link has for a sum and two results
            begun = await _timed(
                delay,
                ear,
                lambda: first.ready(40 * _MBPS),
                {"worker": first.recorder, "server": server, "ps": ps},
            )
            # the second one gets the 70 Mbit/s that are left of the aggregator's link
            await _timed(delay, ear, lambda: second.ready(100 * _MBPS), {"worker": second.recorder})
            # and alone no more than the aggregator can forward
            ended = await _timed(delay, ear, first.done, {"worker": second.recorder, "server": server})
            second.done()
            if repetition:
                for role, (said, heard) in begun.items():
                    found.setdefault(("initialisation", role), []).append(said if role == "worker" else heard)
                for role, (_, heard) in ended.items():
                    found.setdefault(("update", role), []).append(heard)
                found.setdefault(("update", _WORD), []).append(ended["worker"][0])
    return found


def rows(place: str, found: dict[tuple[str, str], list[float]]) -> Iterator[dict[str, Any]]:
    """A row for every quantity and role, and for the mean over roles. Milliseconds."""
    for quantity in dict.fromkeys(quantity for quantity, _ in found):
        mine = {role: samples for (what, role), samples in found.items() if what == quantity}
        if len(mine) > 1:
            mine["mean"] = [sample for role, samples in mine.items() if role != _WORD for sample in samples]
        for role, samples in mine.items():
            middle = statistics.mean(samples) if role == "mean" else statistics.median(samples)
            paper = PAPER.get((quantity, role))
            yield {
                "place": place,
                "quantity": quantity,
                "role": role,
                "ms": middle * 1e3,
                "worst_ms": max(samples) * 1e3,
                "paper_ms": paper,
                "holds": None if paper is None else middle * 1e3 <= paper,
                "samples": len(samples),
            }


def run(repetitions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Both places. Returns what ``--json`` prints; ``holds``: every delay is at most the paper's, with link delays too.

    Raises :class:`inanet.service.exits.Failure` if an answer does not come within ten seconds.
    """
    found: list[dict[str, Any]] = []
    for place, delay in (("loopback", 0.0), (f"{LINK_DELAY * 1e3:g} ms a link", LINKS * LINK_DELAY)):
        say(place)
        try:
            found += rows(place, asyncio.run(measure(delay, repetitions)))
        except TimeoutError as error:
            raise Failure(f"{place}: an answer did not come within {_PATIENCE:g} s") from error
    return {"schema": 1, "ok": True, "rows": found, "holds": all(row["holds"] is not False for row in found)}


def table(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    columns: dict[str, Column] = {
        "place": "",
        "what": ("quantity", ""),
        "role": "",
        "ms": ".2f",
        "worst": ("worst_ms", ".2f"),
        "paper": ("paper_ms", ".1f"),
        "": ("holds", lambda holds: "slower than the paper's" if holds is False else ""),
    }
    yield from aligned(columns, result["rows"])
