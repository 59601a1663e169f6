"""The one interface of everything that carries packets: sockets, memory, and the decorators around them.

A device never blocks and never waits. Its driver reads it when :meth:`Device.fileno` is readable, and sends
until the device takes fewer packets than it was offered; then it waits for what
:meth:`Device.retry_fileno` says and goes on from there.
"""

from typing import Protocol, runtime_checkable

import numpy as np

from inanet.wire.batch import I64, U8, PacketBatch, Transmission
from inanet.wire.endpoint import show


class Device(Protocol):
    """Carries packets of one node. Not thread-safe: one driver owns it."""

    @property
    def endpoint(self) -> int:
        """Own address (:mod:`inanet.wire.endpoint`), with the port the kernel chose where 0 was asked for."""
        ...

    @property
    def rx_budget(self) -> int:
        """Fragments that may be queued for this device before packets are lost; windows are shares of it.

        Counted in the largest units the device receives: sockets with segmentation offload hold fewer
        fragments that arrive one by one.
        """
        ...

    def fileno(self) -> int:
        """File descriptor to watch. Devices without one raise ``OSError``."""
        ...

    def receive(self) -> PacketBatch | None:
        """One drain step: what has arrived, up to the device's batch limit, or ``None`` when there is
        nothing.

        The batch's arena is valid until the next call. More may be waiting after a batch; call until
        ``None``.
        """
        ...

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Send packets ``start`` and following; returns how many of them the device took.

        Fewer than ``len(transmission) - start`` means that sending would block: wait for what
        :meth:`retry_fileno` says and call again with ``start`` advanced. A packet that was taken may still be
        lost, as on any network. Raises ``ValueError`` for a transmission that no network could carry and
        ``OSError`` naming the destination for one that this network cannot (MTU).
        """
        ...

    def retry_fileno(self) -> int | None:
        """After a send that took fewer packets than offered: the descriptor that becomes *readable* when
        sending can go on, or ``None``: the device's own becomes *writable*.
        """
        ...

    def timer(self) -> float | None:
        """When :meth:`flush` has something to give, on the clock of whoever holds packets back; ``None``:
        never.
        """
        ...

    def flush(self, now: float) -> PacketBatch | None:
        """Packets that were held back and are due at ``now`` (seconds). Arena as for :meth:`receive`."""
        ...

    def counters(self) -> dict[str, int]:
        """Totals since the device was opened, by name.

        All devices have ``rx_packets``, ``rx_bytes``, ``tx_packets``, ``tx_bytes`` and ``kernel_overflow``.
        """
        ...

    def close(self) -> None:
        """Give up all resources. Closing twice is fine."""
        ...


def receive_window(device: Device) -> int:
    """Fragments that all neighbours together may have in flight towards a device, whatever size they arrive in.

    A budget counts full super-frames, at 1,070 bytes of the receive buffer for each fragment. One that arrives alone is
    charged up to 2,304 bytes, so that 46 % of a budget fit; the rest is for control packets. At least 64.
    """
    return max(64, 2 * device.rx_budget // 5)


@runtime_checkable
class GroupReceiver(Protocol):
    """A device that can receive what is sent to a multicast group, in the same stream as its own packets."""

    def join(self, group: int) -> int | None:
        """Receive packets to ``group``, an endpoint; their source is the endpoint of whoever sent them.

        Returns a descriptor that must be watched beside the device's own until the group is left, or
        ``None``. Raises ``ValueError`` for an address that is no group.
        """
        ...

    def leave(self, group: int) -> None:
        """Undo :meth:`join`; stop watching the descriptor first."""
        ...


def check_transmission(transmission: Transmission) -> None:
    """Refuse what would read outside the arena.

    Raises ``ValueError`` naming the destination unless the arena is 1-D, uint8 and contiguous, ``length`` is
    positive and all offsets lie inside the arena.
    """
    arena, offsets, length = transmission.arena, transmission.offsets, transmission.length
    if (
        length > 0
        and _is_plain(arena, offsets)
        and (not len(offsets) or (offsets.min() >= 0 and offsets.max() + length <= len(arena)))
    ):
        # as it always is: the text below costs more than the look
        return
    where = f"transmission to {show(transmission.destination)}"
    if length <= 0:
        raise ValueError(f"{where}: packets of {length} B")
    check_arena(where, arena, offsets, np.int64(length))


def _is_plain(arena: U8, offsets: I64) -> bool:
    return (
        arena.ndim == 1
        and arena.dtype == np.uint8
        and bool(arena.flags.c_contiguous)
        and offsets.dtype == np.int64
        and bool(offsets.flags.c_contiguous)
    )


def check_arena(where: str, arena: U8, offsets: I64, lengths: I64 | np.int64) -> None:
    """Refuse what would make the kernel read outside the arena; ``lengths`` is for each packet or for all.

    Raises ``ValueError`` beginning with ``where``.
    """
    if arena.ndim != 1 or arena.dtype != np.uint8 or not arena.flags.c_contiguous:
        raise ValueError(f"{where}: arena must be 1-D contiguous uint8, not {arena.ndim}-D {arena.dtype}")
    if offsets.dtype != np.int64 or not offsets.flags.c_contiguous:
        raise ValueError(f"{where}: offsets must be contiguous int64, not {offsets.dtype}")
    if len(offsets) and (offsets.min() < 0 or np.min(lengths) < 0 or np.max(offsets + lengths) > len(arena)):
        raise ValueError(
            f"{where}: offsets {int(offsets.min())} to {int(offsets.max())} with packets of up to "
            f"{int(np.max(lengths))} B leave the arena of {len(arena)} B"
        )


def aligned_offsets(lengths: I64) -> tuple[I64, int]:
    """Offsets, each divisible by 4, that lay out packets of ``lengths`` one after the other; and the total
    size.
    """
    padded = (lengths + 3) & ~np.int64(3)
    ends = np.cumsum(padded)
    return ends - padded, int(ends[-1]) if len(ends) else 0


def is_group(endpoint: int) -> bool:
    """Whether an endpoint's address is an IPv4 multicast group (224.0.0.0/4)."""
    return endpoint >> 44 == 0xE
