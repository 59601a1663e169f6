"""``ina-switch``: the emulated programmable switch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daemons._chassis import command

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.control.config_switch import SwitchConfig


async def serve(config: SwitchConfig, context: Context[SwitchConfig]) -> None:
    """Forward and aggregate until asked to stop; what waits at the ports gets the drain time to leave."""
    from inanet.aio.switching import SwitchDriver, open_switch
    from inanet.wire.endpoint import show

    switch = await asyncio.to_thread(open_switch, config)
    driver = SwitchDriver(switch)
    context.stats = switch.stats
    context.measure(driver.samples)
    programs = {name: show(where) for name, where in switch.endpoints().items()}
    listed = ", ".join(f"{name} at {where}" for name, where in programs.items())
    try:
        context.ready(f"{len(switch.ports)} ports; {listed or 'no programs'}", **programs)
        await context.stopping.wait()
        while driver.blocked and context.remaining > 0.1:  # noqa: ASYNC110 - bounded, once in a life
            await asyncio.sleep(0.02)
    finally:
        driver.close()


main = command(
    "switch", serve, "Forward frames and aggregate gradients on the way: an emulated programmable switch."
)

if __name__ == "__main__":
    main()
