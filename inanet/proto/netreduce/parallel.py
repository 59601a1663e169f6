"""Hosts with several ranks: parallel NetReduce, and the patterns that it is compared with (section 3.4).

The ranks of a host share memory: whatever their pattern, one :class:`RankHost` has the arrays of all. A *part* of it is a
worker on a ring that carries one piece of the tensor for some of the ranks:

================== =========================== ======================== ==================================
pattern            rings                       a ring's members          within a host
================== =========================== ======================== ==================================
parallel-netreduce one for each rank of a host one worker of every host each ring's worker sums its piece over
                                                                         all ranks (reduce-scatter) and writes
                                                                         the result to all (all-gather)
parallel-ring      the same                    the same                  the same
tencent            one                         one worker of every host  it sums the whole tensor over all ranks
                                                                         (reduce), and writes it to all
                                                                         (broadcast)
flat-ring          one                         all ranks of all hosts    nothing
================== =========================== ======================== ==================================

Only the first needs a switch that sums. Pieces are cut between blocks, so that exponents, and with them the bits of integers
and of floats under block exponents, are the same in all of them (number format).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent, PeerSilent, Refused, RoundDone
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import TensorSpec
from inanet.proto.netreduce.ring import Member, Mode
from inanet.proto.netreduce.worker import Broken, NetReduceWorker
from inanet.wire.batch import PacketBatch, Transmission

Pattern: TypeAlias = Literal["parallel-netreduce", "parallel-ring", "tencent", "flat-ring"]

#: where an IPv4 packet of RoCE has the number of the receiver's queue pair: behind IPv4, UDP, and 5 bytes of its own header
_QUEUE_PAIR = 20 + 8 + 5


@dataclass(frozen=True, slots=True)
class Part:
    """Piece ``piece`` of ``pieces`` of every tensor, for the local ranks ``low`` to ``high`` (exclusive; ``None``: all from
    there on, however many there are), by one worker.
    """

    worker: NetReduceWorker
    low: int
    high: int | None
    piece: int = 0
    pieces: int = 1


def members(
    pattern: Pattern, job: int, ring: int, host: int, hosts: int, each: int, **options: Any
) -> list[Member]:
    """The places of host ``host`` of ``hosts``, with ``each`` ranks each: rings are numbered from ``ring`` on.

    ``options`` are further fields of :class:`~inanet.proto.netreduce.ring.Member`. Raises ``ValueError`` as it does.
    """
    mode: Mode = "switch" if pattern == "parallel-netreduce" else "ring"
    common = {"job": job, "mode": mode, "ranks": hosts * each, **options}
    if pattern == "flat-ring":
        return [
            Member(ring=ring, rank=host * each + rank, hosts=hosts * each, **common) for rank in range(each)
        ]
    rings = 1 if pattern == "tencent" else each
    return [Member(ring=ring + number, rank=host, hosts=hosts, **common) for number in range(rings)]


def parts(pattern: Pattern, workers: Sequence[NetReduceWorker], each: int) -> list[Part]:
    """The parts of a host whose workers have the places of :func:`members`, in that order."""
    if pattern == "flat-ring":
        return [Part(worker, rank, rank + 1) for rank, worker in enumerate(workers)]
    return [Part(worker, 0, each, number, len(workers)) for number, worker in enumerate(workers)]


def cut(spec: TensorSpec, ranks: int, pieces: int) -> list[tuple[int, int]]:
    """Where each of ``pieces`` begins and ends, elements: whole blocks, as even as that allows; small tensors have empty ones.

    Raises ``ValueError`` for a tensor that no format can do.
    """
    form = make_format(spec, ranks)
    edges = [
        min(spec.elements, form.fragments * piece // pieces * form.values) for piece in range(pieces + 1)
    ]
    edges[-1] = spec.elements
    return list(pairwise(edges))


@dataclass(slots=True)
class _Open:
    """A round that runs: parts that are not done, and what those have said that are."""

    left: int
    overflow: int = -1
    refusal: Refused | None = None


class RankHost:
    """The ranks of one host as one machine. Queue pair numbers of its workers towards others differ (``ValueError``)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.job = self.parts[0].worker.member.job
        self._by_number: dict[int, NetReduceWorker] = {}
        for part in self.parts:
            for end in (part.worker.inlet, part.worker.outlet):
                if end.number in self._by_number:
                    raise ValueError(
                        f"job {self.job}: two queue pairs of a host have the number {end.number}; give each worker numbers of"
                        " its own"
                    )
                self._by_number[end.number] = part.worker
        #: by tensor: what each part has of it
        self._pieces: dict[int, list[tuple[int, int]]] = {}
        self._rounds: dict[tuple[int, int], _Open] = {}
        #: whose packets came first last time
        self._first = 0

    @property
    def member(self) -> Member:
        """The host's place on the first ring."""
        return self.parts[0].worker.member

    # ---------------------------------------------------------------- rounds

    def add_tensor(self, tensor: int, spec: TensorSpec) -> None:
        """Make a tensor known under a number, the same on all hosts. Raises ``ValueError`` for what cannot be summed."""
        pieces = [cut(spec, part.worker.member.ranks, part.pieces)[part.piece] for part in self.parts]
        for part, low, high in self._busy(pieces):
            part.worker.add_tensor(tensor, replace(spec, shape=(high - low,)))
        self._pieces[tensor] = pieces

    def _busy(self, pieces: Sequence[tuple[int, int]]) -> list[tuple[Part, int, int]]:
        """Parts with something to do, and what; all of them for a tensor without elements."""
        every = [(part, low, high) for part, (low, high) in zip(self.parts, pieces, strict=True)]
        return [(part, low, high) for part, low, high in every if high > low] or every

    def drop_tensor(self, tensor: int) -> None:
        """Forget a tensor; rounds of it that have begun go on."""
        for part in self.parts:
            part.worker.drop_tensor(tensor)
        self._pieces.pop(tensor, None)

    def begin(self, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float) -> None:
        """Start this host's part in a round. ``arrays`` are 1-D, one per local rank, overwritten by the result.

        Raises ``ValueError`` for arrays that do not suit the tensor, ``KeyError`` for a tensor that is not known.
        """
        pieces = self._pieces[tensor]
        most = max(len(arrays) if part.high is None else part.high for part in self.parts)
        if len(arrays) != most:
            raise ValueError(f"job {self.job}, tensor {tensor}: {len(arrays)} arrays for {most} ranks")
        elements = max(high for _, high in pieces)
        if any(len(array) != elements for array in arrays):
            found = sorted({len(array) for array in arrays})
            raise ValueError(
                f"job {self.job}, tensor {tensor}: arrays of {found} elements for a tensor of {elements}"
            )
        busy = self._busy(pieces)
        for part, low, high in busy:
            part.worker.begin(
                tensor, round_, [array[low:high] for array in arrays[part.low : part.high]], now
            )
        self._rounds[tensor, round_] = _Open(len(busy))

    def give_up(self, round_: int) -> None:
        """A round has failed for everybody: its messages go on, its arrays are left alone from now on."""
        for part in self.parts:
            part.worker.give_up(round_)

    # ---------------------------------------------------------------- packets

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take whole IPv4 packets, each to the worker that has the queue pair; the first worker drops strangers."""
        if len(self.parts) == 1:
            self.parts[0].worker.receive(batch, now)
            return
        ats = np.minimum(batch.offsets[:, None] + _QUEUE_PAIR + np.arange(3), len(batch.arena) - 1)
        digits = batch.arena[ats].astype(np.int64)
        numbers = digits[:, 0] << 16 | digits[:, 1] << 8 | digits[:, 2]
        # what is too short to have a number is not looked at beyond its end
        numbers[batch.lengths < _QUEUE_PAIR + 3] = -1
        rows: dict[NetReduceWorker, list[int]] = {}
        for row, number in enumerate(numbers.tolist()):
            rows.setdefault(self._by_number.get(number, self.parts[0].worker), []).append(row)
        for worker, chosen in rows.items():
            worker.receive(
                PacketBatch(batch.arena, batch.offsets[chosen], batch.lengths[chosen], batch.sources[chosen]),
                now,
            )

    def transmit(self, now: float) -> list[Transmission]:
        """Packets of all workers, which take turns in whose come first."""
        self._first = (self._first + 1) % len(self.parts)
        order = (*self.parts[self._first :], *self.parts[: self._first])
        return [one for part in order for one in part.worker.transmit(now)]

    # ---------------------------------------------------------------- time

    def timer(self) -> float | None:
        times = [part.worker.timer() for part in self.parts]
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Tell the workers whose time has come."""
        for part in self.parts:
            at = part.worker.timer()
            if at is not None and at <= now:
                part.worker.on_timer(now)

    def events(self) -> list[NodeEvent | Broken]:
        """What happened since the last call. A round is done, or refused, when all of its parts are."""
        told: list[NodeEvent | Broken] = []
        for number, part in enumerate(self.parts):
            for event in part.worker.events():
                if isinstance(event, RoundDone | Refused):
                    told += self._ended(number, part, event)
                elif not isinstance(event, PeerSilent) or not any(
                    isinstance(one, PeerSilent) for one in told
                ):
                    told.append(event)
        return told

    def _ended(self, number: int, part: Part, event: RoundDone | Refused) -> list[NodeEvent | Broken]:
        run = self._rounds[event.tensor, event.round]
        # a tensor may have been dropped meanwhile, its rounds go on
        low = self._pieces.get(event.tensor, [(0, 0)] * len(self.parts))[number][0]
        run.left -= 1
        if isinstance(event, RoundDone):
            if event.overflow >= 0 and (run.overflow < 0 or event.overflow + low < run.overflow):
                run.overflow = event.overflow + low
        elif run.refusal is None or _comes_before(event, low, run.refusal):
            rank = event.local_rank + part.low if event.local_rank >= 0 else -1
            run.refusal = replace(event, local_rank=rank, index=event.index + low)
        if run.left:
            return []
        del self._rounds[event.tensor, event.round]
        return [run.refusal or RoundDone(event.job, event.round, event.tensor, run.overflow)]

    # ---------------------------------------------------------------- figures

    def stats(self) -> dict[str, int]:
        """Counters since the start, of all workers together."""
        return _sum([part.worker.stats() for part in self.parts])

    def drops_by_reason(self) -> dict[str, int]:
        return _sum([part.worker.drops_by_reason() for part in self.parts])


def _comes_before(event: Refused, low: int, other: Refused) -> bool:
    """Whether a refusal is the one to tell: a rank of this host before another's, then the lower element."""
    return (event.local_rank < 0, event.index + low) < (other.local_rank < 0, other.index)


def _sum(counters: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counters:
        for name, value in one.items():
            total[name] = total.get(name, 0) + value
    return total
