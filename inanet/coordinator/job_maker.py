"""How a job is made of one that has formed or resumed: its epoch, its key, and whoever plans for it."""

from collections.abc import Callable, Collection
from functools import partial

from inanet.coordinator.child_ids import Planner
from inanet.coordinator.ended_jobs import Ended
from inanet.coordinator.fabrics import Fabrics
from inanet.coordinator.goat.rounds import SYSTEM
from inanet.coordinator.job import Job
from inanet.coordinator.members import Forming
from inanet.coordinator.multicast_groups import Groups
from inanet.coordinator.peers import Peers
from inanet.coordinator.plan_versions import Rescheduled
from inanet.coordinator.receive_buffers import Receivers
from inanet.coordinator.resumption import Resuming
from inanet.coordinator.round_ledger import Host
from inanet.coordinator.settings import FormatOf, Settings
from inanet.coordinator.switches import sums_only
from inanet.planning.topology import Arrangement


class JobMaker:
    """Puts jobs into ``jobs``, by number. They share receive buffers (``receivers``) and the addresses of ``groups``."""

    def __init__(
        self,
        settings: Settings,
        format_of: FormatOf,
        key_source: Callable[[], int],
        epochs: Callable[[], int],
        peers: Peers,
        jobs: dict[int, Job],
        fabrics: Fabrics,
        ended: Ended,
    ) -> None:
        self.receivers = Receivers()
        self.groups = Groups(settings.group_range, settings.group_port)
        #: of the last job that was admitted or taken over
        self.epoch = 0
        self._settings = settings
        self._format_of = format_of
        self._key_source = key_source
        self._epochs = epochs
        self._peers = peers
        self._jobs = jobs
        self._fabrics = fabrics
        self._ended = ended

    def next_epoch(self) -> int:
        """That of the next job, or of one that goes on."""
        self.epoch = self._epochs()
        return self.epoch

    def next_key(self) -> int:
        """The key of the next job, or of one that goes on."""
        return self._key_source() & 0xFFFFFFFFFFFFFFFF

    def make(
        self, name: str, chosen: Arrangement, pending: Forming | Resuming, hosts: dict[str, Host]
    ) -> Job:
        """A job that has still to start, or to take over what its members hold."""
        number, members = pending.number, pending.members
        format_of = self._format_of if chosen.switched is None else sums_only(self._format_of)
        downlink = self._settings.downlink

        def planner(its: Arrangement, key: int, ranks: int) -> Planner:
            return Planner(
                number,
                key,
                ranks,
                its.topology.ancestors,
                group_of=None if downlink == "unicast" else partial(self.groups.of, number, key),
                probe=downlink == "auto",
                switched=its.switched,
                publish=its.publish,
            )

        def fresh_key() -> int:
            self._ended.remember(job.planner.key, "it goes on without this host")
            self.groups.withdraw(number)
            return self.next_key()

        def renewal(ranks: int) -> tuple[int, Planner]:
            return self.next_epoch(), planner(chosen, fresh_key(), ranks)

        def reschedule(
            hosts: Collection[str], avoided: Collection[str], only_other: bool
        ) -> Rescheduled | None:
            assert job.planner.switched is not None
            workers = {name: job.hellos[name] for name in hosts}
            current = job.topology if only_other else None
            anew = self._fabrics.scheduled.rearrange(workers, job.planner.switched.number, avoided, current)
            if anew is None:
                return None
            made = planner(anew, fresh_key(), job.planner.ranks)
            return Rescheduled(self.next_epoch(), anew.topology, made, self._peers.nodes(), anew.reason)

        def next_nonce(name: str) -> int:
            peer = self._peers.worker(number, name) or self._peers.node(name)
            return peer.nonce + 1 if peer else 0

        hellos = {**self._peers.nodes(), **members.hellos}
        job = Job(
            name,
            chosen.topology,
            planner(chosen, pending.key, members.ranks),
            hosts,
            hellos,
            self._settings,
            format_of,
            self.receivers,
            next_nonce,
            pending.epoch,
            renewal if chosen.switched is None else None,
            # slots of asynchronous training have gradients that nobody sends again
            reschedule if chosen.publish is not None and members.system != SYSTEM else None,
            elastic=self._settings.elastic,
        )
        self._jobs[number] = job
        return job
