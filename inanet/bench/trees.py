"""TCP-Agg in a tree: a server at every inner node, those below the root passing sums on, and a rank at every place."""

from collections.abc import Sequence

from inanet.bench.peers.rank import Team
from inanet.bench.stage import Place, Stage
from inanet.launch.process import python
from inanet.planning.topology import Tree

_TCP = "inanet.bench.peers.tcp"
#: Bytes in a message, as TCP-Agg has them in labs.
_MESSAGE = 1 << 20


def tcp_tree(name: str, stage: Stage, tree: Tree) -> Team:
    """Ranks and servers, every node of ``tree`` being a host of the stage. Raises
    :class:`inanet.service.exits.Failure` if a server does not start.
    """
    listening: dict[str, tuple[str, str]] = {}
    servers = []
    for node in tree.nodes:
        children = tree.children.get(node, ())
        if not children:
            continue
        port_file, address = stage.directory / f"{name}-{node}", stage.address(node)
        above = listening[tree.parents[node]] if node in tree.parents else ()
        what = (str(port_file), str(len(children)), str(_MESSAGE), address, "stream")
        process = stage.spawn(node, python(_TCP, "server", *what, *above), {})
        listening[node] = (address, stage.appears(port_file, process))
        servers.append(process.pid)

    def rank(place: Place) -> Sequence[str]:
        above = listening[tree.parents[place.host]]
        return python(_TCP, "rank", str(place.rank), str(stage.world), *above, str(_MESSAGE), "0")

    return Team(name, stage.per_rank(rank), servers=servers)
