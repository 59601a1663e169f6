"""Claims of a paper, and whether they hold here."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: ``==``, ``<=``, ``>=`` as they stand, with ``tolerance`` as a share of the paper's number; ``~``: within it
Relation = Literal["==", "<=", ">=", "~"]


@dataclass(frozen=True, slots=True)
class Claim:
    """``ours`` must stand in ``relation`` to ``paper``, which may be missed by ``tolerance`` (relative).

    ``reason`` says why a claim does not hold, or what its number hides; empty if there is nothing to say.
    """

    name: str
    paper: float
    ours: float
    relation: Relation
    tolerance: float = 0.0
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether it does. A number that is not finite holds nowhere."""
        if not math.isfinite(self.ours):
            return False
        slack = abs(self.paper) * self.tolerance
        if self.relation == "<=":
            return self.ours <= self.paper + slack
        if self.relation == ">=":
            return self.ours >= self.paper - slack
        return abs(self.ours - self.paper) <= slack

    def as_dict(self) -> dict[str, Any]:
        """All fields and ``holds``. JSON knows no infinity: numbers that are not finite become ``None``."""
        fields = asdict(self) | {"holds": self.holds}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }


def reduction(ours: float, theirs: float) -> float:
    """Per cent by which ``ours`` is below ``theirs``; negative: above. 0 / 0 is no reduction."""
    return 100.0 * (1.0 - ours / theirs) if theirs else 0.0


def ratio(ours: float, theirs: float) -> float:
    """``ours / theirs``, infinite for a positive number over nothing."""
    if theirs:
        return ours / theirs
    return math.inf if ours else 1.0


def shorter(
    system: str, paper: float, gains: tuple[float, float], slack: float, why: tuple[str, str]
) -> list[Claim]:
    """Whether iterations are shorter than another system's, at the best and at the worst point of a sweep.

    ``gains`` are those two, and ``paper`` the best one of the paper's, in per cent; ``slack`` is by how much an iteration
    may be longer at the worst, in per cent. ``why`` is said where one of them does not hold.
    """
    best, worst = gains
    at_best = f"iteration time below {system}'s, at best, per cent"
    at_worst = f"iteration time over {system}'s, at worst, ratio"
    return [
        Claim(at_best, paper, best, ">=", 0.25, "" if best >= 0.75 * paper else why[0]),
        Claim(at_worst, 1.0, 1 - worst / 100, "<=", slack / 100, "" if worst >= -slack else why[1]),
    ]
