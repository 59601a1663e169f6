"""What a parameter server has for jobs on switches: machines at addresses of their own, and who tells them of jobs."""

from pathlib import Path

from inanet.aio.machine_runner import MachineRunner
from inanet.aio.station import Station, open_device
from inanet.config.daemons import AnyConfig, PsConfig
from inanet.messages.services import EXPONENTS, Service
from inanet.planning.goat.epochs import for_any_workers
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.root import Epochs, Sharded, SwitchedRoot
from inanet.proto.slots.systems import PROGRAMS
from inanet.service.exits import Failure
from inanet.service.shard_state import ModelFolder


async def serve_switches(station: Station) -> tuple[SwitchedRoot, dict[str, Service]]:
    """Open machines for all systems beside a station's node; the follower of plans, and where the machines are."""
    exponents = ExponentRoot()
    made = {system: parts.make_server() for system, parts in PROGRAMS.items()}
    servers = {system: server for system, server in made.items() if server is not None}
    for server in servers.values():
        if isinstance(server, Epochs):
            server.choose = for_any_workers()
    services = {}
    for name, machine in {EXPONENTS: exponents, **servers}.items():
        if isinstance(machine, Sharded) and station.config.node.transport == "rawip":
            # ranks send UDP
            continue
        device = await open_device(station.config, station.driver.now, legacy=True)
        station.runners.add(MachineRunner(machine, device, station.on_event))
        services[name] = Service(endpoint=device.endpoint)
        if isinstance(machine, Sharded):
            machine.endpoint = device.endpoint
            machine.models = _models(station.config)
            services[name] = Service(endpoint=device.endpoint, keeps=machine.models is not None)
    return SwitchedRoot(station.node, exponents, servers), services


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
