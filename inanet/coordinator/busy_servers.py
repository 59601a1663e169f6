"""Servers that something else keeps busy: a burst of load takes them out of running jobs until it is over."""

from dataclasses import dataclass, field

from inanet.messages.registration import Register, Report
from inanet.planning.trees import MEMORY_SHARE

#: A machine with a smaller share of idle cores is busy: a daemon that sums is one thread, so on more than one core this
#: is not its own work.
IDLE_SHARE = 0.1
#: Reports in a row that say the same before it is believed.
REPORTS = 3


@dataclass(slots=True)
class Strain:
    """Who is busy, by the reports so far."""

    _streaks: dict[str, int] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)

    def report(self, card: Register, load: Report) -> str:
        """One more report of a node: why it is busy, empty if it is not."""
        name = card.name
        cores = load.idle_cores < IDLE_SHARE * card.cores
        memory = card.memory > 0 and load.memory_used > MEMORY_SHARE * card.memory
        changed = (cores or memory) != (name in self._busy)
        self._streaks[name] = self._streaks.get(name, 0) + 1 if changed else 0
        if self._streaks[name] >= REPORTS:
            self._busy ^= {name}
            self._streaks[name] = 0
        if name not in self._busy:
            return ""
        if memory:
            return f"{load.memory_used / card.memory:.0%} of its memory is in use"
        return f"{load.idle_cores:g} of its {card.cores} cores are idle"
