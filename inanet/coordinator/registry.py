"""Nodes that have registered: what they are, what they have to spare, and when they last said so."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from inanet.messages.control import Hello
from inanet.messages.registration import NodeState, Register, Report

#: Counters of a node that an overview has.
FIGURES = (
    "rx_packets",
    "tx_packets",
    "rows_sent",
    "results_in",
    "contributions_in",
    "leaf_contributions",
    "retransmissions",
    "fragments_completed",
    "slots_free",
    "slots_total",
    "dropped",
)


@dataclass(slots=True)
class Entry:
    """A registered node. ``heard``: when its last report came."""

    card: Register
    heard: float
    load: Report | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


class Registry:
    """All of them, by name."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> Entry | None:
        """A node's entry."""
        return self._entries.get(name)

    def enter(self, card: Register, now: float) -> None:
        """A node has registered."""
        self._entries[card.name] = Entry(card, now)

    def leave(self, name: str) -> None:
        """Its connection is gone."""
        self._entries.pop(name, None)

    def report(self, name: str, load: Report, now: float) -> None:
        """What it has to spare now."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.load, entry.heard = load, now

    def count(self, name: str, counters: Mapping[str, int]) -> None:
        """Its counters."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.counters = {figure: counters[figure] for figure in FIGURES if figure in counters}

    def missing(self, expected: Collection[str]) -> tuple[str, ...]:
        """Expected nodes that have not registered, in order."""
        return tuple(name for name in expected if name not in self._entries)

    def states(self, serving: Mapping[str, Hello], now: float) -> tuple[NodeState, ...]:
        """Everybody who is there: registered, or connected to serve jobs."""
        names = sorted({*self._entries, *serving})
        return tuple(self._state(name, serving.get(name), now) for name in names)

    def _state(self, name: str, hello: Hello | None, now: float) -> NodeState:
        entry = self._entries.get(name)
        if entry is None:
            assert hello is not None
            return NodeState(name=name, role=hello.role, registered=False, serves=True, counters={})
        card, load = entry.card, entry.load
        return NodeState(
            name=name,
            role=card.role,
            registered=True,
            serves=hello is not None,
            address=card.address,
            software=card.software,
            cores=card.cores,
            memory=card.memory,
            link_bps=card.link_bps,
            idle_cores=load.idle_cores if load else None,
            memory_used=load.memory_used if load else None,
            send_bps=load.send_bps if load else 0,
            receive_bps=load.receive_bps if load else 0,
            age=max(0.0, now - entry.heard),
            counters=dict(entry.counters),
        )
