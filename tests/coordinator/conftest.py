"""A fabric that has just started."""

import pytest

from tests.coordinator.nodes import Nodes


@pytest.fixture
def nodes() -> Nodes:
    """All are in the job, and what they were sent for that is forgotten."""
    started = Nodes()
    started.start()
    started.clear()
    return started
