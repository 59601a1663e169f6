"""Configuration files for the daemons of a fabric on one machine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inanet.config.daemons import MODELS, Role
from inanet.config.file import validate, write_toml
from inanet.launch.topology import NodeSpec, section
from inanet.proto.slots.systems import TREES, sparse_systems
from inanet.proto.zebra.plan import Sparse

#: How long a daemon may finish what runs after SIGTERM; the demo stops daemons that have nothing left to do.
DRAIN_TIMEOUT = "3 s"
#: Of a packet to a switch that sums hot keys.
HOT_PAIRS = Sparse().hot_pairs


def worker_socket(directory: Path, name: str) -> Path:
    """Where the worker daemon ``name`` serves training processes."""
    return directory / f"{name}.sock"


def configurations(
    directory: Path,
    nodes: Iterable[NodeSpec],
    impair: float,
    seed: int,
    downlink: str = "unicast",
    system: str = TREES,
    memory: str = "",
) -> dict[str, str]:
    """TOML by node name: data on kernel-chosen ports of 127.0.0.1, everything else in ``directory``.

    Every node loses, duplicates, reorders and corrupts arriving packets with probability ``impair`` each,
    repeatably for a ``seed``, and independently of the other nodes. ``downlink`` is how results go out; a switch
    runs ``system``, in so much ``memory`` if it is given.
    """
    nodes = list(nodes)
    coordinator = f"unix:{directory / 'control.sock'}"
    faults = dict.fromkeys(("drop", "duplicate", "reorder", "corrupt"), impair)
    texts = {}
    for index, node in enumerate(nodes):
        role: Role = node.role
        sections: dict[str, Any] = {
            "node": {"name": node.name, "listen": "127.0.0.1:0"} if role != "switch" else {"name": node.name},
            "log": {"format": "plain"},
            "impair": {"seed": seed * len(nodes) + index, **faults},
            "control": {
                "listen" if node.parent is None else "coordinator": coordinator,
                "drain_timeout": DRAIN_TIMEOUT,
            },
        }
        if role == "worker":
            sections["local"] = {"socket": str(worker_socket(directory, node.name))}
        if role == "switch":
            program = {"system": system, "udp_ports": "0", **({"memory": memory} if memory else {})}
            sections["switch"] = {"programs": [program]}
            if system in sparse_systems():
                # so that all pairs of a packet may be of one register
                sections["switch"]["recirculations"] = HOT_PAIRS - 1
        if node.parent is None:
            sections["topology"] = section(nodes)
            sections["control"]["downlink"] = downlink
        texts[node.name] = write_toml(validate(MODELS[role], sections, directory / f"{node.name}.toml"))
    return texts
