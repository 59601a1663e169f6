"""A fabric that has just started, and members of scripted coordinators."""

import pytest

from tests.control.nodes import Nodes
from tests.control.script import SPEC, Script, layout_of


@pytest.fixture
def nodes() -> Nodes:
    """All are in the job, and what they were sent for that is forgotten."""
    started = Nodes()
    started.start()
    started.clear()
    return started


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
