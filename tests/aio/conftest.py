"""Certificates for tests of control connections."""

from pathlib import Path

import pytest

from inanet.trust import authority


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority and some certificates, and another authority beside it."""
    directory = tmp_path_factory.mktemp("keys")
    authority.initialise(directory, 1)
    authority.issue(directory, "manager", roles=(), coordinator=True, days=1)
    authority.issue(directory, "w0", roles=("worker", "status"), jobs=("train*",), days=1)
    authority.issue(directory, "ps", roles=("ps", "status"), days=1)
    authority.issue(directory, "a0", roles=("aggregator",), days=1)
    authority.issue(directory, "late", roles=("worker", "status"), days=0)
    authority.initialise(directory / "other", 1)
    authority.issue(directory / "other", "w0", roles=("worker", "status"), coordinator=True, days=1)
    return directory
