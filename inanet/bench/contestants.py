"""The contestants that come with the program. Importing this module registers them."""

import importlib.util
from collections.abc import Callable, Sequence

from inanet.bench.peers import openmpi
from inanet.bench.peers.rank import Team
from inanet.bench.registry import Peer, register
from inanet.bench.stage import Place, Stage
from inanet.launch.process import python

_TCP = "inanet.bench.peers.tcp"
#: What a synchronous switch holds of every worker, bytes: a pool of the size that SwitchML has, and above what a
#: lab's link needs to be full.
_SWITCH_MEMORY = 128 << 10


def _needs_torch() -> str:
    return "" if importlib.util.find_spec("torch") else "torch is not installed (bench extra)"


def needs_mpi() -> str:
    return "" if openmpi.installed() else "mpi4py and openmpi are not installed (bench extra)"


def _gloo(stage: Stage) -> Team:
    rendezvous = str(stage.directory / "gloo")
    return Team(
        "gloo",
        stage.per_rank(
            lambda place: python("inanet.bench.peers.gloo", str(place.rank), str(stage.world), rendezvous)
        ),
    )


def _openmpi_local(stage: Stage) -> Team:
    directory = stage.directory / "openmpi"
    directory.mkdir()
    return Team("openmpi", [stage.spawn(stage.server, openmpi.command(stage.world, directory), {})])


def _tcp(name: str, message: int, style: str, window: int = 0) -> Callable[[Stage], Team]:
    """A TCP server of a ``style`` for all ranks; one with a window stands for a switch and runs where links are free."""

    def start(stage: Stage) -> Team:
        port_file = stage.directory / name
        host = stage.idle if window else stage.server
        address, world = stage.address(host), str(stage.world)
        command = python(_TCP, "server", str(port_file), world, str(message), address, style)
        server = stage.spawn(host, command, {})
        port = stage.appears(port_file, server)

        def rank(place: Place) -> Sequence[str]:
            return python(_TCP, "rank", str(place.rank), world, address, port, *map(str, (message, window)))

        return Team(name, stage.per_rank(rank), servers=[server.pid])

    return start


def _inanet(
    name: str,
    *,
    one_host: bool = False,
    memory: str = "shared",
    mode: str = "prologue",
    downlink: str = "unicast",
) -> Callable[[Stage], Team]:
    """inanet itself: an agent for every host, or one for all ranks."""

    def start(stage: Stage) -> Team:
        agents = stage.agents(one_host, downlink)

        def rank(place: Place) -> Sequence[str]:
            numbers = (place.rank, stage.world, agents.sharing[place.rank])
            socket = str(agents.sockets[place.rank])
            return python("inanet.bench.peers.xagg", *map(str, numbers), socket, memory, mode, name)

        return Team(name, stage.per_rank(rank), agents.helpers, agents.servers)

    return start


GLOO = register(Peer("gloo", ("local", "star", "loss", "hetero"), _gloo, "ring", _needs_torch))
register(Peer("openmpi", ("local",), _openmpi_local, "ring", needs_mpi))
register(Peer("ps", ("local", "star", "hetero"), _tcp("ps", 1 << 20, "plain"), "server"))
register(Peer("tcp-agg-1k", ("local",), _tcp("tcp-agg-1k", 1 << 10, "stream"), "server", ingests=True))
register(Peer("tcp-agg-1m", ("local",), _tcp("tcp-agg-1m", 1 << 20, "stream"), "server", ingests=True))
register(Peer("tcp-agg", ("star", "hetero"), _tcp("tcp-agg", 1 << 20, "stream"), "server"))
register(
    Peer(
        "switch-sync",
        ("hetero",),
        _tcp("switch-sync", 64 << 10, "stream", _SWITCH_MEMORY),
        "synchronous",
    )
)
register(Peer("xagg-shm", ("local",), _inanet("xagg-shm", one_host=True), "tree"))
register(
    Peer(
        "xagg-shm-private",
        ("local",),
        _inanet("xagg-shm-private", one_host=True, memory="private"),
        "tree",
    )
)
register(Peer("xagg-udp", ("local", "star", "loss", "hetero"), _inanet("xagg-udp"), "tree", ingests=True))
register(
    Peer(
        "xagg-udp-multicast",
        ("local", "star", "loss"),
        _inanet("xagg-udp-multicast", downlink="multicast"),
        "tree",
        ingests=True,
    )
)
register(Peer("xagg-udp-fixed", ("hetero",), _inanet("xagg-udp-fixed", mode="fixed"), "tree"))
register(Peer("xagg-udp-prologue", ("hetero",), _inanet("xagg-udp-prologue", mode="prologue"), "tree"))
