"""What daemons do that another one coordinates: hold slots for its jobs, and stay registered."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.aio.station import Station
    from inanet.config.daemons import AggConfig, AnyConfig, PsConfig
    from inanet.config.switch import SwitchConfig
    from inanet.messages.fields import NodeRole
    from inanet.service.addresses import HostPort
    from inanet.service.metrics import Source


@contextlib.asynccontextmanager
async def registered(
    role: NodeRole,
    config: AnyConfig | SwitchConfig,
    coordinator: str,
    *,
    where: str,
    figures: Callable[[], Mapping[str, object]],
    measure: Callable[[Source], None],
    rate: int | None = None,
) -> AsyncIterator[None]:
    """The daemon is registered at ``coordinator`` while the block lasts, whenever that can be reached. It says good-bye unless
    the block ends with an error.

    ``where`` its data plane receives, with these counters, over a link of this rate (None: as the kernel says). ``measure``
    is the :meth:`Context.measure` of the daemon, whose metrics say whether it is.
    """
    from inanet.about import version
    from inanet.aio.registration import Registration
    from inanet.service.resources import HostResources

    registration = Registration(
        coordinator,
        config.node.name,
        role,
        config.control.secret(),
        machine=await asyncio.to_thread(HostResources, where.partition(":")[0], rate),
        endpoint=where,
        software=version(),
        figures=figures,
        keys=config.control.tls_keys(),
    )
    measure(registration.samples)
    task = asyncio.create_task(registration.run())
    try:
        yield
        await registration.leave(f"the {role} was asked to stop")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def registered_node(
    station: Station,
    role: NodeRole,
    config: AnyConfig,
    coordinator: str,
    measure: Callable[[Source], None],
) -> contextlib.AbstractAsyncContextManager[None]:
    """The same for a node of trees."""
    from inanet.wire.endpoint import show

    where, rate = show(station.device.endpoint), config.node.rate
    return registered(
        role, config, coordinator, where=where, figures=station.counters, measure=measure, rate=rate
    )


async def follow(
    role: NodeRole,
    config: AggConfig | PsConfig,
    coordinator: HostPort,
    context: Context[AggConfig] | Context[PsConfig],
) -> None:
    """Aggregate for the jobs of a coordinator until asked to stop; a lost coordinator is waited for. A parameter server
    also serves jobs on switches.
    """
    context.prepare_kernels()
    from inanet.aio.ps_machines import serve_switches
    from inanet.aio.station import Station, open_device
    from inanet.aio.uplink import Uplink
    from inanet.service.exits import Failure

    loop = asyncio.get_running_loop()
    device = await open_device(config, loop.time)
    station = Station(role, config, device, lambda: uplink.flush())
    follower, services = await serve_switches(station) if role == "ps" else (None, {})
    member = station.member(station.identity(services=services), follower=follower)
    patience = config.control.join_timeout
    uplink = Uplink(
        member,
        str(coordinator),
        join=patience,
        # once welcomed, it serves whoever coordinates next, however long that takes
        resume=math.inf,
        wake=station.kick,
        keys=config.control.tls_keys(),
    )
    context.stats = station.figures
    context.health = station.healthy
    context.drops = station.drops
    context.measure(station.samples)
    running = asyncio.create_task(uplink.run())
    stopping = asyncio.create_task(context.stopping.wait())
    welcome = asyncio.create_task(uplink.until(lambda: member.welcomed, "Welcome", patience))
    tasks = (running, stopping, welcome)
    try:
        async with registered_node(station, role, config, str(coordinator), context.measure):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if member.welcomed:
                context.ready(f"connected to {coordinator}")
                await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            if not context.stopping.is_set():
                why = member.failed.message if member.failed is not None else welcome.exception()
                raise Failure(f"{role} {config.node.name}: {why}")
            await uplink.leave(f"the {role} was asked to stop")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        station.close()
