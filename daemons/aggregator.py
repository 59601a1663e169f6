"""``ina-agg``: an aggregator. It connects to the coordinator and takes part in whatever jobs need it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daemons._chassis import command

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.control.config import AggConfig


async def serve(config: AggConfig, context: Context[AggConfig]) -> None:
    """Aggregate until asked to stop; a lost coordinator is waited for."""
    from inanet.aio.station import Station, open_device
    from inanet.aio.uplink import Uplink
    from inanet.control.exits import Failure

    loop = asyncio.get_running_loop()
    device = await open_device(config, loop.time)
    station = Station("aggregator", config, device, lambda: uplink.flush())
    member = station.member(station.identity())
    uplink = Uplink(
        member,
        str(config.control.coordinator),
        join=config.control.join_timeout,
        resume=config.control.join_timeout,
        wake=station.driver.kick,
    )
    context.stats = station.figures
    context.health = station.healthy
    context.measure(station.samples)
    running = asyncio.create_task(uplink.run())
    stopping = asyncio.create_task(context.stopping.wait())
    welcome = asyncio.create_task(
        uplink.until(lambda: member.welcomed, "Welcome", config.control.join_timeout)
    )
    tasks = (running, stopping, welcome)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if member.welcomed:
            context.ready(f"connected to {config.control.coordinator}")
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        if not context.stopping.is_set():
            why = member.failed.message if member.failed is not None else welcome.exception()
            raise Failure(f"aggregator {config.node.name}: {why}")
        await uplink.leave("the aggregator was asked to stop")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        station.close()


main = command("agg", serve, "Aggregate gradients for the jobs of a fabric.")

if __name__ == "__main__":
    main()
