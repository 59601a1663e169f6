"""The register file and the limits of the hardware that the switch stands for."""

from dataclasses import dataclass

#: what switches of the papers' time have for registers
DEFAULT_BYTES = 20_000_000


class RegistersExceeded(ValueError):
    """A program wants more registers than there are left; the message says who has the others."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a packet may do on its way through the pipeline.

    ``registers`` bytes there are. In a pass through the pipeline a packet accesses each register once at most, so that
    one with many values makes several; it comes back at most ``recirculations`` times. Raises ``ValueError`` for numbers
    that let no packet pass.
    """

    registers: int = DEFAULT_BYTES
    recirculations: int = 8

    def __post_init__(self) -> None:
        if self.registers < 0 or self.recirculations < 0:
            raise ValueError(f"a switch with {self} lets no packet pass")

    @property
    def most_passes(self) -> int:
        """Passes that a packet may make."""
        return 1 + self.recirculations


class RegisterFile:
    """Who holds how much of the registers."""

    def __init__(self, budget: int = DEFAULT_BYTES) -> None:
        self.budget = budget
        self.held: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Bytes nobody holds."""
        return self.budget - sum(self.held.values())

    def claim(self, name: str, size: int, share: int | None = None) -> None:
        """Give ``size`` bytes to the program ``name``; ``share`` is the most it may have.

        Raises :class:`RegistersExceeded` and changes nothing if there are not so many.
        """
        free = self.free
        if share is not None and size > share:
            raise RegistersExceeded(
                f"program {name} takes {size} B of registers and its share is {share} B: give it a larger share or "
                "fewer slots"
            )
        if size > free:
            others = ", ".join(f"{other} {held} B" for other, held in self.held.items())
            raise RegistersExceeded(
                f"program {name} takes {size} B of registers and {free} of {self.budget} B are free"
                + (f" ({others})" if others else "")
                + ": give it fewer slots, or the switch a larger register file"
            )
        self.held[name] = size
