"""``inanet.join_sparse``: a rank of a sparse job, by the job's file.

>>> with inanet.join_sparse("clicks.toml", rank=0) as member:
...     rows = member.job.push_pull(keys, gradients)

A file with ``[control]`` is of a job in a fabric of daemons: the coordinator says where its switch and its PS shards are, and when
the job is over. In one without, the file itself says where everybody is (:mod:`inanet.sparse.job_file`).

The connection to the coordinator is in a thread of its own beside the one that trains.
"""

import asyncio
import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
from numpy.typing import NDArray

from inanet.aio.uplink import Uplink
from inanet.config.file import ConfigError, Problem, find_file, read_toml, validate
from inanet.config.sparse import FabricSparseConfig, OnlineSection
from inanet.errors import FabricError, InaError, JoinTimeout, RoundTimeout, error_of
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.phy.device import Device, receive_window
from inanet.phy.fault import FaultInjector
from inanet.phy.udp import UdpDevice
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.common.refusal import Refusal
from inanet.proto.zebra.job import EMPTY, hot_of, job_of
from inanet.proto.zebra.plan import Online, Sparse, ZebraJob
from inanet.proto.zebra.stream import DAEMON_TIMING
from inanet.proto.zebra.worker import IterationDone, Pulled, Refused, Stalled, ZebraWorker
from inanet.service.addresses import refuse_loopback_early, resolve
from inanet.sparse.job import SparseJob
from inanet.sparse.job_file import SparseFile
from inanet.sparse.stations import Stations
from inanet.trust.certificates import Keys

#: seconds beyond the coordinator's own deadline, after which it says who is missing
_GRACE = 5.0
#: seconds to say good-bye
_FAREWELL = 5.0


class PlanFollower:
    """A :class:`~inanet.proto.common.machine.Follower` that only wants to know its place: the first plan has it for good. Later ones may have
    other hot keys, of which ``changed(facts)`` is told.
    """

    def __init__(self, changed: Callable[[ZebraJob], None] = lambda _facts: None) -> None:
        self.plan: NodePlan | None = None
        self._changed = changed
        self._decided = 0

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Remember the first; tell of other hot keys."""
        self.plan = self.plan or plan
        facts = plan.switched
        if isinstance(facts, ZebraJob) and facts.decided > self._decided:
            self._decided = facts.decided
            self._changed(facts)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Sparse jobs have no tensors."""
        raise Refusal("a rank of a sparse job has no tensors")

    def drop_layout(self, job_id: int, tensor: int) -> None:
        """There is none."""

    def drop_job(self, job_id: int) -> None:
        """Whoever trains hears of the end by its error."""

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """There are no rounds."""

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """There are no rounds."""

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        """A rank is no root."""
        return False


class CoordinatorConnection:
    """Joins as ``identity`` at ``address`` and stays. In the line's thread ``over(error)`` is called when the job has ended with an
    error, and ``changed(facts)`` when others of its keys are hot.
    """

    def __init__(
        self,
        identity: Identity,
        address: str,
        *,
        patience: float,
        keys: Keys | None,
        over: Callable[[InaError], None],
        changed: Callable[[ZebraJob], None],
    ) -> None:
        self._identity = identity
        self._address = address
        self._patience = patience
        self._keys = keys
        self._over = over
        self._place = PlanFollower(changed)
        self._missing = ""
        self._failed = False
        self._changed = threading.Condition()
        self._ended: InaError | None = None
        self._closing: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"inanet {identity.name}", daemon=True)
        self._thread.start()

    def plan(self) -> NodePlan:
        """The plan, once everybody is there. Raises what the coordinator says, as :func:`~inanet.errors.error_of` names
        it: :class:`~inanet.errors.JoinRefused`, :class:`~inanet.errors.JoinTimeout` with who is missing, ...
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._place.plan is not None or self._ended is not None, self._patience + _GRACE
            )
            if self._ended is not None:
                raise self._ended
            if self._place.plan is None:
                raise JoinTimeout(
                    f"no plan from {self._address} within {self._patience:g} s, nor in the {_GRACE:g} s after"
                    + (f": {self._missing}" if self._missing else ""),
                    job=self._identity.job,
                    rank=self._identity.ranks[0],
                )
            return self._place.plan

    def close(self, *, failed: bool = False) -> None:
        """Leave the job in good order or, ``failed``, as one whom the others need not wait for. Closing twice is fine."""
        with self._changed:
            self._failed = failed
            loop, closing = self._loop, self._closing
        if loop is not None and closing is not None and self._thread.is_alive():
            # it may have ended meanwhile
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(closing.set)
        self._thread.join(_FAREWELL)

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        asyncio.run(self._stay())

    async def _stay(self) -> None:
        closing = asyncio.Event()
        member = Member(self._place, self._identity, progress=self._progress)
        uplink = Uplink(
            member,
            self._address,
            join=self._patience,
            resume=self._patience,
            wake=lambda: self._look(member),
            keys=self._keys,
        )
        with self._changed:
            self._loop, self._closing = asyncio.get_running_loop(), closing
        running = asyncio.create_task(uplink.run())
        waiting = asyncio.create_task(closing.wait())
        try:
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
            if closing.is_set() and not self._failed:
                await uplink.leave("the rank is done")
            elif not closing.is_set():
                self._look(member)
        finally:
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)

    def _progress(self, text: str) -> None:
        self._missing = text

    def _look(self, member: Member) -> None:
        """Whether the plan is there, or an error."""
        failed = member.failed
        error: InaError | None = None
        with self._changed:
            if failed is not None and self._ended is None:
                joining = self._place.plan is None and failed.cause == "timeout"
                error = self._ended = error_of(
                    "join_timeout" if joining else failed.cause,
                    failed.message,
                    job=self._identity.job,
                    rank=self._identity.ranks[0],
                    ranks=failed.missing,
                )
            self._changed.notify_all()
        if error is not None:
            self._over(error)


class SparseMember:
    """One rank of a sparse job, whose other machines are other processes. Made by :func:`join_sparse`; ``name`` is the job's in errors.

    In a fabric the coordinator's word, over ``connection``, ends the job, which has begun after the iteration ``began`` of its
    model, of all jobs that have trained it; 0: it is new, or not kept.
    """

    def __init__(
        self,
        worker: ZebraWorker,
        device: Device,
        timeout: float,
        name: str,
        connection: CoordinatorConnection | None = None,
        began: int = 0,
    ) -> None:
        self.worker = worker
        self.timeout = timeout
        self.name = name
        self.began = began
        self._connection = connection
        self.job = SparseJob(self, worker.rank, worker)
        self._stations = Stations({"worker": (worker, device)})

    def do(self, action: Callable[[float], Any]) -> Any:
        """Do something with the machine."""
        return self._stations.do(action, self._listen)

    def wait_for(self, until: Callable[[], bool], job: SparseJob, timeout: float | None) -> None:
        """Carry packets until a condition holds. Raises :class:`~inanet.errors.RoundTimeout`."""
        patience = self.timeout if timeout is None else timeout
        if not self._stations.wait(until, self._listen, time.monotonic() + patience):
            raise RoundTimeout(
                f"not finished after {patience:g} s: {job.why()}",
                job=self.name,
                rank=job.rank,
                round=self.worker.done + 1,
                ranks=self.worker.ranks_waited_for,
            )

    def _listen(self, name: str, event: Any) -> None:
        if isinstance(event, Pulled | Stalled | Refused | IterationDone):
            self.job.heard(event)

    def use(self, facts: ZebraJob) -> None:
        """The coordinator says which keys are hot from an iteration on that shard 0 will name."""
        hot = hot_of(facts)
        self.do(lambda now: self.worker.prepare(hot))

    def close(self, *, failed: bool = False) -> None:
        """Leave the job and close the socket: in good order, after which other ranks of a fabric that still push wait for this one
        until they time out, or, ``failed``, so that they get a :class:`~inanet.errors.WorkerLostError` at once.
        """
        if self._connection is not None:
            self._connection.close(failed=failed)
        self._stations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # whoever leaves by an error has not done its part
        self.close(failed=kind is not None)


class _Word:
    """Passes on what the coordinator says to the rank, which may not be there yet."""

    def __init__(self) -> None:
        self.member: SparseMember | None = None
        self.error: InaError | None = None

    def over(self, error: InaError) -> None:
        """The job has ended."""
        self.error = error
        if self.member is not None:
            self.member.job.end(error)

    def changed(self, facts: ZebraJob) -> None:
        """Other keys are hot: none before this rank has trained."""
        if self.member is not None:
            self.member.use(facts)


def join_sparse(file: str | Path, rank: int, *, timeout: float = 60.0) -> SparseMember:
    """Be a rank of the job in ``file``; ``timeout`` seconds are the default for its pushes and pulls.

    In a fabric this returns when all ranks have joined and there are a switch and shards for them. Raises
    :class:`~inanet.config.file.ConfigError` for a file that makes no sense, ``ValueError`` for a rank that the job does not
    have, ``OSError`` when the rank's address cannot be bound; in a fabric :class:`~inanet.errors.JoinTimeout` with who is
    missing, :class:`~inanet.errors.JoinRefused`, and :class:`~inanet.service.addresses.AddressError` for an address that
    others cannot reach.
    """
    path = find_file(file)
    found = read_toml(path)
    if "control" not in found:
        by_addresses = SparseFile(path)
        worker = by_addresses.worker(rank)
        device = by_addresses.device(by_addresses.job.workers[rank])
        return SparseMember(worker, device, timeout, str(worker.job.number))
    config = validate(FabricSparseConfig, found, path)
    return _join(config, _sparse(config, path), rank, timeout)


def _sparse(config: FabricSparseConfig, path: Path) -> Sparse:
    """What the file says of the job. Raises :class:`~inanet.config.file.ConfigError`."""
    section = config.job
    try:
        return Sparse(
            width=section.width,
            shards=section.shards,
            sharding=section.sharding,
            optimiser=section.optimiser,
            rate=section.rate,
            beta=section.beta,
            initial=section.initial,
            registers=section.registers,
            hot_pairs=min(section.hot_pairs, 255),
            shift=section.shift,
            hot=tuple(section.hot_keys() or ()),
            online=_online(section.online),
            model=section.model or "",
        )
    except ValueError as error:
        raise ConfigError(path, [Problem("job", str(error))]) from None
    except OSError as error:
        raise ConfigError(
            path, [Problem("job.hot", f"cannot read {section.hot}: {error.strerror}")]
        ) from None


def _online(section: OnlineSection | None) -> Online | None:
    return None if section is None else Online(**dict(section))


def _join(config: FabricSparseConfig, sparse: Sparse, rank: int, timeout: float) -> SparseMember:
    section, control = config.job, config.control
    if not 0 <= rank < section.world:
        raise ValueError(f"the job has ranks 0 to {section.world - 1}, not {rank}")
    name = f"{config.node.name}-{rank}"
    # files that have vanished since the file was read are found out before there is a socket
    token, keys = control.secret(), control.tls_keys()
    device = _device(config, name, rank)
    word = _Word()
    identity = Identity(
        name=name,
        role="worker",
        token=token,
        endpoint=device.endpoint,
        rx_window=receive_window(device),
        job=section.name,
        ranks=(rank,),
        world=section.world,
        system=section.system,
        sparse=sparse,
    )
    if not structlog.is_configured():
        # what the connection has to say goes beside what the training writes, not into it
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    connection = CoordinatorConnection(
        identity,
        str(control.coordinator),
        patience=control.join_timeout,
        keys=keys,
        over=word.over,
        changed=word.changed,
    )
    try:
        plan = connection.plan()
        worker = _worker(plan, rank)
    except BaseException:
        connection.close()
        device.close()
        raise
    began = max(0, plan.switched.begin if isinstance(plan.switched, ZebraJob) else 0)
    member = SparseMember(worker, device, timeout, section.name, connection, began)
    word.member = member
    if word.error is not None:
        member.job.end(word.error)
    return member


def _device(config: FabricSparseConfig, name: str, rank: int) -> Device:
    """Where the rank sends and receives."""
    listen = resolve(config.node.listen)
    refuse_loopback_early(name, listen.address, config.control.coordinator)
    device: Device = UdpDevice(listen.address, listen.port)
    how = config.impair
    if not how.active:
        return device
    rates = {kind: getattr(how, kind) for kind in ("drop", "duplicate", "reorder", "corrupt")}
    return FaultInjector(device, how.seed * 1009 + rank, time.monotonic, **rates)


def _worker(plan: NodePlan, rank: int) -> ZebraWorker:
    """The rank's machine. Raises :class:`~inanet.errors.FabricError` for a plan that is of no sparse job."""
    facts = plan.switched
    if not isinstance(facts, ZebraJob):
        raise FabricError("the coordinator's plan has no switch: it is another version", rank=rank)
    worker = ZebraWorker(job_of(facts, plan.key), rank, DAEMON_TIMING, secrets.randbits(32))
    if facts.hot_version != EMPTY.version:
        worker.prepare(hot_of(facts))
        worker.start(facts.hot_version)
    return worker
