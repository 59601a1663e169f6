"""What a switch knows of a program that it runs: which packets are its, whose they are, where its results go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inanet.wire.batch import I64, U64

#: ethertype of the raw frames of A2TP's and ATP's public programs
RAW_ETHERTYPE = 0x0700


@dataclass(frozen=True, slots=True)
class Registration:
    """A program and its packets.

    ``name`` is unique in the switch. Its packets are UDP datagrams to one of ``ports`` and, if ``raw``, frames with
    ethertype :data:`RAW_ETHERTYPE`. They are taken from the endpoints in ``uplinks`` alone (bound endpoints); an uplink is
    where a packet of that endpoint goes when the program lets it pass and the frame itself has no destination (ports over UDP),
    or 0 if nowhere. ``groups`` are the endpoints of each group that the program may name. ``passes`` is how often its packets
    go through the pipeline, ``share`` the most register bytes it may take.
    """

    name: str
    #: a :class:`~inanet.proto.common.program.Program`; those of systems are told of jobs that come and go
    program: Any
    ports: tuple[range, ...] = ()
    raw: bool = False
    uplinks: dict[int, int] = field(default_factory=dict)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: neighbours by job, where jobs may share them
    users: dict[int, tuple[int, ...]] = field(default_factory=dict)
    passes: int = 1
    share: int | None = None


def check_ports(registrations: list[Registration]) -> None:
    """Refuse packets that two programs claim. Raises ``ValueError`` naming both."""
    taken: list[tuple[range, str]] = []
    raw: str | None = None
    for one in registrations:
        if any(other.name == one.name for other in registrations if other is not one):
            raise ValueError(f"two programs are named {one.name}; names are used once")
        if one.raw and raw is not None:
            raise ValueError(f"programs {raw} and {one.name} both claim raw frames; set raw = false for one")
        raw = one.name if one.raw else raw
        for ports in one.ports:
            for other, name in taken:
                # port 0 is whichever the kernel finds
                if max(ports.start, other.start, 1) < min(ports.stop, other.stop):
                    raise ValueError(
                        f"programs {name} and {one.name} both claim UDP ports "
                        f"{max(ports.start, other.start, 1)} to {min(ports.stop, other.stop) - 1}; give one others"
                    )
            taken.append((ports, one.name))


def matches(registrations: Sequence[Registration], where: Mapping[int, int]) -> tuple[I64, int, U64]:
    """What :func:`inanet.switch.parse.find_packets` knows of programs: UDP ports, whose raw frames are, members.

    ``where`` says at which port endpoints must come in.
    """
    ports = [
        (ports.start, ports.stop - 1, number)
        for number, one in enumerate(registrations)
        for ports in one.ports
    ]
    raw = next((number for number, one in enumerate(registrations) if one.raw), -1)
    members = [
        (number, endpoint, where.get(endpoint, -1) + 1)
        for number, one in enumerate(registrations)
        for endpoint in one.uplinks
    ]
    return (
        np.array(ports, np.int64).reshape(len(ports), 3),
        raw,
        np.array(members, np.uint64).reshape(len(members), 3),
    )
