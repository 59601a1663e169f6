"""When a retired id may be issued again: when no packet can carry it in a round that still matters (child ids).

The coordinator sees Begins late: a host may have begun a round, and the lost aggregator forwarded its part,
before the coordinator knew of the round. But a host that answers a ping sent after a plan has said Begin
for every round it began before that plan. So the rounds in question are those begun when all hosts have
answered, and the id is free when all of them are over.
"""

from collections.abc import Collection
from dataclasses import dataclass

from inanet.coordinator.round_ledger import RoundLedger


@dataclass(slots=True)
class _Version:
    version: int
    #: the ping each host still has to answer
    nonces: dict[str, int]
    #: the newest round begun when all had answered
    horizon: int | None = None


class RetiredIds:
    """Plan versions that retired ids, the oldest first."""

    def __init__(self, ledger: RoundLedger) -> None:
        self._ledger = ledger
        self._versions: list[_Version] = []

    def track(self, version: int, nonces: dict[str, int]) -> None:
        """A version retired ids; ``nonces`` are the next pings of the hosts."""
        self._versions.append(_Version(version, nonces))

    def answered(self, host: str, nonce: int) -> None:
        """A host has answered a ping."""
        for entry in self._versions:
            if entry.nonces.get(host, nonce + 1) <= nonce:
                del entry.nonces[host]
            if not entry.nonces and entry.horizon is None:
                entry.horizon = self._ledger.newest

    def settled(self, hosts: Collection[str]) -> int:
        """The newest version such that the ids retired in it and before it are free; 0 if there is none.

        Hosts not among ``hosts`` are gone and are not waited for.
        """
        version = 0
        for entry in self._versions:
            if any(host in hosts for host in entry.nonces):
                break
            if entry.horizon is None:
                entry.horizon = self._ledger.newest
            if not self._ledger.settled_up_to(entry.horizon):
                break
            version = entry.version
        self._versions = [entry for entry in self._versions if entry.version > version]
        return version
