"""A host of a NetReduce ring on its own RoCE transport: a worker on a device, in a thread of its own.

What an application with an RDMA network card would have: it calls :meth:`RingHost.all_reduce` and waits, and between two
calls the host still acknowledges what its neighbours repeat.
"""

import os
import queue
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from numpy.typing import NDArray

from inanet.phy.device import Device
from inanet.proto.common.events import NodeEvent, Refused, RoundDone
from inanet.proto.common.plan import TensorSpec
from inanet.proto.netreduce.parallel import Part, RankHost
from inanet.proto.netreduce.ring import Connection, Member
from inanet.proto.netreduce.worker import Broken, NetReduceWorker
from inanet.service.exits import Failure
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint

#: queue pairs towards the predecessor and the successor, and UDP source port, where all hosts of a ring have the same
QUEUE_PAIRS = (0x11, 0x12)
SOURCE_PORT = 0xC011
#: seconds that the thread has for letting go of the arrays of a round that is given up
_LETTING_GO = 1.0


@dataclass(frozen=True, slots=True)
class _Begin:
    """A round that somebody waits for."""

    tensor: int
    round: int
    arrays: Sequence[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _GiveUp:
    """A round that nobody waits for any more; ``done`` is set when its arrays are left alone."""

    round: int
    done: threading.Event


@dataclass(frozen=True, slots=True)
class _Unfit:
    """A round that was never begun, and why: what was asked for does not suit the ring, which goes on."""

    round: int
    error: Exception


_Said: TypeAlias = NodeEvent | Broken | _Unfit | BaseException


def ring_of(addresses: Sequence[str], number: int = 0) -> list[Connection]:
    """Connections of ring ``number`` of hosts that :func:`join_ring` makes, by rank: what a switch has to be told."""
    ends, queue_pair = [endpoint(address, 0) >> 16 for address in addresses], QUEUE_PAIRS[0] + 2 * number
    return [Connection(end, ends[(rank + 1) % len(ends)], queue_pair) for rank, end in enumerate(ends)]


def join_ring(
    member: Member, addresses: Sequence[str], number: int = 0, *, raw: bool = False, psn: int = 0
) -> NetReduceWorker:
    """A worker that is connected to its neighbours on the ring of hosts with these ``addresses``, by rank.

    Nothing is exchanged: the ends of all hosts are alike but for their addresses. Rings between the same hosts have
    different ``number``.
    """
    ends = [endpoint(address, SOURCE_PORT + number) for address in addresses]
    pairs = (QUEUE_PAIRS[0] + 2 * number, QUEUE_PAIRS[1] + 2 * number)
    worker = NetReduceWorker(member, ends[member.rank], numbers=pairs, psn=psn, raw=raw)
    successor = replace(worker.inlet, endpoint=ends[(member.rank + 1) % len(ends)])
    predecessor = replace(worker.outlet, endpoint=ends[member.rank - 1])
    worker.connect(successor, predecessor)
    return worker


def join_rings(
    members: Sequence[Member], addresses: Sequence[str], each: int, *, raw: bool = False, psn: int = 0
) -> RankHost:
    """The ranks of a host, ``each`` of them, on a ring for each of ``members``, its places there: parallel NetReduce, or parallel
    rings (:func:`inanet.proto.netreduce.parallel.members`). Switches are told of :func:`ring_of` each number.
    """
    workers = [
        join_ring(member, addresses, number, raw=raw, psn=psn) for number, member in enumerate(members)
    ]
    return RankHost([Part(worker, 0, each, piece, len(workers)) for piece, worker in enumerate(workers)])


class RingHost:
    """A worker, or the ranks of a host, on ``device``, which is the host's from now on, until :meth:`close`. One thread calls it.

    A turn takes what has arrived and sends what may leave; ``pause`` seconds lie between two, at least: moderation, for
    windows that reach further than that.
    """

    def __init__(self, worker: NetReduceWorker | RankHost, device: Device, *, pause: float = 0.0) -> None:
        self.worker = worker
        self._device = device
        self._pause = pause
        self._asked: queue.SimpleQueue[_Begin | _GiveUp] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._round = 0
        #: why there are no rounds any more
        self._over: BaseException | None = None
        self._waiting: list[tuple[Transmission, int]] = []
        self._bell, self._rope = os.pipe()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ring-host", daemon=True)
        self._thread.start()

    def add_tensor(self, tensor: int, spec: TensorSpec) -> None:
        """Make a tensor known under a number, the same on all hosts. Raises ``ValueError`` for what cannot be summed."""
        self.worker.add_tensor(tensor, spec)

    def all_reduce(self, tensor: int, arrays: Sequence[NDArray[Any]], deadline: float) -> None:
        """One round: ``arrays`` are 1-D, one per local rank, and are overwritten with the result.

        Raises :class:`~inanet.service.exits.Failure` for a ring that is broken, for values and sums that cannot be, and when the
        round is not done in ``deadline`` seconds: its arrays are left alone from then on, while its messages go on, as on all
        other hosts. Raises ``ValueError`` and ``KeyError`` for arrays and tensors that do not suit: that is no round. Raises
        what went wrong in the host's thread; after that, and on a ring that is broken, every call does at once.
        """
        if self._over is not None:
            raise self._over
        self._round += 1
        self._ask(_Begin(tensor, self._round, arrays))
        stop = time.monotonic() + deadline
        while True:
            try:
                said = self._said.get(timeout=max(0.0, stop - time.monotonic()))
            except queue.Empty:
                raise self._late(deadline) from None
            if isinstance(said, Broken):
                self._over = said = Failure(said.reason)
            if isinstance(said, BaseException):
                self._over = said
                raise said
            # what is said of rounds before this one was waited for in vain
            if not isinstance(said, RoundDone | Refused | _Unfit) or said.round != self._round:
                continue
            if isinstance(said, _Unfit):
                raise said.error
            if isinstance(said, Refused):
                raise Failure(
                    f"{self._name}: round {said.round} was refused: element {said.index} is NaN or infinite"
                )
            if said.overflow >= 0:
                raise Failure(
                    f"{self._name}: round {said.round}: the exact sum of element {said.overflow} does not fit the tensor's type;"
                    " sum smaller values, or in a wider type"
                )
            return

    @property
    def _name(self) -> str:
        member = self.worker.member
        return f"job {member.job}, ring {member.ring}, rank {member.rank}"

    def _ask(self, what: _Begin | _GiveUp) -> None:
        self._asked.put(what)
        os.write(self._rope, b"!")

    def _late(self, deadline: float) -> Failure:
        """Give the round up."""
        letting = _GiveUp(self._round, threading.Event())
        self._ask(letting)
        letting.done.wait(_LETTING_GO)
        return Failure(
            f"{self._name}: round {self._round} is not done in {deadline:g} s: a host of the ring is late or gone, or what"
            f" lies between does not let its packets through; {self.worker.stats()}"
        )

    def close(self) -> None:
        """End the thread and close the device; closing twice is fine."""
        if self._closing:
            return
        self._closing = True
        os.write(self._rope, b"!")
        self._thread.join()
        os.close(self._bell)
        os.close(self._rope)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                began = time.monotonic()
                self._turn()
                self._sleep()
                rest = began + self._pause - time.monotonic()
                if rest > 0 and not self._closing:
                    time.sleep(rest)
        except BaseException as error:
            self._said.put(error)
        finally:
            self._device.close()

    def _turn(self) -> None:
        worker, device = self.worker, self._device
        while not self._asked.empty():
            self._do(self._asked.get())
        held = device.flush(time.monotonic())
        if held is not None:
            worker.receive(held, time.monotonic())
        while (batch := device.receive()) is not None:
            worker.receive(batch, time.monotonic())
        now = time.monotonic()
        at = worker.timer()
        if at is not None and at <= now:
            worker.on_timer(now)
        self._send(now)
        for event in worker.events():
            self._said.put(event)

    def _do(self, asked: _Begin | _GiveUp) -> None:
        if isinstance(asked, _GiveUp):
            self.worker.give_up(asked.round)
            asked.done.set()
            return
        try:
            self.worker.begin(asked.tensor, asked.round, asked.arrays, time.monotonic())
        except (ValueError, KeyError) as error:
            self._said.put(_Unfit(asked.round, error))

    def _send(self, now: float) -> None:
        """Send in order, as far as the device takes it."""
        while True:
            if not self._waiting:
                self._waiting = [(one, 0) for one in self.worker.transmit(now)]
            if not self._waiting:
                return
            while self._waiting:
                one, start = self._waiting[0]
                start += self._device.send(one, start)
                if start < len(one):
                    self._waiting[0] = one, start
                    return
                del self._waiting[0]

    def _sleep(self) -> None:
        """Until something has come, is due, may be sent or is asked for."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(self._device.fileno(), select.POLLIN | (select.POLLOUT if self._waiting else 0))
        due = [at for at in (self.worker.timer(), self._device.timer()) if at is not None]
        wait = None if not due else max(0.0, min(due) - time.monotonic()) * 1000
        for fd, _ in poll.poll(wait):
            if fd == self._bell:
                os.read(self._bell, 4096)
