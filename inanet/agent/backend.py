"""The worker agent: collectives of local ranks, carried by the host's node through the fabric.

A job whose ranks are all on this host needs no fabric: :mod:`inanet.agent.sums`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from numpy.typing import NDArray

from inanet.agent.sums import LocalSums, Threads
from inanet.aio.machine_runner import MachineRunner
from inanet.aio.rates import RateReporter, rate_requests
from inanet.aio.station import Station, open_device
from inanet.aio.uplink import Uplink
from inanet.config.daemons import WorkerConfig
from inanet.errors import InaError, JoinRefused, JoinTimeout, OverflowRefused, error_of
from inanet.member.evaluation import Evaluation
from inanet.member.identity import Failed
from inanet.member.member import Member
from inanet.proto.common.events import NodeEvent, Participation
from inanet.proto.common.plan import TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.host import SwitchedHost
from inanet.proto.slots.systems import SYSTEMS
from inanet.service import kernels
from inanet.trust.certificates import Keys

_log = structlog.get_logger("inanet.backend")


@dataclass(slots=True)
class _Membership:
    """One job of this host. ``sums`` if all of its ranks are here, else ``member`` and ``uplink``.

    ``host``: the machine that carries it, if that is not the host's node, run by ``runner``.
    """

    name: str
    runner: MachineRunner | None = None
    host: SwitchedHost | None = None
    sums: LocalSums | None = None
    member: Member | None = None
    uplink: Uplink | None = None
    running: "asyncio.Task[None] | None" = None


class FabricBackend:
    """See :class:`inanet.agent.group.Backend`. ``lost(job, error)`` is called when a whole job is lost."""

    def __init__(
        self,
        station: Station,
        coordinator: str | None,
        *,
        join: float,
        lost: Callable[[str, InaError], None],
        keys: Keys | None = None,
    ) -> None:
        self._station = station
        self._coordinator = coordinator
        self._join_seconds = join
        self._lost = lost
        self._keys = keys
        self._jobs: dict[str, _Membership] = {}
        self._threads = Threads()
        #: negotiates rates, if the configuration asks for it
        self._rate_reporter: RateReporter | None = None

    async def join(
        self, job: str, ranks: tuple[int, ...], world: int, system: str, progress: Callable[[str], None]
    ) -> None:
        """Join at the coordinator and wait for the plan."""
        mine = _Membership(job)
        self._jobs[job] = mine
        if len(ranks) == world:
            if system in SYSTEMS:
                _log.warning(
                    "all ranks are on this host and are summed here: no switch is used",
                    job=job,
                    system=system,
                )
            mine.sums = LocalSums(ranks, self._threads)
            return
        if self._coordinator is None:
            del self._jobs[job]
            raise JoinRefused(
                f"{len(ranks)} of {world} ranks are on this host, whose ina-worker has no coordinator to find the others "
                "through: set coordinator in the [control] section of its configuration"
            )
        station = self._station
        if system in SYSTEMS:
            try:
                # kernels that were never compiled here take longer than the coordinator waits for an answer
                await asyncio.to_thread(kernels.prepare, [f"worker:{system}"])
                mine.runner = await self._open_runner(mine)
            except BaseException:
                del self._jobs[job]
                raise
        runner = mine.runner
        member = station.member(
            station.identity(job, ranks, world, system, device=runner.device if runner else None),
            progress=progress,
            follower=mine.host,
        )
        mine.member = member
        mine.uplink = Uplink(
            member,
            self._coordinator,
            join=self._join_seconds,
            resume=self._join_seconds,
            wake=lambda: self._woken(mine),
            keys=self._keys,
        )
        mine.running = asyncio.get_running_loop().create_task(mine.uplink.run())
        try:
            # the coordinator gives up at the same deadline, and says who is missing; leave it time to
            await mine.uplink.until(lambda: member.joined, "the plan", self._join_seconds + 5.0)
        except TimeoutError as error:
            await self.leave(job, "joining took too long")
            raise JoinTimeout(str(error), job=job) from None
        except asyncio.CancelledError:
            await self.leave(job, "joining was given up")
            raise
        if member.failed is not None:
            failed = member.failed
            await self.leave(job, "joining failed")
            cause = "join_timeout" if failed.cause == "timeout" else failed.cause
            raise error_of(cause, failed.message, job=job, rank=-1, ranks=failed.missing)
        if station.pace is not None and member.job is not None and runner is None:
            member.rate_requests = rate_requests(station.node, member.job, station.config.node.rate)
        if member.evaluate and member.job is not None:
            number, began = member.job, station.driver.now()
            member.evaluation = Evaluation(number, lambda: station.node.sends(number), began)
        if member.watched:
            self._rate_reporter = self._rate_reporter or RateReporter(
                lambda: list(station.members), self.flush
            )

    async def _open_runner(self, mine: _Membership) -> MachineRunner:
        """A machine for a job on a switch, at an endpoint of its own by which the switch knows it (bound endpoints)."""
        station = self._station
        config, timing = station.config, station.config.timing
        if config.node.transport != "udp":
            raise JoinRefused(
                f"a job on a switch needs node.transport 'udp' on this host, which has {config.node.transport!r}"
            )
        device = await open_device(config, station.driver.now, legacy=True)
        host = SwitchedHost(
            device.endpoint,
            Timing(retransmit=timing.retransmit, retransmit_max=timing.retransmit_max),
            {
                name: getattr(config, system.section).model_dump()
                for name, system in SYSTEMS.items()
                if system.section and isinstance(config, WorkerConfig)
            },
        )

        def happened(event: NodeEvent) -> None:
            fair = station.excuse(event)
            if mine.member is not None and fair is not None:
                mine.member.on_event(fair, station.driver.now())
                self.flush()

        mine.host = host
        runner = MachineRunner(host, device, happened)
        station.runners.add(runner)
        return runner

    def _kick(self, mine: _Membership) -> None:
        """What carries a job may have something to send."""
        (mine.runner or self._station).driver.kick()

    def flush(self) -> None:
        """Send what the members have to say; called after the node's events."""
        for mine in self._jobs.values():
            if mine.uplink is not None:
                mine.uplink.flush()

    def _woken(self, mine: _Membership) -> None:
        self._kick(mine)
        if self._rate_reporter is not None:
            self._rate_reporter.poke()
        member = mine.member
        if (
            member is not None
            and member.joined
            and member.failed is not None
            and self._jobs.get(mine.name) is mine
        ):
            failed = member.failed
            self._lost(
                mine.name, error_of(failed.cause, failed.message, job="", rank=-1, ranks=failed.missing)
            )

    def submit(
        self, job: str, round_: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]]
    ) -> "asyncio.Future[Participation | None]":
        """One round of this host's ranks; in asynchronous training, with the epoch that it took part in."""
        mine = self._jobs[job]
        if mine.sums is not None:
            return mine.sums.submit(round_, spec, arrays)
        assert mine.member is not None
        # a tensor without a format is refused by the coordinator, on all hosts and under this round's number
        future: asyncio.Future[Participation | None] = asyncio.get_running_loop().create_future()
        done = partial(self._finished, mine.member, round_, future)
        mine.member.begin(round_, spec, arrays, self._station.driver.now(), done)
        self.flush()
        self._kick(mine)
        if self._rate_reporter is not None:
            self._rate_reporter.poke()
        return future

    @staticmethod
    def _finished(
        member: Member, round_: int, future: "asyncio.Future[Participation | None]", failed: Failed | None
    ) -> None:
        if future.done():
            return
        if failed is None:
            future.set_result(member.participation)
        elif failed.cause == "overflow":
            future.set_exception(OverflowRefused(failed.message, round=round_))
        else:
            ranks = failed.missing or (() if failed.rank is None else (failed.rank,))
            details = {"tensor": failed.tensor, "index": failed.index}
            future.set_exception(
                error_of(
                    failed.cause, failed.message, job="", rank=-1, round=round_, ranks=ranks, details=details
                )
            )

    def mismatch(self, job: str, round_: int, spec: TensorSpec, rank: int, text: str) -> None:
        """Tell the other hosts that ranks here disagree."""
        mine = self._jobs[job]
        if mine.member is not None:
            mine.member.refuse_mismatch(round_, spec, rank, text)
            self.flush()

    def awaited(self, job: str) -> str:
        """Other hosts, or the coordinator until it has welcomed this one, and while there is no connection to it."""
        mine = self._jobs.get(job)
        if mine is None or mine.member is None or mine.uplink is None:
            return "waiting for other hosts"
        if not (mine.member.joined or mine.member.welcomed):
            return (
                f"no welcome from the coordinator at {mine.uplink.address} yet; if that lasts, the log of this host's "
                "ina-worker says why, and 'ina doctor' looks from here"
            )
        if not mine.uplink.connected:
            return f"no connection to the coordinator at {mine.uplink.address}, waiting for it to come back"
        return "waiting for other hosts"

    async def quieten(self, job: str, reason: str) -> None:
        """Give the rounds of a job up, and wait until threads that write into their arrays have stopped; what comes from the
        network is written by the event loop, and forgotten at once.
        """
        mine = self._jobs.get(job)
        if mine is not None and mine.sums is not None:
            await mine.sums.close()
        elif mine is not None and mine.member is not None:
            mine.member.abandon(Failed("worker_lost", reason))

    async def leave(self, job: str, reason: str) -> None:
        """Take the host out of the job."""
        mine = self._jobs.pop(job, None)
        if mine is not None and mine.sums is not None:
            await mine.sums.close()
        if mine is None or mine.member is None:
            return
        assert mine.uplink is not None
        await mine.uplink.leave(reason)
        if mine.running is not None:
            mine.running.cancel()
            await asyncio.gather(mine.running, return_exceptions=True)
        mine.member.abandon(Failed("worker_lost", reason))
        if mine.member in self._station.members:
            self._station.members.remove(mine.member)
        if mine.runner is not None:
            self._station.runners.close(mine.runner)
            return
        # the job's groups are another job's by and by
        self._station.driver.kick()

    def stats(self) -> dict[str, int]:
        """Counters of the host's node, drops by reason as ``drop_<reason>``."""
        return self._station.stats() | {f"drop_{reason}": n for reason, n in self._station.drops().items()}

    def close(self) -> None:
        """End the threads, once all jobs were left."""
        if self._rate_reporter is not None:
            self._rate_reporter.close()
        self._threads.close()
