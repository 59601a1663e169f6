"""The life of a daemon's process: event loop, signals, drain, reload, watchdog, exit code. Knows no protocol.

SIGTERM or SIGINT asks the daemon to drain and sets a deadline; a second one ends the process at once; SIGHUP
reads the file again and applies what can change while running. An error in a callback of the loop ends the
daemon: a data path that stopped working must not look alive.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar

import structlog

from inanet.about import bug_hint, version
from inanet.config.certificate import check as check_certificate
from inanet.config.daemons import DaemonFile, Role
from inanet.config.file import ConfigError
from inanet.config.manager import ManagerConfig
from inanet.service import addresses, kernel_cache, kernels, logs
from inanet.service.exits import Exit, Failure, explain
from inanet.service.metrics import Sample, Scrape, Source, serve_metrics
from inanet.service.sd_notify import Notifier
from inanet.service.strangers import Strangers

C = TypeVar("C", bound=DaemonFile)
LoopName = Literal["uvloop", "asyncio"]

#: Seconds a daemon has after its drain deadline to close what it holds, before the process is ended.
GRACE = 1.0
#: Seconds that a daemon asks for while it compiles kernels, anew with every one.
COMPILE_SECONDS = 180.0
#: A file named here gets the daemon's counters as one JSON object when it ends in good order.
STATS_VARIABLE = "INA_STATS_FILE"
#: The only setting applied by SIGHUP; changes of others are reported as waiting for a restart.
RELOADABLE = frozenset({"log.level"})


class Context(Generic[C]):
    """What a daemon's ``serve`` gets besides its configuration, and what it tells about itself.

    ``log`` is bound to role and node. ``stopping`` is set when the daemon shall drain: finish what runs,
    begin nothing new, return. ``health`` is asked before every proof of life to the service manager; it
    should say whether the data path moves (or has nothing to do). ``stats`` gives the counters for
    :data:`STATS_VARIABLE`, ``drops`` those of packets dropped.
    """

    def __init__(self, role: Role, config: C, notifier: Notifier, log: Any) -> None:
        self.role = role
        self.config = config
        self.log = log
        self.stopping = asyncio.Event()
        self.health: Callable[[], bool] = lambda: True
        self.stats: Callable[[], Mapping[str, object]] | None = None
        #: packets dropped so far, by reason
        self.drops: Callable[[], Mapping[str, int]] | None = None
        self.metrics_port: int | None = None
        self._notifier = notifier
        self._scrape = Scrape()
        self._deadline: float | None = None
        self._status = ""

    def ready(self, status: str, **facts: str | int) -> None:
        """Say that start-up is complete: sockets bound, coordinator reached. Facts (ports) go to whoever
        waits.
        """
        self._status = status
        self.log.info("ready", status=status, **facts)
        self._notifier.ready(status, **facts)

    def prepare_kernels(self) -> None:
        """Call it before the data plane is imported. Compiles the kernels that this daemon may need and the cache lacks, in
        processes of their own; whoever waits is told of each, and the log of the first. Raises :class:`Failure`."""
        notice = kernel_cache.ensure()
        if notice:
            self.log.warning("kernel cache", note=notice)
        told = False

        def tell(done: int, total: int) -> None:
            nonlocal told
            if not told:
                told = True
                self.log.info("compiling kernels", missing=total - done, of=total, note="once for this host")
            self._notifier.starting(f"compiling kernels: {done} / {total}", COMPILE_SECONDS)

        if not os.environ.get(kernels.AHEAD_VARIABLE):
            kernels.prepare(kernel_sets(self.role, self.config), tell)

    def coordinating(self, listen: addresses.HostPort, address: str) -> str:
        """What to say of a coordinator that listens; warns of one that only its own host can reach, whatever its name promises."""
        reason = addresses.only_here(listen)
        if reason:
            self.log.warning("this coordinator is for its own host only", address=address, reason=reason)
        named = "" if not listen.host or address.startswith(f"{listen.host}:") else f" ({listen.host})"
        return f"coordinating at {address}{named}{', reached from this host only' if reason else ''}"

    def status(self, text: str) -> None:
        """One line for ``systemctl status``; cheap, to be renewed every few seconds."""
        self._status = text
        self._notifier.status(text)

    def measure(self, source: Source) -> None:
        """Have ``source`` called at every scrape of the metrics: it may only read."""
        self._scrape.add(source)

    @property
    def remaining(self) -> float:
        """Seconds left to drain; infinite while nobody asked for it."""
        return float("inf") if self._deadline is None else max(0.0, self._deadline - time.monotonic())


def kernel_sets(role: Role, config: Any) -> list[str]:
    """What a daemon with this configuration may need (:data:`inanet.service.kernels.MODULES`)."""
    sets: list[str] = [role]
    if role == "switch":
        sets += [f"program:{program.system}" for program in config.switch.programs]
        if config.switch.rings:
            sets.append("inanet.proto.netreduce.program")
        return sets if config.switch.transport == "udp" else [*sets, "frames"]
    if config.node.transport != "udp":
        sets.append(f"inanet.phy.{config.node.transport}")
    if getattr(config.node, "xdp", "off") != "off":
        sets += ["inanet.xdp.gate", "inanet.xdp.inbox"]
    if role == "ps" and (config.topology is None or config.topology.switches):
        sets.append("servers")
    return sets


Serve = Callable[[C, Context[C]], Coroutine[Any, Any, None]]


class Supervisor(Generic[C]):
    """Runs ``serve`` between a start and an end that are the same for every daemon."""

    def __init__(self, context: Context[C], serve: Serve[C], reread: Callable[[], C], written: logs.Logs):
        self._context = context
        self._serve = serve
        self._reread = reread
        self._logs = written
        self._reloaded = (True, time.time())
        self._watchdog_misses = 0
        self._broken: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the daemon returns or was asked to stop. Raises what ``serve`` raised, and
        :class:`Failure` if the drain deadline passed.
        """
        context = self._context
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        context.measure(self._samples)
        with contextlib.ExitStack() as stack:
            if context.config.metrics.listen is not None:
                address = await asyncio.to_thread(addresses.resolve, context.config.metrics.listen)
                server = await serve_metrics(address, context._scrape)
                stack.callback(server.close)
                context.metrics_port = server.port
                context.log.info(
                    "serving metrics", address=address.address, port=server.port, origin=address.origin
                )
            beside = [asyncio.create_task(self._prove_life()), asyncio.create_task(self._look_around())]
            try:
                await self._until_done()
            finally:
                for task in beside:
                    task.cancel()
                self._logs.look()
        _write_stats(context.stats)

    async def _until_done(self) -> None:
        context = self._context
        serving = asyncio.create_task(self._serve(context.config, context))
        asked = asyncio.create_task(context.stopping.wait())
        ends: set[asyncio.Future[Any]] = {serving, self._broken}
        try:
            await asyncio.wait({asked, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not serving.done():
                await asyncio.wait(ends, timeout=context.remaining, return_when=asyncio.FIRST_COMPLETED)
            overdue = not serving.done()
            if overdue:
                serving.cancel()
                await asyncio.wait({serving}, timeout=GRACE)
            if self._broken.done():
                self._broken.result()
            if overdue:
                raise Failure(
                    f"did not drain within {context.config.control.drain_timeout:g} s of the signal: rounds "
                    "in progress were given up; set control.drain_timeout higher if they need longer"
                )
            serving.result()
        finally:
            asked.cancel()

    def _on_stop(self, number: signal.Signals) -> None:
        context = self._context
        if context.stopping.is_set():
            context.log.warning("second signal, ending at once", signal=number.name)
            os._exit(Exit.FAILED)
        drain = context.config.control.drain_timeout
        context.log.info("stopping", signal=number.name, drain_seconds=drain)
        context._deadline = time.monotonic() + drain
        context._notifier.stopping(drain + 2 * GRACE)
        # ends the process even if the loop is stuck in a system call or a thread never returns
        faulthandler.dump_traceback_later(drain + 2 * GRACE, exit=True)
        context.stopping.set()

    def _on_reload(self) -> None:
        context = self._context
        context._notifier.reloading()
        try:
            fresh = self._reread()
        except (ConfigError, OSError) as error:
            self._reloaded = (False, self._reloaded[1])
            reason = explain(error)[1]
            context.log.error("reload refused, running on as before", reason=reason)
            since = time.strftime("%F %T", time.localtime(self._reloaded[1]))
            context._notifier.ready(f"{context._status} (file of {since} in force; refused: {reason})")
            return
        waiting = sorted(changed(context.config, fresh) - RELOADABLE)
        self._logs.threshold.level = fresh.log.level
        self._reloaded = (True, time.time())
        context.log.info("reloaded", log_level=fresh.log.level)
        if waiting:
            context.log.warning("changes wait for a restart", keys=waiting)
        context._notifier.ready(context._status)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, details: dict[str, Any]) -> None:
        error = details.get("exception")
        self._context.log.error("unhandled error", reason=details.get("message"), exc_info=error)
        # a failed task nobody looked at concerns one connection; a failed callback is the data path
        if error is not None and "handle" in details and not self._broken.done():
            self._broken.set_exception(error)

    async def _prove_life(self) -> None:
        interval = self._context._notifier.watchdog_interval
        while interval is not None:
            if self._context.health():
                self._context._notifier.watchdog()
            else:
                self._watchdog_misses += 1
                self._context.log.warning("proof of life withheld", reason="no_progress")
            await asyncio.sleep(interval)

    async def _look_around(self) -> None:
        """What has to be said now and then, whether or not anything happens."""
        loop = asyncio.get_running_loop()
        strangers = Strangers()
        while True:
            await asyncio.sleep(logs.RATE_SECONDS)
            self._logs.look()
            if self._context.drops is not None:
                for reason, count, total in strangers.seen(self._context.drops(), loop.time()):
                    self._context.log.warning(
                        "packets of strangers dropped", reason=reason, count=count, total=total
                    )

    def _samples(self) -> Iterable[Sample]:
        yield Sample("inanet_build_info", 1, (version(), self._context.role))
        yield Sample("inanet_config_last_reload_successful", float(self._reloaded[0]))
        yield Sample("inanet_config_last_reload_success_timestamp_seconds", self._reloaded[1])
        yield Sample("inanet_watchdog_misses", self._watchdog_misses)
        yield Sample("inanet_log_lines_unwritten", self._logs.sink.unwritten)


def _write_stats(stats: Callable[[], Mapping[str, object]] | None) -> None:
    path = os.environ.get(STATS_VARIABLE)
    if stats is not None and path:
        Path(path).write_text(json.dumps(stats()))


def changed(before: DaemonFile, after: DaemonFile) -> set[str]:
    """Dotted keys in which two configurations of the same daemon differ."""
    old = {section: keys or {} for section, keys in before.model_dump().items()}
    new = {section: keys or {} for section, keys in after.model_dump().items()}
    return {
        f"{section}.{key}"
        for section, keys in old.items()
        for key in {*keys, *new[section]}
        if keys.get(key) != new[section].get(key)
    }


def _loop_factory(name: LoopName) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "asyncio":
        return asyncio.new_event_loop
    # never uvloop.install(): it would break netlink libraries in this process
    import uvloop

    return uvloop.new_event_loop


def run(role: Role, config: C, serve: Serve[C], reread: Callable[[], C], loop: LoopName = "uvloop") -> Exit:
    """Run a daemon to its end and say how it ended. ``reread`` loads the configuration anew for SIGHUP."""
    written = logs.configure(config.log.level, config.log.format)
    log = structlog.get_logger().bind(role=role, node=config.node.name)
    notifier = Notifier()

    async def supervise() -> None:
        context = Context(role, config, notifier, log)
        await Supervisor(context, serve, reread, written).run()

    try:
        log.info("starting", version=version(), loop=loop, pid=os.getpid())
        if not isinstance(config, ManagerConfig) and config.impair.active:
            log.warning("impairment is on: packets are damaged on purpose", **config.impair.model_dump())
        check_certificate(role, config)
        with asyncio.Runner(loop_factory=_loop_factory(loop)) as runner:
            runner.run(supervise())
    except Exception as error:
        code, message = explain(error)
        if code is Exit.BUG:
            log.critical("ended by a bug", reason=message, hint=bug_hint(), exc_info=error)
        else:
            log.error("ended by an error", reason=message, exit_code=int(code))
        notifier.status(message)
        return code
    finally:
        faulthandler.cancel_dump_traceback_later()
    log.info("stopped")
    return Exit.OK
