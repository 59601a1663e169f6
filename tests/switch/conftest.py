"""Fixtures of the switch's tests: everything they open is closed, whatever happens."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what is pushed on it."""
    with ExitStack() as opened:
        yield opened
