"""``ina-switch``: the emulated programmable switch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daemons._chassis import command

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.aio.uplink import Uplink
    from inanet.config.switch import SwitchConfig


async def serve(config: SwitchConfig, context: Context[SwitchConfig]) -> None:
    """Forward and aggregate until asked to stop; what waits at the ports gets the drain time to leave."""
    context.prepare_kernels()
    from inanet.aio.switch import SwitchDriver, join_fabric, open_switch
    from inanet.wire.endpoint import show

    switch = await asyncio.to_thread(open_switch, config)
    driver = SwitchDriver(switch, config.switch.pause)
    context.stats = switch.stats
    context.measure(driver.samples)
    programs = {name: show(where) for name, where in switch.endpoints().items()}
    listed = ", ".join(f"{name} at {where}" for name, where in programs.items())
    uplink = join_fabric(config, driver)
    try:
        if uplink is None:
            context.ready(f"{len(switch.ports)} ports; {listed or 'no programs'}", **programs)
            await context.stopping.wait()
        else:
            await _follow(config, context, uplink, f"{listed or 'no programs'}", programs)
        while driver.blocked and context.remaining > 0.1:  # noqa: ASYNC110 - bounded, once in a life
            await asyncio.sleep(0.02)
    finally:
        driver.close()


async def _follow(
    config: SwitchConfig,
    context: Context[SwitchConfig],
    uplink: Uplink,
    status: str,
    programs: dict[str, str],
) -> None:
    """Serve the jobs of a coordinator as well, until asked to stop; a lost one is waited for."""
    from daemons._following import registered
    from inanet.service.exits import Failure
    from inanet.wire.endpoint import show

    member = uplink.member
    running = asyncio.create_task(uplink.run())
    stopping = asyncio.create_task(context.stopping.wait())
    welcome = asyncio.create_task(
        uplink.until(lambda: member.welcomed, "Welcome", config.control.join_timeout)
    )
    tasks = (running, stopping, welcome)
    try:
        where = show(member.identity.endpoint)
        coordinator = str(config.control.coordinator)
        async with registered(
            "switch", config, coordinator, where=where, figures=dict, measure=context.measure
        ):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if member.welcomed:
                context.ready(f"connected to {coordinator}; {status}", **programs)
                await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            if not context.stopping.is_set():
                why = member.failed.message if member.failed is not None else welcome.exception()
                raise Failure(f"switch {config.node.name}: {why}")
            await uplink.leave("the switch was asked to stop")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


main = command(
    "switch", serve, "Forward frames and aggregate gradients on the way: an emulated programmable switch."
)

if __name__ == "__main__":
    main()
