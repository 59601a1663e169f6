"""One aggregator on the way, as the kernel program and as a process: four children send, the parent gets the sums.

Children and parent are sockets of this process in one namespace, the aggregator is in another, a virtual cable between
them. ``python -m inanet.bench.hop udp|tcp FRAGMENTS PORT_FILE`` is the aggregator as a process; ``tcp`` adds what comes
over one connection per child, in messages of one fragment, and forwards sums over another connection (TCP-Agg). A
message is what one ``send`` carries; one ``recv`` takes as many as there are.
"""

import socket
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.bench.veth import Cable
from inanet.proto.common.plan import Fold
from inanet.proto.tree import engine
from inanet.proto.tree.engine import Count, tables_of
from inanet.proto.tree.slots import ShardColumn, SlotMemory, TreeColumn
from inanet.proto.tree.xagg import policy, slotwork
from inanet.wire.batch import Transmission
from inanet.wire.drops import DROP_CODES
from inanet.wire.endpoint import endpoint
from inanet.wire.integrity import checksum
from inanet.wire.xagg import MAGIC_VERSION, PAYLOAD_BYTES, ROW, ROW_BYTES, Kind

CHILDREN = 4
KEY = 0x1BADB002DEADBEEF
JOB, SHARD, ROUND = 1, 0, 1
AGGREGATOR = endpoint(Cable.ADDRESSES[1], 7000)
PARENT = endpoint(Cable.ADDRESSES[0], 7100)
SOURCES = tuple(endpoint(Cable.ADDRESSES[0], 7101 + child) for child in range(CHILDREN))
_recv = types.ExternalFunction("recv", types.intp(types.intc, types.voidptr, types.uintp, types.intc))
_send = types.ExternalFunction("send", types.intp(types.intc, types.voidptr, types.uintp, types.intc))
_poll = types.ExternalFunction("poll", types.intc(types.voidptr, types.uintp, types.intc))
_DONTWAIT, _NOSIGNAL = 0x40, 0x4000
_POLLIN, _POLLOUT = 1, 4
_PATIENCE = 20_000


def describe(memory: SlotMemory, fragments: int) -> int:
    """Make the job known to a node's tables, its round open; returns the row of its shard."""
    tree = memory.add_tree(memory.add_job(JOB, 0, KEY))
    memory.trees[tree, TreeColumn.LIVE] = (1 << CHILDREN) - 1
    memory.trees[tree, TreeColumn.BIT] = 1
    memory.trees[tree, TreeColumn.PARENT_ENDPOINT] = PARENT
    memory.child_endpoint[tree, :CHILDREN] = SOURCES
    row = memory.add_shard(JOB, SHARD, tree, int(Fold.SUM), fragments, ROUND - 1)
    reopen(memory, row)
    return row


def reopen(memory: SlotMemory, row: int) -> None:
    """Begin the same round again with empty slots."""
    start = int(memory.shards[row, ShardColumn.SLOT0])
    memory.state[start : start + int(memory.shards[row, ShardColumn.COUNT])] = 0
    engine.open_round(tables_of(memory), row, ROUND)


def contributions(child: int, fragments: int) -> NDArray[Any]:
    """A child's packets, as :func:`packets`."""
    return packets(fragments, Kind.DATA, child)


def packets(fragments: int, kind: Kind, child: int) -> NDArray[Any]:
    """Packets of a round, headers, tags and checksums included; of dtype :data:`~inanet.wire.xagg.ROW`. Results have no
    host, whatever ``child`` they are for.
    """
    rows = np.zeros(fragments, ROW)
    values = np.random.default_rng(child).integers(-(1 << 28), 1 << 28, PAYLOAD_BYTES // 4, np.int32)
    rows["payload"], rows["checksum"] = values, checksum(values.tobytes(), "<")
    header = rows["header"]
    header["magic"], header["kind"], header["job"] = MAGIC_VERSION, kind, JOB
    header["host"] = 0 if kind is Kind.RESULT else 1 << child
    header["gradient"] = np.arange(fragments)
    header["round"], header["shard"] = ROUND, SHARD
    words = np.ascontiguousarray(rows.view(np.uint8).reshape(fragments, ROW_BYTES)[:, :20]).view("<u4")
    tag = np.full(fragments, KEY, np.uint64)
    for word in range(5):
        tag = (tag ^ words[:, word]) * np.uint64(0x9E3779B97F4A7C15)
        tag ^= tag >> np.uint64(29)
    tag *= np.uint64(0xBF58476D1CE4E5B9)
    header["tag"] = tag ^ tag >> np.uint64(32)
    return rows


def serve_udp(fragments: int, ready: Path) -> None:
    """Aggregate in this process until it is ended."""
    import select

    from inanet.phy.udp import UdpDevice

    memory = SlotMemory(fragments)
    row = describe(memory, fragments)
    tables = tables_of(memory)
    drops, counts = np.zeros(DROP_CODES, np.int64), np.zeros(len(Count), np.int64)
    events, used = np.zeros((1 << 16, 4), np.int64), np.zeros(1, np.int64)
    offsets = np.empty(fragments, np.int64)
    device = UdpDevice(Cable.ADDRESSES[1], 7000, rcvbuf=1 << 24, sndbuf=1 << 22)
    poller = select.poll()
    poller.register(device.fileno(), select.POLLIN)
    ready.write_text("ready")
    sent = 0
    while poller.poll():
        while (batch := device.receive()) is not None:
            used[0] = 0
            arena = batch.arena[: len(batch.arena) & ~3].view(np.int32)
            policy.ingest(
                tables, arena, batch.offsets, batch.lengths, batch.sources, events, used, counts, drops
            )
            logged = int(memory.shards[row, ShardColumn.UP_LOGGED])
            if logged > sent:
                found = slotwork.logged_rows(tables, row, sent, logged, True, offsets)
                device.send(Transmission(PARENT, memory.bytes, offsets[:found], ROW_BYTES))
                sent = logged
            if logged == fragments:
                reopen(memory, row)
                sent = 0


@numba.njit(cache=True, nogil=True)
def _forward(fds: Any, parent: int, polls: Any, fragments: int, sums: Any, inbox: Any) -> int:
    """One round over TCP: whatever has come from a child is added, and each sum leaves in a message of its own.

    ``sums`` is int32[fragments, values], ``inbox`` uint8[children, bytes]; the head of a row of it holds the part of a
    message that has come so far. Children may be ahead of one another as far as they like.
    """
    children, size = len(fds), sums.shape[1] * 4
    got = np.zeros(children, np.int64)
    held = np.zeros(children, np.int64)
    counts = np.zeros(fragments, np.int32)
    done = 0
    while done < fragments:
        for i in range(children):
            polls[i, 0] = fds[i]
            polls[i, 1] = _POLLIN if got[i] < fragments else 0
        if _poll(polls.ctypes, children, _PATIENCE) <= 0:
            return -1
        for i in range(children):
            if not (polls[i, 1] >> 16) & _POLLIN or got[i] == fragments:
                continue
            room = min(inbox.shape[1] - held[i], (fragments - got[i]) * size - held[i])
            n = _recv(fds[i], inbox[i, held[i] :].ctypes, room, _DONTWAIT)
            if n == 0:
                return -1
            if n < 0:
                continue
            held[i] += n
            whole = held[i] // size
            words = inbox[i, : whole * size].view(np.int32)
            for message in range(whole):
                fragment = got[i] + message
                target = sums[fragment]
                source = words[message * sums.shape[1] : (message + 1) * sums.shape[1]]
                if counts[fragment] == 0:
                    target[:] = source
                else:
                    for j in range(len(source)):
                        target[j] += source[j]
                counts[fragment] += 1
                if counts[fragment] == children:
                    if _send(parent, target.ctypes, size, _NOSIGNAL) != size:
                        return -1
                    done += 1
            got[i] += whole
            held[i] -= whole * size
            for j in range(held[i]):
                inbox[i, j] = inbox[i, whole * size + j]
    return 0


@numba.njit(cache=True, nogil=True)
def offer(fds: Any, parent: int, polls: Any, payloads: Any, received: Any) -> int:
    """The children's and the parent's side of one round over TCP, in messages of one fragment."""
    children, fragments, size = payloads.shape
    sent = np.zeros(children, np.int64)
    total = fragments * size
    got = 0
    while got < total:
        waiting = True
        for i in range(children):
            # some messages of every child in turn, as far as there is room
            for _ in range(64):
                if sent[i] == total:
                    break
                part = sent[i] % size
                n = _send(
                    fds[i], payloads[i, sent[i] // size, part:].ctypes, size - part, _DONTWAIT | _NOSIGNAL
                )
                if n <= 0:
                    break
                sent[i] += n
                waiting = False
        n = _recv(parent, received.ctypes, len(received), _DONTWAIT)
        if n == 0:
            return -1
        if n > 0:
            got += n
        elif waiting:
            polls[children, 0] = parent
            polls[children, 1] = _POLLIN
            for i in range(children):
                polls[i, 0] = fds[i]
                polls[i, 1] = _POLLOUT if sent[i] < total else 0
            _poll(polls.ctypes, children + 1, _PATIENCE)
    return 0


def serve_tcp(fragments: int, ready: Path) -> None:
    """TCP-Agg until a child closes its connection."""
    _forward(
        np.zeros(0, np.int32),
        0,
        np.zeros((0, 2), np.int32),
        0,
        np.zeros((0, 1), np.int32),
        np.zeros((0, 4), np.uint8),
    )
    with socket.create_server((Cable.ADDRESSES[1], 7000)) as server:
        ready.write_text("ready")
        connections = [server.accept()[0] for _ in range(CHILDREN + 1)]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    parent = connections.pop()
    fds = np.array([connection.fileno() for connection in connections], np.int32)
    polls = np.zeros((CHILDREN, 2), np.int32)
    sums = np.zeros((fragments, PAYLOAD_BYTES // 4), np.int32)
    inbox = np.zeros((CHILDREN, 1 << 18), np.uint8)
    while True:
        head = connections[0].recv(8, socket.MSG_WAITALL)
        if len(head) < 8 or _forward(
            fds, parent.fileno(), polls, int.from_bytes(head, "little"), sums, inbox
        ):
            return


if __name__ == "__main__":
    {"udp": serve_udp, "tcp": serve_tcp}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
