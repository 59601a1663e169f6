"""A worker's place on its ring, and the ends of its connections."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from inanet.proto.netreduce.plan import Sizes
from inanet.proto.roce import Attributes
from inanet.wire.batch import U8
from inanet.wire.netreduce import HEADER_BYTES, PLAIN_TAG, TAG, Header, NoHeader, Operation, decode
from inanet.wire.roce import timeout_seconds

#: ``switch``: results come from a switch, anything else is an error; ``ring``: ring all-reduce; ``auto``: a first message
#: tells
Mode = Literal["auto", "switch", "ring"]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's place. ``rank`` is its position on the ring of ``hosts``; ``ranks`` contribute over all of them (*n* of the
    number format).

    ``first`` is the MsgID that the ring begins with; MsgIDs go on for its life. ``mode`` is the same for all hosts. A peer
    may be ``skew`` seconds late: its neighbours' packets are held by the switch meanwhile, so acknowledgements must be
    waited for that long (patient acknowledgements), by the queue pair alone or, with ``patient``, by connecting it again where
    it had got to when it gives up, which network cards cannot. Raises ``ValueError`` for queue pairs that would give up
    earlier, and for ones with packets of another size.
    """

    job: int
    ring: int
    rank: int
    hosts: int
    ranks: int
    sizes: Sizes = field(default_factory=Sizes)
    epoch: int = 0
    first: int = 0
    mode: Mode = "auto"
    skew: float = 0.5
    patient: bool = False
    attributes: Attributes = field(default_factory=Attributes)

    def __post_init__(self) -> None:
        name = f"job {self.job}, ring {self.ring}"
        if not 0 <= self.rank < self.hosts or (self.hosts < 2 and self.mode != "switch"):
            raise ValueError(
                f"{name}: rank {self.rank} of {self.hosts}; without a switch a ring has two hosts or more"
            )
        if self.attributes.path_mtu != self.sizes.packet_bytes:
            raise ValueError(
                f"{name}: queue pairs cut packets of {self.attributes.path_mtu} B and the ring agreed on"
                f" {self.sizes.packet_bytes} B"
            )
        timeout = timeout_seconds(self.attributes.timeout)
        alone = not self.patient or self.mode != "switch"
        if alone and timeout is not None and timeout * (self.attributes.retry_cnt + 1) < self.skew:
            raise ValueError(
                f"{name}: a queue pair gives up after {timeout * (self.attributes.retry_cnt + 1):.3g} s without an"
                f" acknowledgement and peers may be {self.skew:.3g} s late: raise its timeout (code"
                f" {self.attributes.timeout}) or retry_cnt, or lower skew"
            )

    @property
    def predecessor(self) -> int:
        """The rank that this worker receives from."""
        return (self.rank - 1) % self.hosts

    def header(
        self, message: int, operation: Operation, *, plain: bool = False, length: int | None = None
    ) -> Header:
        """The INA header of one of this worker's messages; ``plain`` ones are for the neighbour alone."""
        return Header(
            ring=self.ring,
            message=message & 0xFFFFFFFF,
            length=self.sizes.length if length is None else length,
            rank=self.rank,
            operation=operation,
            epoch=self.epoch,
            tag=PLAIN_TAG if plain else TAG,
        )


class RingBroken(Exception):
    """The ring cannot go on; says what happened, to whom, and what to do."""


def check(
    member: Member, data: U8, message: int, operation: Operation, *, plain: bool, length: int
) -> Header:
    """The header of a message that has arrived in place of ``message``. Raises :class:`RingBroken` if it is another's."""
    name = f"job {member.job}, ring {member.ring}, rank {member.rank}"
    try:
        header = decode(data[:HEADER_BYTES].tobytes())
    except NoHeader as error:
        raise RingBroken(
            f"{name}: rank {member.predecessor} sent no message where one was due ({error}): all workers must agree on mode,"
            " epoch and sizes"
        ) from None
    expected = (
        PLAIN_TAG if plain else TAG,
        *(member.ring, member.epoch, member.predecessor, message & 0xFFFFFFFF, operation, length),
    )
    found = (
        *(
            header.tag,
            header.ring,
            header.epoch,
            header.rank,
            header.message,
            header.operation,
            header.length,
        ),
    )
    if found != expected:
        raise RingBroken(
            f"{name}: expected {'a plain' if plain else 'an aggregated'} message {message & 0xFFFFFFFF} of rank"
            f" {member.predecessor}, got {header}: all workers must begin the same rounds in the same order, and agree on"
            " mode, epoch and sizes"
        )
    return header


def zeros(count: int) -> U8:
    """A buffer."""
    return np.zeros(count, np.uint8)
