"""In-network aggregation for distributed training on ordinary Linux machines.

>>> import inanet
>>> with inanet.connect("train") as job:           # RANK, WORLD_SIZE and INA_SOCKET from the environment
...     job.all_reduce(gradient, op="mean")        # in place

Names are loaded on first use, so that ``import inanet`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inanet.client.handle import Handle as Handle
    from inanet.client.job import Job as Job
    from inanet.client.job import connect as connect
    from inanet.errors import AgentUnavailable as AgentUnavailable
    from inanet.errors import FabricError as FabricError
    from inanet.errors import InaError as InaError
    from inanet.errors import JoinRefused as JoinRefused
    from inanet.errors import JoinTimeout as JoinTimeout
    from inanet.errors import MismatchError as MismatchError
    from inanet.errors import NonFiniteError as NonFiniteError
    from inanet.errors import OverflowRefused as OverflowRefused
    from inanet.errors import RoundTimeout as RoundTimeout
    from inanet.errors import WorkerLostError as WorkerLostError

_CLIENT = {
    "Handle": "inanet.client.handle",
    "Job": "inanet.client.job",
    "connect": "inanet.client.job",
    "join_sparse": "inanet.sparse.member",
    "sparse_group": "inanet.sparse.group",
}
_ERRORS = (
    "AgentUnavailable",
    "FabricError",
    "InaError",
    "JoinRefused",
    "JoinTimeout",
    "MismatchError",
    "NonFiniteError",
    "OverflowRefused",
    "RoundTimeout",
    "WorkerLostError",
)


def __getattr__(name: str) -> Any:
    module = _CLIENT.get(name) or ("inanet.errors" if name in _ERRORS else None)
    if module is None:
        raise AttributeError(f"module 'inanet' has no attribute {name!r}")
    # kept, so that the next use does not come here
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLIENT, *_ERRORS})
