"""The way from the kernel program to a parent: whether what the program sends gets there, and how much it may send."""

from dataclasses import dataclass, field

from inanet.proto.tree.reliability import Link

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
    #: the parent's last CREDIT at the start, packets of the link's count then, and those of it that the program has sent since
    credited: int = field(init=False)
    counted: int = field(init=False)
    fresh: int = 0
    #: times that the parent has asked for something that the program had sent, by row of the shard
    missed: dict[int, int] = field(default_factory=dict)
    arrives: bool | None = None
    #: the parent lacked most of a group: should some come after all, as from a ring that is emptied by other packets, then
    #: that proves nothing
    doubted: bool = False
    #: packets put on the account of the link because the program may send them
    reserved: int = 0

    #: (shard row, round, group) of the groups in which the parent has said what it lacks
    judged: set[tuple[int, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.credited = self.link.taken
        # what is on its way now proves nothing
        self.counted = self.link.packets - self.link.in_flight

    @property
    def ours(self) -> int:
        """Packets that user space has sent."""
        return self.link.packets - self.counted - self.fresh

    def look(self, sent: int) -> None:
        """Has the parent taken clearly more than user space has sent? Then what the program sends arrives.

        A quarter of it is more than a network repeats, and less than what losses leave.
        """
        tried = sent - self.before
        if self.arrives is None and tried and not self.doubted:
            taken = (self.link.taken - self.credited) & _MASK32
            if taken < 1 << 31 and 4 * (taken - self.ours) > tried:
                self.arrives = True

    def heard(self, group: tuple[int, int, int], left: int, asked: int) -> None:
        """Of a group of which the program has sent ``left``, the parent lacks ``asked``. Only the first time says anything:
        later, user space may have repeated what had vanished.
        """
        if group in self.judged:
            return
        self.judged.add(group)
        if self.arrives is None and left >= SAMPLE:
            if 2 * asked < left:
                self.arrives = True
            else:
                self.doubted = True

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
        self.release()
        if fresh:
            self.link.sent(fresh, now)
            self.fresh += fresh

    def release(self) -> None:
        """Nothing is kept for the program any more."""
        self.link.in_flight = max(0, self.link.in_flight - self.reserved)
        self.reserved = 0

    def lacked(self, row: int) -> None:
        """The parent has asked for something in a shard that the program had sent."""
        self.missed[row] = self.missed.get(row, 0) + 1

    def judge(self, row: int, tried: int) -> None:
        """At the end of a shard's round, in which the program has sent ``tried`` packets: whatever was lost of it has been
        asked for again. Of other shards on the same way it may still be on its way, or not missed yet.
        """
        missed = self.missed.pop(row, 0)
        if self.arrives is None and tried:
            self.arrives = missed * 2 < tried
