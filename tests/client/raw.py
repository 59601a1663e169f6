"""A process that says to its agent what it likes, and what a proper one would say."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from inanet.messages import segments
from inanet.messages.session import PROTOCOL, Unpacker, pack
from tests.client.agent import PATIENCE

HELLO = {"protocol": PROTOCOL, "job": "train", "rank": 0, "world": 1, "local_world": 1}
REDUCE: dict[str, Any] = {
    "seq": 1,
    "name": "w",
    "dtype": "f32",
    "shape": [4],
    "op": "sum",
    "mode": "carried",
    "factor": 0.0,
    "propagate": False,
    "memory": 1,
    "offset": 0,
}


class Raw:
    """A process that says what it likes."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self._unpacker = Unpacker()
        self._messages: list[dict[str, Any]] = []

    def say(self, kind: str, *fds: int, **fields: Any) -> None:
        socket.send_fds(self.socket, [pack(kind, **fields)], list(fds))

    def share(self, **fields: Any) -> None:
        """A page of memory with the number 1, unless it is said to be something else."""
        fd, _ = segments.create(4096)
        self.say("memory", fd, **{"id": 1, "size": 4096} | fields)
        os.close(fd)

    def hear(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds."""
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if message["t"] in kinds:
                    return message
            data = self.socket.recv(1 << 16)
            assert data, f"no {kinds}"
            self._messages += self._unpacker.feed(data)

    def end(self) -> str:
        """Why the server has ended the session."""
        message = self.hear("failed")
        with contextlib.suppress(ConnectionResetError):
            assert self.socket.recv(1) == b""
        return str(message["message"])
