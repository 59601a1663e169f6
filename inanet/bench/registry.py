"""Who takes part in ``ina bench compare``: peers and systems register themselves with :func:`register`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from inanet.bench.peers.rank import Team
from inanet.bench.stage import Stage

#: Tables for which processes are started; ``ingest`` is drawn from the runs of ``local``.
Table: TypeAlias = Literal["local", "star", "loss", "hetero"]
#: How a peer loads the links, and so which of :mod:`inanet.bench.bounds` holds for it; ``spliced``: its lab has ina-switch
#: for every switch.
Traffic: TypeAlias = Literal["tree", "server", "ring", "synchronous", "spliced"]


def nothing_lacking() -> str:
    """For peers that need nothing."""
    return ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A contestant. ``start`` puts its ranks on a stage, and must leave nothing that outlives the stage's stack."""

    name: str
    tables: tuple[Table, ...]
    start: Callable[[Stage], Team]
    traffic: Traffic
    #: what is not installed, for people; empty if it can start
    lacking: Callable[[], str] = nothing_lacking
    #: one process sums what all ranks send, so the peer has a row in ``ingest``
    ingests: bool = False


_registered: list[Peer] = []


def register(peer: Peer) -> Peer:
    """Have ``peer`` take part in its tables, after those that are registered. Raises ``ValueError`` if the name is
    taken in one of them."""
    for table in peer.tables:
        if any(other.name == peer.name for other in peers(table)):
            raise ValueError(f"there is a peer {peer.name!r} in the table {table!r} already")
    _registered.append(peer)
    return peer


def unregister(peer: Peer) -> None:
    """Take a peer out again. Raises ``ValueError`` if it is not registered."""
    _registered.remove(peer)


def peers(table: Table) -> tuple[Peer, ...]:
    """Those that take part in a table, installed or not, in order."""
    return tuple(peer for peer in _registered if table in peer.tables)
