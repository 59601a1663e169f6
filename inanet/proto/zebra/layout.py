"""Where hot parameters lie in a switch's registers, and which of them travel together (section III-D).

A register is an array of slots of which one packet can access one per pass through the pipeline. A packet with several
parameters of one register has to be recirculated, once for each beyond the first. Two things keep that rare: parameters
of similar heat lie in different registers (the i-th hottest in register i mod m), and a worker does not put two
parameters of one register into a packet (Algorithm 1) if it can help it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from inanet.kernels.jit import njit
from inanet.wire.batch import I64


@dataclass(frozen=True, slots=True)
class Layout:
    """``register`` and ``slot`` int64[k], by rank; ``registers`` there are, of ``depth`` slots each."""

    register: I64
    slot: I64
    registers: int
    depth: int

    @property
    def position(self) -> I64:
        """int64[k]: register * depth + slot, the place in a register file that is one array."""
        return self.register * self.depth + self.slot


def _checked(count: int, registers: int) -> int:
    if count < 0 or registers < 1:
        raise ValueError(
            f"{count} hot parameters in {registers} registers: there must be one register at least"
        )
    return max(1, -(-count // registers))


def by_heat(count: int, registers: int) -> Layout:
    """Rank i + m j in register i, slot j. Raises ``ValueError`` without registers."""
    depth = _checked(count, registers)
    ranks = np.arange(count, dtype=np.int64)
    return Layout(ranks % registers, ranks // registers, registers, depth)


def at_random(count: int, registers: int, rng: np.random.Generator) -> Layout:
    """The baseline of Fig. 10: any parameter in any register. Raises ``ValueError`` as :func:`by_heat`."""
    depth = _checked(count, registers)
    places = rng.permutation(registers * depth)[:count].astype(np.int64)
    return Layout(places // depth, places % depth, registers, depth)


@njit(
    "int64(int64[::1], int64, int64, int64[::1], int64[::1], int64[::1])", cache=True, nogil=True, _nrt=False
)
def _orchestrate(register: Any, capacity: int, estimate: int, last: Any, following: Any, packet: Any) -> Any:
    """Algorithm 1. ``packet[i]`` becomes the number of the packet of the i-th gradient; returns how many there are.

    The candidate for a gradient is the first packet that is not full and has none of its register. Packets before the last
    one that took this register are full or have the register, because every gradient takes the first candidate; so the
    search begins behind that one. ``following[p]`` leads to the first packet from ``p`` on that is not full.
    """
    left = 0
    room = np.int64(capacity)
    for i in range(register.size):
        p = last[register[i]] + 1
        root = p
        while following[root] != root:
            root = following[root]
        while following[p] != root:
            following[p], p = root, following[p]
        if root >= estimate:
            packet[i] = estimate + left // room
            left += 1
            continue
        packet[i] = root
        last[register[i]] = root
        following[estimate + 1 + root] += 1
        if following[estimate + 1 + root] == room:
            following[root] = root + 1
    return estimate + -(-left // room)


def orchestrate(register: I64, registers: int, capacity: int) -> tuple[I64, I64]:
    """Algorithm 1 for gradients whose registers are ``register`` int64[n], in the order of transmission.

    Gives the order int64[n] in which they are to be encoded and the count of every packet int64[packets]. What finds no
    packet goes into packets of its own at the end, whatever their registers.
    """
    count = len(register)
    estimate = -(-count // capacity)
    # first the way to the next packet with room, then how many gradients each packet has
    following = np.concatenate([np.arange(estimate + 1), np.zeros(estimate, np.int64)])
    packet: I64 = np.zeros(count, np.int64)
    last = np.full(registers, -1, np.int64)
    total = int(_orchestrate(np.ascontiguousarray(register), capacity, estimate, last, following, packet))
    return np.argsort(packet, kind="stable"), np.bincount(packet, minlength=total).astype(np.int64)


def in_sequence(count: int, capacity: int) -> I64:
    """Packets of ``capacity`` gradients as they come, the last one shorter: int64[packets]."""
    full, rest = divmod(count, capacity)
    return np.array([capacity] * full + [rest] * (rest > 0), np.int64)
