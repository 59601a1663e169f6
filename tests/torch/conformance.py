"""PyTorch's own distributed tests against the process group "ina": ``python -m tests.torch.conformance``.

They come with torch (torch.testing._internal.distributed.distributed_test) and need ``expecttest``. Ranks on the
hosts of a fabric on this machine, INA required; cases are chosen as for Gloo, and where they make its group they
get ours. Prints one line per case, and ends with 1 if one failed that is not among :data:`REFUSED`. Not part of the
test run, for it takes minutes. Some groups of cases want ``--world 8``.
"""

import argparse
import os
import sys
import unittest
from collections import Counter
from typing import Any

from inanet.launch.fabric import Fabric
from tests.torch.conftest import HOSTS

#: cases that cannot pass, and why
REFUSED: dict[str, str] = {
    "test_get_backend": "the backend is called ina",
    "test_monitored_barrier_gloo": "torch offers monitored_barrier for the backend gloo alone",
    "test_monitored_barrier_gloo_subgroup": "torch offers monitored_barrier for the backend gloo alone",
}


def _prepare(fabric: Fabric, world: int) -> Any:
    """The module with the cases, whose conditions it evaluates when it is imported."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(world), TEMP_DIR=str(fabric.directory / "torch"), INA_REQUIRE="1"
    )
    os.makedirs(os.environ["TEMP_DIR"])
    import torch
    from torch.testing._internal.distributed import distributed_test

    import inanet.torch

    assert inanet.torch.group.NAME in torch.distributed.Backend.backend_list
    torch.set_num_threads(1)
    return distributed_test


def _cases(module: Any, fabric: Fabric) -> type[unittest.TestCase]:
    import torch.multiprocessing

    class Cases(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            # torch is imported already, and nothing has used its threads
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *arguments: Any, **keywords: Any) -> None:
            os.environ["INA_SOCKET"] = str(fabric.worker_socket(HOSTS[rank % len(HOSTS)]))
            initialise = module.dist.init_process_group
            module.dist.init_process_group = lambda **options: initialise(**options | {"backend": "ina"})
            super()._run(rank, *arguments, **keywords)

    return Cases


class _Result(unittest.TestResult):
    """One line per case as it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def _say(self, test: unittest.TestCase, how: str, why: str = "") -> None:
        name = test._testMethodName
        if how == "FAILED" and name in REFUSED:
            how, why = "refused", REFUSED[name]
        self.count[how] += 1
        print(f"{how:<8} {name}{': ' + why if why else ''}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._say(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        text = str(error[1]).strip().splitlines()
        self._say(test, "FAILED", " | ".join(line for line in text if line)[-600:])

    addError = addFailure


def main() -> int:
    """Run the cases whose names contain one of the arguments, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    parser.add_argument("--world", type=int, default=len(HOSTS), help="ranks")
    options = parser.parse_args()
    wanted = options.names
    with Fabric(len(set(HOSTS)), 0) as fabric:
        cases = _cases(_prepare(fabric, options.world), fabric)
        names = unittest.TestLoader().getTestCaseNames(cases)
        chosen = [name for name in names if not wanted or any(part in name for part in wanted)]
        result = _Result()
        unittest.TestSuite(map(cases, chosen)).run(result)
    print(", ".join(f"{number} {how}" for how, number in result.count.items()))
    return 1 if result.count["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
