"""A kernel program's place on an interface, in the mode that is better there.

``auto`` does not guess the mode. It begins in generic mode, which sees what a local sender or the interface has merged, and
counts how many packets come in a frame. Where they come one by one, the driver's own mode is tried. Where frames hold many
packets, it depends on the program: an aggregator's walks them at less cost than any driver's one call per packet, but a
worker's would only copy what its socket gets as cheaply.
"""

import socket
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import structlog

from inanet.phy.interfaces import examine
from inanet.service.addresses import is_loopback, owners
from inanet.service.exits import Exit, Failure
from inanet.wire.xagg import ROW_BYTES
from inanet.xdp.attach import Attachable, Attachment, Unavailable
from inanet.xdp.memory import Mode

_log: Any = structlog.get_logger("inanet.xdp")

#: packets after which ``auto`` looks again, and packets of a frame from which on frames are merged ones
ENOUGH = 8192
MERGED = 2.0
#: transports whose packets a program knows, with the bytes of their headers
_HEADROOM = {"udp": 28, "rawip": 20}

Wanted: TypeAlias = Literal["auto", "native", "generic"]
Made = TypeVar("Made")


class ModeUnavailable(Failure):
    """A mode that was asked for by name cannot be had."""

    code = Exit.PERMISSION


def modes(wanted: Wanted) -> tuple[Mode, ...]:
    """Modes that may be used, the first one first."""
    return ("generic", "native") if wanted == "auto" else (wanted,)


def interface_of(address: str, transport: str) -> str:
    """The interface whose packets to ``address`` a program sees. Raises :class:`~inanet.xdp.attach.Unavailable`."""
    if is_loopback(address):
        raise Unavailable("driver: packets on the loopback interface reach no XDP driver")
    if transport not in _HEADROOM:
        raise Unavailable(f"driver: transport {transport} is past the kernel already")
    found = owners().get(address)
    if found is None:
        raise Unavailable(f"driver: {address} is an address of no interface")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        size, least = examine(sock, found).mtu, ROW_BYTES + _HEADROOM[transport]
    if size < least:
        raise Unavailable(
            f"driver: {found} has an MTU of {size}, fragments need {least}: ip link set {found} mtu 1500"
        )
    return found


def asked_for(wanted: Wanted | Literal["off"], make: Callable[[Wanted], Made], instead: str) -> Made | None:
    """What ``[node] xdp`` asks for; ``None`` for user space, with the reason in the log where ``auto`` cannot: ``instead``
    says what is done then. Raises :class:`ModeUnavailable` where a mode that was named cannot be had.
    """
    if wanted == "off":
        return None
    try:
        return make(wanted)
    except Unavailable as reason:
        if wanted != "auto":
            error = ModeUnavailable(f"[node] xdp = {wanted!r}: {reason}")
            if not str(reason).startswith("permission"):
                # this host cannot have it as it is: that is the file's fault
                error.code = Exit.USAGE
            raise error from None
        _log.warning(instead, reason=str(reason))
        return None


class ModeChoice:
    """``program`` on ``interface`` until :meth:`close`; with ``auto``, ``merged`` is what is better for merged frames.

    Raises :class:`~inanet.xdp.attach.Unavailable`.
    """

    def __init__(
        self,
        program: Attachable,
        interface: str,
        wanted: Wanted,
        merged: Literal["generic", "off"] = "generic",
    ) -> None:
        self._program = program
        self._merged = merged
        self.auto = wanted == "auto"
        self._chosen = False
        self._attachment = self._attach(interface, modes(wanted))

    def _attach(self, interface: str, allowed: tuple[Mode, ...]) -> Attachment:
        """In the first mode that the interface takes."""
        for mode in allowed[:-1]:
            try:
                return Attachment(self._program, interface, mode)
            except Unavailable as reason:
                _log.info("XDP mode unavailable", mode=mode, reason=str(reason))
        return Attachment(self._program, interface, allowed[-1])

    @property
    def mode(self) -> Mode | Literal["off"]:
        """What the program runs in; ``off`` once it has turned out that nothing is gained by it."""
        return self._attachment.mode if self._attachment.attached else "off"

    def choose(self, packets: int, frames: int) -> bool:
        """With ``auto``, once so many packets have come in so many frames that they tell: which mode is better? Returns
        whether it is another one than before.
        """
        if not self.auto or self._chosen or packets < ENOUGH:
            return False
        self._chosen = True
        before, together = self.mode, packets / max(1, frames)
        if together < MERGED and before == "generic":
            self.change("native")
        elif together >= MERGED and self._merged == "off":
            self.close()
        _log.info("xdp mode chosen", mode=self.mode, packets_per_frame=round(together, 1))
        return self.mode != before

    def change(self, mode: Mode) -> bool:
        """Put the program on in another mode, or leave it as it was. Packets in between are user space's, and all are from
        then on if somebody else has taken the place meanwhile.
        """
        interface, before = self._attachment.interface, self._attachment.mode
        self._attachment.close()
        for wanted in (mode, before):
            try:
                self._attachment = Attachment(self._program, interface, wanted)
            except Unavailable as reason:
                _log.info("XDP mode unavailable", mode=wanted, reason=str(reason))
            else:
                return wanted == mode
        _log.warning("XDP program detached: another one has taken its place", interface=interface)
        return False

    def close(self) -> None:
        """Take the program off. Closing twice is fine."""
        self._attachment.close()
