"""``ina-ps``: the root of the trees, and the coordinator of the fabric beside it unless a manager is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daemons._chassis import command

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.config.daemons import PsConfig
    from inanet.planning.plans import Downlink
    from inanet.planning.topology import Topology


def fabric(config: PsConfig, context: Context[PsConfig]) -> Topology:
    """The trees that jobs use: as configured, or what the planner chooses, which is logged with the reason."""
    topology = config.topology
    assert topology is not None
    if topology.plan == "configured":
        return topology.fabric(config.node.name)
    downlinks: list[Downlink] = ["unicast"] if config.control.downlink == "unicast" else ["multicast"]
    selected = topology.selection(config.node.name, downlinks)
    context.log.info("plan chosen", plan=selected.plan.name, reason=selected.reason)
    return selected.plan.topology()


async def serve(config: PsConfig, context: Context[PsConfig]) -> None:
    """Coordinate and aggregate until asked to stop; running jobs wait for the next start."""
    from daemons._following import follow, registered_node

    if config.control.coordinator is not None:
        await follow("ps", config, config.control.coordinator, context)
        return
    context.prepare_kernels()
    from inanet.aio.coordinator import Coordination
    from inanet.aio.ps_machines import serve_switches
    from inanet.aio.station import Station, open_device
    from inanet.coordinator.settings import settings_of

    loop = asyncio.get_running_loop()
    device = await open_device(config, loop.time)
    station = Station("ps", config, device, lambda: coordination.pump())
    assert config.topology is not None
    switches = config.topology.switches
    follower, services = await serve_switches(station) if switches else (None, {})
    member = station.member(station.identity(services=services), follower=follower)
    settings = settings_of(
        config.control,
        fabric(config, context),
        negotiate=config.node.rate_negotiation,
        # not itself: whoever is answered sees that it is there
        expected=tuple(name for name in config.topology.nodes if name != config.node.name),
        switches=switches,
        links=config.topology.links,
    )
    coordination = Coordination(settings, member, station.kick, keys=config.control.tls_keys())
    context.stats = station.figures
    context.health = station.healthy
    context.drops = station.drops
    context.measure(station.samples)
    context.measure(coordination.job_samples)
    try:
        await coordination.start(str(config.control.listen))
        status = await asyncio.to_thread(context.coordinating, config.control.listen, coordination.address)
        context.ready(status, control=coordination.address)
        # as a node like all others
        async with registered_node(station, "ps", config, coordination.address, context.measure):
            await context.stopping.wait()
            coordination.stopping = True
    finally:
        # nothing is drained: jobs are in the hands of their members, and go on with whoever coordinates next
        await coordination.close("it was asked to stop; jobs wait for it to start again")
        station.close()


main = command("ps", serve, "Sum gradients at the root and coordinate the fabric.")

if __name__ == "__main__":
    main()
