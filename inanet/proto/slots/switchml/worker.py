"""SwitchML at a worker: a pool of slots with two versions, one fragment in flight for each.

Fragment *s* uses slot ``s mod pool`` in version ``(s div pool) mod 2``. The count goes on over rounds and tensors, so that
the alternation survives them: beginning again with version 0 would make new fragments look like duplicates of old ones.

SwitchML's own number format (*packetwise*): every packet has an exponent, which travels one batch ahead of its data. Packet *j* carries the exponent of fragment *j* and the values of fragment *j* minus a batch; a batch is the pool, or the whole
tensor if that is smaller. So a batch without data precedes every tensor, and when a fragment's values are due the switch's
answer to its exponent is there: both used the same slot. The exponent *e* is the smallest with ``max |x| <= 2**e``, the
largest over the workers counts, and values are scaled by ``floor((2**31 - 1) / n) / 2**e``; the public program's
``(2**31 - 1) / (n 2**e)`` may wrap when every worker has the largest value.

Exponents of packets depend on where packets begin and end: results are within ``n / 2 * 2**e / floor((2**31 - 1) / n)`` of
the exact sum and the same on all workers, but not the bits of the other systems (number format). The second of the two
exponents says that a fragment holds a NaN or infinity (1), so that all workers refuse it together.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import gather
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.exponents import Agreement
from inanet.proto.slots.source import Arrays, Source, Tensor
from inanet.proto.slots.switchml.job import SwitchMLJob
from inanet.proto.slots.window import TIMING, Index, Window
from inanet.proto.slots.worker import Answers, Framing, Layout, Mask, Membership, Worker
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.switchml import DATA, FRAMES, MAX_SLOTS, SET_BIT, SIZES, VALUES_AT, frame_bytes

#: bytes of the exponents before the values
_EXPONENTS = 2
#: exponents are signed bytes; float32 needs -149 to 128, what is below is as good as zero in its packet
LOWEST, HIGHEST = -126, 127


class PacketwiseStream(Source):
    """A round of a float32 tensor; ``batch`` is the pool. Raises ``ValueError`` for other tensors."""

    def __init__(self, tensor: Tensor, round_: int, arrays: Arrays, width: int, batch: int) -> None:
        super().__init__(tensor, round_, arrays)
        spec = tensor.spec
        for array in arrays:
            if spec.dtype != "f32" or array.dtype != np.float32 or array.shape != (spec.elements,):
                raise ValueError(
                    f"tensor {spec.name!r}: exponents of packets are for f32 arrays of {spec.elements} elements"
                )
        self.width = width
        self._fragments = -(-spec.elements // width)
        self._lag = min(batch, self._fragments)
        padded = np.zeros((len(arrays), self._fragments * width), np.float32)
        for row, array in zip(padded, arrays, strict=True):
            row[: spec.elements] = array
        self._values = padded.reshape(len(arrays), self._fragments, width)
        self._result: NDArray[np.float64] = np.zeros((self._fragments, width))
        self._own = self._own_exponents()
        self._agreed: NDArray[np.int64] = np.zeros(self._fragments, np.int64)
        self._known: NDArray[np.bool_] = np.zeros(self._fragments, np.bool_)
        self._poisoned: NDArray[np.bool_] = np.zeros(self._fragments, np.bool_)
        self._limit = (2**31 - 1) // tensor.format.ranks
        self._taken = 0

    def _own_exponents(self) -> NDArray[np.int8]:
        """int8[fragments, 2]: exponent, and 1 for a fragment that holds a NaN or infinity."""
        out = np.zeros((self._fragments, 2), np.int8)
        if self._fragments:
            peak = np.abs(self._values).max(axis=(0, 2))
            bad = ~np.isfinite(peak)
            fraction, exponent = np.frexp(np.where(bad, 0.0, peak))
            # frexp: peak = fraction * 2 ** exponent with fraction in [0.5, 1); exactly a power of two fits one less
            exponent = exponent - (fraction == 0.5)
            # beyond 2 ** 127 there is no signed byte: refused as well
            bad |= exponent > HIGHEST
            out[:, 0] = np.where(bad | (peak == 0.0), LOWEST, np.clip(exponent, LOWEST, HIGHEST))
            out[:, 1] = bad
        return out

    def open(self) -> None:
        """The first batch may leave: it carries exponents alone."""
        self.opened = True
        self.ready = self._lag
        self.count = self._fragments + self._lag

    def advance(self, client: Agreement | None, now: float) -> None:
        """Values may leave whose exponents are agreed, in order."""
        known = self._fragments if self._known.all() else int(np.argmin(self._known))
        self.ready = self._lag + known

    def exponents(self, packets: Index) -> NDArray[np.int8]:
        """int8[n, 2]: what these packets carry as exponents."""
        out = np.zeros((len(packets), 2), np.int8)
        out[:, 0] = LOWEST
        mine = packets < self._fragments
        out[mine] = self._own[packets[mine]]
        return out

    def _scales(self, fragments: Index) -> NDArray[np.float64]:
        return np.ldexp(float(self._limit), -self._agreed[fragments])

    def place(self, fragments: Index, arena: NDArray[np.uint8], at: int, stride: int) -> None:
        """Write values; the first batch has none."""
        with_data = fragments >= self._lag
        source = fragments[with_data] - self._lag
        scaled = self._values[:, source].astype(np.float64) * self._scales(source)[:, None]
        # a fragment that is refused adds nothing
        sums = np.where(np.isfinite(scaled), np.rint(scaled), 0.0).clip(-self._limit, self._limit).sum(axis=0)
        places = at + np.flatnonzero(with_data) * stride
        arena[places[:, None] + np.arange(4 * self.width)] = (
            sums.astype(">i4").view(np.uint8).reshape(len(source), 4 * self.width)
        )

    def take(self, arena: NDArray[np.uint8], ats: Index, fragments: Index) -> None:
        """Take exponents of fragments to come and sums of those a batch ago."""
        self._taken += len(fragments)
        heads = arena[ats[:, None] - _EXPONENTS + np.arange(_EXPONENTS)].view(np.int8)
        news = fragments < self._fragments
        self._agreed[fragments[news]] = heads[news, 0]
        self._poisoned[fragments[news]] = heads[news, 1] != 0
        self._known[fragments[news]] = True
        with_data = fragments >= self._lag
        if with_data.any():
            source = fragments[with_data] - self._lag
            raw = arena[ats[with_data][:, None] + np.arange(4 * self.width)]
            sums = np.ascontiguousarray(raw).view(">i4").astype(np.float64)
            self._result[source] = sums / self._scales(source)[:, None]

    @property
    def finished(self) -> bool:
        return self.opened and self._taken == self.count

    def finish(self) -> None:
        spec = self.tensor.spec
        poisoned = np.flatnonzero(self._poisoned)
        if len(poisoned):
            if not spec.propagate:
                position, index = self._blame()
                self.refusal = (position, index if position >= 0 else int(poisoned[0]) * self.width)
            self._result[poisoned] = np.nan
        if spec.op == "mean":
            self._result /= self.tensor.format.ranks
        with np.errstate(over="ignore"):
            flat = self._result.reshape(-1)[: spec.elements].astype(np.float32)
        for array in self.arrays:
            array[:] = flat

    def _blame(self) -> tuple[int, int]:
        """Local rank and element of the first value that cannot be sent."""
        for position, array in enumerate(self.arrays):
            bad = np.flatnonzero(~(np.abs(array) <= 2.0**HIGHEST))
            if len(bad):
                return position, int(bad[0])
        return -1, -1


class SwitchMLFraming(Framing):
    """``pool`` is the job's share of slots at the switch; ``values`` (64 or 256) what a packet carries.

    Exponents of floats are those of the number format's blocks, agreed with the root, so that the bits are those of every other
    system; the packets' own two are 0. With ``packetwise`` they are the packets' own:
    float32 tensors only, no root.
    """

    def __init__(self, member: Membership, pool: int, values: int, packetwise: bool) -> None:
        if not 1 <= pool <= MAX_SLOTS or values not in SIZES:
            raise ValueError(f"a pool of 1 to {MAX_SLOTS} slots, {list(SIZES)} values; not {pool}, {values}")
        super().__init__(member, Layout(values, frame_bytes(values), VALUES_AT, 32))
        self.pool = pool
        self._packetwise = packetwise
        self.asks_root = not packetwise
        self._kind = DATA << 4 | SIZES[values]

    def source(self, tensor: Tensor, round_: int, arrays: Arrays) -> Source:
        if self._packetwise and tensor.format.uses_exponents:
            return PacketwiseStream(tensor, round_, arrays, self.layout.width, self.pool)
        return super().source(tensor, round_, arrays)

    def read(self, batch: PacketBatch, index: Index, drops: NDArray[np.int64], now: float) -> Answers:
        heads = np.empty((len(index), VALUES_AT), np.uint8)
        gather(batch.arena, batch.offsets[index], heads)
        kind = heads[:, 0] & 0xF7 == self._kind
        mine = heads[:, 1] == self.member.job & 0xFF
        drops[Drop.BAD_TYPE] += int(np.count_nonzero(~kind))
        drops[Drop.FOREIGN_JOB] += int(np.count_nonzero(kind & ~mine))
        good = kind & mine
        low = np.ascontiguousarray(heads[good, 2:6]).view("<u4")[:, 0].astype(np.int64)
        return Answers.unmarked(low, batch.offsets[index[good]] + VALUES_AT)

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask, streams: Iterable[Source]
    ) -> None:
        view = frames.view(FRAMES[self.layout.width])[:, 0]
        view["kind"] = self._kind
        view["job"] = self.member.job & 0xFF
        view["packet_id"] = numbers & 0xFFFFFFFF
        view["pool_index"] = numbers % self.pool + np.where(numbers // self.pool % 2 == 1, SET_BIT, 0)
        for stream in streams:
            if isinstance(stream, PacketwiseStream) and stream.first is not None:
                mine = (numbers >= stream.first) & (numbers < stream.first + (stream.count or 0))
                view["exponents"][mine] = stream.exponents(numbers[mine] - stream.first)


def switchml_worker(
    member: Membership, pool: int, *, values: int = 256, packetwise: bool = False, timing: Timing = TIMING
) -> Worker:
    """A worker, see :class:`SwitchMLFraming`."""
    framing = SwitchMLFraming(member, pool, values, packetwise)
    return Worker(framing, Window(pool, timing, member.first))


def join(member: Membership, job: SwitchMLJob, timing: Timing) -> Worker:
    """The worker of a job as its plan describes it."""
    return switchml_worker(member, job.slots, values=job.values or 256, timing=timing)
