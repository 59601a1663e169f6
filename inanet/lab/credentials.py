"""How the daemons of a lab prove who they are: by certificates made for the run, or, if that is wanted, by a token alone."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inanet.config.daemons import Role
from inanet.trust.certificates import STATUS

#: Days for which a lab's certificates are valid: longer than any run.
_DAYS = 30
#: What certificates call a daemon, where its program has another name.
_CALLED = {"agg": "aggregator"}


def prepare(directory: Path, nodes: Mapping[str, Role], *, insecure: bool = False) -> None:
    """Make what :func:`sections` speaks of, in files below ``directory`` that only their owner can read.

    Certificates are those of ``ina keys``, one for every node. ``insecure``: a token instead, in the clear on the lab's
    own wires, which nothing but the lab can reach; for measurements that compare with systems without TLS.
    """
    if insecure:
        token = _token(directory)
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        return
    from inanet.trust import authority

    authority.initialise(_keys(directory), _DAYS)
    for name, role in nodes.items():
        roles = (_CALLED.get(role, role), STATUS)
        authority.issue(_keys(directory), name, roles=roles, coordinator=role == "ps", days=_DAYS)


def section(directory: Path, name: str, *, insecure: bool = False) -> dict[str, Any]:
    """The keys of ``[control]`` that a node needs for it."""
    if insecure:
        return {"insecure": True, "token_file": str(_token(directory))}
    keys = _keys(directory)
    return {"ca_file": str(keys / "ca.pem"), "key_file": str(keys / f"{name}.pem")}


def _token(directory: Path) -> Path:
    return directory / "token"


def _keys(directory: Path) -> Path:
    return directory / "keys"
