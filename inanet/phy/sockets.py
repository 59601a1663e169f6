"""What datagram sockets have in common: batches in and out, back-pressure, errors that must not kill,
counters.
"""

import errno
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import numpy as np

from inanet.phy.device import check_transmission
from inanet.phy.mmsg import PATH_ERRORS, ReceiveTable, kernel_drops, path_mtu, system_error
from inanet.wire.batch import I64, U8, PacketBatch, Transmission
from inanet.wire.endpoint import address_of, show

#: receive buffer asked for; unprivileged processes get at most ``net.core.rmem_max``
RCVBUF = 4 << 20
#: Send buffer asked for, eight super-frames: a burst leaves in one call. Small on purpose: the queueing discipline holds
#: about this much, the rest waits here and the sender learns of congestion as EAGAIN instead of as loss in its own
#: interface's queue.
SNDBUF = 512 << 10

#: beyond ``net.core.rmem_max`` and ``wmem_max``, for processes with CAP_NET_ADMIN
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33

#: what kernels and drivers without segmentation offload answer to a super-frame
_SEGMENTATION_REFUSED = frozenset((errno.EINVAL, errno.EIO, errno.EOPNOTSUPP, errno.ENOPROTOOPT))
#: what kernels answer to one datagram for an address or port that can have no receiver: broadcast, class E, port 0
_NO_RECEIVER = frozenset((errno.EACCES, errno.EINVAL))
_PENDING_ERRORS = 8
_COUNTERS = (
    "rx_packets",
    "rx_bytes",
    "rx_superframes",
    "rx_truncated",
    "tx_packets",
    "tx_bytes",
    "tx_superframes",
    "eagain",
    "path_errors",
    "segmentation_refused",
)


class OutgoingTable(Protocol):
    """Messages to one destination at a time; see :class:`inanet.phy.mmsg.SendTable`."""

    def aim(self, destination: int, segment: int) -> None:
        """Set destination endpoint and segment size in bytes, 0 for none."""
        ...

    def gather(self, arena: U8, offsets: I64, start: int, length: int, segments: int) -> int:
        """Prepare messages; returns their number, or -1 for a packet outside the arena. Raises ``TypeError`` for
        arrays of other types."""
        ...

    def send(self, fd: int, first: int, messages: int) -> int:
        """One system call; returns how many messages left, or minus the errno."""
        ...


class SocketDevice(ABC):
    """A non-blocking socket as a :class:`inanet.phy.device.Device`; subclasses say how packets are framed.

    Takes ownership of ``sock``. ``own`` is the endpoint that peers know it by.
    """

    #: bytes the kernel puts before each packet, for messages
    headroom: ClassVar[int]
    #: largest message the kernel takes, without its own headers
    max_message: ClassVar[int]

    def __init__(
        self,
        sock: socket.socket,
        receive_table: ReceiveTable,
        send_table: OutgoingTable,
        segments: int,
        own: int,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._in = receive_table
        self._out = send_table
        #: most packets per message; 1 means no segmentation
        self._segments = segments
        self._endpoint = own
        self._drops_before = kernel_drops(sock)
        self._overflow = 0
        self._counts = dict.fromkeys(_COUNTERS, 0)

    @property
    def endpoint(self) -> int:
        """Own address; raw sockets have port 0."""
        return self._endpoint

    @property
    @abstractmethod
    def rx_budget(self) -> int:
        """Fragments that may be queued; see :attr:`inanet.phy.device.Device.rx_budget`."""

    @property
    def rcvbuf(self) -> int:
        """Receive buffer granted by the kernel, in the bytes it charges packets with (twice what was asked
        for).
        """
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def fileno(self) -> int:
        """The socket's file descriptor; -1 once closed."""
        return self._socket.fileno()

    @property
    def received(self) -> ReceiveTable:
        """The table of messages, for a loop that receives by itself; see :meth:`account`."""
        return self._in

    def segments_of(self, length: int) -> int:
        """Most packets of a length that one message may have now."""
        return max(1, min(self._segments, self.max_message // length))

    def account(self, figures: Sequence[int]) -> None:
        """Count what a loop has received and sent by itself: packets, bytes, super-frames of both, EAGAIN, path errors."""
        self._in.used()
        names = ("rx_packets", "rx_bytes", "rx_superframes", "tx_packets", "tx_bytes", "tx_superframes")
        for name, figure in zip((*names, "eagain", "path_errors"), figures, strict=True):
            if figure:
                self._counts[name] += figure

    def receive(self) -> PacketBatch | None:
        """One ``recvmmsg``. Raises ``OSError`` when the socket is unusable (closed)."""
        count = self._take(self._socket, self._endpoint)
        return self._unpack(count) if count else None

    def _take(self, sock: socket.socket, endpoint: int, first: int = 0) -> int:
        """One ``recvmmsg`` into the table, behind ``first`` messages; returns how many came."""
        for _ in range(_PENDING_ERRORS):
            count = self._in.receive(sock.fileno(), first)
            if count >= 0:
                return count
            if -count not in PATH_ERRORS:
                raise system_error(-count, f"receiving at {show(endpoint)}")
            # an ICMP answer to something sent earlier; reading it has cleared it
            self._counts["path_errors"] += 1
        return 0

    @abstractmethod
    def _unpack(self, count: int) -> PacketBatch | None:
        """Batch of the ``count`` messages that the receive table holds."""

    def _unpack_by(self, find: Callable[..., int], count: int) -> PacketBatch:
        """A batch of those among ``count`` messages, a packet each, that a kernel finds good; the others are truncated."""
        table = self._in
        offsets, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
        sources = np.empty(count, np.uint64)
        kept = int(find(table.headers, table.arena, count, table.stride, offsets, lengths, sources))
        self._counts["rx_truncated"] += count - kept
        batch = PacketBatch(table.arena, offsets[:kept], lengths[:kept], sources[:kept])
        return self._received(batch, count, int(batch.lengths.sum()))

    def _received(self, batch: PacketBatch, messages: int, received: int) -> PacketBatch:
        """A batch, counted: it came in so many messages and has ``received`` bytes."""
        self._counts["rx_superframes"] += messages
        self._counts["rx_packets"] += len(batch)
        self._counts["rx_bytes"] += received
        return batch

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Send from ``start`` on, several super-frames a system call; see
        :meth:`inanet.phy.device.Device.send`.
        """
        total, length = len(transmission), transmission.length
        if not 0 < length <= self.max_message:
            check_transmission(transmission)
            raise self._too_big(transmission)
        at, plainly = start, False
        while at < total:
            segments = 1 if plainly else min(self._segments, self.max_message // length)
            self._out.aim(transmission.destination, length if segments > 1 else 0)
            messages = self._gather(transmission, at, segments)
            left, code = self._push(messages)
            taken = min(total - at, left * segments)
            self._counts["tx_packets"] += taken
            self._counts["tx_bytes"] += taken * length
            self._counts["tx_superframes"] += left
            at += taken
            if plainly and left and self._segments > 1:
                # only now is it known that the super-frame was refused for being one
                self._segments = 1
                self._counts["segmentation_refused"] = 1
            if code == errno.EAGAIN:
                self._counts["eagain"] += 1
                break
            if code == errno.EMSGSIZE:
                raise self._too_big(transmission)
            if segments > 1 and code in _SEGMENTATION_REFUSED:
                plainly = True
            elif code in _NO_RECEIVER:
                # a peer that announced such an address must not end the process that believed it
                self._counts["path_errors"] += total - at
                at = total
            elif code:
                raise system_error(code, f"sending to {show(transmission.destination)}")
        return at - start

    def _gather(self, transmission: Transmission, start: int, segments: int) -> int:
        """Prepare messages; the kernel that does so looks at every offset, so only its refusal costs a second look."""
        arena, offsets = transmission.arena, transmission.offsets
        try:
            messages = self._out.gather(arena, offsets, start, transmission.length, segments)
        except TypeError:
            messages = -1
        if messages < 0:
            check_transmission(transmission)
            raise ValueError(
                f"transmission to {show(transmission.destination)} changed while it was being sent"
            )
        return messages

    def _push(self, messages: int) -> tuple[int, int]:
        """Hand the prepared messages to the kernel; returns how many it took, and the errno that stopped it
        or 0.

        A path error is reported once for an earlier packet (ICMP) and then cleared, so the message is tried
        again; a second one is this message's own, which then is lost as on any network.
        """
        first, tried = 0, -1
        while first < messages:
            sent = self._out.send(self._socket.fileno(), first, messages)
            if sent >= 0:
                first += sent
            elif -sent not in PATH_ERRORS:
                return first, -sent
            else:
                self._counts["path_errors"] += 1
                if tried == first:
                    first += 1
                tried = first
        return first, 0

    def _too_big(self, transmission: Transmission) -> OSError:
        destination = address_of(transmission.destination)
        mtu = path_mtu(destination)
        known = f" {mtu}" if mtu else ""
        return OSError(
            errno.EMSGSIZE,
            f"packets of {transmission.length} B need an MTU of {transmission.length + self.headroom} B; the "
            f"path to {show(transmission.destination)} has{known or ' a smaller one'}: raise the MTU of the "
            "interfaces on it",
        )

    def retry_fileno(self) -> int | None:
        """The socket becomes writable when its send buffer has room again."""
        return None

    def timer(self) -> float | None:
        return None

    def flush(self, now: float) -> PacketBatch | None:
        return None

    def counters(self) -> dict[str, int]:
        """Totals.

        Packets, bytes and super-frames (messages) each way; ``rx_truncated`` packets longer than the buffers;
        ``kernel_overflow`` super-frames the kernel discarded for lack of receive buffer; ``eagain`` sends
        that had to wait; ``path_errors`` ICMP answers and unreachable destinations; ``segmentation_refused``
        1 when the kernel takes plain datagrams only.
        """
        if self._socket.fileno() >= 0:
            drops = kernel_drops(self._socket)
            self._overflow += (drops - self._drops_before) & 0xFFFFFFFF
            self._drops_before = drops
        return {**self._counts, "kernel_overflow": self._overflow}

    def close(self) -> None:
        """Close the socket; counters stay readable."""
        if self._socket.fileno() >= 0:
            self.counters()
            self._socket.close()
