"""What a training process need not say because its environment does: the agent's socket, rank and world."""

import os
from pathlib import Path

from inanet.errors import AgentUnavailable

#: environment variable with the path of the agent's socket
SOCKET_VARIABLE = "INA_SOCKET"
#: environment variable with the system that carries jobs
SYSTEM_VARIABLE = "INA_SYSTEM"
#: where agents that are system services listen: by hand or by this project's unit
SYSTEM_SOCKETS = (Path("/run/inanet/worker.sock"), Path("/run/ina-worker/worker.sock"))


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """The agent's socket: the argument, INA_SOCKET, or the first that exists of the usual places.

    The places are ``inanet/worker.sock`` in XDG_RUNTIME_DIR, then :data:`SYSTEM_SOCKETS`. Raises
    :class:`~inanet.errors.AgentUnavailable` with the places that were searched.
    """
    if given is not None:
        return Path(given)
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = ([Path(runtime) / "inanet" / "worker.sock"] if runtime else []) + list(SYSTEM_SOCKETS)
    for place in places:
        if place.exists():
            return place
    searched = tuple(map(str, places))
    raise AgentUnavailable(
        f"no worker agent: there is no socket at {', '.join(searched)}; start ina-worker on this host, and "
        f"if it listens elsewhere (local.socket in its configuration) set {SOCKET_VARIABLE} or pass socket=",
        searched=searched,
    )


def number(name: str, given: int | None, variable: str, default: int | None = None) -> int:
    """``given``, or else what the environment variable says, or else the default.

    Raises ``ValueError``, naming argument and variable, if there is none or it is no number.
    """
    if given is not None:
        return given
    text = os.environ.get(variable)
    if not text:
        if default is None:
            raise ValueError(f"{name}= is not given and {variable} is not in the environment")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {variable} is {text!r}, not a number") from None


def chosen_system(given: str | None = None) -> str:
    """The system that a job asks for: the argument, INA_SYSTEM, or nothing, and then its agent decides."""
    return os.environ.get(SYSTEM_VARIABLE, "") if given is None else given
