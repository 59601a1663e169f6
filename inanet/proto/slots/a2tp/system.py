"""A2TP: ATP where a collision marks the occupant as well, and packets may bypass their slot.

A worker has two windows, a mark to read, a mark to set, and a probe for the base round trip.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.recovery import Timing
from inanet.proto.slots.a2tp.windows import PAPER, PROFILES, A2tpPace, Windows
from inanet.proto.slots.atp.heads import Heads
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.atp.policy import Variant
from inanet.proto.slots.atp.program import AtpProgram
from inanet.proto.slots.atp.ps import atp_server
from inanet.proto.slots.atp.worker import Marking, make_worker
from inanet.proto.slots.ps import SumServer
from inanet.proto.slots.source import Source
from inanet.proto.slots.window import TIMING, Index
from inanet.proto.slots.worker import Mask, Membership, Worker
from inanet.wire.a2tp import FRAME, HEADER_BYTES, Mark
from inanet.wire.atp import ECHO, FLAGS_AT, MARK_AT, PROBE, Flag
from inanet.wire.drops import Drop


class A2tpProgram(AtpProgram):
    """See :class:`~inanet.proto.slots.atp.program.AtpProgram`."""

    name = "a2tp"
    variant = Variant(head=HEADER_BYTES, marks=True, preempts=False)


def make_server() -> SumServer:
    """The machine."""
    return atp_server(FRAME)


_COL, _BYPASS = int(Mark.COL), int(Mark.BYPASS)
#: seconds between probes while rounds are under way
PROBE_INTERVAL = 0.02
#: probes whose echo may still come
PROBES = 16


class A2tpMarking(Marking):
    """The marks Col and bypass, and probes whose round trips ``pace`` learns from."""

    frame_type = FRAME

    def __init__(self, member: Membership, pace: A2tpPace) -> None:
        self._member, self._pace = member, pace
        self._probes: dict[int, float] = {}
        self._next_probe = 0
        self._probe_at = 0.0

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, slots: Mask, streams: Iterable[Source]
    ) -> None:
        frames[~slots, MARK_AT] = _BYPASS
        if self._pace.windows.profile.public:
            # to a switch with the public program the two are one
            frames[~slots, FLAGS_AT] |= np.uint8(Flag.RESEND)

    def collided(self, heads: Heads) -> Mask:
        marked: Mask = heads.mark & _COL != 0
        return marked

    def own(self, now: float, busy: bool) -> NDArray[np.uint8] | None:
        if not busy:
            self._pace.straggling.idle()
            return None
        if now < self._probe_at:
            return None
        self._probe_at = now + PROBE_INTERVAL
        number = self._next_probe = (self._next_probe + 1) & 0xFFFF
        self._probes[number] = now
        if len(self._probes) > PROBES:
            del self._probes[next(iter(self._probes))]
        frame = np.zeros(1, FRAME)
        frame["bitmap"], frame["flags"] = self._member.bit, PROBE
        frame["app"], frame["seq"] = self._member.job, number
        return frame.view(np.uint8).reshape(1, FRAME.itemsize)

    def other(self, heads: Heads, drops: NDArray[np.int64], now: float) -> None:
        echoes = (heads.flags & np.uint8(0xFF ^ Flag.ECN) == ECHO) & (heads.bitmap == self._member.bit)
        drops[Drop.BAD_TYPE] += int(np.count_nonzero(~echoes))
        for number in (heads.low[echoes] & 0xFFFF).tolist():
            sent = self._probes.pop(number, None)
            if sent is None:
                drops[Drop.DUPLICATE] += 1
            else:
                self._pace.straggling.echoed(now - sent)


def a2tp_worker(
    member: Membership,
    window: int,
    slots: int,
    *,
    initial: int = 50,
    profile: str = PAPER.name,
    weight: float = 1.0,
    straggling: bool = True,
    timing: Timing = TIMING,
) -> Worker:
    """A worker: ``window`` bounds LCW; ``profile`` (``"paper"`` or ``"artifact"``), ``weight`` and ``straggling`` are explained
    in :mod:`inanet.proto.slots.a2tp.windows`. Raises ``ValueError`` for a profile that does not exist.
    """
    if profile not in PROFILES:
        raise ValueError(f"A2TP has no profile {profile!r}, it has {', '.join(PROFILES)}")
    how = PROFILES[profile]
    windows = Windows(min(initial, window), window, how, weight=weight, straggling=straggling)
    pace = A2tpPace(windows, member.first)
    return make_worker(member, window, slots, A2tpMarking(member, pace), pace, timing)


def join(
    member: Membership,
    job: AtpJob,
    timing: Timing,
    *,
    profile: str = PAPER.name,
    weight: float = 1.0,
    straggling: bool = True,
) -> Worker:
    """The worker of a job as its plan describes it; the rest is for hosts to choose, alike for all of a job."""
    return a2tp_worker(
        member,
        job.window,
        job.slots,
        initial=job.window,
        profile=profile,
        weight=weight,
        straggling=straggling,
        timing=timing,
    )
