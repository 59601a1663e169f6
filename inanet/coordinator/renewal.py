"""A job that goes on in another epoch: without workers that are gone (elastic rounds), over other switches, or
because somebody knows its key who was sent away.

Everything is told anew under another key, so nothing counts that was sent before; when the moment for that has come,
:mod:`inanet.coordinator.elasticity` says.
"""

from inanet.coordinator.elasticity import Shrinking
from inanet.coordinator.events import KeyChanged, MembershipChanged, PlanChosen
from inanet.coordinator.plan_versions import Rescheduled, Versions
from inanet.coordinator.retired_ids import Settling
from inanet.coordinator.round_ledger import Round
from inanet.coordinator.rounds import JobLost
from inanet.messages.control import JobEnded, Judge, Judged
from inanet.messages.text import clip

#: Wait for a quiet moment like an aggregator; no node is called that.
REARRANGED, REKEYED = "*", "#"


class Renewing(Versions):
    """What :class:`~inanet.coordinator.job.Job` is built on, beside its plans: the change from one epoch to the next."""

    def _shrink(self, reason: str, newest: int, open_: list[Round]) -> None:
        """Have roots judge the rounds under way, and hosts begin no round after ``newest`` until the next epoch."""
        shrinking = self._shrinking
        if shrinking is None:
            shrinking = self._shrinking = Shrinking(reason, 0, newest + 1)
        shrinking.reason, shrinking.before = reason, max(shrinking.before, newest + 1)
        self._holding.cancel()
        self._hold_for_shrinking()
        for round_ in open_:
            tensors = [
                self.collectives.tensors.book.find(spec) for spec in dict.fromkeys(round_.specs.values())
            ]
            known = tuple(sorted(tensor.layout.tensor for tensor in tensors if tensor is not None))
            shrinking.asked[round_.number] = set(round_.roots)
            for root in round_.roots:
                self._send(root, Judge(job=self.number, round=round_.number, tensors=known))

    def _judged(self, name: str, message: Judged) -> None:
        if self._shrinking is not None and self._shrinking.judged(name, message.round, message.complete):
            self._give_up(message.round)

    def _give_up(self, number: int) -> None:
        """A round that some root does not have all of, now that nobody will send it any more."""
        round_ = self.collectives.ledger.get(number)
        if round_ is not None and round_.failure is None:
            collectives = self.collectives
            collectives.fail(round_, "worker_lost", collectives.farewell, missing=collectives.departed)

    @property
    def _may_renew(self) -> bool:
        """Whether nothing of the old membership is under way any more."""
        return (
            self._shrinking is not None
            and self._shrinking.settled(self.hosts)
            and not self.collectives.completing
            and not self._vacancies
        )

    def _renew(self, reason: str, found: Rescheduled | None) -> None:
        """Begin the next epoch, with the hosts that are left; on other switches if ``found`` says so."""
        for name in self.collectives.tensors.holders():
            self.dismiss(name, "the job goes on in a new epoch")
        planner = self.planner
        ranks = sum(len(host.ranks) for host in self.hosts.values())
        fewer = ranks < planner.ranks
        if found is not None:
            self.epoch, self.topology, self.planner = found.epoch, found.topology, found.planner
            self.hellos.update(found.hellos)
            self.log.append(PlanChosen(self.number, self.name, found.reason))
        else:
            assert self._renewal is not None
            self.epoch, self.planner = self._renewal(ranks)
        self.planner.follow(self.topology.ancestors)
        self.planner.version = planner.version
        self.collectives.renew(self.planner)
        self._members = tuple(sorted(self.hosts))
        self._settling = Settling(self.collectives.ledger)
        self._gate, self._attach = set(), {}
        self._quiet = self._held_back = False
        if fewer or found is not None:
            # what others have done, and trees for them, is of no use
            self._performances, self._wanted = {}, None
            self._holding.discard(REARRANGED)
        self._holding.discard(REKEYED)
        self._compromised = ""
        if found is None and fewer:
            self.log.append(MembershipChanged(self.number, self.name, ranks, self.epoch, reason))
        elif found is None:
            self.log.append(KeyChanged(self.number, self.name, self.epoch, reason))
        self._advance(f"{reason}; {ranks} ranks go on", {})

    def _replan(self, name: str, reason: str) -> None:
        """A switch is gone: rounds under way fail, and the job is scheduled anew once all hosts hold."""
        self._avoided.add(name)
        self.collectives.give_up(f"{reason}; the job is scheduled anew: call again")
        self._shrink(reason, self.collectives.ledger.newest, [])

    def _anew(self, reason: str) -> Rescheduled | None:
        """A schedule over the switches that are there now, if it is for that that hosts hold."""
        if self._reschedule is None:
            return None
        found = self._reschedule(self.hosts, self._avoided, False)
        if found is None:
            text = f"job {self.name!r}: {reason}, and its sums cannot be made without it"
            raise JobLost("aggregator_lost", text)
        return found

    def dismiss(self, name: str, reason: str) -> None:
        """Tell an aggregator that the job goes on without it."""
        self._told.pop(name, None)
        self._send(name, JobEnded(job=self.number, reason=clip(reason)))
