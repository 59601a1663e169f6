"""How the ranks of a torch process group find their agents and become one job.

Torch's own rendezvous knows all ranks already: each says through it which agent it sits beside, and from
that follow the job's name, the ranks per host, and whether all have an agent at all. There is no second list
of hosts. Every decision is made from what all ranks have said, so all decide the same.
"""

import json
import logging
import os
import secrets
import socket as sockets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from inanet.client.connection import Connection
from inanet.client.environment import socket_path
from inanet.client.job import Job, connect
from inanet.errors import AgentUnavailable, FabricError, InaError, JoinTimeout
from inanet.torch.options import MOST_JOIN_SECONDS, Options

#: Hands in what this rank has to say (JSON) and returns what all have said, by rank.
Exchange = Callable[[Any], list[Any]]

_PROBE_SECONDS = 10.0
#: seconds in which rank 0 must leave a group that others have left, in which others hear that it does, in which its store
#: closes, and between two looks
_LEAVE_SECONDS, _HEARD_SECONDS, _CLOSE_SECONDS, _LOOK_SECONDS = 5.0, 1.0, 0.2, 0.005
_log = logging.getLogger("inanet")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def through_store(store: "dist.Store", rank: int, size: int, seconds: float) -> Exchange:
    """An exchange through a store that belongs to the group alone. Rank 0 collects, so that N ranks cost 3 N
    requests. It raises :class:`~inanet.errors.JoinTimeout` naming the first rank that does not come.
    """
    patience = timedelta(seconds=seconds)
    calls = 0

    def wait(key: str, missing: int) -> bytes:
        try:
            store.wait([key], patience)
        except RuntimeError as error:
            raise JoinTimeout(
                f"rank {missing} has not said within {seconds:g} s which agent it has ({error})",
                rank=rank,
                ranks=(missing,),
            ) from None
        return bytes(store.get(key))

    def exchange(value: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        store.set(f"ina/{calls}/{rank}", json.dumps(value))
        everything = f"ina/{calls}/all"
        if rank == 0:
            said = [json.loads(wait(f"ina/{calls}/{peer}", peer)) for peer in range(size)]
            store.set(everything, json.dumps(said))
            return said
        answer: list[Any] = json.loads(wait(everything, 0))
        return answer

    return exchange


def leave(store: "dist.Store", server: "dist.TCPStore", rank: int, size: int) -> None:
    """Leave the default group: returns when the store of rank 0 does not listen any more, if that process has it.

    A rank that began the next group of the same address before that would join the last one's store. Nobody waits long
    for ranks that stay, or for a store that belongs to the launcher. ``server`` is what ``store`` asks.
    """
    try:
        if rank == 0:
            store.set("left", b"")
            deadline = time.monotonic() + _HEARD_SECONDS
            while store.add("heard", 0) < size - 1 and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            return
        store.wait(["left"], timedelta(seconds=_LEAVE_SECONDS))
        store.add("heard", 1)
    except RuntimeError as error:
        # rank 0 stays, or is gone
        _log.debug("left the store: %s", error)
        return
    deadline = time.monotonic() + _CLOSE_SECONDS
    while time.monotonic() < deadline:
        try:
            sockets.create_connection((server.host, server.port), _CLOSE_SECONDS).close()
        except OSError:
            return
        time.sleep(_LOOK_SECONDS)


def through_group(group: "dist.ProcessGroup | None") -> Exchange:
    """An exchange through any process group that can gather."""

    def exchange(value: Any) -> list[Any]:
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, value, group=group)
        return said

    return exchange


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the ranks have not become a job, and which of them could not."""

    reason: str
    ranks: tuple[int, ...] = ()
    kind: type[InaError] = FabricError

    def error(self, rank: int) -> InaError:
        """What ``require_ina`` raises."""
        return self.kind(f"{self.reason}; require_ina is set", rank=rank, ranks=self.ranks)


@dataclass(frozen=True, slots=True)
class Joined:
    """The job of these ranks; ``local``: all of them share one agent, which sums in memory."""

    job: Job
    local: bool


def join(exchange: Exchange, rank: int, size: int, options: Options, seconds: float) -> Joined | Refusal:
    """Join the job of these ranks through their agents, all or none of them.

    ``seconds``: what a round may take, and joining up to :data:`~inanet.torch.options.MOST_JOIN_SECONDS`.
    Raises an :class:`~inanet.errors.InaError` on all ranks if any of them requires INA and cannot
    have it.
    """
    said = exchange(_introduction(options))
    required = any(one["required"] for one in said)
    answer = _unreachable(said) or _connect(exchange, said, rank, size, options, seconds)
    if isinstance(answer, Refusal) and required:
        raise answer.error(rank)
    return answer


def _introduction(options: Options) -> dict[str, Any]:
    """What a rank says first. The token makes the job's name new, so that processes of an earlier run that
    still live cannot meddle."""
    introduction = {
        "name": options.name,
        "token": secrets.token_hex(4),
        "node": sockets.gethostname(),
        "required": options.required,
        "agent": "",
        "why": "",
    }
    try:
        introduction["agent"] = _agent(options)
    except AgentUnavailable as error:
        introduction["why"] = error.reason
    return introduction


def _agent(options: Options) -> str:
    """What tells this host's agent from every other: the kernel's boot and the socket's inode there.

    Raises :class:`~inanet.errors.AgentUnavailable` if nobody listens.
    """
    path = socket_path(options.socket)
    try:
        Connection(path, _PROBE_SECONDS).close()
        status = os.stat(path)
    except OSError as error:
        raise AgentUnavailable(
            f"no worker agent at {path} ({error.strerror or error}); start ina-worker on this host, or set "
            "INA_SOCKET to where it listens",
            searched=(os.fspath(path),),
        ) from None
    boot = _BOOT.read_text().strip() if _BOOT.exists() else sockets.gethostname()
    return f"{boot}:{status.st_dev}:{status.st_ino}"


def _unreachable(said: Sequence[dict[str, Any]]) -> Refusal | None:
    without = tuple(rank for rank, one in enumerate(said) if one["why"])
    if not without:
        return None
    first = said[without[0]]
    others = f" (and {len(without) - 1} more)" if len(without) > 1 else ""
    reason = f"rank {without[0]}{others} on {first['node']} has no agent: {first['why']}"
    return Refusal(reason, without, AgentUnavailable)


def _connect(
    exchange: Exchange, said: Sequence[dict[str, Any]], rank: int, size: int, options: Options, seconds: float
) -> Joined | Refusal:
    job: Job | None = None
    why = ""
    local = sum(one["agent"] == said[rank]["agent"] for one in said)
    try:
        job = connect(
            f"{said[0]['name']}-{said[0]['token']}",
            rank=rank,
            world=size,
            local_world=local,
            socket=options.socket,
            timeout=min(seconds, MOST_JOIN_SECONDS),
        )
    except InaError as error:
        why = str(error)
    try:
        answers = exchange(why)
    except BaseException:
        if job is not None:
            job.close()
        raise
    failed = tuple(peer for peer, text in enumerate(answers) if text)
    if job is not None and not failed:
        job.timeout = seconds
        return Joined(job, local == size)
    if job is not None:
        job.close()
    return Refusal(f"rank {failed[0]} could not join: {answers[failed[0]]}", failed)
