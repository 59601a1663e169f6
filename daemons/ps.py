"""``ina-ps``: the root of the trees, and the coordinator of the fabric beside it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daemons._chassis import command

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.control.config import PsConfig
    from inanet.control.plans import Downlink
    from inanet.control.topology import Topology


def fabric(config: PsConfig, context: Context[PsConfig]) -> Topology:
    """The trees that jobs use: as configured, or what the planner chooses, which is logged with the reason."""
    if config.topology.plan == "configured":
        return config.topology.fabric(config.node.name)
    downlinks: list[Downlink] = ["unicast"] if config.control.downlink == "unicast" else ["multicast"]
    selected = config.topology.selection(config.node.name, downlinks)
    context.log.info("plan chosen", plan=selected.plan.name, reason=selected.reason)
    return selected.plan.topology()


async def serve(config: PsConfig, context: Context[PsConfig]) -> None:
    """Coordinate and aggregate until asked to stop; running jobs get the drain time to end."""
    from inanet.aio.coordination import Coordination
    from inanet.aio.station import Station, open_device
    from inanet.control.settings import Settings

    loop = asyncio.get_running_loop()
    device = await open_device(config, loop.time)
    station = Station("ps", config, device, lambda: coordination.pump())
    member = station.member(station.identity())
    settings = Settings(
        topology=fabric(config, context),
        token=config.control.secret(),
        silence=10 * config.control.heartbeat,
        probe=3 * config.control.heartbeat,
        join=config.control.join_timeout,
        round=config.control.round_timeout,
        downlink=config.control.downlink,
        group_range=config.control.group_range,
        group_port=config.control.group_port,
        negotiate=config.node.rate_negotiation,
        loss_threshold=config.control.loss_threshold,
    )
    coordination = Coordination(settings, member, station.driver.kick)
    context.stats = station.figures
    context.health = station.healthy
    context.measure(station.samples)
    try:
        await coordination.start(str(config.control.listen))
        context.ready(f"coordinating at {coordination.address}", control=coordination.address)
        await context.stopping.wait()
        while coordination.jobs_running and context.remaining > 0.5:  # noqa: ASYNC110 - bounded, once in a life
            await asyncio.sleep(0.05)
    finally:
        await coordination.close("the coordinator was asked to stop")
        station.close()


main = command("ps", serve, "Sum gradients at the root and coordinate the fabric.")

if __name__ == "__main__":
    main()
