"""Control messages as bytes: a 4-byte big-endian length, then one msgpack map.

Whatever bytes a peer sends, decoding yields messages or raises :class:`ControlError`, nothing else, and
never holds more than one frame's worth of memory for it.
"""

import msgpack
from pydantic import TypeAdapter, ValidationError

from inanet.messages.control import KINDS, Message
from inanet.messages.fields import Frozen

LENGTH_BYTES = 4
#: Largest frame body in bytes.
MAX_FRAME = 1 << 20
#: Limits inside a frame: longest text in bytes, longest array, largest map.
MAX_TEXT = 1 << 16
MAX_ARRAY = 1 << 16
MAX_MAP = 1 << 12

_ADAPTERS: dict[str, TypeAdapter[Message]] = {kind: TypeAdapter(message) for kind, message in KINDS.items()}


class ControlError(ValueError):
    """Bytes that are not a control message, or a message too large to send. The text names the kind and the
    field.
    """


def encode(message: Message | Frozen) -> bytes:
    """The frame of a message, length included. Raises :class:`ControlError` if it is over
    :data:`MAX_FRAME`.
    """
    body: bytes = msgpack.packb(message.model_dump(serialize_as_any=True), use_bin_type=True)
    if len(body) > MAX_FRAME:
        raise ControlError(f"{type(message).__name__} takes {len(body)} B, a frame holds {MAX_FRAME}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode(body: bytes) -> Message:
    """The message in a frame's body (length stripped). Raises :class:`ControlError` and nothing else."""
    if len(body) > MAX_FRAME:
        raise ControlError(f"frame of {len(body)} B, allowed are {MAX_FRAME}")
    try:
        fields = msgpack.unpackb(
            body,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=MAX_TEXT,
            max_bin_len=0,
            max_array_len=MAX_ARRAY,
            max_map_len=MAX_MAP,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise ControlError(f"not msgpack within the limits: {error or type(error).__name__}") from None
    if not isinstance(fields, dict):
        raise ControlError(f"a message is a map, not {type(fields).__name__}")
    kind = fields.get("kind")
    adapter = _ADAPTERS.get(kind) if isinstance(kind, str) else None
    if adapter is None:
        raise ControlError(f"unknown kind of message: {str(kind)[:64]!r}")
    try:
        message = adapter.validate_python(fields)
    except ValidationError as error:
        raise ControlError(f"{kind}: {_first(error)}") from None
    return message


def _first(error: ValidationError) -> str:
    """The first complaint and how many more there are; the input itself is not repeated, it may be large or
    secret.
    """
    details = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(str(part) for part in details[0]["loc"])[:200]
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{where}: {details[0]['msg'][:500]}{more}"


class Decoder:
    """Cuts a stream of bytes into messages, however the bytes are split.

    After a :class:`ControlError` the stream has no boundary to continue from: every later call raises it
    again.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._error: ControlError | None = None

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by ``data``, oldest first.

        Raises :class:`ControlError` if the stream is not one of messages; messages before the offending one
        in the same ``data`` are not returned, since the connection is over.
        """
        if self._error is not None:
            raise self._error
        self._buffer += data
        try:
            return self._cut()
        except ControlError as error:
            self._error = error
            self._buffer.clear()
            raise

    def _cut(self) -> list[Message]:
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[start : start + LENGTH_BYTES], "big")
            if length > MAX_FRAME:
                raise ControlError(f"frame of {length} B announced, allowed are {MAX_FRAME}")
            end = start + LENGTH_BYTES + length
            if len(self._buffer) < end:
                break
            messages.append(decode(bytes(self._buffer[start + LENGTH_BYTES : end])))
            start = end
        del self._buffer[:start]
        return messages

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame; not 0 at the end of a stream means it was cut off."""
        return len(self._buffer)
