"""The way from the kernel program to a parent: whether what the program sends gets there, and how much it may send."""

from dataclasses import dataclass, field

from inanet.proto.reliability import Link

#: packets that the program may send to a parent before it has been shown that they arrive
PROBATION = 256
#: and how many of a group are enough to judge by what the parent lacks of it
SAMPLE = 32
_MASK32 = 0xFFFFFFFF


@dataclass(slots=True)
class Road:
    """Whether what the program sends to a parent gets there: on some drivers it vanishes without a word."""

    link: Link
    #: packets that the program had sent before to whoever was the parent then
    before: int
    #: packets that user space has sent since, and the parent's last CREDIT, now and at the start
    ours: int = 0
    credited: int = field(init=False)
    #: times that the parent has asked for something that the program had sent
    missed: int = 0
    arrives: bool | None = None
    #: packets put on the account of the link because the program may send them
    reserved: int = 0

    def __post_init__(self) -> None:
        self.credited = self.link.taken

    def look(self, sent: int) -> None:
        """Has the parent taken clearly more than user space has sent? Then what the program sends arrives.

        A quarter of it is more than a network repeats, and less than what losses leave.
        """
        tried = sent - self.before
        if self.arrives is None and tried:
            taken = (self.link.taken - self.credited) & _MASK32
            if taken < 1 << 31 and 4 * (taken - self.ours) > tried:
                self.arrives = True

    def heard(self, left: int, asked: int) -> None:
        """Of a group of which the program has sent ``left``, the parent lacks ``asked``."""
        if self.arrives is None and left >= SAMPLE and 2 * asked < left:
            self.arrives = True

    def limit(self, sent: int, *, half: bool = False) -> int:
        """How many packets the program may have sent: few before it has shown that they arrive, and only ``half`` of
        what the link takes, which is kept for it then, as long as user space has something to send as well.
        """
        room = self.link.room
        if half:
            room = self.reserved = room // 2
            self.link.in_flight += room
        if self.arrives is None:
            return min(sent + room, max(sent, self.before + PROBATION))
        return sent + room if self.arrives else sent

    def settle(self, fresh: int, now: float) -> None:
        """Put on the link's account what the program has sent, instead of what it might have sent."""
        self.link.in_flight = max(0, self.link.in_flight - self.reserved)
        self.reserved = 0
        if fresh:
            self.link.sent(fresh, now)

    def judge(self, sent: int) -> None:
        """At the end of a round, when whatever was lost has been asked for again."""
        tried = sent - self.before
        if self.arrives is None and tried:
            self.arrives = self.missed * 2 < tried
