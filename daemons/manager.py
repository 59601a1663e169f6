"""``ina-manager``: the coordinator of a fabric in a daemon of its own. Nodes register, jobs are admitted and planned."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daemons._chassis import command

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.aio.coordinator import Coordination
    from inanet.config.manager import ManagerConfig
    from inanet.coordinator.registry import Registry
    from inanet.planning.topology import TreeFabric

#: Seconds between progress lines while expected nodes are missing.
PROGRESS = 3.0


def fabric(config: ManagerConfig, registry: Registry) -> TreeFabric:
    """The trees of the file, if it has some, else what the planner makes of the nodes that register."""
    from inanet.coordinator.managed_fabric import ManagedFabric, Policy
    from inanet.planning.costs import load as load_costs

    if config.topology is not None:
        return config.topology.fabric(config.topology.roots[0])
    planning = config.planning
    policy = Policy(
        kind=planning.plan,
        tensor=planning.tensor,
        rate=planning.rate,
        downlinks=["unicast"] if config.control.downlink == "unicast" else ["multicast", "unicast"],
        evaluate=planning.evaluate,
        dynamic=planning.dynamic,
    )
    return ManagedFabric(registry, policy, load_costs(), config.fabric.expect)


def expected_nodes(config: ManagerConfig) -> tuple[str, ...]:
    """Nodes that are missing while they are not there: those of ``fabric.expect``, and those of the file's trees."""
    named = config.topology.nodes if config.topology is not None else ()
    return tuple(dict.fromkeys((*config.fabric.expect, *named)))


async def serve(config: ManagerConfig, context: Context[ManagerConfig]) -> None:
    """Coordinate until asked to stop; running jobs wait for the next start."""
    from inanet.aio.coordinator import Coordination
    from inanet.coordinator.epochs import Epochs
    from inanet.coordinator.registry import Registry
    from inanet.coordinator.settings import settings_of

    registry = Registry()
    settings = settings_of(
        config.control,
        fabric(config, registry),
        negotiate=config.node.rate_negotiation,
        evaluate=config.planning.evaluate and config.topology is None,
        expected=expected_nodes(config),
        switches=config.topology.switches if config.topology is not None else (),
        any_switch=config.topology is None,
        links=config.topology.links if config.topology is not None else (),
    )

    def unkept(reason: str) -> None:
        context.log.error(
            "number of the job not kept, serving from memory",
            reason=reason,
            fix="make room there; after a restart numbers may come twice, which confuses logs and no job",
        )

    epochs = Epochs(config.node.state_file, unkept)
    coordination = Coordination(
        settings, None, registry=registry, epochs=epochs.next, keys=config.control.tls_keys()
    )
    context.stats = coordination.figures
    context.measure(coordination.samples)
    try:
        await coordination.start(str(config.control.listen))
        context.log.info("coordinating", address=coordination.address, expected=len(config.fabric.expect))
        if await _everybody(config, registry, coordination, context):
            status = await asyncio.to_thread(
                context.coordinating, config.control.listen, coordination.address
            )
            context.ready(status, control=coordination.address)
            await context.stopping.wait()
            coordination.stopping = True
    finally:
        # nothing is drained: jobs are in the hands of their members, and go on with whoever coordinates next
        await coordination.close("it was asked to stop; jobs wait for it to start again")


async def _everybody(
    config: ManagerConfig, registry: Registry, coordination: Coordination, context: Context[ManagerConfig]
) -> bool:
    """Wait for all expected nodes, saying who is missing; False if asked to stop. Raises ``Failure`` when it is late."""
    from inanet.service.exits import Failure

    expected = config.fabric.expect
    loop = asyncio.get_running_loop()
    deadline = loop.time() + config.control.join_timeout
    stopping = asyncio.create_task(context.stopping.wait())
    try:
        while missing := registry.missing(expected):
            text = f"joined {len(expected) - len(missing)} of {len(expected)}, missing: {', '.join(missing)}"
            left = deadline - loop.time()
            if left <= 0:
                seconds = config.control.join_timeout
                raise Failure(
                    f"{text}: gave up after {seconds:g} s; start these nodes with control.coordinator = "
                    f"'{coordination.address}', or take them out of fabric.expect"
                )
            context.log.info("waiting", progress=text)
            context.status(text)
            changed = asyncio.create_task(coordination.changed())
            await asyncio.wait(
                (stopping, changed), timeout=min(PROGRESS, left), return_when=asyncio.FIRST_COMPLETED
            )
            changed.cancel()
            if stopping.done():
                return False
    finally:
        stopping.cancel()
    return True


main = command("manager", serve, "Coordinate a fabric: nodes register, jobs are admitted and planned.")

if __name__ == "__main__":
    main()
