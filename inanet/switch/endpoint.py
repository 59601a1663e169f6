"""A program as a machine at one address: whatever is sent there goes through it, and what it decides is sent.

For fabrics that forward everything else by themselves, as UDP does: then a switch is one more endpoint.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from inanet.proto.common.program import Action, Program, Verdicts
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES

#: packets that a program sees at a time
BATCH = 4096


class SwitchEndpoint:
    """``groups`` are the endpoints of each group that the program may name. Packets that the program lets pass have nowhere
    to go and are counted in ``unroutable``.
    """

    def __init__(self, program: Program, groups: Mapping[int, Sequence[int]]) -> None:
        self.program = program
        self.groups = {number: tuple(members) for number, members in groups.items()}
        self.drops = np.zeros(DROP_CODES, np.int64)
        self.unroutable = 0
        self._verdicts = Verdicts(BATCH)
        self._out: list[Transmission] = []

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Run a batch through the program."""
        # the program edits packets where they lie, and they leave from there after the device has been read again
        low = int(batch.offsets.min()) if len(batch) else 0
        high = int((batch.offsets + batch.lengths).max(initial=low))
        arena, offsets = batch.arena[low:high].copy(), batch.offsets - low
        for first in range(0, len(batch), BATCH):
            part = slice(first, first + BATCH)
            mine = PacketBatch(arena, offsets[part], batch.lengths[part], batch.sources[part])
            self.program.process(mine, np.zeros(len(mine), np.uint8), self._verdicts, now)
            self._leave(mine)

    def _leave(self, batch: PacketBatch) -> None:
        verdicts, count = self._verdicts, len(batch)
        action = verdicts.action[:count]
        np.add.at(self.drops, verdicts.reason[:count][action == Action.DROP], 1)
        self.unroutable += int((action == Action.PASS).sum())
        leaving = np.flatnonzero((action != Action.DROP) & (action != Action.PASS))
        if not len(leaving):
            return
        target = np.where(action == Action.REPLY, batch.sources.astype(np.int64), verdicts.target[:count])
        # packets with one fate and length leave together, in the order in which they came
        fate = np.stack([action == Action.GROUP, target, verdicts.length[:count]])[:, leaving]
        cuts = np.flatnonzero((np.diff(fate, axis=1) != 0).any(axis=0)) + 1
        for run in np.split(leaving, cuts):
            head = run[0]
            to, length = int(target[head]), int(verdicts.length[head])
            for member in self.groups[to] if action[head] == Action.GROUP else (to,):
                self._out.append(Transmission(member, batch.arena, batch.offsets[run], length))

    def transmit(self, now: float) -> list[Transmission]:
        out, self._out = self._out, []
        return out + self.program.spilled()

    def timer(self) -> float | None:
        """The program's next deadline."""
        return self.program.timer()

    def on_timer(self, now: float) -> None:
        self.program.on_timer(now)

    def events(self) -> list[object]:
        """A switch tells nobody anything."""
        return []
