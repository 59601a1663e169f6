"""What a parameter server has for jobs on switches: machines at addresses of their own, and who tells them of jobs."""

from pathlib import Path

from inanet.aio.beside import Beside
from inanet.aio.station import Station, open_device
from inanet.control.config import AnyConfig, PsConfig
from inanet.control.exits import Failure
from inanet.control.goat.epochs import for_any_workers
from inanet.control.services import EXPONENTS, Service
from inanet.control.sparse_state import ModelFolder
from inanet.proto.switched.exponents import ExponentRoot
from inanet.proto.switched.root import Epochs, Sharded, SwitchedRoot
from inanet.proto.systems import PROGRAMS


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
        station.beside.add(Beside(machine, device, station.on_event))
        services[name] = Service(endpoint=device.endpoint)
        if isinstance(machine, Sharded):
            machine.endpoint = device.endpoint
            machine.models = _models(station.config)
            services[name] = Service(endpoint=device.endpoint, keeps=machine.models is not None)
    return SwitchedRoot(station.node, exponents, servers), services


def _models(config: AnyConfig) -> ModelFolder | None:
    """Files of models in the folder for them, if there is one. Raises :class:`~inanet.control.exits.Failure` if there cannot be."""
    models = config.node.models if isinstance(config, PsConfig) else None
    if models is None:
        return None
    folder = Path(models)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"node.models: there can be no folder {folder}: {error.strerror}") from error
    return ModelFolder(folder)
