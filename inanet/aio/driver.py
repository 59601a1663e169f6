"""Ties a sans-IO machine to a device and an event loop: feed batches, send what it has, re-arm one timer, hand
on events.

Nothing else happens here. The device is read until it is empty or a budget is used up, so that timers and the
control plane get their turn under load; sending stops when the device is full or its rate used up, and goes
on when the device says so.
"""

import asyncio
import errno
import selectors
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from weakref import WeakSet

import structlog

from inanet.aio.moderation import BATCH, Moderation
from inanet.aio.turn import Turn, turn_for
from inanet.phy.device import Device, GroupReceiver
from inanet.proto.common.events import NodeEvent
from inanet.proto.common.machine import Machine
from inanet.proto.tree.node import Node
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import show

_log: Any = structlog.get_logger("inanet.driver")

#: batches taken in one callback of the event loop, as long as they are small
READ_BUDGET = 8
#: seconds that a turn may take, much being to come: timers of others in the event loop wait for it; a descriptor ends it sooner
LONGEST_TURN = 0.05
#: turns that do not wait after one that was woken
RESTLESS = 4
#: seconds by which two readings of one clock may differ
_SAME_CLOCK = 0.1
#: seconds between two complaints about one destination
_COMPLAINT_SECONDS = 5.0


#: all that are open: a turn of one must not outlast what another one waits for
_drivers: "WeakSet[Driver]" = WeakSet()


class Driver:
    """Runs ``node`` on ``device``. ``on_event`` is called for every event, inside the event loop.

    ``clock`` must be the loop's own (``loop.time``) or agree with it.
    """

    def __init__(self, node: Machine, device: Device, on_event: Callable[[NodeEvent], None]) -> None:
        self.node = node
        self.device = device
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._out: Iterator[Transmission] | None = None
        self._pending: tuple[Transmission, int] | None = None
        #: what is watched while something is pending: a descriptor to read, or the device's own to write
        #: (``None``)
        self._retry: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._kick: asyncio.Handle | None = None
        #: descriptors of joined groups that are watched beside the device's own
        self._groups: dict[int, int] = {}
        #: groups of the node's plans, and those among them that could not be joined
        self._wanted: frozenset[int] = frozenset()
        self._refused: set[int] = set()
        self._closed = False
        #: batches processed; a watchdog can see progress in it
        self.batches = 0
        #: packets given up because a path does not take any of their size
        self.refused = 0
        #: by destination: when that may be complained of again
        self._complaints: dict[int, float] = {}
        self._moderation = Moderation(device.rx_budget)
        #: pending end of a pause between two reads
        self._resting: asyncio.Handle | None = None
        #: that is a turn as soon as others have had theirs: it sends what there is by then
        self._follows = False
        #: turns that need no Python per batch, where node and device allow them
        backend = _backend(self._loop)
        self._turn = turn_for(node, device, backend)
        #: the device takes no more from turns, and is watched for room
        self._blocked = self._watches_room = False
        #: turns that are not to wait, because others in the loop have been woken and may call each other
        self._restless = 0
        #: turns may wait by themselves
        self._waits = self._turn is not None and backend >= 0
        _drivers.add(self)
        self._watch_arrivals(True)

    def now(self) -> float:
        """The time that the node is driven with."""
        return self._loop.time()

    def kick(self) -> None:
        """The node may have something to send or to say: its plan, a layout or a round was changed from
        outside.
        """
        if self._kick is None and not self._closed:
            self._kick = self._loop.call_soon(self._kicked)

    def join(self, group: int) -> None:
        """Also receive what is sent to a multicast group, an endpoint. Raises ``OSError`` if the device
        cannot.
        """
        if not isinstance(self.device, GroupReceiver):
            raise OSError(
                errno.EOPNOTSUPP,
                f"{show(self.device.endpoint)} cannot receive the group {show(group)}: use unicast, or the udp "
                "device",
            )
        descriptor = self.device.join(group)
        if descriptor is not None and group not in self._groups:
            self._groups[group] = descriptor
            if self._resting is None:
                self._loop.add_reader(descriptor, self._readable)

    def leave(self, group: int) -> None:
        """Undo :meth:`join`."""
        assert isinstance(self.device, GroupReceiver)
        descriptor = self._groups.pop(group, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
        self.device.leave(group)

    def _kicked(self) -> None:
        self._kick = None
        if not self._closed:
            self._follow_groups()
        self._pump()

    def _follow_groups(self) -> None:
        """Be in the groups that the node's plans name, and in no others. Without one a parent repairs by unicast."""
        wanted = self.node.groups
        if wanted == self._wanted:
            return
        for group in self._wanted - wanted:
            if group not in self._refused:
                self.leave(group)
            self._refused.discard(group)
        for group in wanted - self._wanted:
            try:
                self.join(group)
            except OSError as error:
                self._refused.add(group)
                _log.warning("multicast group not joined", group=show(group), reason=str(error))
        self._wanted = wanted

    def _readable(self) -> None:
        packets, drained = 0, False
        goes_on, self._follows = self._resting is not None, False
        try:
            for _ in range(READ_BUDGET):
                taken, drained = self._take() if self._turn is None else self._run(self._turn, goes_on)
                packets += taken
                if drained or packets >= BATCH or goes_on:
                    break
            self._follows = self._waits and packets > 0 and self._moderation.goes_on(self.node.lacking)
            self._pump()
        finally:
            # whatever has happened, the device is read again
            if not self._closed:
                self._rest(packets, drained)
                self._watch_room()

    def _take(self) -> tuple[int, bool]:
        """A batch for the node; how many packets it had, and whether there is no more."""
        batch = self.device.receive()
        if batch is None:
            return 0, True
        self.batches += 1
        self.node.receive(batch, self._loop.time())
        return len(batch), False

    def _run(self, turn: Turn, goes_on: bool) -> tuple[int, bool]:
        """As :meth:`_take`, with what follows sent; ``goes_on``: more is waited for, as long as the loop has nothing else to do."""
        now, until = self._loop.time(), 0.0
        self._restless -= self._restless > 0
        if goes_on and self._waits and self._pending is None and self._kick is None and not self._restless:
            now = time.monotonic()
            others = [one for one in tuple(_drivers) if one is not self and one._loop is self._loop]
            if not any(one._follows for one in others):
                due = (one._due for one in others if one._due is not None)
                until = min(now + LONGEST_TURN, turn.deadline, *due)
        outcome = turn.run(now, sends=self._pending is None, until=until)
        self.batches += outcome.batches
        self._blocked = outcome.blocked
        if outcome.woken:
            self._restless = RESTLESS
        if outcome.leftover is not None:
            self._send_on(outcome.leftover)
        return outcome.packets, outcome.drained

    def _rest(self, packets: int, drained: bool) -> None:
        """Read again after a pause, or as soon as there is something."""
        if self._follows:
            # the next turn waits by itself, once others have had theirs
            if self._resting is None:
                self._watch_arrivals(False)
            self._resting = self._loop.call_soon(self._readable)
            return
        pause = self._moderation.pause(packets if drained else 0, self.node.lacking, self._loop.time())
        if pause:
            if self._resting is None:
                self._watch_arrivals(False)
            self._resting = self._loop.call_later(pause, self._readable)
        elif self._resting is not None:
            self._resting = None
            self._watch_arrivals(True)

    def _watch_arrivals(self, on: bool) -> None:
        """Have :meth:`_readable` called for what arrives, or not."""
        for descriptor in (self.device.fileno(), *self._groups.values()):
            if on:
                self._loop.add_reader(descriptor, self._readable)
            else:
                self._loop.remove_reader(descriptor)

    def _watch_room(self) -> None:
        """Have turns go on when the device takes more, unless one follows soon anyway."""
        wanted = self._blocked and self._resting is None and self._pending is None and not self._closed
        if wanted == self._watches_room:
            return
        self._watches_room = wanted
        if wanted:
            self._loop.add_writer(self.device.fileno(), self._readable)
        else:
            self._loop.remove_writer(self.device.fileno())

    def _pump(self) -> None:
        if self._closed:
            return
        now = self._loop.time()
        held = self.device.flush(now)
        if held is not None:
            self.node.receive(held, now)
        self._send()
        for event in self.node.events():
            self._on_event(event)
        self._arm()
        self._watch_room()

    def _send(self) -> None:
        """Send until there is nothing left or the device is full."""
        if self._pending is not None:
            return
        node, turn = self.node, self._turn
        if turn is None:
            self._transmit(node.transmit)
            return
        assert isinstance(node, Node)
        repeats = partial(node.transmit, logs=False)
        changed = node.state.dirty
        if not self._transmit(repeats) or not changed or self._follows:
            return
        outcome = turn.run(self._loop.time(), budget=0)
        self._blocked = outcome.blocked
        if outcome.leftover is None or self._send_on(outcome.leftover):
            self._transmit(repeats)

    def _transmit(self, transmit: Callable[[float], Iterable[Transmission]]) -> bool:
        """Send what a machine has; False if some of it waits for the device."""
        if self._out is None:
            self._out = iter(transmit(self._loop.time()))
        for transmission in self._out:
            if not self._send_on(transmission):
                return False
        self._out = None
        return True

    def _send_on(self, transmission: Transmission) -> bool:
        """Offer packets to the device; False if some have to wait for it."""
        taken = self._offer(transmission, 0)
        if taken == len(transmission):
            return True
        self._pending = (transmission, taken)
        self._watch_room()
        self._watch()
        return False

    def _offer(self, transmission: Transmission, start: int) -> int:
        """Offer packets to the device; how many it took. Those too big for their path are lost: others have other paths."""
        try:
            return self.device.send(transmission, start)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            left = len(transmission) - start
            self.refused += left
            now = self._loop.time()
            if now >= self._complaints.get(transmission.destination, now):
                self._complaints[transmission.destination] = now + _COMPLAINT_SECONDS
                _log.error("packets lost", peer=show(transmission.destination), reason=error.strerror)
            return left

    def _watch(self) -> None:
        """Have :meth:`_resume` called when the device can take more of what is pending."""
        self._retry = self.device.retry_fileno()
        if self._retry is None:
            self._loop.add_writer(self.device.fileno(), self._resume)
        else:
            self._loop.add_reader(self._retry, self._resume)

    def _unwatch(self) -> None:
        if self._retry is None:
            self._loop.remove_writer(self.device.fileno())
        else:
            self._loop.remove_reader(self._retry)

    def _resume(self) -> None:
        assert self._pending is not None
        transmission, start = self._pending
        start += self._offer(transmission, start)
        if start < len(transmission):
            self._pending = (transmission, start)
            if self.device.retry_fileno() != self._retry:
                # it was tokens that were missing, and now it is room in the buffer, or the other way round
                self._unwatch()
                self._watch()
            return
        self._pending = None
        self._unwatch()
        self._pump()

    def _arm(self) -> None:
        """One timer for the node and the device, moved only when the next deadline has changed."""
        due = [at for at in (self.node.timer(), self.device.timer()) if at is not None]
        soonest = min(due, default=None)
        if soonest == self._due and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = soonest
        if soonest is not None:
            self._timer = self._loop.call_at(soonest, self._expired)

    def _expired(self) -> None:
        self._timer = None
        now = self._loop.time()
        at = self.node.timer()
        if at is not None and at <= now + 0.0005:
            # event loops fire up to a clock tick early; the node must see its deadline reached or it would
            # spin
            self.node.on_timer(max(now, at))
        self._pump()

    def close(self) -> None:
        """Stop driving and close the device; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        _drivers.discard(self)
        self._watch_arrivals(False)
        if self._pending is not None:
            self._unwatch()
        self._watch_room()
        for handle in (self._timer, self._kick, self._resting):
            if handle is not None:
                handle.cancel()
        self.device.close()


def _backend(loop: asyncio.AbstractEventLoop) -> int:
    """The descriptor that is readable when one of those that a loop watches is ready; -1 if there is none, or the loop has a clock
    of its own.
    """
    if abs(loop.time() - time.monotonic()) > _SAME_CLOCK:
        return -1
    if hasattr(loop, "_get_backend_id"):
        return int(loop._get_backend_id())
    selector = getattr(loop, "_selector", None)
    return int(selector.fileno()) if isinstance(selector, selectors.EpollSelector) else -1
