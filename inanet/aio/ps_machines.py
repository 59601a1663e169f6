"""What a parameter server has for jobs on switches: machines at addresses of their own, and who tells them of jobs."""

from pathlib import Path

from inanet.aio.machine_runner import MachineRunner
from inanet.aio.station import Station, open_device
from inanet.config.daemons import AnyConfig, PsConfig
from inanet.messages.services import Service
from inanet.planning.goat.epochs import for_any_workers
from inanet.proto.common.machine import Host, Server
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.root import SwitchedRoot
from inanet.proto.slots.systems import EXPONENTS, SYSTEMS
from inanet.service.exits import Failure
from inanet.service.shard_state import ModelFolder


async def serve_switches(station: Station) -> tuple[SwitchedRoot, dict[str, Service]]:
    """Open machines for all systems beside a station's node; the follower of plans, and where the machines are."""
    made = {system: parts.make_server() for system, parts in SYSTEMS.items()}
    servers: dict[str, Server] = {
        EXPONENTS: ExponentRoot(),
        **{system: server for system, server in made.items() if server is not None},
    }
    services = {}
    models, choose = _models(station.config), for_any_workers()
    for name, server in servers.items():
        if station.config.node.transport == "rawip" and not server.takes_raw:
            continue
        device = await open_device(station.config, station.driver.now, legacy=True)
        station.runners.add(MachineRunner(server, device, station.on_event))
        server.settle(Host(device.endpoint, models, choose))
        services[name] = Service(endpoint=device.endpoint, keeps=server.keeps)
    return SwitchedRoot(station.node, servers), services


def _models(config: AnyConfig) -> ModelFolder | None:
    """Files of models in the folder for them, if there is one. Raises :class:`~inanet.service.exits.Failure` if there cannot be."""
    models = config.node.models if isinstance(config, PsConfig) else None
    if models is None:
        return None
    folder = Path(models)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"node.models: there can be no folder {folder}: {error.strerror}") from error
    return ModelFolder(folder)
