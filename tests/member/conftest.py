"""Members of scripted coordinators."""

import pytest

from tests.member.script import SPEC, Script, layout_of


@pytest.fixture
def script() -> Script:
    """Not welcomed yet."""
    return Script()


@pytest.fixture
def joined() -> Script:
    """In the job, with one tensor."""
    made = Script()
    assert made.join(layout_of(SPEC)) == []
    return made
