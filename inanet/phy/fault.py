"""Decorator that makes a network bad on purpose: loses, repeats, reorders, damages and delays packets, from
a seed.

It acts on what is **received**. Every hop has exactly one receiving side, so a fabric whose devices all
have an injector meets every fault once per hop. Faults are drawn per packet, never per super-frame (faults per packet).
Each packet takes the same number of draws whatever befalls it, and reordering counts packets, so the
outcome depends on the seed and on the order of arrival alone, not on how the kernel happened to batch them
(delays and the reordering deadline follow the clock).

Damage is one flipped bit in a copy above the kernel, where no UDP checksum can see it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.phy.device import Device
from inanet.phy.gather import join, select
from inanet.phy.wrapper import Wrapper
from inanet.wire.batch import I64, PacketBatch

F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: draws per packet, by purpose
_DROP, _DUPLICATE, _CORRUPT, _REORDER, _SPAN, _BIT, _DELAY, _DELAY_TIME = range(8)
_DRAWS = 8
#: packets to let pass before a delayed packet: only its time releases it
_NEVER = np.iinfo(np.int64).max
#: place of packets released by time: before all of the new batch
_FRONT = -1.0


@dataclass(slots=True)
class _Held:
    """Packets held back, copied out of the device's arena; arrays have one entry per packet."""

    packets: PacketBatch
    #: when they are released at the latest
    due: F64
    #: later packets still to let pass
    passing: I64
    #: arrival numbers, which decide ties
    arrival: I64

    def part(self, mask: Mask) -> "_Held":
        chosen = np.flatnonzero(mask)
        return _Held(select(self.packets, chosen), self.due[mask], self.passing[mask], self.arrival[mask])


class FaultInjector(Wrapper):
    """Impairs what ``device`` receives.

    ``drop``, ``duplicate``, ``reorder``, ``corrupt`` are probabilities per packet. A reordered packet comes
    after 1 to ``reorder_span`` packets that arrived behind it, or ``reorder_hold`` seconds later if fewer
    arrive by then. ``delay`` is a range of seconds, uniform, for the share ``delayed`` of the packets. A
    duplicate is an undamaged copy in the original's place. ``clock`` gives the time in seconds that
    :meth:`timer` and :meth:`flush` use. Raises ``ValueError`` for what is not a probability or a range.
    """

    def __init__(
        self,
        device: Device,
        seed: int,
        clock: Callable[[], float],
        *,
        drop: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        corrupt: float = 0.0,
        delay: tuple[float, float] = (0.0, 0.0),
        delayed: float = 1.0,
        reorder_span: int = 8,
        reorder_hold: float = 0.005,
    ) -> None:
        super().__init__(device)
        shares = {
            "drop": drop,
            "duplicate": duplicate,
            "reorder": reorder,
            "corrupt": corrupt,
            "delayed": delayed,
        }
        for name, value in shares.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is a probability between 0 and 1, not {value}")
        if not 0.0 <= delay[0] <= delay[1]:
            raise ValueError(f"delay is a range of seconds, lowest first, not {delay}")
        if reorder_span < 1:
            raise ValueError(f"reorder_span is a number of packets from 1 on, not {reorder_span}")
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._drop, self._duplicate, self._reorder, self._corrupt = drop, duplicate, reorder, corrupt
        self._delay = delay
        self._delayed = delayed if delay[1] > 0 else 0.0
        self._span, self._hold = reorder_span, reorder_hold
        self._active = max(drop, duplicate, reorder, corrupt, self._delayed) > 0
        #: draws below these are faults
        self._limits = np.zeros(_DRAWS)
        self._limits[[_DROP, _DUPLICATE, _CORRUPT, _REORDER, _DELAY]] = (
            drop,
            duplicate,
            corrupt,
            reorder,
            self._delayed,
        )
        self._held: _Held | None = None
        #: when the first of them is due
        self._earliest = float("inf")
        self._arrivals = 0
        self._counts = dict.fromkeys(
            (
                "injected",
                "injected_duplicates",
                "injected_corruptions",
                "injected_reorderings",
                "injected_delays",
            ),
            0,
        )

    def receive(self) -> PacketBatch | None:
        """What is left of the next batch, with held packets that are due; ``None`` when the device has
        nothing."""
        while (batch := self._device.receive()) is not None:
            impaired = self._impair(batch, self._clock())
            if len(impaired):
                return impaired
        return self._release(self._clock())

    def flush(self, now: float) -> PacketBatch | None:
        """Held packets whose time has come, and what the wrapped device releases, impaired."""
        inner = self._device.flush(now)
        batch = self._release(now) if inner is None else self._impair(inner, now)
        return batch if batch is not None and len(batch) else None

    def timer(self) -> float | None:
        """When the next held packet is due."""
        times = [float(self._earliest)] if self._held is not None else []
        inner = self._device.timer()
        if inner is not None:
            times.append(inner)
        return min(times, default=None)

    def counters(self) -> dict[str, int]:
        """The device's, and by kind how many packets were impaired; ``injected`` counts the lost ones."""
        return {**self._device.counters(), **self._counts}

    def close(self) -> None:
        """Close the device; held packets are gone."""
        self._keep([])
        self._device.close()

    def _impair(self, batch: PacketBatch, now: float) -> PacketBatch:
        """Apply all faults to a batch that has just arrived."""
        if not self._active:
            return batch
        count = len(batch)
        draws = self._rng.random((count, _DRAWS))
        if not (draws < self._limits).any() and self._overtaken(count, now):
            self._arrivals += count
            return batch
        alive = draws[:, _DROP] >= self._drop
        index = np.flatnonzero(alive)
        again = np.flatnonzero(alive & (draws[:, _DUPLICATE] < self._duplicate))
        chosen = np.concatenate([index, again])
        packets = join([select(batch, chosen)])
        self._damage(packets, draws[index])

        arrival = chosen + self._arrivals
        self._arrivals += count
        place = chosen.astype(np.float64)
        place[len(index) :] += 0.25
        passing = np.zeros(len(chosen), np.int64)
        due = np.full(len(chosen), now)
        originals = slice(0, len(index))
        behind, late = self._reordered(draws[index]), draws[index, _DELAY] < self._delayed
        place[originals] += np.where(behind > 0, behind + 0.5, 0.0)
        passing[originals] = np.maximum(behind + index - (count - 1), 0)
        due[originals] += np.where(passing[originals] > 0, self._hold, 0.0)
        low, high = self._delay
        due[originals][late] = now + low + (high - low) * draws[index, _DELAY_TIME][late]
        passing[originals][late] = _NEVER

        self._counts["injected"] += count - len(index)
        self._counts["injected_duplicates"] += len(again)
        self._counts["injected_reorderings"] += int(np.count_nonzero(behind))
        self._counts["injected_delays"] += int(np.count_nonzero(late))
        fresh = _Held(packets, due, passing, arrival)
        return self._merge(fresh, place, count, now)

    def _overtaken(self, count: int, now: float) -> bool:
        """Let as many packets pass those that are held, if none of these leaves by it."""
        held = self._held
        if held is None:
            return True
        if now >= self._earliest or (held.passing <= count).any():
            return False
        held.passing[held.passing != _NEVER] -= count
        return True

    def _reordered(self, draws: F64) -> I64:
        """How many later packets each packet must let pass; 0 for those that keep their place."""
        span = 1 + (draws[:, _SPAN] * self._span).astype(np.int64)
        return np.where(draws[:, _REORDER] < self._reorder, span, 0)

    def _damage(self, packets: PacketBatch, draws: F64) -> None:
        """Flip one bit of some of the first ``len(draws)`` packets, in place."""
        lengths = packets.lengths[: len(draws)]
        hit = np.flatnonzero((draws[:, _CORRUPT] < self._corrupt) & (lengths > 0))
        bit = (draws[hit, _BIT] * (lengths[hit] * 8)).astype(np.int64)
        packets.arena[packets.offsets[hit] + bit // 8] ^= (1 << (bit % 8)).astype(np.uint8)
        self._counts["injected_corruptions"] += len(hit)

    def _merge(self, fresh: _Held, place: F64, count: int, now: float) -> PacketBatch:
        """Hold what must wait, and put what need not, and earlier packets that need no longer, in order."""
        parts, places, times, arrivals = [], [], [], []
        waiting = []
        held = self._held
        if held is not None:
            overdue = held.due <= now
            enough = held.passing <= count
            out = overdue | enough
            if out.any():
                leaving = held.part(out)
                parts.append(leaving.packets)
                places.append(np.where(overdue[out], _FRONT, leaving.passing - 0.5))
                times.append(np.where(overdue[out], leaving.due, 0.0))
                arrivals.append(leaving.arrival)
            if not out.all():
                left = held.part(~out)
                left.passing = np.where(left.passing == _NEVER, _NEVER, left.passing - count)
                waiting.append(left)
        holds = (fresh.passing > 0) & (fresh.due > now)
        if holds.any():
            kept = fresh.part(holds)
            waiting.append(kept)
        self._keep(waiting)
        going = fresh.part(~holds)
        if not parts and not holds.any() and not (np.diff(place) < 0).any():
            return going.packets
        parts.append(going.packets)
        places.append(place[~holds])
        times.append(np.zeros(len(going.due)))
        arrivals.append(going.arrival)
        order = np.lexsort((np.concatenate(arrivals), np.concatenate(times), np.concatenate(places)))
        return select(join(parts) if len(parts) > 1 else going.packets, order)

    def _release(self, now: float) -> PacketBatch | None:
        """Held packets that are due, earliest first."""
        held = self._held
        if held is None or now < self._earliest:
            return None
        leaving, left = held.part(held.due <= now), held.part(held.due > now)
        self._keep([left] if len(left.due) else [])
        return select(leaving.packets, np.lexsort((leaving.arrival, leaving.due)))

    def _keep(self, waiting: list[_Held]) -> None:
        """Hold these packets back and nothing else."""
        if not waiting:
            self._held, self._earliest = None, float("inf")
            return
        # compact: a few packets held for long must not keep the memory of their whole batch
        packets = join([held.packets for held in waiting])
        due = np.concatenate([held.due for held in waiting])
        passing = np.concatenate([held.passing for held in waiting])
        arrival = np.concatenate([held.arrival for held in waiting])
        self._held, self._earliest = _Held(packets, due, passing, arrival), float(due.min())
