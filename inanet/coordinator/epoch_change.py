"""An elastic job goes on without workers that are gone (elastic rounds).

A round whose contributions are all at the roots is completed, with the lost worker's part in it; any other fails on all
survivors with one error. Only the roots can tell which it is, so they are asked, and a root that lacks something gives the
round up before it answers: a round never fails on some ranks only. Hosts hold meanwhile. When all have said what they have
begun, and nothing is under way any more, the job gets a plan under a new key, the next epoch, with fewer ranks: nodes
forget everything that was sent before it, so nothing of the old membership can be counted in the new one.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class EpochChange:
    """What has to be settled first. ``nonce`` is that of the hold hosts are asked for, ``before`` its round."""

    reason: str
    nonce: int
    before: int
    held: set[str] = field(default_factory=set)
    #: by round, the roots that have still to say whether they have all of it
    asked: dict[int, set[str]] = field(default_factory=dict)

    def hold_again(self, nonce: int) -> None:
        """Hosts have been sent a plan, which lets them go on: they are asked anew."""
        self.nonce = nonce
        self.held.clear()

    def judged(self, root: str, round_: int, complete: bool) -> bool:
        """A root has answered; whether the round fails with that."""
        waiting = self.asked.get(round_)
        if waiting is None or root not in waiting:
            return False
        waiting.discard(root)
        if not complete or not waiting:
            del self.asked[round_]
        return not complete

    def waits_for(self, root: str) -> Iterator[int]:
        """Rounds about which a root has not answered, which it will not do any more."""
        for round_ in [round_ for round_, roots in self.asked.items() if root in roots]:
            del self.asked[round_]
            yield round_

    def settled(self, hosts: Collection[str]) -> bool:
        """Whether all hosts hold and all roots have answered."""
        return not self.asked and self.held.issuperset(hosts)
