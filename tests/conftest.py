"""What all tests share: one hypothesis profile under which every run draws the same examples."""

import importlib
import os

from hypothesis import settings

# No example database, no deadline: a run depends on nothing but the code, and time is not what tests judge.
settings.register_profile("deterministic", derandomize=True, database=None, deadline=None)
settings.load_profile("deterministic")


#: modules whose kernels take long to compile, and that tests import late
COMPILED_LATE = (
    "inanet.proto.slots.atp.policy",
    "inanet.proto.slots.switchml.policy",
    "inanet.kernels.together",
    "inanet.switch.framed",
)


def pytest_configure() -> None:
    """Where two processes collect the same tests ('-n 2'), the second one begins to compile at the other end: numba's
    cache has for each what the other has compiled."""
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        for module in COMPILED_LATE:
            importlib.import_module(module)
