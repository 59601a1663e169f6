"""PyTorch's own distributed tests over the process group "ina", beside Gloo.

They come with torch (torch.testing._internal.distributed.distributed_test) and need ``expecttest``. The whole, once by Gloo
and once for every way of all-reduce, with the cases for CUDA devices as well:

    python -m tests.torch.conformance --beside-gloo

It takes an hour, prints the counts of every run, and ends with 1 if a case passes by Gloo that does not by ina and is not among
:data:`EXPECTED`. One run prints a line per case: ``--way fabric``, ``"one host"``, ``"no agent"`` or ``gloo``. Ranks are
forked with torch imported. Cases are chosen as for Gloo, and where they make its group they get ours. ``--cuda`` runs the
cases that torch runs on CUDA devices alone, with the devices' tensors on the CPU. Some groups of cases want ``--world 8``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inanet.launch.fabric import Fabric

#: cases that cannot pass, and why: they assert what Gloo is, not what it does
EXPECTED: dict[str, str] = {
    "test_get_backend": "the backend's name is ina, and the case wants gloo",
}
#: those of them that torch before 2.14 refuses by itself
BEFORE_2_14: dict[str, str] = {
    "test_monitored_barrier_gloo": "torch offers monitored_barrier for the backend gloo alone",
    "test_monitored_barrier_gloo_subgroup": "torch offers monitored_barrier for the backend gloo alone",
}
#: what a quick run consists of: every collective once, DDP, hooks, subgroups, profilers
QUICK = (
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_barrier_timeout_full_group",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_destroy_full_group",
    "test_get_future",
    "test_isend_torch_profiler",
    "test_reduce_sum",
    "test_scatter_complex",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
)
WAYS: dict[str, Sequence[int]] = {
    "fabric": (0, 0, 1, 1),
    "one host": (0, 0, 0, 0),
    "no agent": (),
    "gloo": (),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks are: the sockets of their agents (none: no agent), and the backend they get."""

    sockets: Sequence[Path]
    backend: str
    directory: Path

    def socket(self, rank: int) -> Path:
        """The agent of a rank."""
        return self.sockets[rank % len(self.sockets)] if self.sockets else self.directory / "nobody"


def _prepare(place: Place, world: int, cuda: bool) -> Any:
    """The module with the cases, whose conditions it evaluates when it is imported."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world), TEMP_DIR=str(place.directory / "torch"))
    if place.sockets:
        os.environ["INA_REQUIRE"] = "1"
    os.makedirs(os.environ["TEMP_DIR"])
    import torch

    if cuda:
        _imagine_devices(torch, world)
    from torch.testing._internal.distributed import distributed_test

    import inanet.torch

    assert inanet.torch.group.NAME in torch.distributed.Backend.backend_list
    torch.set_num_threads(1)
    return distributed_test


def _imagine_devices(torch: Any, count: int) -> None:
    """As many CUDA devices as there are ranks, whose tensors are on the CPU."""

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def moved(plain: Any) -> Any:
        def to(self: Any, *arguments: Any, **keywords: Any) -> Any:
            arguments = tuple(_on_cpu(torch, one) for one in arguments)
            keywords = {name: _on_cpu(torch, one) for name, one in keywords.items()}
            return plain(self, *arguments, **keywords)

        return to

    torch.Tensor.cuda = torch.nn.Module.cuda = stay
    torch.Tensor.to, torch.nn.Module.to = moved(torch.Tensor.to), moved(torch.nn.Module.to)
    for name in ("zeros", "ones", "rand", "randn", "empty", "full", "tensor", "arange"):
        plain = getattr(torch, name)

        def make(*arguments: Any, _plain: Any = plain, **keywords: Any) -> Any:
            return _plain(*arguments, **{key: _on_cpu(torch, one) for key, one in keywords.items()})

        setattr(torch, name, make)
    for name, value in {
        "device_count": lambda: count,
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "empty_cache": lambda: None,
    }.items():
        setattr(torch.cuda, name, value)


def _on_cpu(torch: Any, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return value


def _cases(module: Any, place: Place) -> type[unittest.TestCase]:
    import torch.multiprocessing

    class Cases(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            # torch is imported already, and nothing has used its threads
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *arguments: Any, **keywords: Any) -> None:
            os.environ["INA_SOCKET"] = str(place.socket(rank))
            initialise = module.dist.init_process_group
            module.dist.init_process_group = lambda **options: initialise(
                **options | {"backend": place.backend}
            )
            super()._run(rank, *arguments, **keywords)

    return Cases


class _Result(unittest.TestResult):
    """One line per case as it ends."""

    def __init__(self, expected: dict[str, str]) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}
        self._expected = expected

    def _say(self, test: unittest.TestCase, how: str, why: str = "") -> None:
        name = test._testMethodName
        if how == "FAILED" and name in self._expected:
            how, why = "expected", self._expected[name]
        self.outcomes[name] = how
        print(f"{how:<8} {name}{': ' + why if why else ''}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._say(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        text = str(error[1]).strip().splitlines()
        self._say(test, "FAILED", " | ".join(line for line in text if line)[-600:])

    addError = addFailure


def beside_gloo(names: Sequence[str], world: int) -> int:
    """Run everything in processes of their own; 1 if something passes by Gloo alone."""
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in ([], ["--cuda"]):
            outcomes: dict[str, dict[str, str]] = {}
            for way in ("gloo", *(one for one in WAYS if one != "gloo")):
                file = Path(folder) / f"{way}{len(kind)}.json"
                command = [sys.executable, "-m", __spec__.name, *names, *kind, "--way", way]
                command += ["--world", str(world), "--outcomes", str(file)]
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
                outcomes[way] = json.loads(file.read_text())
                count = ", ".join(f"{n} {how}" for how, n in Counter(outcomes[way].values()).items())
                print(f"{' '.join([way, *kind])}: {count}", flush=True)
                for name, how in outcomes[way].items():
                    if outcomes["gloo"][name] == "passed" and how not in ("passed", "expected"):
                        lost += 1
                        print(f"  {name} passes by Gloo and {how} here", flush=True)
    return 1 if lost else 0


def main() -> int:
    """Run the cases whose names contain one of the arguments, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    parser.add_argument("--way", choices=WAYS, default="fabric", help="how all-reduces go, or gloo alone")
    parser.add_argument("--world", type=int, default=4, help="ranks")
    parser.add_argument("--cuda", action="store_true", help="cases for CUDA devices, on the CPU")
    parser.add_argument("--quick", action="store_true", help="the short list of a test run")
    parser.add_argument("--outcomes", type=Path, help="file for the outcomes, as JSON")
    parser.add_argument("--beside-gloo", action="store_true", help="every way, and Gloo")
    options = parser.parse_args()
    if options.beside_gloo:
        return beside_gloo(options.names, options.world)
    hosts = WAYS[options.way]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sockets: list[Path] = []
        if hosts:
            fabric = stack.enter_context(Fabric(len(set(hosts)), 0))
            sockets = [fabric.worker_socket(host) for host in hosts]
        place = Place(sockets, "gloo" if options.way == "gloo" else "ina", directory)
        cases = _cases(_prepare(place, options.world, options.cuda), place)
        names = unittest.TestLoader().getTestCaseNames(cases)
        if options.quick:
            names = [name for name in names if name in QUICK]
        chosen = [name for name in names if not options.names or any(part in name for part in options.names)]
        import torch

        expected = EXPECTED if torch.__version__ >= (2, 14) else EXPECTED | BEFORE_2_14
        result = _Result({} if options.way == "gloo" else expected)
        unittest.TestSuite(map(cases, chosen)).run(result)
    if options.outcomes is not None:
        options.outcomes.write_text(json.dumps(result.outcomes))
    count = Counter(result.outcomes.values())
    print(", ".join(f"{number} {how}" for how, number in count.items()))
    return 1 if count["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
