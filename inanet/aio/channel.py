"""Control connections: one TCP or Unix stream per node, carrying :mod:`inanet.messages.codec` frames.

Nothing here waits without a deadline, and every deadline says what was waited for and with whom: a job that
stops must be able to say why. Addresses are ``"host:port"`` or ``"unix:/path"``. Works on uvloop and on
asyncio's own loop.
"""

import asyncio
import errno
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from inanet.messages.codec import ControlError, Decoder, encode
from inanet.messages.control import Message
from inanet.service.exits import Failure
from inanet.trust.certificates import HANDSHAKE_SECONDS, Certified, KeyFileError, Keys, certified

#: A peer that lets this many bytes pile up does not read; the connection is given up.
WRITE_LIMIT = 8 << 20
#: Seconds between attempts to connect: the first pause and the longest.
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
#: The reason of one who ends a TLS handshake without a word: one who does not know what that is, for example.
HUNG_UP = "the other end hung up"
#: How the reason begins if the name of a host has no address.
UNRESOLVED = "its name does not resolve"
#: The longest that is waited at once: a process that was stopped meanwhile loses no more than that of a deadline.
STEP_SECONDS = 1.0
_READ_BYTES = 1 << 16
#: what breaks a connection though both processes live
_PATH_ERRORS = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
)
#: struct tcp_info (linux/tcp.h): its first bytes, TCP_ESTABLISHED, and fields among the 32-bit words behind the first eight bytes
_TCP_INFO_BYTES = 104
_ESTABLISHED = 1
_UNACKED, _LAST_ACK = 4, 12
#: X509_V_ERR_INVALID_PURPOSE: a certificate that is good, but for something else.
_UNFIT = 26
#: DEPTH_ZERO_SELF_SIGNED_CERT, SELF_SIGNED_CERT_IN_CHAIN, UNABLE_TO_GET_ISSUER_CERT_LOCALLY: one of somebody else's.
_FOREIGN = frozenset({18, 19, 20})


class DeadlineError(TimeoutError):
    """Something did not happen in time: ``what`` names it and with whom, ``seconds`` is how long it was
    waited for, ``reason`` why it failed the last time, if that is known.
    """

    def __init__(self, what: str, seconds: float, reason: str = "") -> None:
        super().__init__(f"{what}: nothing within {seconds:g} s{f' ({reason})' if reason else ''}")
        self.what = what
        self.seconds = seconds
        self.reason = reason


class ChannelClosed(ConnectionError):
    """The connection is gone; the text says with whom and, if known, why. ``path``: it was the path that failed, the other
    end may be well; else its process has closed it, or has ended.
    """

    def __init__(self, text: str, path: bool = False) -> None:
        super().__init__(text)
        self.path = path


class AddressError(Failure):
    """An address that is neither ``host:port`` nor ``unix:/path``, or that cannot be listened on."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed control address: ``path`` for Unix sockets, else ``host`` and ``port``."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """``"10.0.0.1:7000"``, ``"[::1]:7000"`` or ``"unix:/run/ina.sock"``. Raises :class:`AddressError`
    naming the text.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path or len(os.fsencode(path)) > 107:
            raise AddressError(f"{text!r}: a Unix socket path has 1 to 107 bytes")
        return Address(path=path)
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:
        raise AddressError(f"{text!r} is neither host:port (port 0 to 65535) nor unix:/path")
    return Address(host=host.removeprefix("[").removesuffix("]"), port=int(port))


class Channel:
    """One control connection. Iterate over it for messages; it ends when the peer closes.

    ``silence``: seconds after which a peer that says nothing counts as gone (:class:`DeadlineError`), None
    for a connection on which silence is normal. Not safe for use from several threads.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        silence: float | None = None,
    ) -> None:
        self.peer = peer
        self.silence = silence
        #: what the peer's certificate says; None without TLS
        self.certificate: Certified | None = None
        if writer.get_extra_info("ssl_object") is not None:
            self.certificate = certified(writer.get_extra_info("peercert"))
        #: whose list of revoked certificates ends this connection when the peer's is on it
        self.keys: Keys | None = None
        #: whether this end has called, over TCP and without TLS
        self.plain = False
        #: anything at all
        self._heard = False
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder()
        self._ready: deque[Message] = deque()
        raw = writer.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, message: Message) -> None:
        """Queue a message without waiting. Raises :class:`ChannelClosed` if the connection is gone, or is
        given up because the peer has left :data:`WRITE_LIMIT` bytes unread.
        """
        self.post_frame(encode(message))

    def post_frame(self, frame: bytes) -> None:
        """The same for a message that is encoded already."""
        if self._writer.is_closing():
            raise ChannelClosed(f"connection to {self.peer} is closed")
        self._writer.write(frame)
        queued = self._writer.transport.get_write_buffer_size()
        if queued > WRITE_LIMIT:
            self.abort()
            raise ChannelClosed(f"{self.peer} has left {queued} B of control messages unread")

    async def send(self, message: Message, seconds: float = 10.0) -> None:
        """Queue a message and wait until the peer's backlog is small again.

        Raises :class:`ChannelClosed`, or :class:`DeadlineError` after ``seconds``.
        """
        self.post(message)
        try:
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except TimeoutError:
            raise DeadlineError(f"sending {message.kind} to {self.peer}", seconds) from None
        except OSError as error:
            raise ChannelClosed(f"connection to {self.peer} broke: {error}") from None

    async def receive(self, seconds: float | None = None, what: str = "a message") -> Message:
        """The next message. Raises :class:`ChannelClosed` when the peer has closed, :class:`DeadlineError`
        ("waiting for ``what`` from ...") after ``seconds``, and
        :class:`~inanet.messages.codec.ControlError` if the bytes are no messages (the connection is closed
        then).
        """
        left = seconds
        while not self._ready:
            step = None if left is None else min(left, STEP_SECONDS)
            began = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(step):
                    while not self._ready:
                        await self._read()
            except TimeoutError:
                assert seconds is not None
                assert left is not None
                assert step is not None
                # this process may not have run for longer than it asked to wait: what came meanwhile is still to be read
                left -= min(step, asyncio.get_running_loop().time() - began)
                if left <= 0:
                    raise DeadlineError(f"waiting for {what} from {self.peer}", seconds) from None
        return self._ready.popleft()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
        except OSError as error:
            text = f"connection to {self.peer} broke: {reason_of(error)}"
            raise ChannelClosed(text, path=error.errno in _PATH_ERRORS) from None
        if not data:
            cut = f" in the middle of a message ({self._decoder.pending} B)" if self._decoder.pending else ""
            if self.certificate is not None and not self._heard:
                # with TLS 1.3 a client's certificate is judged after the handshake has ended here
                cut = (
                    " without a word: perhaps it does not take this node's certificate; 'ina keys show' says whose it is "
                    "and until when it is good, 'ina keys issue' makes another"
                )
            elif self.plain and not self._heard:
                # all that one who wants TLS does about a connection without it
                cut = "; it may want TLS: set control.ca_file and key_file, or give --ca-file and --key-file"
            raise ChannelClosed(f"{self.peer} closed the connection{cut}")
        self._heard = True
        if self.keys is not None and (why := self.keys.withdrawn(self.certificate)):
            self.abort()
            raise ChannelClosed(f"connection to {self.peer} given up: {why}")
        try:
            self._ready.extend(self._decoder.feed(data))
        except ControlError as error:
            self.abort()
            raise ControlError(f"from {self.peer}: {error}") from None

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the peer closes. Raises :class:`DeadlineError` after ``silence`` seconds without
        one.
        """
        while True:
            try:
                message = await self.receive(self.silence)
            except ChannelClosed:
                return
            yield message

    def take(self) -> list[Message]:
        """Messages already here, without waiting."""
        messages = list(self._ready)
        self._ready.clear()
        return messages

    async def close(self, seconds: float = 2.0) -> None:
        """Send what is queued and close; what does not leave within ``seconds`` is dropped.
        Idempotent.
        """
        self._writer.close()
        try:
            async with asyncio.timeout(seconds):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def abort(self) -> None:
        """Close at once; queued messages are dropped. Idempotent."""
        self._writer.transport.abort()

    @property
    def local(self) -> str:
        """This end's IPv4 address; empty for a Unix socket."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def remote(self) -> str:
        """The other end's IPv4 address; empty if it has none."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and len(name) == 2 else ""

    @property
    def acknowledged(self) -> bool:
        """Whether the other end's kernel has acknowledged lately what was sent to it: its host is up and reached, and the process
        there has not ended, whether or not it says anything. Always so for a Unix socket.
        """
        raw = self._writer.get_extra_info("socket")
        if raw is None or self.closed:
            return False
        if raw.family not in (socket.AF_INET, socket.AF_INET6):
            return True
        try:
            info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return False
        words = struct.unpack_from("=8x14I", info)
        lately = words[_UNACKED] == 0 or words[_LAST_ACK] < 1000 * STEP_SECONDS
        return bool(info[0] == _ESTABLISHED and lately)

    @property
    def closed(self) -> bool:
        """Whether this side has closed or lost the connection."""
        return self._writer.is_closing()


async def connect(
    address: str,
    seconds: float,
    silence: float | None = None,
    keys: Keys | None = None,
    *,
    listens: bool = False,
) -> Channel:
    """Connect, trying again with growing pauses until it works; over TLS if there are ``keys``, except to a Unix socket. If it
    ``listens``, one who is not there is not waited for.

    Raises :class:`DeadlineError` naming the address and the last reason after ``seconds``,
    :class:`AddressError` at once if the address cannot be one, and :class:`~inanet.trust.certificates.KeyFileError` for keys
    that cannot be used. Whoever answers must have a coordinator's certificate.
    """
    target = parse_address(address)
    tls = keys.client() if keys is not None and not target.path else None
    pause = FIRST_PAUSE
    reason = ""
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    if target.path:
                        reader, writer = await asyncio.open_unix_connection(target.path)
                    else:
                        reader, writer = await _open(target, tls)
                except OSError as error:
                    reason = reason_of(error)
                    if listens and isinstance(error, ConnectionRefusedError | FileNotFoundError):
                        raise DeadlineError(f"connecting to {address}", seconds, reason) from None
                else:
                    channel = Channel(reader, writer, address, silence)
                    reason = _distrust(channel.certificate, keys)
                    if not reason:
                        channel.keys = keys
                        channel.plain = tls is None and not target.path
                        return channel
                    channel.abort()
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
                if tls is not None and keys is not None:
                    # the files may be others by now; while there are none, it is tried with what they were
                    with suppress(KeyFileError):
                        tls = keys.client()
    except TimeoutError:
        raise DeadlineError(f"connecting to {address}", seconds, reason) from None


def _distrust(certificate: Certified | None, keys: Keys | None) -> str:
    """Why whoever has answered is not taken for the coordinator; empty if it is."""
    if certificate is not None and not certificate.coordinator:
        return "its certificate is not that of a coordinator: 'ina keys issue --coordinator' makes one"
    return keys.withdrawn(certificate) if keys is not None else ""


async def _open(
    target: Address, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        if tls is None:
            return await asyncio.open_connection(target.host, target.port)
        return await asyncio.open_connection(
            target.host, target.port, ssl=tls, server_hostname="", ssl_handshake_timeout=HANDSHAKE_SECONDS
        )
    except UnicodeError as error:
        # no resolver is asked for a name with an empty part, or one that is too long
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None


def reason_of(error: OSError) -> str:
    """What the system says; asyncio puts the address in its place, which the caller names anyway."""
    if isinstance(error, ssl.SSLError):
        hint = ""
        if getattr(error, "verify_code", 0) == _UNFIT:
            hint = (
                "; whoever listens there needs a coordinator's certificate, of 'ina keys issue --coordinator'"
            )
        elif getattr(error, "verify_code", 0) in _FOREIGN:
            hint = "; the certificate of the other end is of another authority than this end's ca_file"
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}{hint}"
    if isinstance(error, socket.gaierror):
        return f"{UNRESOLVED}: {error.strerror or error}"
    if error.errno:
        return os.strerror(error.errno)
    return error.strerror or str(error) or HUNG_UP
