"""Sums over TCP in a server process: a plain parameter server, and TCP-Agg with messages of any size.

Every rank has one connection with TCP_NODELAY. It sends its tensor in messages; the server adds what comes and sends
sums back once it has them from all ranks, so that sending, adding and receiving overlap. A *plain* parameter server
waits for the whole tensor of every rank first: push, then pull. A *window* makes it a model of a switch that
aggregates synchronously: no rank is further ahead of the sum than the switch has memory for. The loops are compiled and call the C library's ``recv``
and ``send`` themselves: no Python runs per message, on either side. A message is what one ``send`` carries; one ``recv``
takes as many as there are, for nothing forces a good TCP server to ask for them one by one.

A server with a parent passes sums up to it, as one of its ranks, and what comes down to its own.
``server PORT_FILE WORLD MESSAGE HOST stream|plain [PARENT PORT]`` or ``rank RANK WORLD HOST PORT MESSAGE WINDOW`` (message and window
in bytes; window 0: as far ahead as a rank can get).
"""

import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.bench.peers.rank import serve

# found by name, unlike ctypes' functions, so that what calls them can be kept on disk
_recv = types.ExternalFunction("recv", types.intp(types.intc, types.voidptr, types.uintp, types.intc))
_send = types.ExternalFunction("send", types.intp(types.intc, types.voidptr, types.uintp, types.intc))
_poll = types.ExternalFunction("poll", types.intc(types.voidptr, types.uintp, types.intc))
_DONTWAIT, _NOSIGNAL = 0x40, 0x4000
_POLLIN, _POLLOUT = 1, 4
#: Milliseconds without a byte after which the other side counts as gone; the parent has a deadline of its own.
_PATIENCE = 120_000
#: Bytes the server asks for at once: fits the cache of a core beside the sums they are added to.
_INBOX = 1 << 18


@numba.njit(cache=True, nogil=True)
def _add(sums: Any, front: int, inbox: Any, first: int, count: int) -> int:
    """Add ``count`` received values from index ``first`` on; those from ``front`` on are the first of this round and
    replace what is there. Returns the new front."""
    values = inbox[: count * 4].view(np.float32)
    old = min(max(front - first, 0), count)
    target = sums[first : first + old]
    source = values[:old]
    for j in range(len(target)):
        target[j] += source[j]
    sums[first + old : first + count] = values[old:]
    return max(front, first + count)


@numba.njit(cache=True, nogil=True)
def _serve_round(
    fds: Any, up: int, polls: Any, total: int, message: int, plain: bool, sums: Any, inbox: Any
) -> int:
    """One all-reduce of ``total`` floats: receive, add, send back, for all ranks at once; 0, or -1 if a rank is gone.

    ``polls`` is int32[ranks + 1, 2]. ``inbox`` is uint8[ranks, bytes]; the head of a row holds the bytes of a value that has
    not come as a whole. With a parent's connection ``up`` (else -1), sums go there, and what comes from there, which takes
    their place, goes back.
    """
    world = len(fds)
    size = total * 4
    got = np.zeros(world, np.int64)
    sent = np.zeros(world, np.int64)
    added = np.zeros(world, np.int64)
    raw = sums.view(np.uint8)
    front = done = risen = come = 0
    links = world + (1 if up >= 0 else 0)
    while done < world:
        complete = added.min() * 4
        if plain and complete < size:
            complete = 0
        back = come if up >= 0 else complete
        for i in range(world):
            polls[i, 0] = fds[i]
            events = 0
            if got[i] < size:
                events |= _POLLIN
            if sent[i] < back:
                events |= _POLLOUT
            polls[i, 1] = events
        polls[world, 0] = up
        polls[world, 1] = (_POLLIN if come < size else 0) | (_POLLOUT if risen < complete else 0)
        if _poll(polls.ctypes, links, _PATIENCE) <= 0:
            return -1
        for i in range(world):
            ready = polls[i, 1] >> 16
            if ready & _POLLIN and got[i] < size:
                start = got[i] - added[i] * 4
                n = _recv(
                    fds[i], inbox[i, start:].ctypes, min(inbox.shape[1] - start, size - got[i]), _DONTWAIT
                )
                if n == 0:
                    return -1
                if n > 0:
                    got[i] += n
                    front = _add(sums, front, inbox[i], added[i], (start + n) >> 2)
                    count = (start + n) >> 2
                    added[i] += count
                    for j in range(start + n - count * 4):
                        inbox[i, j] = inbox[i, count * 4 + j]
            limit = added.min() * 4
            if plain and limit < size:
                limit = 0
            back = come if up >= 0 else limit
            if sent[i] < back:
                while sent[i] < back:
                    n = _send(
                        fds[i], raw[sent[i] :].ctypes, min(message, back - sent[i]), _DONTWAIT | _NOSIGNAL
                    )
                    if n <= 0:
                        break
                    sent[i] += n
                    if sent[i] == size:
                        done += 1
            elif ready & ~(_POLLIN | _POLLOUT):
                return -1
        if up >= 0:
            limit = added.min() * 4
            while risen < limit:
                n = _send(up, raw[risen:].ctypes, min(message, limit - risen), _DONTWAIT | _NOSIGNAL)
                if n <= 0:
                    break
                risen += n
            if (polls[world, 1] >> 16) & _POLLIN and come < size:
                n = _recv(up, raw[come:].ctypes, min(65536, size - come), _DONTWAIT)
                if n == 0:
                    return -1
                if n > 0:
                    come += n
    return 0


@numba.njit(cache=True, nogil=True)
def _exchange(fd: int, polls: Any, out: Any, result: Any, message: int, window: int) -> int:
    """A rank's side: send ``out`` in messages, at most ``window`` bytes ahead, while receiving ``result``; both uint8."""
    size = len(out)
    sent = got = 0
    while got < size:
        allowed = min(size, got + window) if window else size
        polls[0, 0] = fd
        polls[0, 1] = _POLLIN | (_POLLOUT if sent < allowed else 0)
        if _poll(polls.ctypes, 1, _PATIENCE) <= 0:
            return -1
        ready = polls[0, 1] >> 16
        if ready & _POLLOUT:
            while sent < allowed:
                n = _send(fd, out[sent:].ctypes, min(message, allowed - sent), _DONTWAIT | _NOSIGNAL)
                if n <= 0:
                    break
                sent += n
        if ready & _POLLIN:
            while got < size:
                n = _recv(fd, result[got:].ctypes, min(max(message, 65536), size - got), _DONTWAIT)
                if n <= 0:
                    if n == 0:
                        return -1
                    break
                got += n
        elif ready & ~(_POLLIN | _POLLOUT):
            return -1
    return 0


class TcpRank:
    """One rank."""

    def __init__(self, host: str, port: int, message: int, window: int = 0) -> None:
        # compiled before anybody waits for it
        nothing = np.zeros(0, np.uint8)
        _exchange(0, np.zeros((1, 2), np.int32), nothing, nothing, 1, 0)
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._message = message
        self._window = window
        self._polls = np.zeros((1, 2), np.int32)
        self._token = np.zeros(1, np.float32)

    def barrier(self) -> None:
        """A one-element sum."""
        self.all_reduce(self._token, 0.0)

    def all_reduce(self, array: NDArray[np.float32], late: float) -> NDArray[np.float32]:
        """In place: the sum streams back into what has been sent already. The server hears the size at once, so that
        it takes what the others send while this rank is late."""
        self._socket.sendall(array.size.to_bytes(8, "little"))
        time.sleep(late)
        raw = array.view(np.uint8)
        if _exchange(self._socket.fileno(), self._polls, raw, raw, self._message, self._window):
            raise ConnectionError("the TCP aggregator is gone")
        return array


def run_server(
    port_file: Path, world: int, message: int, host: str, plain: bool, parent: tuple[str, int] | None = None
) -> None:
    """Serve rounds until a rank closes its connection. The port it listens on is written to ``port_file``. A server with a
    ``parent`` is one of its ranks.
    """
    nobody, polls, nothing = np.zeros(0, np.int32), np.zeros((1, 2), np.int32), np.zeros((0, 0), np.uint8)
    # compiled before anybody waits for it
    _serve_round(nobody, -1, polls, 0, message, plain, np.zeros(0, np.float32), nothing)
    with ExitStack() as stack:
        above = stack.enter_context(socket.create_connection(parent)) if parent is not None else None
        with socket.create_server((host, 0)) as server:
            partial = port_file.with_suffix(".partial")
            partial.write_text(str(server.getsockname()[1]))
            partial.rename(port_file)
            ranks = [stack.enter_context(server.accept()[0]) for _ in range(world)]
        for connection in ranks if above is None else [above, *ranks]:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _serve(ranks, above, message, plain)


def _serve(ranks: list[socket.socket], above: socket.socket | None, message: int, plain: bool) -> None:
    """Rounds over connections to all ranks until one is closed."""
    fds = np.array([rank.fileno() for rank in ranks], np.int32)
    up = -1 if above is None else above.fileno()
    polls = np.zeros((len(ranks) + 1, 2), np.int32)
    inbox = np.zeros((len(ranks), _INBOX), np.uint8)
    sums = np.zeros(1, np.float32)
    while True:
        heads = [rank.recv(8, socket.MSG_WAITALL) for rank in ranks]
        if any(len(head) < 8 for head in heads):
            return
        total = int.from_bytes(heads[0], "little")
        if above is not None:
            above.sendall(heads[0])
        if len(sums) < total:
            sums = np.zeros(total, np.float32)
        if total and _serve_round(fds, up, polls, total, message, plain, sums[:total], inbox):
            return


if __name__ == "__main__":
    if sys.argv[1] == "server":
        port_file, address, style = Path(sys.argv[2]), sys.argv[5], sys.argv[6]
        parent = (sys.argv[7], int(sys.argv[8])) if len(sys.argv) > 7 else None
        run_server(port_file, int(sys.argv[3]), int(sys.argv[4]), address, style == "plain", parent)
    else:
        me, everybody = int(sys.argv[2]), int(sys.argv[3])
        serve(me, everybody, TcpRank(sys.argv[4], *map(int, sys.argv[5:8])))
