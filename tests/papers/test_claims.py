"""Claims that several figures make."""

import pytest

from inanet.papers.claims import shorter


@pytest.mark.parametrize(
    ("gains", "holds", "reasons"),
    [
        ((13.0, -1.0), [True, True], ["", ""]),
        ((9.0, -1.0), [False, True], ["best", ""]),
        ((13.0, -3.0), [True, False], ["", "worst"]),
    ],
)
def test_iterations_are_shorter_at_best_and_not_longer_at_worst(
    gains: tuple[float, float], holds: list[bool], reasons: list[str]
) -> None:
    claims = shorter("atp", 13.0, gains, 2, ("best", "worst"))
    assert [claim.holds for claim in claims] == holds
    assert [claim.reason for claim in claims] == reasons
