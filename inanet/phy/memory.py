"""In-memory network for tests and simulation: deterministic, in order, without a clock and without loss of
its own except where a receiver's bounded queue overflows, which is counted as a kernel would."""

from collections import deque

import numpy as np

from inanet.phy.device import aligned_offsets, check_transmission, is_group
from inanet.wire.batch import U8, PacketBatch, Transmission
from inanet.wire.endpoint import endpoint, show

#: transmissions that one :meth:`MemoryDevice.receive` joins into a batch, as the UDP device does with
#: super-frames
BATCH_TRANSMISSIONS = 32


class MemoryNetwork:
    """Joins :class:`MemoryDevice` objects by their endpoints. Packets to an endpoint nobody has are lost."""

    def __init__(self) -> None:
        self._devices: dict[int, MemoryDevice] = {}
        self._groups: dict[int, list[MemoryDevice]] = {}
        self._next_port = 49152

    def open(
        self, address: str = "127.0.0.1", port: int = 0, *, queue_packets: int = 65536
    ) -> "MemoryDevice":
        """A device at this address; port 0 picks a free one. It queues up to ``queue_packets`` received
        packets.

        Raises ``OSError`` when the endpoint is taken.
        """
        if port == 0:
            while endpoint(address, self._next_port) in self._devices:
                self._next_port += 1
            port = self._next_port
        own = endpoint(address, port)
        if own in self._devices:
            raise OSError(f"{show(own)} is already open on this network")
        device = MemoryDevice(self, own, queue_packets)
        self._devices[own] = device
        return device

    def device(self, own: int) -> "MemoryDevice | None":
        """The open device at an endpoint, if there is one."""
        return self._devices.get(own)

    def receivers(self, destination: int) -> "list[MemoryDevice]":
        """The devices that get what is sent to an endpoint: one at most, or the members of a group as they joined."""
        if is_group(destination):
            return self._groups.get(destination, [])
        device = self._devices.get(destination)
        return [] if device is None else [device]

    def join(self, group: int, device: "MemoryDevice") -> None:
        """Make a device a member of a group, once."""
        members = self._groups.setdefault(group, [])
        if device not in members:
            members.append(device)

    def leave(self, group: int, device: "MemoryDevice") -> None:
        """Undo :meth:`join`. Raises ``KeyError`` for a device that is no member."""
        members = self._groups.get(group, [])
        if device not in members:
            raise KeyError(group)
        members.remove(device)
        if not members:
            del self._groups[group]

    def groups_of(self, device: "MemoryDevice") -> list[int]:
        """Groups that a device is a member of."""
        return [group for group, members in self._groups.items() if device in members]

    def remove(self, own: int) -> None:
        """Forget a device; called by :meth:`MemoryDevice.close`."""
        device = self._devices.pop(own, None)
        if device is not None:
            for group in self.groups_of(device):
                self.leave(group, device)


class MemoryDevice:
    """A device of a :class:`MemoryNetwork`; see :class:`inanet.phy.device.Device`."""

    def __init__(self, network: MemoryNetwork, own: int, queue_packets: int) -> None:
        self._network = network
        self._endpoint = own
        self._capacity = queue_packets
        self._queue: deque[tuple[int, U8]] = deque()
        self._queued = 0
        self._open = True
        self._counts = dict.fromkeys(
            ("rx_packets", "rx_bytes", "tx_packets", "tx_bytes", "kernel_overflow", "unreachable"), 0
        )

    @property
    def endpoint(self) -> int:
        """Own address."""
        return self._endpoint

    @property
    def rx_budget(self) -> int:
        """Packets the receive queue holds."""
        return self._capacity

    def fileno(self) -> int:
        """Raises ``OSError``: there is nothing to watch, whoever owns the network decides when to read."""
        raise OSError("a memory device has no file descriptor: read it after others have sent")

    def receive(self) -> PacketBatch | None:
        """What up to :data:`BATCH_TRANSMISSIONS` sends have brought, in their order, or ``None``."""
        if not self._queue:
            return None
        taken = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_TRANSMISSIONS))]
        counts = np.array([len(packets) for _, packets in taken])
        lengths = np.repeat(np.array([packets.shape[1] for _, packets in taken], np.int64), counts)
        sources = np.repeat(np.array([source for source, _ in taken], np.uint64), counts)
        offsets, size = aligned_offsets(lengths)
        arena = np.zeros(size, np.uint8)
        first = 0
        for _, packets in taken:
            count, length = packets.shape
            stride = (length + 3) & ~3
            begin = int(offsets[first])
            arena[begin : begin + count * stride].reshape(count, stride)[:, :length] = packets
            first += count
        self._queued -= len(lengths)
        self._counts["rx_packets"] += len(lengths)
        self._counts["rx_bytes"] += int(lengths.sum())
        return PacketBatch(arena, offsets, lengths, sources)

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Copy packets to the receiver's queue. Takes all: what does not fit there is lost and counted there.

        Raises ``OSError`` on a closed device, ``ValueError`` as :func:`~inanet.phy.device.check_transmission`
        does.
        """
        if not self._open:
            raise OSError(f"device {show(self._endpoint)} is closed")
        check_transmission(transmission)
        offsets = transmission.offsets[start:]
        if len(offsets) == 0:
            return 0
        self._counts["tx_packets"] += len(offsets)
        self._counts["tx_bytes"] += len(offsets) * transmission.length
        receivers = self._network.receivers(transmission.destination)
        if not receivers:
            self._counts["unreachable"] += len(offsets)
            return len(offsets)
        arena, length = transmission.arena, transmission.length
        if len(offsets) == 1:
            packets = arena[offsets[0] : offsets[0] + length].reshape(1, length).copy()
        else:
            packets = np.lib.stride_tricks.sliding_window_view(arena, length)[offsets]
        for receiver in receivers:
            receiver._deliver(self._endpoint, packets)
        return len(offsets)

    def join(self, group: int) -> None:
        """Also receive what is sent to ``group``. Joining twice is one membership. Raises ``ValueError`` for an address
        that is no group.
        """
        if not is_group(group):
            raise ValueError(
                f"{show(group)} is not a multicast group; groups are 224.0.0.0 to 239.255.255.255"
            )
        self._network.join(group, self)

    def leave(self, group: int) -> None:
        """Undo :meth:`join`. Raises ``KeyError`` if it was not joined."""
        self._network.leave(group, self)

    def _deliver(self, source: int, packets: U8) -> None:
        """Queue packets, uint8[n, length], as far as there is room."""
        room = max(self._capacity - self._queued, 0)
        self._counts["kernel_overflow"] += max(len(packets) - room, 0)
        packets = packets[:room]
        if len(packets):
            self._queue.append((source, packets))
            self._queued += len(packets)

    def retry_fileno(self) -> int | None:
        """Sending never blocks."""
        return None

    def timer(self) -> float | None:
        return None

    def flush(self, now: float) -> PacketBatch | None:
        return None

    def counters(self) -> dict[str, int]:
        """Totals; ``unreachable``: packets sent to an endpoint without a device, ``kernel_overflow``: own
        queue.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Leave the network; queued packets are gone."""
        if self._open:
            self._open = False
            self._network.remove(self._endpoint)
            self._queue.clear()
            self._queued = 0
