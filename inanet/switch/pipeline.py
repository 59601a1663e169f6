"""The pipeline: packets of a program go in, runs of packets that leave together come out.

Its stages are ``parse`` and ``filter`` (the ports find packets and refuse foreign ones), ``slot`` and ``aggregate`` (the
program's kernels), ``mark`` and ``forward`` (queues and ports). Python runs once per batch in each. The hardware's limits
bind every program: register bytes, and passes of a packet.

What leaves is put in order: packets that go the same way become runs, which leave as super-frames, in order of arrival. A
run ends where length or mark change, because the segments of a super-frame share both.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from inanet.kernels.jit import njit
from inanet.proto.common.program import Action, Verdicts
from inanet.switch.egress import EgressQueue
from inanet.switch.port import SwitchPort
from inanet.switch.programs import Registration, check_ports
from inanet.wire.batch import I64, U8, U64, PacketBatch
from inanet.wire.drops import DROP_CODES, Drop

#: what switches of the papers' time have for registers
DEFAULT_BYTES = 20_000_000


class RegistersExceeded(ValueError):
    """A program wants more registers than there are left; the message says who has the others."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a packet may do on its way through the pipeline.

    ``registers`` bytes there are. In a pass through the pipeline a packet accesses each register once at most, so that
    one with many values makes several; it comes back at most ``recirculations`` times. Raises ``ValueError`` for numbers
    that let no packet pass.
    """

    registers: int = DEFAULT_BYTES
    recirculations: int = 8

    def __post_init__(self) -> None:
        if self.registers < 0 or self.recirculations < 0:
            raise ValueError(f"a switch with {self} lets no packet pass")

    @property
    def most_passes(self) -> int:
        """Passes that a packet may make."""
        return 1 + self.recirculations


class RegisterBudget:
    """Who holds how much of the registers."""

    def __init__(self, budget: int = DEFAULT_BYTES) -> None:
        self.budget = budget
        self.held: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Bytes nobody holds."""
        return self.budget - sum(self.held.values())

    def claim(self, name: str, size: int, share: int | None = None) -> None:
        """Give ``size`` bytes to the program ``name``; ``share`` is the most it may have.

        Raises :class:`RegistersExceeded` and changes nothing if there are not so many.
        """
        free = self.free
        if share is not None and size > share:
            raise RegistersExceeded(
                f"program {name} takes {size} B of registers and its share is {share} B: give it a larger share or "
                "fewer slots"
            )
        if size > free:
            others = ", ".join(f"{other} {held} B" for other, held in self.held.items())
            raise RegistersExceeded(
                f"program {name} takes {size} B of registers and {free} of {self.budget} B are free"
                + (f" ({others})" if others else "")
                + ": give it fewer slots, or the switch a larger register file"
            )
        self.held[name] = size


PREFIX = "occupied_"


class Occupancy:
    """A ring of the last ``capacity`` samples, one every ``interval`` seconds."""

    def __init__(self, interval: float = 0.1, capacity: int = 1024) -> None:
        self._interval = interval
        self._samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=capacity)
        self._next = 0.0

    def timer(self) -> float:
        """When the next sample is due, in seconds; at once at first."""
        return self._next

    def sample(self, programs: Iterable[tuple[str, Mapping[str, int]]], now: float) -> None:
        """Take a sample from the counters (:meth:`inanet.proto.common.program.Program.stats`) of named programs."""
        held = {
            f"{program}/{name.removeprefix(PREFIX)}": value
            for program, stats in programs
            for name, value in stats.items()
            if name.startswith(PREFIX)
        }
        self._samples.append((now, held))
        self._next = now + self._interval

    def samples(self) -> list[dict[str, object]]:
        """The samples, oldest first: ``at`` seconds and ``slots`` by ``program/job``."""
        return [{"at": at, "slots": held} for at, held in self._samples]


#: ways that one call tells apart; a power of two, and how many of them may be taken
WAYS = 2048
MOST_WAYS = WAYS // 2
#: columns of ``runs``
RUN_ACTION, RUN_TARGET, RUN_ORIGIN, RUN_LENGTH, RUN_MARK, RUN_START, RUN_COUNT = range(7)
RUN_COLUMNS = 7
#: entries of ``tally``
ABSORBED, EMITTED, PASSED_ON, RECIRCULATED, MOST_SEEN, MARKS, OVER = range(7)
TALLY = 7

_PASS, _DROP, _UNICAST, _GROUP, _REPLY = (int(action) for action in Action)
_OK, _TOO_MANY_PASSES = int(Drop.OK), int(Drop.TOO_MANY_PASSES)


@njit(
    "int64(uint8[::1], int64[::1], uint8[::1], uint8[::1], uint64[::1], uint64[::1], int64, int64, int64,"
    " int64[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def find_ways(
    action: U8,
    target: I64,
    reason: U8,
    passes: U8,
    origins: U64,
    senders: U64,
    first: int,
    count: int,
    most_passes: int,
    ways: I64,
    slots: I64,
    way_of: I64,
    drops: I64,
    tally: I64,
) -> int:
    """Give every packet from ``first`` on a way or drop it; returns the index of the first packet not looked at,
    which is ``count`` unless the ways ran out.

    ``ways[k]`` becomes (action, target, origin or sender, packets); ``slots`` (WAYS, filled with -1 here) is the hash
    table over them; ``way_of[i]`` is -1 for what does not leave. ``ways[MOST_WAYS, 0]`` is set to how many there are.
    """
    for k in range(WAYS):
        slots[k] = -1
    used = np.int64(0)
    last = np.int64(-1)
    i = np.int64(first)
    while i < count:
        what = np.int64(action[i])
        made = np.int64(passes[i])
        if what == _DROP:
            way_of[i] = -1
            if reason[i] == _OK:
                tally[ABSORBED] += 1
                # its values are in a slot already: it cannot be undone, but it is told
                tally[OVER] += made > most_passes
            else:
                drops[reason[i]] += 1
        elif made > most_passes:
            way_of[i] = -1
            tally[OVER] += 1
            drops[_TOO_MANY_PASSES] += 1
        else:
            whither = target[i] if _UNICAST <= what <= _GROUP else np.int64(0)
            whence = np.int64(senders[i]) if what == _GROUP else np.int64(origins[i])
            if last >= 0 and ways[last, 0] == what and ways[last, 1] == whither and ways[last, 2] == whence:
                k = int(last)
            else:
                mix = np.uint64(whither) * np.uint64(0x9E3779B97F4A7C15)
                mix ^= mix >> np.uint64(29)
                mix = (mix ^ np.uint64(whence) ^ np.uint64(what)) * np.uint64(0xBF58476D1CE4E5B9)
                at = np.int64(mix >> np.uint64(32)) & (WAYS - 1)
                while True:
                    k = slots[at]
                    if k < 0 or (ways[k, 0] == what and ways[k, 1] == whither and ways[k, 2] == whence):
                        break
                    at = (at + 1) & (WAYS - 1)
                if k < 0:
                    if used == MOST_WAYS:
                        break
                    k = int(used)
                    used += 1
                    slots[at] = k
                    ways[k, 0], ways[k, 1], ways[k, 2], ways[k, 3] = what, whither, whence, 0
                last = np.int64(k)
            way_of[i] = k
            ways[k, 3] += 1
            if what == _PASS:
                tally[PASSED_ON] += 1
            else:
                tally[EMITTED] += 1
        tally[RECIRCULATED] += made - 1
        tally[MOST_SEEN] = max(tally[MOST_SEEN], made)
        i += 1
    ways[MOST_WAYS, 0] = used
    return int(i)


@njit(
    "int64(int64[::1], uint8[::1], int64[::1], int64, int64, int64[:, ::1], int64[::1], int64[::1], int64[:, ::1],"
    " int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def build_runs(
    length: I64,
    mark: U8,
    offsets: I64,
    first: int,
    end: int,
    ways: I64,
    way_of: I64,
    ordered: I64,
    runs: I64,
    tally: I64,
) -> int:
    """Lay the offsets of packets ``first`` to ``end - 1`` out by way in ``ordered``; returns how many runs they make.

    ``runs`` has a row for each: (action, target, origin, length, mark, start in ``ordered``, packets). Uses up the
    packet counts in ``ways``.
    """
    used = ways[MOST_WAYS, 0]
    at = np.int64(0)
    for k in range(used):
        packets = ways[k, 3]
        ways[k, 3] = at
        at += packets
    # the index first: lengths and marks are needed to find where runs end
    for i in range(first, end):
        k = way_of[i]
        if k >= 0:
            ordered[ways[k, 3]] = i
            ways[k, 3] += 1
    made = np.int64(0)
    start = np.int64(0)
    for k in range(used):
        for j in range(start, ways[k, 3]):
            i = ordered[j]
            ordered[j] = offsets[i]
            marked = np.int64(mark[i] != 0)
            tally[MARKS] += marked
            if j == start or runs[made - 1, RUN_LENGTH] != length[i] or runs[made - 1, RUN_MARK] != marked:
                runs[made, RUN_ACTION] = ways[k, 0]
                runs[made, RUN_TARGET] = ways[k, 1]
                runs[made, RUN_ORIGIN] = ways[k, 2]
                runs[made, RUN_LENGTH] = length[i]
                runs[made, RUN_MARK] = marked
                runs[made, RUN_START] = j
                runs[made, RUN_COUNT] = 0
                made += 1
            runs[made - 1, RUN_COUNT] += 1
        start = ways[k, 3]
    return int(made)


#: packets judged at once: a full read of a port
BATCH = 64 * 128
STAGES = ("parse", "filter", "slot", "aggregate", "mark", "forward")


@dataclass(slots=True)
class Run:
    """Packets that leave together: ``arena[offsets[i] :][:length]``, all by the same way and with the same mark.

    ``action`` and ``target`` as in a verdict. ``origin`` is what the port said of where the packets came from or, for
    GROUP, of who they are from now on.
    """

    action: int
    target: int
    origin: int
    length: int
    mark: bool
    arena: U8
    offsets: I64


class Pipeline:
    """Runs the programs of ``registrations`` within the limits of ``hardware``. Sans-IO.

    ``loopback`` is the queue of the recirculation port: packets that need more than one pass go through it for each
    further one. Raises :class:`~inanet.switch.pipeline.RegistersExceeded` for programs that do not fit and
    ``ValueError`` for ones that need more passes than there are or claim the same packets.
    """

    def __init__(
        self,
        registrations: Iterable[Registration],
        hardware: Hardware | None = None,
        *,
        loopback: EgressQueue | None = None,
        occupancy: Occupancy | None = None,
    ) -> None:
        self.hardware = hardware or Hardware()
        self.registrations = list(registrations)
        self.registers = RegisterBudget(self.hardware.registers)
        self.loopback = loopback
        self.occupancy = occupancy or Occupancy()
        check_ports(self.registrations)
        for registration in self.registrations:
            if registration.passes > self.hardware.most_passes:
                raise ValueError(
                    f"packets of program {registration.name} need {registration.passes} passes through the pipeline and "
                    f"the hardware recirculates them {self.hardware.recirculations} times at most: allow more "
                    "recirculations or values in a pass"
                )
            self._claim(registration)
        self.drops: I64 = np.zeros(DROP_CODES, np.int64)
        self.stages = dict.fromkeys(STAGES, 0)
        self._tally: I64 = np.zeros(TALLY, np.int64)
        self._verdicts = Verdicts(BATCH)
        self._ways: I64 = np.zeros((MOST_WAYS + 1, 4), np.int64)
        self._slots: I64 = np.zeros(WAYS, np.int64)
        self._way_of: I64 = np.zeros(BATCH, np.int64)
        self._runs: I64 = np.zeros((BATCH, RUN_COLUMNS), np.int64)
        self._calm: U8 = np.zeros(BATCH, np.uint8)

    def _claim(self, registration: Registration) -> None:
        size = registration.program.register_bytes()
        self.registers.claim(registration.name, size, registration.share)

    def process(
        self,
        registration: Registration,
        batch: PacketBatch,
        origins: U64,
        senders: U64,
        now: float,
        congested: U8 | None = None,
    ) -> list[Run]:
        """Send a batch through the program; packets begin at their INA headers and may be edited in place.

        ``origins`` and ``senders`` (one per packet) are handles of the port's own, which come back in the runs.
        ``congested`` as for :meth:`inanet.proto.common.program.Program.process`; left out where nothing is. Every packet of
        ``batch`` has passed the port's filter.
        """
        runs: list[Run] = []
        for first in range(0, len(batch), BATCH):
            part = slice(first, first + BATCH)
            piece = PacketBatch(batch.arena, batch.offsets[part], batch.lengths[part], batch.sources[part])
            heed = self._calm[: len(piece)] if congested is None else congested[part]
            self._judge(registration, piece, heed, now)
            runs += self._leave(piece, origins[part], senders[part])
        return runs

    def _judge(self, registration: Registration, batch: PacketBatch, congested: U8, now: float) -> None:
        """The program's stages, and the passes they take."""
        verdicts, count = self._verdicts, len(batch)
        verdicts.action[:count] = Action.PASS
        verdicts.target[:count] = 0
        verdicts.length[:count] = batch.lengths
        verdicts.reason[:count] = Drop.OK
        verdicts.mark[:count] = 0
        verdicts.passes[:count] = 1
        self.stages["slot"] += count
        admitted = count
        if self.loopback is not None and registration.passes > 1 and count:
            # a packet that finds no room before its last pass would leave a slot half added to: ask before its first
            size = (registration.passes - 1) * int(batch.lengths.max())
            admitted = sum(self.loopback.admit(count, size, now))
        if admitted:
            part = slice(0, admitted)
            judged = PacketBatch(batch.arena, batch.offsets[part], batch.lengths[part], batch.sources[part])
            registration.program.process(judged, congested[part], verdicts, now)
        verdicts.action[admitted:count] = Action.DROP
        verdicts.reason[admitted:count] = Drop.QUEUE_FULL

    def _leave(self, batch: PacketBatch, origins: U64, senders: U64) -> list[Run]:
        """Runs of the packets that have been judged."""
        verdicts, tally, count = self._verdicts, self._tally, len(batch)
        before = int(tally[ABSORBED] + tally[EMITTED])
        runs = []
        first = 0
        while first < count:
            end = int(
                find_ways(
                    verdicts.action,
                    verdicts.target,
                    verdicts.reason,
                    verdicts.passes,
                    origins,
                    senders,
                    first,
                    count,
                    self.hardware.most_passes,
                    self._ways,
                    self._slots,
                    self._way_of,
                    self.drops,
                    tally,
                )
            )
            ordered = np.empty(end - first, np.int64)
            made = build_runs(
                verdicts.length,
                verdicts.mark,
                batch.offsets,
                first,
                end,
                self._ways,
                self._way_of,
                ordered,
                self._runs,
                tally,
            )
            for action, target, origin, length, mark, start, packets in self._runs[:made].tolist():
                runs.append(
                    Run(
                        action,
                        target,
                        origin,
                        length,
                        bool(mark),
                        batch.arena,
                        ordered[start : start + packets],
                    )
                )
            first = end
        self.stages["aggregate"] += int(tally[ABSORBED] + tally[EMITTED]) - before
        return runs

    def spilled(self, registration: Registration, sender: int) -> list[Run]:
        """What the program sends beside its batches, as runs from ``sender``."""
        return [
            Run(
                Action.UNICAST,
                transmission.destination,
                sender,
                transmission.length,
                False,
                transmission.arena,
                transmission.offsets,
            )
            for transmission in registration.program.spilled()
        ]

    def timer(self) -> float:
        times: list[float | None] = [registration.program.timer() for registration in self.registrations]
        return min(self.occupancy.timer(), *(at for at in times if at is not None), float("inf"))

    def on_timer(self, now: float) -> None:
        """Let slots age and sample who holds them. Call :meth:`spilled` for every program afterwards."""
        for registration in self.registrations:
            at = registration.program.timer()
            if at is not None and at <= now:
                registration.program.on_timer(now)
        if self.occupancy.timer() <= now:
            self.occupancy.sample(((one.name, one.program.stats()) for one in self.registrations), now)

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped so far, by the label of :class:`~inanet.wire.drops.Drop`; what never happened is left out."""
        return {reason.label: int(self.drops[reason]) for reason in Drop if self.drops[reason]}

    def stats(self) -> dict[str, object]:
        """Packets by stage and what became of them, recirculations and limits, registers, programs, occupancy."""
        tally = self._tally
        return {
            "stages": dict(self.stages),
            "absorbed": int(tally[ABSORBED]),
            "emitted": int(tally[EMITTED]),
            "passed": int(tally[PASSED_ON]),
            "recirculations": int(tally[RECIRCULATED]),
            "most_passes": int(tally[MOST_SEEN]),
            "over_the_limit": int(tally[OVER]),
            "registers": {"budget": self.registers.budget, "held": dict(self.registers.held)},
            "programs": {one.name: one.program.stats() for one in self.registrations},
            "occupancy": self.occupancy.samples(),
        }

    def stats_with(
        self, ports: Iterable[SwitchPort], past: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, object]:
        """:meth:`stats`, the counters of ``ports`` by their names, and drops by reason.

        Drops count those at ports too, also at former ones, whose counters have been added up in ``past``.
        """
        drops = self.drops_by_reason()
        counted = {port.name: port.counters() for port in ports}
        for reason, counter in ((Drop.KERNEL_OVERFLOW, "kernel_overflow"), (Drop.INJECTED, "injected")):
            lost = sum(counters.get(counter, 0) for counters in (*counted.values(), past))
            if lost:
                drops[reason.label] = lost
        return {**self.stats(), "drops": drops, "ports": counted}
