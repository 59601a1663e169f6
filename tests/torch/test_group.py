"""The process group "ina" through real agents."""

import os
import signal
import time
import tomllib
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
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
from tests.torch.ranks import Rank, Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

INA = {"pg_options": inanet.torch.Options(require_ina=True)}
OPS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int64", "int32", "int8", "uint8")
#: Gloo takes neither of the last two
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64", "complex128", "int16", "float8_e4m3fn")


def contribution(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (7, 301)) -> torch.Tensor:
    """Small numbers: products stay in range, integers stay exact in 16 bits, and no mean is halfway."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(1, 5, shape, generator=generator)
    return values.to(dtype) if dtype != torch.bool else values % 2 == 0


def reduce_directly(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """What all ranks should get."""
    result = tensors[0].clone()
    wide = result.to(torch.float64) if result.is_floating_point() else result
    for tensor in tensors[1:]:
        if op in ("SUM", "AVG"):
            wide = wide + tensor
        elif op in ("MAX", "MIN"):
            wide = (torch.maximum if op == "MAX" else torch.minimum)(wide, tensor.to(wide.dtype))
        elif op == "PRODUCT":
            wide = wide * tensor
        else:
            wide = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op](
                wide, tensor
            )
    return (wide / len(tensors) if op == "AVG" else wide).to(tensors[0].dtype)


def every_operation(rank: Rank) -> dict[tuple[str, str], str]:
    """By operation and dtype: "right", "wrong", or how it was refused."""
    answers = {}
    with rank.group("ina", **INA):
        for kind in DTYPES:
            dtype = getattr(torch, kind)
            for op in OPS:
                tensor = contribution(rank.rank, dtype)
                try:
                    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                except (RuntimeError, ValueError, TypeError) as error:
                    answers[kind, op] = f"{type(error).__name__}: {error}"
                    continue
                expected = reduce_directly(op, [contribution(peer, dtype) for peer in range(rank.world)])
                right = torch.equal(tensor, expected) if kind != "float8_e4m3fn" else False
                answers[kind, op] = "right" if right else "wrong"
    return answers


def test_a_torch_that_looks_for_backends_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2.14 on it calls what a package has named for the backend, and expects the backend to be registered then."""
    group = "torch.distributed.backends"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"][group].items()
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    EntryPoint(name, value, group).load()()
    assert name == inanet.torch.group.NAME
    assert set(dist.Backend._plugins) == {name.upper()}


class TestOperations:
    def test_every_operation_and_dtype_is_right_or_refused(self, ranks: Ranks) -> None:
        results = ranks.run(every_operation)
        answers = results[0]
        assert all(one == answers for one in results)
        assert "wrong" not in answers.values()
        for kind in (*FLOATS, "complex64", "complex128"):
            assert answers[kind, "SUM"] == answers[kind, "AVG"] == "right"
        for kind in (*FLOATS, *INTEGERS):
            assert {answers[kind, op] for op in ("SUM", "MAX", "MIN", "PRODUCT")} == {"right"}
        for kind in INTEGERS:
            assert answers[kind, "AVG"].startswith(f"TypeError: the mean of torch.{kind}")
            assert {answers[kind, op] for op in ("BAND", "BOR", "BXOR")} == {"right"}
        assert (
            answers["int16", "SUM"] == answers["float8_e4m3fn", "SUM"] == "RuntimeError: Invalid scalar type"
        )

    def test_shapes_strides_and_special_values(self, ranks: Ranks) -> None:
        assert ranks.run(odd_tensors) == [[True] * 8] * 4


def odd_tensors(rank: Rank) -> list[bool]:
    n = rank.world
    with rank.group("ina", **INA):
        scalar = torch.tensor(float(rank.rank))
        dist.all_reduce(scalar)
        empty = torch.zeros(0, 3)
        dist.all_reduce(empty)
        strided = torch.arange(24.0).view(4, 6).t()
        dist.all_reduce(strided, dist.ReduceOp.AVG)
        every_other = torch.ones(10)
        dist.all_reduce(every_other[::2])
        leaf = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(leaf)
        infinite = torch.tensor([float("-inf"), float(rank.rank), float("inf")])
        dist.all_reduce(infinite, dist.ReduceOp.MAX)
        nan = torch.ones(600)
        nan[3] = float("nan") if rank.rank == 2 else 1.0
        dist.all_reduce(nan)
        large = torch.full((5,), 2**40 + rank.rank, dtype=torch.int64)
        dist.all_reduce(large)
        return [
            scalar.item() == n * (n - 1) / 2,
            empty.shape == (0, 3),
            torch.equal(strided, torch.arange(24.0).view(4, 6).t()),
            torch.equal(every_other, torch.tensor([float(n), 1.0] * 5)),
            torch.equal(leaf, torch.full((3,), float(n))),
            torch.equal(infinite, torch.tensor([float("-inf"), n - 1.0, float("inf")])),
            bool(nan[3].isnan()) and torch.equal(nan[256:], torch.full((344,), float(n))),
            torch.equal(large, torch.full((5,), n * 2**40 + n * (n - 1) // 2)),
        ]


def delegated(rank: Rank) -> list[bool]:
    me, n = rank.rank, rank.world
    right = []

    def check(got: torch.Tensor, expected: Any) -> None:
        right.append(torch.equal(got, torch.as_tensor(expected, dtype=got.dtype)))

    with rank.group("ina", **INA):
        assert dist.get_backend() == "ina"
        mine = torch.full((2,), float(me))
        tensor = mine.clone()
        dist.broadcast(tensor, 2)
        check(tensor, [2.0, 2.0])
        gathered = [torch.zeros(2) for _ in range(n)]
        dist.all_gather(gathered, mine)
        check(torch.stack(gathered)[:, 0], range(n))
        whole = torch.zeros(2 * n)
        dist.all_gather_into_tensor(whole, mine)
        check(whole[::2], range(n))
        part = torch.zeros(2)
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * n))
        check(part, [2.0 * me * n, (2 * me + 1.0) * n])
        tensor = mine.clone()
        dist.reduce(tensor, 1)
        if me == 1:
            check(tensor, [n * (n - 1) / 2] * 2)
        out = torch.zeros(n)
        dist.all_to_all_single(out, torch.full((n,), float(me)))
        check(out, range(n))
        dist.scatter(part, [torch.full((2,), float(peer)) for peer in range(n)] if me == 0 else None)
        check(part, [me, me])
        dist.gather(mine, gathered if me == 3 else None, 3)
        if me == 0:
            dist.send(mine + 7, 1)
            dist.send(mine + 9, 1)
        elif me == 1:
            dist.recv(part, 0)
            check(part, [7.0, 7.0])
            assert dist.recv(part) == 0
            check(part, [9.0, 9.0])
        said: list[Any] = [None] * n
        dist.all_gather_object(said, {"rank": me})
        right.append(said == [{"rank": peer} for peer in range(n)])
        dist.barrier()
        work = dist.broadcast(tensor, 0, async_op=True)
        work.wait()
        right.append(work.is_completed())
    return right


def asynchronous(rank: Rank) -> list[bool]:
    n = rank.world
    with rank.group("ina", **INA):
        tensors = [torch.full((1000 + i,), float(i)) for i in range(40)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        seen = []
        chained = works[3].get_future().then(lambda done: done.value()[0].sum().item())
        for index in reversed(range(40)):
            works[index].wait()
            seen.append(torch.equal(tensors[index], torch.full((1000 + index,), float(index * n))))
        seen.append(chained.wait() == 1003 * 3 * n)
        seen.append(all(work.is_completed() and work.is_success() for work in works))
        seen.append(works[0].result()[0] is tensors[0])
        # coalesced, and the functional forms that compiled models call
        pair = [torch.ones(3), torch.ones(5)]
        dist.all_reduce_coalesced(pair)
        seen.append(torch.equal(torch.cat(pair), torch.full((8,), float(n))))
        double = [torch.ones(3, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
        dist.all_reduce_coalesced(double, dist.ReduceOp.AVG)
        seen.append(torch.equal(torch.cat(double), torch.ones(8, dtype=torch.float64)))
        functional = torch.distributed._functional_collectives.all_reduce(
            torch.ones(4), "avg", dist.group.WORLD
        )
        seen.append(torch.equal(functional + 0, torch.ones(4)))
        return seen


def subgroups(rank: Rank) -> list[Any]:
    me = rank.rank
    with rank.group("ina", **INA):
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        ring = dist.new_group(backend="gloo")
        mine = halves[me % 2]
        group = mine if isinstance(mine, inanet.torch.ProcessGroup) else None
        assert group is not None
        before = group.verdict
        tensor = torch.full((5,), float(me))
        dist.all_reduce(tensor, group=mine)
        whole = torch.full((5,), float(me))
        dist.all_reduce(whole)
        plain = torch.full((5,), float(me))
        dist.all_reduce(plain, group=ring)
        # options are inherited, and the job is joined when it is first needed
        assert (before, group.verdict and group.verdict.reason) == (None, "INA is wanted")
        alone, _ = dist.new_subgroups(1)
        single = torch.full((5,), float(me))
        dist.all_reduce(single, dist.ReduceOp.AVG, group=alone)
        return [tensor[0].item(), whole[0].item(), plain[0].item(), single[0].item()]


class TestCollectives:
    def test_others_than_all_reduce(self, ranks: Ranks) -> None:
        assert all(all(right) and len(right) >= 8 for right in ranks.run(delegated))

    def test_asynchronous_coalesced_and_functional(self, ranks: Ranks) -> None:
        assert all(all(seen) for seen in ranks.run(asynchronous))

    def test_groups_of_some_ranks(self, ranks: Ranks) -> None:
        assert ranks.run(subgroups) == [[2.0 if r % 2 == 0 else 4.0, 6.0, 6.0, float(r)] for r in range(4)]


def replicated(how: str) -> list[float]:
    """Losses of a few steps of Adam with all parameters everywhere, or spread over ranks in some way."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 4))
    if how in ("fsdp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=hybrid if how == "hsdp" else init_device_mesh("cpu", (4,)))
    else:
        model = DistributedDataParallel(model)
    adam: Any = torch.optim.Adam
    if how == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), adam, lr=0.01)
    else:
        optimizer = adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def all_replicated(rank: Rank) -> dict[str, list[float]]:
    with rank.group("ina", **INA):
        return {how: replicated(how) for how in ("ddp", "zero", "fsdp", "hsdp")}


class TestSharding:
    """ZeRO and FSDP work; what they reduce and scatter, Gloo does, and the fabric what HSDP all-reduces."""

    def test_losses_are_those_of_ddp(self, ranks: Ranks) -> None:
        for losses in ranks.run(all_replicated):
            for how in ("zero", "fsdp", "hsdp"):
                assert losses[how] == pytest.approx(losses["ddp"], rel=1e-4)


def dying(rank: Rank, where: str) -> tuple[str, tuple[int, ...], float]:
    """How a step ends in which rank 3 is killed: type of the error, whom it names, seconds it took."""
    with rank.group("ina", **INA):
        model = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        for _ in range(2):
            ddp(torch.ones(8, 20)).sum().backward()
        if rank.rank == 3:
            if where == "backward":
                ddp.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            if where == "delegated":
                dist.broadcast(torch.ones(3), 3)
                dist.barrier()
            elif where == "synchronous":
                dist.all_reduce(torch.ones(3))
            elif where == "future":
                dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
            else:
                ddp(torch.ones(8, 20)).sum().backward()
        except RuntimeError as error:
            ranks = error.ranks if isinstance(error, InaError) else ()
            named = type(error).__name__ if where != "future" else str(error)
            # waiting once more tells the same, and so does destroying
            return named, ranks, time.monotonic() - start
        return "no error", (), 0.0


def late(rank: Rank) -> list[str]:
    """Errors of a collective that rank 3 does not call, and of its Work afterwards."""
    with rank.group("ina", seconds=20.0, **INA):
        dist.barrier()
        if rank.rank == 3:
            # until the others have given up
            dist.barrier()
            return []
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        said = []
        for _ in range(2):
            try:
                work.wait(timedelta(seconds=0.2))
            except inanet.RoundTimeout as error:
                said.append(error.reason)
        said.append(str(work.is_completed()))
        dist.barrier()
        return said


class TestErrors:
    """The same named one on every survivor, in good time, whatever collective it was in."""

    @pytest.mark.parametrize("where", ["backward", "forward", "synchronous", "delegated"])
    def test_of_a_rank_that_is_killed(self, ranks: Ranks, where: str) -> None:
        with ranks.started(dying, where) as team:
            for named, who, seconds in team.results([0, 1, 2]):
                assert named == "WorkerLostError"
                # in the others Gloo notices first, which does not know the rank
                assert 3 in who or where in ("forward", "delegated")
                assert seconds < 20.0

    def test_of_a_rank_that_is_killed_in_a_future(self, ranks: Ranks) -> None:
        """Futures of torch carry no types of ours, but they fail, and say why."""
        with ranks.started(dying, "future") as team:
            for text, _, _ in team.results([0, 1, 2]):
                assert "WorkerLostError" in text

    def test_of_a_rank_that_does_not_come(self, ranks: Ranks) -> None:
        results = ranks.run(late)
        for said in results[:3]:
            assert len(said) == 3
            assert said[0].startswith("the sum of a tensor [3] has no result after 0.2 s")
            assert said[2] == "False"


@pytest.mark.parametrize("over", [False, True])
def test_an_agent_too_busy_to_answer_does_not_explain_a_broken_connection(
    monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """It has not said that the job is over: what is gone is a rank. If it is over, the agent's word stands."""

    def stats(seconds: float) -> None:
        raise inanet.AgentUnavailable("the worker agent has not answered")

    monkeypatch.setattr(inanet.torch.group, "_EXPLAIN_SECONDS", 0.01)
    job = SimpleNamespace(name="train", stats=stats, over=over)
    group: Any = SimpleNamespace(
        _gloo=SimpleNamespace(broken=lambda: None), _transport=SimpleNamespace(job=job), rank=lambda: 2
    )
    error = inanet.torch.ProcessGroup._explain(group, RuntimeError("Connection closed by peer"))
    assert type(error) is (inanet.AgentUnavailable if over else inanet.WorkerLostError)
    assert over or "rank 2" in str(error)


def without_agent(rank: Rank, required: bool) -> str:
    if rank.rank == 1:
        os.environ["INA_SOCKET"] = str(rank.directory / "nobody")
    os.environ["INA_REQUIRE"] = "1" if required else "0"
    try:
        with rank.group("ina"):
            tensor = torch.full((3,), float(rank.rank))
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            assert tensor[0].item() == 1.5
            group = dist.group.WORLD
            assert isinstance(group, inanet.torch.ProcessGroup)
            assert group.verdict is not None
            assert group.stats() == {}
            return f"{group.verdict.use_ina}: {group.verdict.reason}"
    except inanet.AgentUnavailable as error:
        return f"{error.ranks}: {error}"


class TestChoice:
    def test_without_an_agent_gloo_reduces(self, ranks: Ranks) -> None:
        for said in ranks.run(without_agent, False):
            assert said.startswith("False: rank 1 on ")
            assert "no worker agent at" in said

    def test_without_an_agent_requiring_one_is_an_error(self, ranks: Ranks) -> None:
        for said in ranks.run(without_agent, True):
            assert said.startswith("(1,): rank ")
            assert "require_ina is set" in said

    def test_other_options_are_refused(self) -> None:
        with pytest.raises(
            TypeError, match=r"pg_options of backend 'ina' are inanet\.torch\.Options, not dict"
        ):
            inanet.torch.group.create(None, {})
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            inanet.torch.Options(timeout=0.0)
