"""The conversation between a training process and the worker agent of its host, over a Unix socket.

Frames are a 4-byte big-endian length and a msgpack map with the key ``t``; a ``memory`` frame travels with one file
descriptor (SCM_RIGHTS). Tensors never travel: both sides map the memfd. Neither pydantic nor the data plane is
imported here, because training processes import this.
"""

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Any

import msgpack

#: version of this conversation
PROTOCOL = 1
#: longest frame either side accepts
FRAME_LIMIT = 64 << 10
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK = 1, 2
SEALS = _F_SEAL_SHRINK | _F_SEAL_SEAL


class SessionError(ValueError):
    """The other side does not keep to the conversation."""


def pack(kind: str, **fields: Any) -> bytes:
    """One frame."""
    body: bytes = msgpack.packb({"t": kind, **fields})
    if len(body) > FRAME_LIMIT:
        raise SessionError(f"a {kind} message of {len(body)} B exceeds {FRAME_LIMIT} B; use a shorter name")
    return len(body).to_bytes(4, "big") + body


class Unpacker:
    """Bytes in, messages out; raises :class:`SessionError` and nothing else, whatever the bytes are."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Messages completed by ``data``."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > FRAME_LIMIT:
                raise SessionError(f"a frame of {length} B exceeds {FRAME_LIMIT} B")
            if len(self._buffer) < 4 + length:
                break
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            messages.append(_parse(body))
        return messages


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(
            body, strict_map_key=True, max_map_len=256, max_array_len=4096, max_str_len=16384, max_ext_len=0
        )
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise SessionError(f"not msgpack: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise SessionError("not a map with the key 't'")
    return message


def field(message: dict[str, Any], name: str, kind: type, *, low: int | None = None, high: int | None = None) -> Any:
    """A field of exactly this type and, for numbers, within ``low`` to ``high``; else :class:`SessionError`."""
    value = message.get(name)
    if type(value) is not kind:
        raise SessionError(f"{message['t']}.{name} is {value!r}, not {kind.__name__}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise SessionError(f"{message['t']}.{name} = {value} is not between {low} and {high}")
    return value


@dataclass(slots=True)
class Segment:
    """Shared memory: a sealed memfd and its mapping."""

    fd: int
    size: int
    memory: mmap.mmap

    @classmethod
    def create(cls, size: int) -> "Segment":
        """New memory that can never shrink, so that the agent cannot be hit by SIGBUS.

        Raises ``OSError`` when the system has none left.
        """
        fd = os.memfd_create("inanet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, SEALS)
            return cls(fd, size, mmap.mmap(fd, size))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, size: int) -> "Segment":
        """Map memory that somebody else made. Owns ``fd`` from now on, also on failure.

        Raises :class:`SessionError` if it could shrink or is smaller than said.
        """
        try:
            if fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK == 0:
                raise SessionError("shared memory is not sealed against shrinking")
            if size < 1 or os.fstat(fd).st_size < size:
                raise SessionError(f"shared memory has {os.fstat(fd).st_size} B, not the {size} B announced")
            return cls(fd, size, mmap.mmap(fd, size))
        except OSError as error:
            os.close(fd)
            raise SessionError(f"cannot map shared memory: {error}") from None
        except SessionError:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the descriptor; the mapping goes with its last array."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
