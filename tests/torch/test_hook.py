"""The hook of DistributedDataParallel through real agents."""

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import inanet
import inanet.torch
from inanet.errors import InaError
from inanet.torch import verdict
from tests.torch.ranks import Rank, Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


class Model(nn.Module):
    """Three layers; ``skip`` leaves the middle one out, whose gradients nobody computes then."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(20, 300, dtype=dtype)
        self.middle = nn.Linear(300, 300, dtype=dtype)
        self.last = nn.Linear(300, 5, dtype=dtype)

    def forward(self, data: torch.Tensor, skip: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(data))
        if not skip:
            hidden = torch.tanh(self.middle(hidden))
        return self.last(hidden)


def flat(module: nn.Module) -> bytes:
    """All gradients as one string of bytes."""
    parts = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(parts).contiguous().view(torch.uint8).numpy().tobytes()


def as_tensor(data: bytes, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def batch(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, 20, generator=generator).to(dtype)


def plain_steps(ddp: DistributedDataParallel, generator: torch.Generator) -> None:
    ddp(batch(generator)).square().sum().backward()


def bf16_steps(ddp: DistributedDataParallel, generator: torch.Generator) -> None:
    ddp(batch(generator, torch.bfloat16)).square().sum().backward()


def f64_steps(ddp: DistributedDataParallel, generator: torch.Generator) -> None:
    ddp(batch(generator, torch.float64)).square().sum().backward()


def autocast_steps(ddp: DistributedDataParallel, generator: torch.Generator) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = ddp(batch(generator)).float().square().sum()
    loss.backward()


def accumulating_steps(ddp: DistributedDataParallel, generator: torch.Generator) -> None:
    with ddp.no_sync():
        ddp(batch(generator)).square().sum().backward()
    ddp(batch(generator)).square().sum().backward()


def skipping_steps(ddp: DistributedDataParallel, generator: torch.Generator) -> None:
    """The ranks do not use the same layers, which is what find_unused_parameters is for."""
    ddp(batch(generator), skip=dist.get_rank() % 2 == 0).square().sum().backward()


def in_the_bucket(state, bucket):  # type: ignore[no-untyped-def]
    """A hook around the hook that takes the result from where torch's own hooks leave it."""
    return inanet.torch.GradientHook.reduce(state, bucket).then(lambda _: bucket.buffer().clone())


def gradients(
    hooked: bool, step: Callable[..., None], kind: str, ddp_options: dict[str, Any], trace: Path | None
) -> list[bytes]:
    """Gradients of a few steps, in buckets that DDP builds anew after the first."""
    ddp = DistributedDataParallel(Model(getattr(torch, kind)), bucket_cap_mb=0.001, **ddp_options)
    state = None
    if hooked:
        state, reduce = inanet.torch.hook(require_ina=True, trace=trace)
        ddp.register_comm_hook(state, reduce if trace is not None else in_the_bucket)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        ddp.zero_grad()
        step(ddp, generator)
        seen.append(flat(ddp))
    if state is not None:
        assert state.stats()["drop_short"] == 0
        state.close()
    return seen


def train(rank: Rank, trace: Path, *case: Any) -> list[list[bytes]]:
    """Gradients through the fabric, once more, and through Gloo."""
    with rank.group():
        return [gradients(True, *case, trace), gradients(True, *case, None), gradients(False, *case, None)]


CASES: dict[str, tuple[Callable[..., None], str, dict[str, Any]]] = {
    "plain": (plain_steps, "float32", {}),
    "views": (plain_steps, "float32", {"gradient_as_bucket_view": True}),
    "static": (plain_steps, "float32", {"static_graph": True}),
    "bf16": (bf16_steps, "bfloat16", {}),
    "autocast": (autocast_steps, "float32", {}),
    "no_sync": (accumulating_steps, "float32", {}),
    "unused": (skipping_steps, "float32", {"find_unused_parameters": True}),
    "f64": (f64_steps, "float64", {}),
}
#: largest difference from Gloo, relative to the largest gradient: half a bfloat16 unit, or float32 sums
TOLERANCE = {"bfloat16": 2**-7, "float32": 1e-6, "float64": 1e-14}


class TestGradients:
    """They are Gloo's within the error bound, and the same bits on all ranks and in every run."""

    @pytest.mark.parametrize("case", CASES)
    def test_of_a_few_steps(self, ranks: Ranks, tmp_path: Path, case: str) -> None:
        results = ranks.run(train, tmp_path, *CASES[case])
        kind = CASES[case][1]
        assert len({tuple(seen) for one in results for seen in one[:2]}) == 1
        mine, _, gloo = results[0]
        for one, other in zip(mine, gloo, strict=True):
            ina, ring = (as_tensor(data, getattr(torch, kind)).double() for data in (one, other))
            assert (ina - ring).abs().max() <= TOLERANCE[kind] * ring.abs().max()
        files = sorted(tmp_path.glob("*.json"))
        assert len(files) == 4
        for file in files:
            # a static graph is learned in more steps than one, in which there is one bucket
            if case != "static":
                check_trace(json.loads(file.read_text())["traceEvents"], kind)


def check_trace(events: list[dict[str, Any]], kind: str) -> None:
    """Everything but float64 goes through the fabric, and is sent while backward goes on."""
    for step in (2, 3, 4):  # after the first, DDP builds its buckets anew
        begun = [event for event in events if event["ph"] == "b" and event["args"]["step"] == step]
        if kind == "float64":
            assert begun == []
            continue
        assert len(begun) >= 3
        backward = next(event for event in events if event["ph"] == "X" and event["args"]["step"] == step)
        # the first bucket is with the agent before the last one is even computed
        assert begun[0]["args"]["sent"] < begun[-1]["ts"]
        assert backward["ts"] <= begun[0]["ts"]
        assert begun[-1]["ts"] <= backward["ts"] + backward["dur"]
    ended = [event["id"] for event in events if event["ph"] == "e"]
    assert sorted(ended) == sorted(event["id"] for event in events if event["ph"] == "b")


def uneven(rank: Rank) -> list[bytes]:
    """Weights after two epochs in which a rank has the more batches the higher it is, by the hook and by Gloo."""
    weights = []
    with rank.group():
        for hooked in (True, False):
            ddp = DistributedDataParallel(Model(), bucket_cap_mb=0.001)
            if hooked:
                ddp.register_comm_hook(*inanet.torch.hook(require_ina=True))
            optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
            generator = torch.Generator().manual_seed(rank.rank)
            for _ in range(2):
                with ddp.join():
                    for _ in range(4 + rank.rank):
                        optimizer.zero_grad()
                        plain_steps(ddp, generator)
                        optimizer.step()
            flattened = torch.cat([p.detach().flatten() for p in ddp.parameters()])
            weights.append(flattened.numpy().tobytes())
    return weights


def test_ranks_without_further_batches_stand_in_with_zeros(ranks: Ranks) -> None:
    """DDP makes them call the hook with buckets that are not the model's, and that are gone after the step."""
    results = ranks.run(uneven)
    assert len({ina for ina, _ in results}) == 1
    for ina, gloo in (map(as_tensor, one) for one in results):
        assert (ina - gloo).abs().max() <= 1e-6 * gloo.abs().max()


def failing(rank: Rank, how: str, options: dict[str, Any]) -> tuple[str, str, tuple[int, ...], int]:
    """The type, text, ranks and round of the error with which the third step ends."""
    with rank.group():
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=0.001)
        state, reduce = inanet.torch.hook(require_ina=True, **options)
        ddp.register_comm_hook(state, reduce)
        generator = torch.Generator().manual_seed(rank.rank)
        for _ in range(2):
            plain_steps(ddp, generator)
        if rank.rank == 3:
            # in the middle of backward: gradients of the last layer are on their way
            ddp.module.middle.weight.register_hook(_MISHAPS[how])
        try:
            plain_steps(ddp, generator)
        except InaError as error:
            return type(error).__name__, str(error), error.ranks, error.round
        return "no error", "", (), 0


def _killed(gradient: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped(gradient: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _spoiled(gradient: torch.Tensor) -> torch.Tensor:
    return torch.full_like(gradient, float("nan"))


_MISHAPS: dict[str, Any] = {"killed": _killed, "stopped": _stopped, "spoiled": _spoiled}


class TestErrors:
    """Backward raises them, with their type, on every rank."""

    def test_of_a_rank_that_is_killed_in_a_step(self, ranks: Ranks) -> None:
        with ranks.started(failing, "killed", {}) as team:
            results = team.results([0, 1, 2])
        for kind, text, who, _ in results:
            assert kind == "WorkerLostError"
            assert 3 in who
            assert "has left the job" in text or "rank 3 is gone" in text

    def test_of_a_rank_that_does_not_answer_in_time(self, ranks: Ranks) -> None:
        with ranks.started(failing, "stopped", {"timeout": 1.0}) as team:
            results = team.results([0, 1, 2])
        for kind, text, _, number in results:
            assert kind == "RoundTimeout"
            assert "no result after 1 s" in text
            assert "bucket" in text
            assert number > 0

    def test_of_a_number_that_is_none(self, ranks: Ranks) -> None:
        for kind, text, who, _ in ranks.run(failing, "spoiled", {"nan": "refuse"}):
            assert kind == "NonFiniteError"
            assert who == (3,)
            assert "bucket" in text


def scaled(rank: Rank) -> list[tuple[float, bool]]:
    """Scale and whether the weights moved, over two steps of which the first overflows on one rank."""
    with rank.group():
        ddp = DistributedDataParallel(Model())
        state, reduce = inanet.torch.hook(require_ina=True)
        ddp.register_comm_hook(state, reduce)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        for step in range(2):
            optimizer.zero_grad()
            data = torch.full((8, 20), float("inf") if step == 0 and rank.rank == 1 else 1.0)
            before = ddp.module.last.bias.detach().clone()
            scaler.scale(ddp(data).square().sum() + data[0, 0] * ddp.module.last.bias.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), not torch.equal(before, ddp.module.last.bias)))
        state.close()
        return seen


def test_overflow_on_one_rank_makes_all_grad_scalers_skip(ranks: Ranks) -> None:
    assert ranks.run(scaled) == [[(512.0, False), (512.0, True)]] * 4


def two_models(rank: Rank) -> str:
    with rank.group():
        state, reduce = inanet.torch.hook(require_ina=True)
        models = [DistributedDataParallel(Model()) for _ in range(2)]
        for ddp in models:
            ddp.register_comm_hook(state, reduce)
        models[0](torch.ones(1, 20)).sum().backward()
        try:
            models[1](torch.ones(1, 20)).sum().backward()
        except ValueError as error:
            return str(error)
        return "no error"


def test_one_hook_does_not_serve_two_models(ranks: Ranks) -> None:
    for text in ranks.run(two_models):
        assert "another model" in text


def choosing(
    rank: Rank, options: dict[str, Any], lost: int | None, times: Any, share: float | None, steps: int
) -> tuple[str, bool, list[str]]:
    """The verdict, whether the gradients are right, and the log."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("inanet").addHandler(handler)
    if rank.rank == lost:
        os.environ["INA_SOCKET"] = str(rank.directory / "nobody")
    if times is not None:
        judge = verdict.on_times
        verdict.compare = lambda ina, ring, exchange: judge(*times)
    if share is not None:
        inanet.torch.ddp.CommunicationShare.agreed = lambda self, job: share  # type: ignore[method-assign]
    with rank.group():
        ddp = DistributedDataParallel(Model())
        try:
            state, reduce = inanet.torch.hook(**options)
        except InaError as error:
            return f"{type(error).__name__}: {error}", False, records
        ddp.register_comm_hook(state, reduce)
        for _ in range(steps):
            ddp.zero_grad()
            ddp(torch.full((1, 20), float(rank.rank))).sum().backward()
        right = torch.allclose(ddp.module.last.bias.grad, torch.ones(5))
        judged = f"{state.verdict.use_ina}: {state.verdict.reason}"
        state.close()
        return judged, right, records


class TestChoice:
    """All ranks make the same one, rank 0 says it once, and require_ina turns a no into an error."""

    @pytest.mark.parametrize(
        ("lost", "times", "share", "steps", "reason"),
        [
            (3, None, None, 1, "rank 3 on"),
            (None, (1.0, 1.05), None, 1, "by the group's own all-reduce: aggregation would have to be 10%"),
            (None, (0.5, 1.0), 0.04, 14, "communication takes 4.0% of a step"),
        ],
        ids=["no agent", "slower", "little to communicate"],
    )
    def test_against(
        self, ranks: Ranks, lost: int | None, times: Any, share: float | None, steps: int, reason: str
    ) -> None:
        results = ranks.run(choosing, {}, lost, times, share, steps)
        for judged, right, _ in results:
            assert judged.startswith("False")
            assert reason in judged
            assert right
        lines = [line for line in results[0][2] if "without INA" in line]
        assert len(lines) == 1
        assert reason in lines[0]
        assert not any(results[rank][2] for rank in (1, 2, 3))

    def test_for(self, ranks: Ranks) -> None:
        for judged, right, _ in ranks.run(choosing, {}, None, (0.5, 1.0), 0.5, 14):
            assert judged.startswith("True: 4 MiB took 500.0 ms through the fabric and 1000.0 ms")
            assert right

    def test_required(self, ranks: Ranks) -> None:
        for judged, _, _ in ranks.run(choosing, {"require_ina": True}, 3, None, None, 1):
            assert judged.startswith("AgentUnavailable")
            assert "rank 3" in judged
            assert "require_ina is set" in judged

    def test_measured(self, ranks: Ranks) -> None:
        """Whatever this machine says today, it says it with both figures."""
        results = ranks.run(choosing, {}, None, None, None, 1)
        assert len({judged for judged, _, _ in results}) == 1
        assert "through the fabric and" in results[0][0]
        assert all(right for _, right, _ in results)
