"""The pipeline: packets of a program go in, runs of packets that leave together come out.

Its stages are ``parse`` and ``filter`` (the ports find packets and refuse foreign ones), ``slot`` and ``aggregate`` (the
program's kernels), ``mark`` and ``forward`` (queues and ports). Python runs once per batch in each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from inanet.proto.common.program import Action, Verdicts
from inanet.switch import arrange
from inanet.switch.egress import EgressQueue
from inanet.switch.occupancy import Occupancy
from inanet.switch.port import SwitchPort
from inanet.switch.registers import Hardware, RegisterFile
from inanet.switch.registration import Registration, check_ports
from inanet.wire.batch import I64, U8, U64, PacketBatch
from inanet.wire.drops import DROP_CODES, Drop

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
    further one. Raises :class:`~inanet.switch.registers.RegistersExceeded` for programs that do not fit and
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
        self.registers = RegisterFile(self.hardware.registers)
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
        self._tally: I64 = np.zeros(arrange.TALLY, np.int64)
        self._verdicts = Verdicts(BATCH)
        self._ways: I64 = np.zeros((arrange.MOST_WAYS + 1, 4), np.int64)
        self._slots: I64 = np.zeros(arrange.WAYS, np.int64)
        self._way_of: I64 = np.zeros(BATCH, np.int64)
        self._runs: I64 = np.zeros((BATCH, arrange.RUN_COLUMNS), np.int64)
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
        before = int(tally[arrange.ABSORBED] + tally[arrange.EMITTED])
        runs = []
        first = 0
        while first < count:
            end = int(
                arrange.find_ways(
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
            made = arrange.build_runs(
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
        self.stages["aggregate"] += int(tally[arrange.ABSORBED] + tally[arrange.EMITTED]) - before
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
        """When :meth:`on_timer` wants to be called next."""
        times = [registration.program.timer() for registration in self.registrations]
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
            "absorbed": int(tally[arrange.ABSORBED]),
            "emitted": int(tally[arrange.EMITTED]),
            "passed": int(tally[arrange.PASSED_ON]),
            "recirculations": int(tally[arrange.RECIRCULATED]),
            "most_passes": int(tally[arrange.MOST_SEEN]),
            "over_the_limit": int(tally[arrange.OVER]),
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
