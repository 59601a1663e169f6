"""What of torch.distributed works over the fabric, row by row, with values beside Gloo's: the table of docs/pytorch.md.

    python -m tests.torch.matrix

prints the table. Every row trains or calls something for a few steps and returns numbers. The rows of one world run after
each other in the same processes: by Gloo, by the process group "ina", and by Gloo with the hook on every model.
"""

import copy
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import inanet.torch
from inanet.launch.fabric import Fabric
from inanet.torch import ledger
from tests.torch.ranks import Rank, Ranks

WORLD = 2
STEPS = 4
#: what values may differ by, as a share of the largest one of a row
TOLERANCE = 2e-5
#: operations of the ledger that are all-reduces
_SUMS = ("allreduce", "gradients")


@dataclass(slots=True)
class Cell:
    """What a row gave in one world, on one rank."""

    values: list[float] = field(default_factory=list)
    #: how it was refused, if it was
    refused: str = ""
    #: by way: the operations that went that way
    ways: dict[str, set[str]] = field(default_factory=dict)


class World:
    """One rank of a world: makes models, with the hook on them where the world has it."""

    def __init__(self, rank: Rank, hooked: bool, name: str) -> None:
        self.rank, self.size = rank.rank, rank.world
        self.directory = rank.directory
        self.name = name
        self._hooked = hooked

    def net(self) -> nn.Sequential:
        """The model of most rows, the same on all ranks."""
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def ddp(self, module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
        """DDP around a model."""
        model = DistributedDataParallel(self.net() if module is None else module, **options)
        if self._hooked:
            model.register_comm_hook(*inanet.torch.hook(require_ina=True))
        return model

    def data(self, step: int, rows: int = 6) -> torch.Tensor:
        """What this rank sees in a step."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(rows, 16, generator=generator)


def weights(model: nn.Module) -> list[float]:
    """All parameters, as numbers."""
    found = []
    for parameter in model.parameters():
        value = parameter.detach()
        found += (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()
    return found


def train(world: World, model: Any, optimizer: Any = None, steps: int = STEPS) -> list[float]:
    """Plain training; the weights after it."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(world.data(step)).square().mean().backward()
        optimizer.step()
    return weights(model)


# ---------------------------------------------------------------- hooks


def with_hook(hook: Any, state: Callable[[], Any] = lambda: None) -> Callable[[World], list[float]]:
    def row(world: World) -> list[float]:
        model = DistributedDataParallel(world.net())
        model.register_comm_hook(state(), hook)
        return train(world, model)

    return row


def power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def post_local_sgd(world: World) -> list[float]:
    model = DistributedDataParallel(world.net())
    subgroup, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(world, model, PostLocalSGDOptimizer(optim=local, averager=averager), 6)


# ---------------------------------------------------------------- optimizers and steps


def zero(world: World) -> list[float]:
    model = world.ddp()
    return train(world, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


class _Stream:
    """Torch makes a stream for optimizers in backward, and has none on CPUs: what is done on this one is done at once."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


def optimizer_in_backward(world: World) -> list[float]:
    model = DistributedDataParallel(world.net())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with patch("torch.Stream", _Stream), patch("torch.accelerator.current_stream", _Stream):
        for step in range(STEPS):
            model(world.data(step)).square().mean().backward()
    return weights(model)


def accumulation(world: World) -> list[float]:
    model = world.ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            model(world.data(2 * step)).square().mean().backward()
        model(world.data(2 * step + 1)).square().mean().backward()
        optimizer.step()
    return weights(model)


def grad_scaler(world: World) -> list[float]:
    """In the second step the gradients of rank 1 overflow: all ranks skip it, and halve the scale."""
    model = world.ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(world.data(step)).float().square().mean()
        scaler.scale(loss * (math.inf if step == 1 and world.rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights(model) + scales


def compiled(world: World) -> list[float]:
    model = world.ddp()
    step = torch.compile(model, backend="aot_eager")
    return train(world, step, torch.optim.SGD(model.parameters(), lr=0.1))


class Checkpointed(nn.Module):
    """A model whose middle is computed again in backward."""

    def __init__(self, inner: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.inner[:2], x.requires_grad_(), use_reentrant=self._reentrant)
        return self.inner[2](hidden)


def checkpointing(reentrant: bool) -> Callable[[World], list[float]]:
    def row(world: World) -> list[float]:
        model = world.ddp(Checkpointed(world.net(), reentrant), static_graph=reentrant)
        return train(world, model)

    return row


# ---------------------------------------------------------------- other parallelism


def pipeline(schedule: Any) -> Callable[[World], list[float]]:
    def row(world: World) -> list[float]:
        layers = world.net()
        part = layers[:2] if world.rank == 0 else layers[2:]
        stage = PipelineStage(part, world.rank, WORLD, torch.device("cpu"))
        plan = schedule(stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).square().mean())
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            if world.rank == 0:
                plan.step(x)
            else:
                plan.step(target=torch.ones(8, 8))
            optimizer.step()
        return weights(part)

    return row


def tensor_parallel(world: World) -> list[float]:
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(3)
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(world.net(), mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(6, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return weights(model)


def dtensor(world: World) -> list[float]:
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.arange(24.0).view(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    partial = DTensor.from_local(whole * (world.rank + 1), mesh, [Partial()])
    mean = DTensor.from_local(whole * world.rank, mesh, [Partial("avg")])
    product = sharded.t() @ sharded
    found = [product.full_tensor(), partial.redistribute(mesh, [Replicate()]).to_local()]
    found += [
        partial.redistribute(mesh, [Shard(0)]).to_local(),
        mean.full_tensor(),
        sharded.sum().full_tensor(),
    ]
    return torch.cat([each.flatten() for each in found]).tolist()


def fsdp1(world: World) -> list[float]:
    model = FullyShardedDataParallel(world.net(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(world, model, optimizer)
    with FullyShardedDataParallel.summon_full_params(model):
        return weights(model)


def fsdp2(world: World) -> list[float]:
    model = world.net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    return train(world, model)


def hybrid(world: World) -> list[float]:
    """Replicas that are sharded among one rank each: the all-reduce between replicas is what is left."""
    model = world.net()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard")))
    return train(world, model)


def saved(world: World) -> list[float]:
    """Saved sharded, loaded into another model, trained on."""
    mesh = init_device_mesh("cpu", (WORLD,))
    path = str(world.directory / f"checkpoint-{world.name}")

    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = world.net()
        fully_shard(model, mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = made()
    train(world, model, optimizer)
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=path
    )
    other, its_optimizer = made()
    train(world, other, its_optimizer, 1)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(world, other, its_optimizer, 2)


# ---------------------------------------------------------------- uneven inputs


def joined(world: World) -> list[float]:
    model = world.ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + 2 * world.rank):
            optimizer.zero_grad()
            model(world.data(step)).square().mean().backward()
            optimizer.step()
    return weights(model)


def joined_by_those_left(world: World) -> list[float]:
    """The mean is that of the ranks that still have inputs; buffers are broadcast before each step."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + 2 * world.rank):
            optimizer.zero_grad()
            model(world.data(step)).square().mean().backward()
            optimizer.step()
    return weights(model)


def joined_with_zero(world: World) -> list[float]:
    model = world.ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(2 + 2 * world.rank):
            optimizer.zero_grad()
            model(world.data(step)).square().mean().backward()
            optimizer.step()
    return weights(model)


def unused(world: World) -> list[float]:
    """A layer that rank 0 does not use in odd steps."""

    class Branches(nn.Module):
        def __init__(self, inner: nn.Sequential) -> None:
            super().__init__()
            self.inner, self.extra = inner, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
            out = self.inner(x)
            return self.extra(out) if more else out

    model = world.ddp(Branches(world.net()), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(world.data(step), step % 2 == 0 or world.rank == 1).square().mean().backward()
        optimizer.step()
    return weights(model)


def metrics(world: World) -> list[float]:
    """Counts, sums, maxima and means of one element, as metrics are reduced between steps."""
    found = []
    for step in range(3):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.bool):
            for op in ("SUM", "MAX", "MIN", "AVG"):
                if op == "AVG" and not dtype.is_floating_point:
                    continue
                value = torch.tensor([step + 2 * world.rank]).to(dtype)
                if op == "AVG":
                    # Gloo has no mean
                    dist.all_reduce(value)
                    value /= world.size
                else:
                    dist.all_reduce(value, getattr(dist.ReduceOp, op))
                found.append(float(value))
    return found


ROWS: dict[str, Callable[[World], list[float]]] = {
    "DDP": lambda world: train(world, world.ddp()),
    "`allreduce_hook`": with_hook(default_hooks.allreduce_hook),
    "`fp16_compress_hook`": with_hook(default_hooks.fp16_compress_hook),
    "`bf16_compress_hook`": with_hook(default_hooks.bf16_compress_hook),
    "`powerSGD_hook`": with_hook(powerSGD_hook.powerSGD_hook, power_sgd),
    "`batched_powerSGD_hook`": with_hook(powerSGD_hook.batched_powerSGD_hook, power_sgd),
    "`post_localSGD_hook`, model averaging": post_local_sgd,
    "`quantization_pertensor_hook`": with_hook(
        quantization_hooks.quantization_pertensor_hook, lambda: dist.group.WORLD
    ),
    "`quantization_perchannel_hook`": with_hook(
        quantization_hooks.quantization_perchannel_hook, lambda: dist.group.WORLD
    ),
    "`ZeroRedundancyOptimizer`": zero,
    "optimizers in backward": optimizer_in_backward,
    "gradient accumulation (`no_sync`)": accumulation,
    "`GradScaler`, a step that overflows": grad_scaler,
    "`torch.compile`": compiled,
    "activation checkpointing": checkpointing(False),
    "activation checkpointing, re-entrant": checkpointing(True),
    "unused parameters": unused,
    "pipeline parallel (GPipe)": pipeline(ScheduleGPipe),
    "pipeline parallel (1F1B)": pipeline(Schedule1F1B),
    "tensor parallel": tensor_parallel,
    "DTensor": dtensor,
    "FSDP1": fsdp1,
    "FSDP2 (`fully_shard`)": fsdp2,
    "FSDP2 with a hybrid mesh": hybrid,
    "distributed checkpoint (DCP)": saved,
    "`join`": joined,
    "`join` that divides by those left": joined_by_those_left,
    "`Join` of DDP and ZeRO": joined_with_zero,
    "metrics: one element, mixed dtypes": metrics,
}
#: rows whose models get the hook
HOOKED = (
    "DDP",
    "`ZeroRedundancyOptimizer`",
    "gradient accumulation (`no_sync`)",
    "`GradScaler`, a step that overflows",
    "`torch.compile`",
    "activation checkpointing",
    "activation checkpointing, re-entrant",
    "unused parameters",
    "`join`",
    "`Join` of DDP and ZeRO",
)


def _counts() -> dict[tuple[str, ...], int]:
    return {row[1:4]: int(row[4]) for one in ledger._ledgers for row in one.rows()}


def _ways(before: dict[tuple[str, ...], int], after: dict[tuple[str, ...], int]) -> dict[str, set[str]]:
    ways: dict[str, set[str]] = {}
    for (operation, dtype, way), calls in after.items():
        if calls > before.get((operation, dtype, way), 0):
            what = dtype if operation in _SUMS else _name(operation)
            ways.setdefault(way, set()).add(what)
    return ways


def _name(operation: str) -> str:
    """A collective's name, whichever of its forms was called, and by which version of torch."""
    plain = operation.replace("_", "")
    kinds = {
        "allgather": "all-gather",
        "reducescatter": "reduce-scatter",
        "alltoall": "all-to-all",
        "recv": "receive",
    }
    return next((name for start, name in kinds.items() if plain.startswith(start)), plain)


def cells(rank: Rank, backend: str, hooked: bool, names: Sequence[str]) -> dict[str, Cell]:
    """All rows in one world, on one rank."""
    logging.getLogger("inanet").setLevel(logging.ERROR)
    options = {"pg_options": inanet.torch.Options(require_ina=True)} if backend == "ina" else {}
    found = {}
    with rank.group(backend, **options):
        world = World(rank, hooked, f"{backend}-{hooked}")
        for name in names:
            before = copy.copy(_counts())
            try:
                cell = Cell([float(value) for value in ROWS[name](world)])
            except Exception as error:
                cell = Cell(refused=f"{type(error).__name__}: {error}")
            cell.ways = _ways(before, _counts())
            found[name] = cell
    return found


def worlds(pair: Ranks, names: Sequence[str] = tuple(ROWS)) -> dict[str, list[dict[str, Cell]]]:
    """All rows by Gloo, by the process group, and those of DDP by the hook: for each rank."""
    hooked = [name for name in names if name in HOOKED]
    return {
        "gloo": pair.run(cells, "gloo", False, names, patience=180.0),
        "ina": pair.run(cells, "ina", False, names, patience=180.0),
        "hook": pair.run(cells, "gloo", True, hooked, patience=180.0),
    }


def differs(ours: Cell, gloo: Cell) -> str:
    """How a row differs from Gloo's; empty if it does not."""
    if ours.refused or gloo.refused:
        if ours.refused and gloo.refused:
            return ""
        return ours.refused or f"passes, and Gloo says {gloo.refused}"
    if len(ours.values) != len(gloo.values):
        return f"{len(ours.values)} values, not {len(gloo.values)}"
    largest = max(map(abs, gloo.values), default=0.0)
    worst = max((abs(a - b) for a, b in zip(ours.values, gloo.values, strict=True)), default=0.0)
    return "" if worst <= TOLERANCE * largest else f"values differ by {worst:.3g} of {largest:.3g}"


def table(found: dict[str, list[dict[str, Cell]]]) -> str:
    """The rows as they stand in docs/pytorch.md."""
    lines = ['| | group "ina" | hook | through the fabric | by Gloo |', "|---|---|---|---|---|"]
    for name in found["ina"][0]:
        gloo, ina = found["gloo"][0][name], found["ina"][0][name]
        hook = found["hook"][0].get(name)
        ways = ina.ways
        says = "fails over Gloo, too" if ina.refused and gloo.refused else differs(ina, gloo) or "as Gloo"
        columns = [
            name,
            says,
            "" if hook is None else differs(hook, gloo) or "as Gloo",
            "" if ina.refused else ", ".join(sorted(ways.get("fabric", ()))),
            "" if ina.refused else ", ".join(sorted(ways.get("Gloo", ()))),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder, Fabric(WORLD, 0) as fabric:
        pair = Ranks([fabric.worker_socket(host) for host in range(WORLD)], Path(folder))
        found = worlds(pair)
    print(table(found))
    for name, each in found.items():
        for row, cell in each[0].items():
            if cell.refused:
                print(f"{name}: {row}: {cell.refused[:300]}")


if __name__ == "__main__":
    main()
