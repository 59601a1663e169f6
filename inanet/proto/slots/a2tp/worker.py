"""A2TP at a worker: ATP's, with two windows, a mark to read, a mark to set, and a probe for the base round trip."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.recovery import Timing
from inanet.proto.slots.a2tp.windows import PAPER, PROFILES, A2tpPace, Windows
from inanet.proto.slots.atp.heads import Heads
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.atp.worker import AtpWorker
from inanet.proto.slots.window import Index
from inanet.proto.slots.worker import Mask, Membership
from inanet.wire.a2tp import FRAME, Mark
from inanet.wire.atp import ECHO, FLAGS_AT, MARK_AT, PROBE, Flag
from inanet.wire.batch import Transmission
from inanet.wire.drops import Drop

_COL, _BYPASS = int(Mark.COL), int(Mark.BYPASS)
#: seconds between probes while rounds are under way
PROBE_INTERVAL = 0.02
#: probes whose echo may still come
PROBES = 16


class A2tpWorker(AtpWorker):
    """``window`` bounds LCW; ``profile`` (``"paper"`` or ``"artifact"``), ``weight`` and ``straggling`` are explained in
    :mod:`inanet.proto.slots.a2tp.windows`. Raises ``ValueError`` for a profile that does not exist.
    """

    frame_type = FRAME

    def __init__(
        self,
        member: Membership,
        window: int,
        slots: int,
        *,
        initial: int = 50,
        profile: str = PAPER.name,
        weight: float = 1.0,
        straggling: bool = True,
        timing: Timing | None = None,
    ) -> None:
        if profile not in PROFILES:
            raise ValueError(f"A2TP has no profile {profile!r}, it has {', '.join(PROFILES)}")
        how = PROFILES[profile]
        self.windows = Windows(min(initial, window), window, how, weight=weight, straggling=straggling)
        self.a2tp = A2tpPace(self.windows, member.first)
        super().__init__(member, window, slots, pace=self.a2tp, timing=timing)
        self._probes: dict[int, float] = {}
        self._next_probe = 0
        self._probe_at = 0.0

    def _dress(self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask) -> None:
        super()._dress(frames, numbers, again, slots)
        frames[~slots, MARK_AT] = _BYPASS
        if self.windows.profile.public:
            # to a switch with the public program the two are one
            frames[~slots, FLAGS_AT] |= np.uint8(Flag.RESEND)

    def _col(self, heads: Heads) -> Mask:
        marked: Mask = heads.mark & _COL != 0
        return marked

    # ---------------------------------------------------------------- the base round trip

    def _own(self, now: float) -> list[Transmission]:
        if not self._streams:
            self.a2tp.straggling.idle()
            return []
        if now < self._probe_at:
            return []
        self._probe_at = now + PROBE_INTERVAL
        number = self._next_probe = (self._next_probe + 1) & 0xFFFF
        self._probes[number] = now
        if len(self._probes) > PROBES:
            del self._probes[next(iter(self._probes))]
        frame = np.zeros(1, self.frame_type)
        frame["bitmap"], frame["flags"] = self.member.bit, PROBE
        frame["app"], frame["seq"] = self.member.job, number
        return [
            Transmission(
                self.member.switch, frame.view(np.uint8), np.zeros(1, np.int64), self.layout.frame_bytes
            )
        ]

    def _other(self, heads: Heads, now: float) -> None:
        echoes = (heads.flags & np.uint8(0xFF ^ Flag.ECN) == ECHO) & (heads.bitmap == self.member.bit)
        self.drops[Drop.BAD_TYPE] += int(np.count_nonzero(~echoes))
        for number in (heads.low[echoes] & 0xFFFF).tolist():
            sent = self._probes.pop(number, None)
            if sent is None:
                self.drops[Drop.DUPLICATE] += 1
            else:
                self.a2tp.straggling.echoed(now - sent)

    def degrees(self) -> dict[str, float]:
        """alpha, beta, gamma and both windows now."""
        windows = self.windows
        return {
            "alpha": windows.alpha,
            "beta": windows.beta,
            "gamma": self.a2tp.straggling.gamma,
            "acw": windows.acw,
            "lcw": windows.lcw,
        }


def join(
    member: Membership,
    job: AtpJob,
    timing: Timing,
    *,
    profile: str = PAPER.name,
    weight: float = 1.0,
    straggling: bool = True,
) -> A2tpWorker:
    """The worker of a job as its plan describes it; the rest is for hosts to choose, alike for all of a job."""
    return A2tpWorker(
        member,
        job.window,
        job.slots,
        initial=job.window,
        profile=profile,
        weight=weight,
        straggling=straggling,
        timing=timing,
    )
