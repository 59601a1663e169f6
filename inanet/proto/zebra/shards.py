"""The PS's machine for sparse jobs: a shard of every job that the control plane names."""

from collections.abc import Callable
from functools import partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import Broken, Counted, ModelPart, NodeEvent
from inanet.proto.common.machine import Host
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.zebra.job import EMPTY, hot_of, job_of
from inanet.proto.zebra.journal import Kept, Models, part_of
from inanet.proto.zebra.plan import ZebraJob
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.store import OPTIMISERS, Uniform, zeros
from inanet.proto.zebra.stream import DAEMON_TIMING
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop


class ShardServer:
    """A shard of every job, told apart by who has sent a packet and under which number.

    A job's model is here as long as the job is, unless it has a name: then this shard's part is kept in ``models``. ``endpoint`` is
    where the machine receives, which says which shard it is.
    """

    def __init__(self) -> None:
        self.endpoint = 0
        self.models: Models | None = None
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._shards: dict[int, ParameterShard] = {}
        #: plans by the numbers of jobs in packets, and where their models are kept
        self._plans: dict[int, NodePlan] = {}
        self._kept: dict[int, Kept] = {}
        self._broken: list[Broken] = []
        self._past: dict[str, int] = {}

    takes_raw = False

    @property
    def keeps(self) -> bool:
        """Whether models can be kept here."""
        return self.models is not None

    def settle(self, host: Host) -> None:
        self.endpoint, self.models = host.endpoint, host.models

    def hold(self, job: int, layout: TensorLayout) -> None:
        """There are no tensors."""

    def serve(self, plan: NodePlan) -> None:
        """Be a shard of the job of a plan; of one whose model is kept, when it says with which iteration it begins. Raises
        ``ValueError`` for a job that cannot be, or that has none here.
        """
        facts = _job(plan)
        job, model = job_of(facts, plan.key), facts.sparse.model
        if self.endpoint not in job.shards:
            raise ValueError(f"job {job.number} has no shard at this server")
        if model:
            self._kept[job.number] = self._open(self._part(facts))
        self._plans[job.number] = plan
        try:
            self.follow(plan, 0.0)
        except ValueError:
            self.remove_job(job.number)
            raise

    def _part(self, facts: ZebraJob) -> str:
        """What this server's part of a job's model is called."""
        return f"{facts.sparse.model}.{facts.servers.index(self.endpoint)}of{len(facts.servers)}"

    def _open(self, part: str) -> Kept:
        if self.models is None:
            raise ValueError("this server keeps no models; set node.models to a folder for them")
        try:
            return self.models.open(part)
        except OSError as error:
            raise ValueError(f"cannot keep {part}: {error.strerror}") from None

    def kept(self, job: int) -> ModelPart | None:
        """What is here of the model of a job, by its number in packets; ``None`` if it is not kept. Raises ``ValueError`` for one
        that cannot be read, and for one of which there are other parts here: as new it would be another.
        """
        kept, plan = self._kept.get(job), self._plans.get(job)
        if kept is None or plan is None:
            return None
        try:
            found = part_of(kept.entries())
            others = (
                [] if found.iteration or self.models is None else self.models.trained(_job(plan).sparse.model)
            )
        except OSError as error:
            raise ValueError(f"cannot read the model: {error.strerror}") from None
        if others:
            raise ValueError(
                f"it has {', '.join(others)}, and is to begin {self._part(_job(plan))}: give the job the servers that have "
                "trained the model, as many as they were, or the model another name"
            )
        return found

    def follow(self, plan: NodePlan, now: float) -> None:
        """A job's hot keys, and what has been decided of them. Raises ``ValueError`` for a model that is another's."""
        facts = _job(plan)
        number = facts.number
        if number not in self._plans:
            # it cannot go on here, and the coordinator is about to hear so
            return
        if number not in self._shards:
            if number in self._kept and facts.begin < 0:
                return
            self._shards[number] = self._shard(facts)
        self._try(number, partial(self._tell, self._shards[number], facts))

    @staticmethod
    def _tell(shard: ParameterShard, facts: ZebraJob) -> None:
        if facts.hot_version != EMPTY.version:
            shard.prepare(hot_of(facts))
            if shard.number == 0:
                shard.announce(facts.hot_version)
        shard.settle(facts.decided)

    def _shard(self, facts: ZebraJob) -> ParameterShard:
        job, sparse = job_of(facts, self._plans[facts.number].key), facts.sparse
        place, kept = job.shards.index(self.endpoint), self._kept.get(facts.number)
        initial = Uniform(sparse.initial) if sparse.initial else zeros
        optimiser = OPTIMISERS[sparse.optimiser](sparse.rate, sparse.beta)
        # a server that is lost ends its jobs, so that a shard has one life
        # the same for all shards of the job, and no key any more
        origin = int.from_bytes(blake2b(job.key.to_bytes(8, "big"), digest_size=6).digest(), "big")
        shard = ParameterShard(
            job, place, optimiser, initial, DAEMON_TIMING, journal=kept, model=sparse.model, origin=origin
        )
        if kept is not None:
            try:
                shard.restore(kept.entries(), anew=True, iteration=facts.begin)
            except OSError as error:
                raise ValueError(f"cannot begin with {sparse.model!r}: {error.strerror}") from None
        return shard

    def _try(self, number: int, action: Callable[[], None]) -> None:
        """Do something that may have to be written down: a hot set, or the end of an iteration."""
        try:
            action()
        except OSError as error:
            plan = self._plans[number]
            model = _job(plan).sparse.model
            self._broken.append(Broken(plan.job, f"cannot keep {model!r}: {error.strerror}"))
            self.remove_job(number)

    def remove_job(self, job: int) -> None:
        """Forget a job and its part of the model, unless it is kept; its packets are foreign from now on. Figures stay."""
        shard, kept = self._shards.pop(job, None), self._kept.pop(job, None)
        self._plans.pop(job, None)
        if kept is not None:
            kept.close()
        if shard is not None:
            self.drops += shard.drops
            self._past = _sum(self._past, _counters(shard))

    # ---------------------------------------------------------------- machine

    @property
    def lacking(self) -> int:
        """0: workers wait for every answer."""
        return 0

    @property
    def groups(self) -> frozenset[int]:
        return frozenset()

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Give every packet to the shard of the job that it names; bytes 2 and 3 have its number."""
        long = batch.lengths >= 4
        numbers: NDArray[np.int64] = np.full(len(batch), -1, np.int64)
        at = batch.offsets[long]
        numbers[long] = batch.arena[at + 2].astype(np.int64) << 8 | batch.arena[at + 3]
        self.drops[Drop.SHORT] += int(np.count_nonzero(~long))
        for number in np.unique(numbers[long]).tolist():
            mine = np.flatnonzero(numbers == number)
            shard = self._shards.get(number)
            if shard is None:
                self.drops[Drop.FOREIGN_JOB] += len(mine)
                continue
            part = PacketBatch(batch.arena, batch.offsets[mine], batch.lengths[mine], batch.sources[mine])
            self._try(number, partial(shard.receive, part, now))

    def transmit(self, now: float) -> list[Transmission]:
        return [transmission for shard in self._shards.values() for transmission in shard.transmit(now)]

    def timer(self) -> float | None:
        times = [shard.timer() for shard in self._shards.values()]
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        for shard in self._shards.values():
            shard.on_timer(now)

    def events(self) -> list[NodeEvent]:
        """What shards have counted, and jobs that cannot go on. The control plane hears of lost workers by itself, and workers of
        iterations that are finished.
        """
        broken, self._broken = self._broken, []
        counted = [
            Counted(self._plans[number].job, event.tally)
            for number, shard in self._shards.items()
            for event in shard.events()
            if isinstance(event, Counted)
        ]
        return [*broken, *counted]

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name, over all jobs."""
        out = self._past
        for shard in self._shards.values():
            out = _sum(out, _counters(shard))
        return {**out, "sparse_jobs": len(self._shards)}

    def drops_by_reason(self) -> dict[str, int]:
        drops = sum((shard.drops for shard in self._shards.values()), self.drops.copy())
        return {reason.label: int(drops[reason]) for reason in Drop if reason is not Drop.OK}


def _job(plan: NodePlan) -> ZebraJob:
    """What a sparse job's plan says."""
    assert isinstance(plan.switched, ZebraJob)
    return plan.switched


def _counters(shard: ParameterShard) -> dict[str, int]:
    """A shard's counters but those of drops, which have a place of their own."""
    return {f"sparse_{name}": n for name, n in shard.stats().items() if not name.startswith("drop_")}


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
