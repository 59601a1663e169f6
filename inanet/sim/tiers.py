"""Switches of a rack in a network of racks: they mark what queues at them, and sum in two levels.

A job's *root* is the switch above its PS (SwitchML: above most of its workers). Where two or more of its workers share another
rack, that rack's switch sums them first and is one member at the root. Workers that are alone in their rack send to the root.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.program import Action, Verdicts
from inanet.proto.slots.registers import JOBS
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.sim.burst import Burst
from inanet.sim.nodes import Switch
from inanet.wire.atp import FLAGS_AT, Flag
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop

_ECN = np.uint8(Flag.ECN)
#: Where a SwitchML packet has its job, in its header.
_JOB_AT = 1


class RackSwitch(Switch):
    """Sets the ECN flag of ATP's header (byte 5) in what leaves a port above its threshold, as the public program does at
    egress. ``flags`` tells that packets have such a header.
    """

    flags = True

    def emit(self, neighbour: str, burst: Burst, now: float) -> None:
        for at, piece in self.links[neighbour].carry(burst, now):
            if self.flags and piece.marked.any():
                data = piece.data.copy()
                data[piece.marked, FLAGS_AT] |= _ECN
                piece = Burst(piece.source, piece.destination, data, piece.marked)
            self._launch(neighbour, at, piece)


class PlainSwitch(RackSwitch):
    """A switch that marks nothing in headers: SwitchML's have no flag."""

    flags = False


class TieredSwitchML(SwitchMLProgram):
    """SwitchML's program with a switch above it for some jobs.

    Complete sums of such a job go up, and so does a repeated one, which the switch above can answer if it is complete there;
    what comes down goes to all workers of the rack.
    """

    def __init__(self, *, values: int, budget: int, age: float) -> None:
        super().__init__(values=values, budget=budget, age=age)
        self._above: NDArray[np.int64] = np.full(JOBS, -1, np.int64)

    def put_below(self, job: int, parent: int) -> None:
        """Send a job's sums on to the switch at this address."""
        self._above[job] = parent

    def _run(self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float) -> None:
        super()._run(batch, congested, verdicts, now)
        count = len(batch)
        jobs = batch.arena[batch.offsets + _JOB_AT].astype(np.int64)
        above = self._above[jobs]
        action, target = verdicts.action[:count], verdicts.target[:count]
        down = batch.sources.astype(np.int64) == above
        up = (above >= 0) & ~down & ((action == Action.GROUP) | (action == Action.REPLY))
        action[up] = Action.UNICAST
        target[up] = above[up]
        action[down] = Action.GROUP
        target[down] = self.tenants.bindings.group[jobs[down]]
        verdicts.reason[:count][down] = Drop.OK
