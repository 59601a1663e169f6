"""Results as a worker's parent sends them, and the worker's ring as its node sees it."""

from typing import Any

import numpy as np

from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import Kind, Packet
from inanet.xdp.inbox import Inbox
from tests.xdp.conftest import DROP, PASS

KEY, JOB, SHARD, ROUND = 0x0123456789ABCDEF, 7, 2, 41
GROUP = endpoint("239.192.0.9", 7401)


def packet(fragment: int, **other: Any) -> bytes:
    """A result, or what is like one."""
    key = other.pop("key", KEY)
    fields: dict[str, Any] = {
        "kind": Kind.RESULT,
        "job": JOB,
        "host": 0,
        "gradient": fragment,
        "round": ROUND,
    }
    fields |= {"shard": SHARD, "plan": 1, "attempt": 0}
    payload = np.full(256, fragment + 1, np.int32).tobytes()
    return Packet(**(fields | {"payload": payload} | other)).encode(key)


def show(inbox: Inbox, arrived: bytes) -> int:
    """Run the program on a frame; returns the verdict. What is passed is as it came."""
    verdict, left, _ = inbox.program("native").test_run(arrived)
    assert verdict in (DROP, PASS)
    assert verdict == DROP or left == arrived
    return verdict


def everything(inbox: Inbox) -> list[tuple[bytes, int]]:
    """Packets that are in the ring, with their sources."""
    found: list[tuple[bytes, int]] = []
    while (batch := inbox.take()) is not None:
        found += [(batch.packet(index), int(batch.sources[index])) for index in range(len(batch))]
    return found
