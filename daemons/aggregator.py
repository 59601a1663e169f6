"""``ina-agg``: an aggregator. It connects to the coordinator and takes part in whatever jobs need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daemons._chassis import command

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.config.daemons import AggConfig


async def serve(config: AggConfig, context: Context[AggConfig]) -> None:
    """Aggregate until asked to stop; a lost coordinator is waited for."""
    from daemons._following import follow

    await follow("aggregator", config, config.control.coordinator, context)


main = command("agg", serve, "Aggregate gradients for the jobs of a fabric.")

if __name__ == "__main__":
    main()
