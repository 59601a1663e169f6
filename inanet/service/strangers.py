"""Packets that no node of a fabric sends, told by counts: whoever is flooded must see it, and not drown in lines about it."""

from collections.abc import Iterator, Mapping

from inanet.wire.drops import Drop

#: Reasons that a node, its jobs and a network that damages packets do not cause.
STRANGE = (Drop.SHORT, Drop.OVERSIZED, Drop.BAD_MAGIC, Drop.BAD_TYPE, Drop.BAD_TAG, Drop.FOREIGN_HOST)
#: Seconds between two lines about one reason.
MINUTE = 60.0


class Strangers:
    """Compares counters of drops with those told of before."""

    def __init__(self) -> None:
        #: by reason: what was told, and when
        self._told: dict[str, tuple[int, float]] = {}

    def seen(self, drops: Mapping[str, int], now: float) -> Iterator[tuple[str, int, int]]:
        """Reasons to tell of, each with the packets since it was told last, and all: at most once in :data:`MINUTE` seconds each."""
        for drop in STRANGE:
            total = drops.get(drop.label, 0)
            before, at = self._told.get(drop.label, (0, -MINUTE))
            if total > before and now - at >= MINUTE:
                self._told[drop.label] = total, now
                yield drop.label, total - before, total
