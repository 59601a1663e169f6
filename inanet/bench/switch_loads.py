"""What ``ina bench switch`` sends: rounds of contributions of four workers, for every program that can be had."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.slots.systems import SYSTEMS
from inanet.switch.programs import Job, Registration, build

WORKERS = 4
JOB = 1
#: fragments of a round and worker: what receive buffers hold
FRAGMENTS = 1920


@dataclass(frozen=True, slots=True)
class Load:
    """One row's program: the system, its values in a packet, and how many segments a super-frame has."""

    system: str
    values: int
    segments: int

    @property
    def name(self) -> str:
        return f"{self.system}-{self.values}"


LOADS = (
    Load("switchml", 256, 60),
    Load("switchml", 64, 128),
    Load("atp", 62, 128),
    Load("esa", 62, 128),
    Load("a2tp", 62, 128),
)


def registration(
    load: Load, workers: Sequence[int], ps: int, port: int = 0, raw: bool = False
) -> Registration:
    """The program of a load with the bench's job; ``port`` is its UDP port. Raises ``ImportError`` while there is none."""
    own: dict[str, Any] = {"values": load.values} if load.system == "switchml" else {}
    slots = FRAGMENTS if load.system == "switchml" else None
    facts = SYSTEMS[load.system]
    return build(
        load.system,
        [Job(JOB, tuple(workers), 0 if load.system == "switchml" else ps, slots)],
        memory=20_000_000,
        age=60.0,
        ports=() if raw else (range(port, port + 1),) if port else (facts.ports,),
        raw=raw,
        **own,
    )


class Rounds:
    """Packets of successive rounds of ``fragments`` each; every value of worker *w* is ``w + 1``, so every sum is 10."""

    def __init__(self, load: Load, fragments: int = FRAGMENTS) -> None:
        self.load = load
        self.fragments = fragments
        self._module: ModuleType = importlib.import_module(f"inanet.wire.{load.system}")
        self.frame: np.dtype[Any] = (
            self._module.FRAMES[load.values] if load.system == "switchml" else self._module.FRAME
        )
        self._round = -1
        make = self._switchml if load.system == "switchml" else self._atp
        self._templates = [make(worker) for worker in range(WORKERS)]

    def _switchml(self, worker: int) -> NDArray[Any]:
        packets = np.zeros(self.fragments, self.frame)
        packets["kind"] = self._module.DATA << 4 | self._module.SIZES[self.load.values]
        packets["job"] = JOB
        packets["values"] = worker + 1
        return packets

    def _atp(self, worker: int) -> NDArray[Any]:
        packets = np.zeros(self.fragments, self.frame)
        packets["bitmap"], packets["fan_in"] = 1 << worker, WORKERS
        packets["agtr"] = np.arange(self.fragments)
        packets["agtr2"] = np.arange(self.fragments) + 20_000
        packets["values"] = worker + 1
        return packets

    def _number(self, packets: NDArray[Any]) -> None:
        numbers = self._round * self.fragments + np.arange(self.fragments)
        if self.load.system == "switchml":
            packets["packet_id"] = numbers
            packets["pool_index"] = np.arange(self.fragments) | (0x8000 if self._round & 1 else 0)
        else:
            packets["seq"] = numbers & 0xFFFF
            packets["app"] = (numbers >> 16 & 0xFF) << 8 | JOB

    def next(self) -> list[NDArray[Any]]:
        """The contributions of the next round, by worker, in the framing's structured dtype; the caller's to edit."""
        self._round += 1
        fresh = [template.copy() for template in self._templates]
        for packets in fresh:
            self._number(packets)
        return fresh

    def answers(self) -> NDArray[Any] | None:
        """What the PS answers to the round, which frees its slots; ``None`` where there is no PS."""
        if self.load.system == "switchml":
            return None
        packets = self._templates[0].copy()
        self._number(packets)
        packets["bitmap"], packets["flags"] = 1, 1
        packets["values"] = 10
        return packets
