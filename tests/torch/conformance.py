"""PyTorch's own distributed tests over the process group "ina", beside Gloo.

They come with torch (torch.testing._internal.distributed.distributed_test) and need ``expecttest``. The whole, every kind of
cases by Gloo and then by every way of all-reduce:

    python -m tests.torch.conformance --beside-gloo

It takes an hour and more, prints the counts of every run, and ends with 1 if a case passes by Gloo that does not by ina and
is not among :data:`EXPECTED`. One run prints a line per case: ``--way fabric``, ``"one host"``, ``"no agent"`` or ``gloo``,
and ``--kind``: ``cpu`` (as torch chooses cases for Gloo), ``cuda`` (those that torch runs on CUDA devices alone, with the
devices' tensors on the CPU, and the optimizer parity that torch has commented out), ``nccl`` (those that it runs over NCCL
alone, likewise), ``hook`` (those of DDP, by Gloo with the hook on every model). Ranks are forked with torch imported. Some groups of cases want ``--world 8``.
"""

import argparse
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inanet.launch.fabric import Fabric

#: cases that cannot pass, and why: they assert what Gloo is, not what it does
EXPECTED: dict[str, str] = {
    "test_get_backend": "the backend's name is ina, and the case wants gloo",
}
#: with the hook alone
WITH_HOOK: dict[str, str] = {
    "test_ddp_grad_div_uneven_inputs": "hooks divide by all ranks, torch's as well: join does not tell them by how many",
}
#: those of them that torch before 2.14 refuses by itself
BEFORE_2_14: dict[str, str] = {
    "test_monitored_barrier_gloo": "torch offers monitored_barrier for the backend gloo alone",
    "test_monitored_barrier_gloo_subgroup": "torch offers monitored_barrier for the backend gloo alone",
}
#: what a quick run consists of, by kind: every collective once, DDP, hooks, subgroups, profilers, joins, parity
QUICK: dict[str, tuple[str, ...]] = {
    "cpu": (
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
    ),
    "cuda": (
        "test_all_reduce_sum_cuda_async",
        "test_ddp_apply_optim_in_backward_ignored_params",
        "test_ddp_buffer_hook_allreduce",
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_grad_div_uneven_inputs",
        "test_ddp_hook_with_optimizer_parity_sgd_view",
        "test_ddp_uneven_input_join_disable",
        "test_post_localSGD_optimizer_parity",
        "test_undefined_grad_parity_unused_parameters",
    ),
    "nccl": ("test_all_to_all_single_unequal_split_cuda", "test_gather_cuda", "test_reduce_scatter_v_cuda"),
    "hook": ("test_ddp_ignore_params_arg", "test_static_graph_multi_forward"),
}
WAYS: dict[str, Sequence[int]] = {
    "fabric": (0, 0, 1, 1),
    "one host": (0, 0, 0, 0),
    "no agent": (),
    "gloo": (),
}


KINDS = ("cpu", "cuda", "nccl", "hook")


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks are: the sockets of their agents (none: no agent), and the backend they get."""

    sockets: Sequence[Path]
    backend: str
    directory: Path

    def socket(self, rank: int) -> Path:
        """The agent of a rank."""
        return self.sockets[rank % len(self.sockets)] if self.sockets else self.directory / "nobody"


def _prepare(place: Place, world: int, kind: str) -> Any:
    """The module with the cases, whose conditions it evaluates when it is imported."""
    # where torch chooses cases
    os.environ["BACKEND"] = "nccl" if kind == "nccl" else "gloo"
    os.environ.update(WORLD_SIZE=str(world), TEMP_DIR=str(place.directory / "torch"))
    if place.sockets:
        os.environ["INA_REQUIRE"] = "1"
    os.makedirs(os.environ["TEMP_DIR"])
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    import inanet.torch

    os.environ["BACKEND"] = distributed_test.BACKEND = "gloo"
    common_distributed.TEST_CUDA = kind != "cpu"
    if kind != "cpu":
        # after the imports: they compile functions that make tensors
        _imagine_devices(torch, world)
    if kind == "hook" and place.backend == "ina":
        _hook_models(torch, inanet.torch.hook)
    assert inanet.torch.group.NAME in torch.distributed.Backend.backend_list
    torch.set_num_threads(1)
    return distributed_test


def _hook_models(torch: Any, hook: Callable[[], Any]) -> None:
    """Every model that DDP wraps gets the hook; cases that register one of their own are skipped."""
    ddp = torch.nn.parallel.DistributedDataParallel
    wrap, register = ddp.__init__, ddp.register_comm_hook

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        wrap(self, *arguments, **keywords)
        register(self, *hook())

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise unittest.SkipTest("it registers a hook itself")

    ddp.__init__ = __init__
    ddp.register_comm_hook = ddp._register_builtin_comm_hook = ddp._register_fused_optim = refuse


def _imagine_devices(torch: Any, count: int) -> None:
    """As many CUDA devices as there are ranks, whose tensors are on the CPU."""
    # builds of torch for CUDA ask devices for what they are when these are imported
    importlib.import_module("torch.testing._internal.common_device_type")
    importlib.import_module("torch._dynamo")

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def on_cpu(value: Any) -> Any:
        cuda = isinstance(value, torch.device) and value.type == "cuda"
        if cuda or (isinstance(value, int) and not isinstance(value, bool)):
            return torch.device("cpu")
        return "cpu" if isinstance(value, str) and value.startswith("cuda") else value

    def moved(plain: Any) -> Any:
        def to(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if "device" in keywords:
                keywords["device"] = on_cpu(keywords["device"])
            return plain(self, *map(on_cpu, arguments), **keywords)

        return to

    def made(plain: Any) -> Any:
        def make(*arguments: Any, **keywords: Any) -> Any:
            if "device" in keywords:
                keywords["device"] = on_cpu(keywords["device"])
            return plain(*arguments, **keywords)

        return make

    class Stream:
        """What is done on it is done at once."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: self

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            return None

    torch.Tensor.cuda = torch.nn.Module.cuda = stay
    torch.Tensor.to, torch.nn.Module.to = moved(torch.Tensor.to), moved(torch.nn.Module.to)
    factories = ("zeros", "ones", "rand", "randn", "randint", "empty", "full", "tensor", "arange", "eye")
    for name in (*factories, "zeros_like", "ones_like", "rand_like", "randn_like", "empty_like", "full_like"):
        setattr(torch, name, made(getattr(torch, name)))
    ddp = torch.nn.parallel.DistributedDataParallel
    wrap = ddp.__init__

    def __init__(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any
    ) -> None:
        wrap(self, module, **more)

    ddp.__init__ = __init__
    torch.Stream = torch.Event = Stream
    torch.accelerator.current_stream = lambda *_: Stream()
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.current_device_index = lambda: 0
    for name, value in {
        # builds of torch for CUDA would look for a driver
        "_lazy_init": lambda: None,
        "device_count": lambda: count,
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "empty_cache": lambda: None,
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
    }.items():
        setattr(torch.cuda, name, value)


#: optimizer parity, as the comment in torch's tests has it: the optimizer, its arguments, whether gradients are views of
#: buckets, whether the graph is static
_PARITY: tuple[tuple[str, tuple[float, ...], dict[str, Any], bool, bool], ...] = (
    *(
        ("AdamW", (1e-2,), {"betas": (0.9, 0.99), "eps": 1e-6}, view, static)
        for view, static in itertools.product((True, False), repeat=2)
    ),
    ("Adam", (1e-2,), {"betas": (0.9, 0.99), "eps": 1e-6}, True, False),
    ("SGD", (1e-2,), {"momentum": 0.9, "weight_decay": 0.01}, True, False),
)


def _parity(torch: Any) -> dict[str, Callable[[Any], None]]:
    """The cases of optimizer parity, by name."""

    def case(*arguments: Any, **options: Any) -> Callable[[Any], None]:
        return lambda self: self._test_ddp_hook_with_optimizer_parity(*arguments, **options)

    cases = {}
    for (name, values, options, view, static), subset in itertools.product(_PARITY, (True, False)):
        flags = {"view": view, "static": static, "subset": subset}
        said = "_".join([name.lower(), *(flag for flag, is_set in flags.items() if is_set)])
        cases[f"test_ddp_hook_with_optimizer_parity_{said}"] = case(
            view, static, getattr(torch.optim, name), subset, *values, **options
        )
    return cases


def _cases(module: Any, place: Place, kind: str) -> type[unittest.TestCase]:
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
            backend = "gloo" if kind == "hook" else place.backend
            module.dist.init_process_group = lambda *some, **options: initialise(
                *some, **options | {"backend": backend}
            )
            super()._run(rank, *arguments, **keywords)

    if kind == "cuda":
        for name, case in _parity(torch).items():
            setattr(Cases, name, case)
    return Cases


def _names(cases: type[unittest.TestCase], kind: str) -> list[str]:
    """Cases of a kind, told by their text."""
    names = list(unittest.TestLoader().getTestCaseNames(cases))
    wanted = {
        "cpu": "",
        "cuda": "gpu|cuda|parity|GPU",
        "nccl": r'BACKEND != "nccl"',
        "hook": "ddp|DataParallel",
    }[kind]
    return [name for name in names if re.search(wanted, name + inspect.getsource(getattr(cases, name)))]


class _Result(unittest.TestResult):
    """One line per case as it ends."""

    def __init__(self, expected: dict[str, str]) -> None:
        super().__init__()
        #: by case: how it ended, and why
        self.outcomes: dict[str, tuple[str, str]] = {}
        self._expected = expected
        self._before = time.monotonic()

    def _say(self, test: unittest.TestCase, how: str, why: str = "") -> None:
        name = test._testMethodName
        if how == "FAILED" and name in self._expected:
            how, why = "expected", self._expected[name]
        self.outcomes[name] = how, why
        now = time.monotonic()
        took, self._before = now - self._before, now
        print(f"{how:<8} {took:5.1f} s {name}{': ' + why if why else ''}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._say(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        text = str(error[1]).strip().splitlines()
        self._say(test, "FAILED", " | ".join(line for line in text if line)[-600:])

    addError = addFailure


def beside_gloo(names: Sequence[str], kinds: Sequence[str], world: int) -> int:
    """Run everything in processes of their own; 1 if something passes by Gloo alone."""
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            outcomes: dict[str, dict[str, tuple[str, str]]] = {}
            for way in ("gloo", *(one for one in WAYS if one != "gloo")):
                file = Path(folder) / f"{way}-{kind}.json"
                command = [sys.executable, "-m", __spec__.name, *names, "--kind", kind, "--way", way]
                command += ["--world", str(world), "--outcomes", str(file)]
                began = time.monotonic()
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
                outcomes[way] = json.loads(file.read_text())
                count = Counter(how for how, _ in outcomes[way].values())
                said = ", ".join(f"{n} {how}" for how, n in sorted(count.items()))
                print(f"{kind}, {way}: {said} in {time.monotonic() - began:.0f} s", flush=True)
                for name, (how, why) in outcomes[way].items():
                    if outcomes["gloo"][name][0] == "passed" and how not in ("passed", "expected"):
                        # what a hook cannot be tried with, it does not lose
                        if kind == "hook" and how == "skipped":
                            continue
                        lost += 1
                        print(f"  {name} passes by Gloo and {how} here: {why[-300:]}", flush=True)
    return 1 if lost else 0


def main() -> int:
    """Run the cases whose names contain one of the arguments, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    parser.add_argument("--way", choices=WAYS, default="fabric", help="how all-reduces go, or gloo alone")
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="which cases (default: cpu; with Gloo all)"
    )
    parser.add_argument("--world", type=int, default=4, help="ranks")
    parser.add_argument("--quick", action="store_true", help="the short list of a test run")
    parser.add_argument("--outcomes", type=Path, help="file for the outcomes, as JSON")
    parser.add_argument("--beside-gloo", action="store_true", help="every way, and Gloo")
    options = parser.parse_args()
    if options.beside_gloo:
        return beside_gloo(options.names, options.kind or KINDS, options.world)
    [kind] = options.kind or ["cpu"]
    hosts = WAYS[options.way]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sockets: list[Path] = []
        if hosts:
            fabric = stack.enter_context(Fabric(len(set(hosts)), 0))
            sockets = [fabric.worker_socket(host) for host in hosts]
        place = Place(sockets, "gloo" if options.way == "gloo" else "ina", directory)
        cases = _cases(_prepare(place, options.world, kind), place, kind)
        names = _names(cases, kind)
        if options.quick:
            names = [name for name in names if name in QUICK[kind]]
        chosen = [name for name in names if not options.names or any(part in name for part in options.names)]
        import torch

        expected = EXPECTED if torch.__version__ >= (2, 14) else EXPECTED | BEFORE_2_14
        if kind == "hook":
            expected = WITH_HOOK
        result = _Result({} if options.way == "gloo" else expected)
        unittest.TestSuite(map(cases, chosen)).run(result)
    if options.outcomes is not None:
        options.outcomes.write_text(json.dumps(result.outcomes))
    count = Counter(how for how, _ in result.outcomes.values())
    print(", ".join(f"{number} {how}" for how, number in count.items()))
    return 1 if count["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
