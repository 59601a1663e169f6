"""What all tests share: one hypothesis profile under which every run draws the same examples."""

import pytest
from hypothesis import settings

from inanet.service.kernels import prepare

# No example database, no deadline: a run depends on nothing but the code, and time is not what tests judge.
settings.register_profile("deterministic", derandomize=True, database=None, deadline=None)
settings.load_profile("deterministic")


def pytest_configure(config: pytest.Config) -> None:
    """Before several processes begin ('-n 2'), compile what the cache lacks once, in parallel: within tests it would count
    against their time, in every process anew."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        return
    prepare(["all"], lambda done, total: print(f"\rcompiling kernels: {done} of {total}", end="", flush=True))
