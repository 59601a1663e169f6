"""``inanet.join_sparse``: a rank of a sparse job, by the job's file.

>>> with inanet.join_sparse("clicks.toml", rank=0) as member:
...     rows = member.job.push_pull(keys, gradients)

A file with ``[control]`` is of a job in a fabric of daemons: the coordinator says where its switch and its PS shards are, and when
the job is over. In one without, the file itself says where everybody is (:mod:`inanet.client.sparse_process`).
"""

import secrets
import sys
import time
from pathlib import Path
from types import TracebackType

import structlog

from inanet.client.sparse_process import SparseMember
from inanet.client.sparse_process import join_sparse as join_by_addresses
from inanet.config.file import ConfigError, Problem, find_file, read_toml, validate
from inanet.config.sparse import FabricSparseConfig, OnlineSection
from inanet.errors import FabricError, InaError
from inanet.member.identity import Identity
from inanet.messages.fields import check_sparse
from inanet.phy.device import Device
from inanet.phy.fault import FaultInjector
from inanet.phy.udp import UdpDevice
from inanet.proto.common.plan import NodePlan, Online, Sparse, Switched
from inanet.proto.zebra.job import EMPTY, hot_of, job_of
from inanet.proto.zebra.stream import DAEMON_TIMING
from inanet.proto.zebra.worker import ZebraWorker
from inanet.service.addresses import refuse_loopback_early, resolve
from inanet.sparse.line import Line


class FabricMember(SparseMember):
    """One rank of a sparse job in a fabric; the coordinator's word ends the job."""

    def __init__(
        self, worker: ZebraWorker, device: Device, timeout: float, line: Line, name: str, began: int
    ) -> None:
        super().__init__(worker, device, timeout)
        self.name = name
        #: the iteration of its model that the job has begun after, of all jobs that have trained it; 0: it is new, or not kept
        self.began = began
        self._line = line

    def use(self, facts: Switched) -> None:
        """The coordinator says which keys are hot from an iteration on that shard 0 will name."""
        hot = hot_of(facts)
        self.do(lambda now: self.worker.prepare(hot))

    def close(self, *, failed: bool = False) -> None:
        """Leave the job: in good order, after which other ranks that still push wait for this one until they time out, or, ``failed``,
        so that they get a :class:`~inanet.errors.WorkerLostError` at once.
        """
        self._line.close(failed=failed)
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # whoever leaves by an error has not done its part
        self.close(failed=kind is not None)


class _Word:
    """Passes on what the coordinator says to the rank, which may not be there yet."""

    def __init__(self) -> None:
        self.member: FabricMember | None = None
        self.error: InaError | None = None

    def over(self, error: InaError) -> None:
        """The job has ended."""
        self.error = error
        if self.member is not None:
            self.member.job.end(error)

    def changed(self, facts: Switched) -> None:
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
        return join_by_addresses(path, rank, timeout=timeout)
    config = validate(FabricSparseConfig, found, path)
    return _join(config, _sparse(config, path), rank, timeout)


def _sparse(config: FabricSparseConfig, path: Path) -> Sparse:
    """What the file says of the job. Raises :class:`~inanet.config.file.ConfigError`."""
    its = config.job
    try:
        sparse = Sparse(
            width=its.width,
            shards=its.shards,
            sharding=its.sharding,
            optimiser=its.optimiser,
            rate=its.rate,
            beta=its.beta,
            initial=its.initial,
            registers=its.registers,
            hot_pairs=min(its.hot_pairs, 255),
            shift=its.shift,
            hot=tuple(its.hot_keys() or ()),
            online=_online(its.online),
            model=its.model or "",
        )
        return check_sparse(sparse)
    except ValueError as error:
        raise ConfigError(path, [Problem("job", str(error))]) from None
    except OSError as error:
        raise ConfigError(path, [Problem("job.hot", f"cannot read {its.hot}: {error.strerror}")]) from None


def _online(section: OnlineSection | None) -> Online | None:
    return None if section is None else Online(**dict(section))


def _join(config: FabricSparseConfig, sparse: Sparse, rank: int, timeout: float) -> FabricMember:
    its, control = config.job, config.control
    if not 0 <= rank < its.world:
        raise ValueError(f"the job has ranks 0 to {its.world - 1}, not {rank}")
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
        rx_window=max(64, device.rx_budget // 2),
        job=its.name,
        ranks=(rank,),
        world=its.world,
        system=its.system,
        sparse=sparse,
    )
    if not structlog.is_configured():
        # what the connection has to say goes beside what the training writes, not into it
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    line = Line(
        identity,
        str(control.coordinator),
        patience=control.join_timeout,
        keys=keys,
        over=word.over,
        changed=word.changed,
    )
    try:
        plan = line.plan()
        worker = _worker(plan, rank)
    except BaseException:
        line.close()
        device.close()
        raise
    began = max(0, plan.switched.begin if plan.switched is not None else 0)
    member = FabricMember(worker, device, timeout, line, its.name, began)
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
    if facts is None:
        raise FabricError("the coordinator's plan has no switch: it is another version", rank=rank)
    worker = ZebraWorker(job_of(facts, plan.key), rank, DAEMON_TIMING, secrets.randbits(32))
    if facts.hot_version != EMPTY.version:
        worker.prepare(hot_of(facts))
        worker.start(facts.hot_version)
    return worker
