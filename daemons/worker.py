"""``ina-worker``: the agent of a host. It carries the collectives of the training processes beside it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from daemons._chassis import command

if TYPE_CHECKING:
    from daemons._lifecycle import Context
    from inanet.config.daemons import WorkerConfig


async def serve(config: WorkerConfig, context: Context[WorkerConfig]) -> None:
    """Serve local ranks until asked to stop; collectives that run get the drain time to end."""
    context.prepare_kernels()
    import os
    from pathlib import Path

    from daemons._following import registered_node
    from inanet.agent.backend import FabricBackend
    from inanet.agent.server import LocalServer
    from inanet.aio.station import Station, open_device

    if config.local.cpus:
        os.sched_setaffinity(0, config.local.cpus)
    loop = asyncio.get_running_loop()
    device = await open_device(config, loop.time)
    station = Station("worker", config, device, lambda: backend.flush())
    coordinator = config.control.coordinator
    backend = FabricBackend(
        station,
        None if coordinator is None else str(coordinator),
        join=config.control.join_timeout,
        lost=lambda job, error: server.lost(job, error),
        keys=config.control.tls_keys(),
    )
    server = LocalServer(
        Path(config.local.socket),
        backend,
        mode=config.local.mode,
        users=_user_ids(config.local.allow_users),
        groups=_group_ids(config.local.allow_groups, context),
        system=config.local.system,
    )
    context.stats = lambda: {**station.figures(), **server.counts()}
    context.health = station.healthy
    context.drops = station.drops
    context.measure(station.samples)
    context.measure(server.samples)
    try:
        await server.start()
        context.ready(f"serving {config.local.socket}")
        async with AsyncExitStack() as registered:
            if coordinator is not None:
                await registered.enter_async_context(
                    registered_node(station, "worker", config, str(coordinator), context.measure)
                )
            await context.stopping.wait()
            while server.busy and context.remaining > 0.5:  # noqa: ASYNC110 - bounded, once in a life
                await asyncio.sleep(0.05)
    finally:
        await server.close()
        backend.close()
        station.close()


def _user_ids(users: tuple[str | int, ...]) -> list[int]:
    import pwd

    from inanet.service.exits import Failure

    ids = []
    for user in users:
        try:
            ids.append(user if isinstance(user, int) else pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise Failure(f"local.allow_users: there is no user {user!r} on this host") from None
    return ids


def _group_ids(groups: tuple[str | int, ...] | None, context: Context[WorkerConfig]) -> list[int] | None:
    """Those that there are: one that is missing has no members who could be let in."""
    import grp

    if groups is None:
        return None
    ids = []
    for group in groups:
        try:
            ids.append(group if isinstance(group, int) else grp.getgrnam(group).gr_gid)
        except KeyError:
            context.log.warning(
                "no such group: its members cannot be let in",
                group=group,
                fix=f"groupadd {group}, usermod -aG {group} USER for each who trains, and restart; or correct local.allow_groups",
            )
    return ids


main = command("worker", serve, "Carry the collectives of this host's training processes.")

if __name__ == "__main__":
    main()
