"""Which host has begun and finished which round of a job, and which rounds are over without a result.

A round is *open* from the first Begin until every host has finished it, or, if it failed, until every host
has come past it (a host that begins it late is told again). It is *settling* until the parameter servers
have confirmed it too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inanet.messages.control import RoundFailed
from inanet.messages.text import show_ranks
from inanet.proto.common.plan import TensorSpec

#: Finished rounds that parameter servers have not confirmed; older ones are no longer waited for.
_MOST_SETTLING = 4096


@dataclass(slots=True)
class Host:
    """A worker host of a job: its global ranks, and the next round it will begin."""

    name: str
    ranks: tuple[int, ...]
    next_round: int = 1


@dataclass(slots=True)
class Round:
    """One open round. ``specs`` has what each host that began it wants reduced."""

    number: int
    since: float
    deadline: float
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    failure: RoundFailed | None = None
    #: parameter servers that will confirm it, those with a part of the tensor in their tree
    roots: frozenset[str] = frozenset()

    @property
    def spec(self) -> TensorSpec | None:
        """The spec of the first host that began it; None if a host refused before it began."""
        return next(iter(self.specs.values()), None)

    @property
    def committed(self) -> bool:
        """Whether a host has the whole result: the round may be late now, but it cannot fail (one outcome)."""
        return bool(self.finished)


class RoundLedger:
    """The rounds of one job over its hosts."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self.hosts = hosts
        self._rounds: dict[int, Round] = {}
        #: what they sum, and the parameter servers that have still to confirm them
        self._settling: dict[int, tuple[TensorSpec | None, set[str]]] = {}
        self._confirmed_early: dict[int, set[str]] = {}

    def __iter__(self) -> Iterator[Round]:
        return iter([self._rounds[number] for number in sorted(self._rounds)])

    def __len__(self) -> int:
        return len(self._rounds)

    def get(self, number: int) -> Round | None:
        """The open round with this number."""
        return self._rounds.get(number)

    @property
    def newest(self) -> int:
        """The highest round any host has begun, 0 if there was none."""
        return max((host.next_round for host in self.hosts.values()), default=1) - 1

    @property
    def oldest_open(self) -> int:
        """No round below this is open."""
        return min([host.next_round for host in self.hosts.values()] + list(self._rounds), default=1)

    @property
    def quiet(self) -> bool:
        """Whether no packet of any round is on its way: all that was begun is finished and confirmed."""
        return not self._rounds and not self._settling

    def unquiet(self) -> str:
        """What of the rounds begun is still on its way, in words; empty if nothing is."""
        for round_ in self:
            ranks = self.not_begun(round_) if round_.failure is not None else self.not_finished(round_)
            return f"round {round_.number} is not over for {show_ranks(ranks)}"
        for number, (_, roots) in sorted(self._settling.items()):
            return f"{', '.join(sorted(roots))} did not confirm round {number}"
        return ""

    def enter(self, host: str, number: int, now: float, seconds: float) -> Round | None:
        """Note that a host has come to a round. None if it has been there before; the numbers must not skip
        any.
        """
        record = self.hosts[host]
        if number < record.next_round:
            return None
        record.next_round = number + 1
        round_ = self._rounds.get(number)
        if round_ is None:
            round_ = self._rounds[number] = Round(number, now, now + seconds)
        return round_

    def adopt(self, opened: Mapping[str, Mapping[int, TensorSpec]], now: float, seconds: float) -> None:
        """Enter the rounds each host has begun and not finished; its other rounds before ``next_round`` it
        has.
        """
        for number in sorted({number for rounds in opened.values() for number in rounds}):
            round_ = self._rounds[number] = Round(number, now, now + seconds)
            for name, host in self.hosts.items():
                if number in opened.get(name, {}):
                    round_.specs[name] = opened[name][number]
                elif host.next_round > number:
                    round_.finished.add(name)

    def finish(self, host: str, number: int) -> None:
        """Note that a host has the result of an open round."""
        round_ = self._rounds.get(number)
        if round_ is not None and number < self.hosts[host].next_round:
            round_.finished.add(host)
            self.tidy(round_)

    def confirm(self, root: str, number: int) -> None:
        """A parameter server needs no packet of this round any more, and of none before it with the same tensor (confirmed rounds):
        what was said of those may have been lost with whoever said or heard it.
        """
        known = self._rounds.get(number)
        if number in self._settling:
            spec = self._settling[number][0]
        elif known is not None:
            self._confirmed_early.setdefault(number, set()).add(root)
            spec = known.spec
        else:
            return
        for other in [n for n, (theirs, _) in self._settling.items() if n <= number and theirs == spec]:
            self._settling[other][1].discard(root)
            if not self._settling[other][1]:
                del self._settling[other]

    def renew(self) -> None:
        """Parameter servers have forgotten all rounds: nothing is left to be confirmed."""
        self._settling.clear()
        self._confirmed_early.clear()
        for round_ in self._rounds.values():
            round_.roots = frozenset()

    def forgive(self, root: str) -> None:
        """A parameter server is gone, and with it what it would have confirmed."""
        for number in list(self._settling):
            self.confirm(root, number)
        for round_ in self._rounds.values():
            round_.roots -= {root}

    def tidy(self, round_: Round) -> None:
        """Close the round if nobody has anything more to do with it."""
        if round_.failure is not None:
            over = all(host.next_round > round_.number for host in self.hosts.values())
        else:
            over = round_.finished >= self.hosts.keys()
        if not over or round_.number not in self._rounds:
            return
        del self._rounds[round_.number]
        confirmed = self._confirmed_early.pop(round_.number, set())
        if round_.failure is None and not confirmed >= round_.roots:
            self._settling[round_.number] = round_.spec, set(round_.roots) - confirmed
            if len(self._settling) > _MOST_SETTLING:
                del self._settling[min(self._settling)]

    def settled_up_to(self, number: int) -> bool:
        """Whether every round up to this one is over for good."""
        return self.oldest_open > number and all(other > number for other in self._settling)

    def not_begun(self, round_: Round) -> tuple[int, ...]:
        """Ranks whose host has not begun the round."""
        return self.ranks([host.name for host in self.hosts.values() if host.next_round <= round_.number])

    def not_finished(self, round_: Round) -> tuple[int, ...]:
        """Ranks whose host has not got the result."""
        return self.ranks([name for name in self.hosts if name not in round_.finished])

    def ranks(self, hosts: list[str]) -> tuple[int, ...]:
        """All ranks on these hosts, sorted."""
        return tuple(sorted(rank for name in hosts for rank in self.hosts[name].ranks))
