"""A worker whose results come through the kernel program's ring: its device.

What the program does not take arrives at the device's socket, and without a program all of it does.
"""

import os
import select
import socket

from inanet.phy.device import Device
from inanet.phy.wrapper import Wrapper
from inanet.wire.batch import PacketBatch
from inanet.wire.endpoint import address_of
from inanet.xdp.inbox import Inbox, InboxCount

#: times in a row that the socket is not looked at after results, when the program has left nothing to it
_SKIPS = 4


def _is_free(group: int) -> bool:
    """Whether no socket of this host is bound to a group, or to its port on all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as alone:
        try:
            alone.bind(address_of(group))
        except OSError:
            return False
    return True


def _share(descriptor: int, allowed: bool) -> None:
    """Whether other sockets may be bound to where this one is."""
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


class InboxDevice(Wrapper):
    """``device``, and before it the results that ``inbox`` has for the same endpoint.

    The socket is only read when something may be there: the program counts what it leaves to it. What other ways bring to
    the socket (loopback, another interface) is seen because it wakes whoever watches :meth:`fileno`, and then because the
    last look has found something.
    """

    def __init__(self, device: Device, inbox: Inbox) -> None:
        super().__init__(device)
        self.inbox = inbox
        #: descriptors that are readable when there is something to read, and room to send
        self._arrivals: select.epoll | None = None
        self._room: select.epoll | None = None
        #: keeps the first of them readable for whoever stops reading before it is told that there is nothing more,
        #: where no record of the program's does; and whether it is readable itself
        self._nudge: int | None = None
        self._nudged = True
        self._sleeping = False
        #: whether results have come since somebody began to read
        self._took = False
        self._seen_passed = 0
        self._skipped = 0
        self._found = False
        self._packets = self._bytes = 0
        #: groups that nobody else on this host hears, with their sockets' descriptors
        self._own_groups: dict[int, int | None] = {}

    def fileno(self) -> int:
        """Readable when the socket is, or when there may be results: always, from one call of :meth:`receive` that has
        returned something to the next that returns ``None``. Raises ``OSError`` for devices without a descriptor.
        """
        if self._arrivals is None:
            self._nudge = os.eventfd(int(self._nudged), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._arrivals = select.epoll()
            for descriptor in (self._device.fileno(), self.inbox.fileno(), self._nudge):
                self._arrivals.register(descriptor, select.EPOLLIN)
        return self._arrivals.fileno()

    def retry_fileno(self) -> int | None:
        """As :meth:`inanet.phy.device.Device.retry_fileno`; never ``None``, as what :meth:`fileno` returns can only be read."""
        inner = self._device.retry_fileno()
        if inner is not None:
            return inner
        if self._room is None:
            self._room = select.epoll()
            self._room.register(self._device.fileno(), select.EPOLLOUT)
        return self._room.fileno()

    def join(self, group: int) -> int | None:
        """As :meth:`inanet.phy.device.GroupReceiver.join`. What the program takes, no other socket of this host gets: it takes
        what is sent to a group only if none is bound to it, and then no other one can be.
        """
        free = _is_free(group)
        descriptor = super().join(group)
        if group not in self._own_groups and free:
            if descriptor is not None:
                _share(descriptor, False)
            self._own_groups[group] = descriptor
            self.inbox.hear(self._own_groups.keys())
        return descriptor

    def leave(self, group: int) -> None:
        if group in self._own_groups:
            del self._own_groups[group]
            self.inbox.hear(self._own_groups.keys())
        super().leave(group)

    def share_groups(self) -> None:
        """The program takes nothing any more: others may hear what this device hears."""
        for descriptor in self._own_groups.values():
            if descriptor is not None:
                _share(descriptor, True)
        self._own_groups.clear()
        self.inbox.hear(frozenset())

    def receive(self) -> PacketBatch | None:
        """Results first, then what the socket has."""
        if self._sleeping:
            self._stay_awake()
            self._sleeping = self._took = False
        batch = self._take()
        if batch is not None:
            return batch
        if self._may_have_more():
            batch = self._device.receive()
            self._found = batch is not None
            if batch is not None:
                return batch
        if self._nudged:
            self._nudged = False
            if self._nudge is not None:
                os.eventfd_read(self._nudge)
        self.inbox.sleep()
        batch = self._take()
        if batch is not None:
            self._stay_awake()
            return batch
        self._sleeping = True
        return None

    def _stay_awake(self) -> None:
        """The program says nothing until :meth:`receive` has found nothing: somebody has to, if it has not already."""
        if self.inbox.awake():
            self._nudged = True
            if self._nudge is not None:
                os.eventfd_write(self._nudge, 1)

    def _take(self) -> PacketBatch | None:
        batch = self.inbox.take()
        if batch is not None:
            self._took = True
            self._packets += len(batch)
            self._bytes += int(batch.lengths.sum())
        return batch

    def _may_have_more(self) -> bool:
        """Whether the socket is worth a system call."""
        passed = self.inbox.passed
        if self._took and not self._found and passed == self._seen_passed and self._skipped < _SKIPS:
            self._skipped += 1
            return False
        self._seen_passed = passed
        self._skipped = 0
        return True

    def counters(self) -> dict[str, int]:
        """The socket's with results counted in, and ``xdp_`` with the names of
        :class:`~inanet.xdp.inbox.InboxCount`.
        """
        counters = self._device.counters()
        counters["rx_packets"] += self._packets
        counters["rx_bytes"] += self._bytes
        counts = self.inbox.counts().tolist()
        return counters | {f"xdp_{what.name.lower()}": counts[what] for what in InboxCount}

    def close(self) -> None:
        """Close the device. Closing twice is fine; the program is somebody else's."""
        for descriptor in (self._arrivals, self._room):
            if descriptor is not None:
                descriptor.close()
        if self._nudge is not None:
            os.close(self._nudge)
            self._nudge = None
        super().close()


def inbox_of(device: Device) -> Inbox | None:
    """Where results for a device come through the kernel; ``None`` if they do not."""
    while not isinstance(device, InboxDevice):
        if not isinstance(device, Wrapper):
            return None
        device = device.wrapped
    return device.inbox
