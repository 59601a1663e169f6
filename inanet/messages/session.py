"""The conversation between a training process and the worker agent of its host, over a Unix socket.

Frames are a 4-byte big-endian length and a msgpack map with the key ``t``; a ``memory`` frame travels with
one file descriptor (SCM_RIGHTS). Tensors never travel: both sides map the memfd, see
:mod:`inanet.messages.segments`.

=========== ========= ========================================================================================
``t``       direction other keys
=========== ========= ========================================================================================
``hello``   to agent  protocol, job, rank, world, local_world, system (or ""): the first frame
``welcome`` from      the job has all its ranks; if all are on this host also shared (bytes), ranks, and a file descriptor:
                      memory for small collectives (:mod:`inanet.client.exchange`), which the agent does not hear of
``waiting`` from      text, ranks, seq: who is waited for, in collective ``seq`` or, if that is 0, to join
``memory``  to agent  id, size (bytes), and the file descriptor of a memfd sealed against shrinking
``release`` to agent  id: the process does not use this memory any more
``reduce``  to agent  seq (1, 2, ..., with gaps for small collectives in shared memory), name, dtype, shape, op, mode, factor, propagate, memory (id),
                      offset (bytes); perhaps id, under which the agent remembers all but seq
``again``   to agent  seq, id: as the last ``reduce`` of this id; not after its memory was released
``result``  from      seq; if it failed also cause, message, round, ranks, details; if it took part in an epoch also epoch,
                      workers, awaited, staleness
``fail``    to agent  cause, message, round, ranks: the ranks have lost each other in shared memory, the job is over
``failed``  from      cause, message, round, ranks, details: the job is over for this process
``late``    to agent  seq, text, ranks: the process has waited too long for this collective, and for whom if it knows; the answer
                      is ``waiting``. seq 0: it has the result after all
``stats``   both      to agent: (none); from: figures
``bye``     to agent  (none): the process leaves in good order
=========== ========= ========================================================================================

Neither pydantic nor the data plane is imported here, because training processes import this.
"""

import reprlib
from typing import Any

import msgpack

#: version of this conversation
PROTOCOL = 4
#: longest frame either side accepts
FRAME_LIMIT = 64 << 10
#: collectives that one process may have on their way, and pieces of memory that it may share
MOST_AHEAD = 256
MOST_SEGMENTS = 4096
#: ids of collectives that are called again and again
MOST_IDS = 4096


class SessionError(ValueError):
    """The other side does not keep to the conversation."""


def pack(kind: str, **fields: Any) -> bytes:
    """One frame. Raises :class:`SessionError` if it is longer than :data:`FRAME_LIMIT`."""
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
        if (
            not self._buffer
            and len(data) >= 4
            and int.from_bytes(data[:4], "big") == len(data) - 4 <= FRAME_LIMIT
        ):
            # one whole frame, as nearly always
            return [_parse(data[4:])]
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


def field(
    message: dict[str, Any], name: str, kind: type[Any], *, low: int | None = None, high: int | None = None
) -> Any:
    """A field of exactly this type, a number within ``low`` to ``high``; else :class:`SessionError`."""
    value: Any = message.get(name)
    if type(value) is not kind:
        raise SessionError(f"{message['t']}.{name} is {reprlib.repr(value)}, not {kind.__name__}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise SessionError(f"{message['t']}.{name} = {value} is not between {low} and {high}")
    return value
