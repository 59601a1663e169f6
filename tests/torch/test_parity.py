"""Whatever works over Gloo works over the process group "ina" and with the hook, whichever way all-reduce goes."""

import copy
import io
import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import inanet.torch
from inanet.torch.gloo import check_writable
from tests.torch.conftest import WAYS
from tests.torch.ranks import Rank, Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

#: seconds for what compiles models
PATIENCE = 150.0


def uses_ina(rank: Rank) -> bool:
    return os.environ.get("INA_REQUIRE") == "1"


def model(*, hooked: bool = False, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)), **options)
    if hooked:
        ddp.register_comm_hook(*inanet.torch.hook())
    return ddp


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


# ---------------------------------------------------------------- callbacks that wait


def waiting_callbacks(rank: Rank) -> list[list[float]]:
    """Each of eight callbacks starts another all-reduce and waits for it, while others are on their way."""
    with rank.group("ina"):
        first = [torch.full((3,), float(index + 1)) for index in range(8)]

        def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            doubled = done.value()[0] * 2
            return dist.all_reduce(doubled, async_op=True, group=second).get_future().wait()[0]

        # a group of its own: torch leaves the order of callbacks among themselves open, and so of their calls
        second = dist.new_group()
        results = []
        for tensor in first:
            results.append(dist.all_reduce(tensor, async_op=True).get_future().then(again).wait().tolist())
        return results


def nested_callbacks(rank: Rank) -> float:
    """A callback within a callback within a callback, each of which waits."""
    with rank.group("ina"):

        def deeper(tensor: torch.Tensor, levels: int) -> torch.Tensor:
            future = dist.all_reduce(tensor, async_op=True).get_future()
            if levels == 0:
                return future.wait()[0]
            return future.then(lambda done: deeper(done.value()[0], levels - 1)).wait()

        return deeper(torch.ones(1), 5).item()


def power_sgd(rank: Rank, backend: str) -> list[float]:
    with rank.group(backend):
        ddp = model()
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.full((4, 20), float(rank.rank + step))).square().mean().backward()
        return gradients(ddp).tolist()


class TestCallbacks:
    def test_may_wait_for_other_all_reduces(self, everywhere: Ranks) -> None:
        expected = [[(index + 1) * 8.0] * 3 for index in range(8)]
        assert everywhere.run(waiting_callbacks) == [expected] * 2

    def test_may_nest(self, everywhere: Ranks) -> None:
        assert everywhere.run(nested_callbacks) == [64.0] * 2

    def test_of_power_sgd(self, everywhere: Ranks) -> None:
        ina, gloo = (everywhere.run(power_sgd, backend)[0] for backend in ("ina", "gloo"))
        assert ina == pytest.approx(gloo, rel=1e-3, abs=1e-5)


# ---------------------------------------------------------------- works that C++ has


def joined(rank: Rank, backend: str, hooked: bool) -> list[float]:
    """Weights after uneven inputs, the mean taken over the ranks that still have some."""
    with rank.group(backend):
        ddp = model(hooked=hooked)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(2 + 2 * rank.rank):
                optimizer.zero_grad()
                ddp(torch.full((4, 20), float(step + rank.rank) / 10)).square().mean().backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist()


def told_of_join(rank: Rank, divide: bool) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("inanet").addHandler(handler)
    with rank.group():
        ddp = model(hooked=True)
        with ddp.join(divide_by_initial_world_size=divide):
            for _ in range(3):
                ddp(torch.ones(4, 20)).sum().backward()
    return [text for text in records if "divide" in text]


def futures_of_complete_works(rank: Rank) -> list[bool]:
    with rank.group("ina"):
        seen = []
        for collective in (dist.all_reduce, lambda tensor, **more: dist.broadcast(tensor, 0, **more)):
            work = collective(torch.ones(3), async_op=True)
            work.wait()
            seen += [work.get_future().done(), work.is_completed(), work.is_success()]
        return seen


def polled(rank: Rank) -> list[float]:
    """The tensor of a work that says that it is complete holds the result; also a column of a matrix."""
    with rank.group("ina"):
        matrix = torch.full((4, 3), 1.0, dtype=torch.float64 if rank.world < 0 else torch.float32)
        work = dist.all_reduce(matrix[:, 1], async_op=True)
        while not work.is_completed():
            pass
        return matrix[0].tolist()


class TestWorks:
    @pytest.mark.parametrize("hooked", [False, True], ids=["group", "hook"])
    def test_join_divides_by_the_ranks_that_have_inputs(self, everywhere: Ranks, hooked: bool) -> None:
        """The hook's own division is by all ranks, as that of torch's hooks."""
        results = everywhere.run(joined, "gloo" if hooked else "ina", hooked)
        assert results[0] == results[1]
        if not hooked:
            assert results[0] == pytest.approx(everywhere.run(joined, "gloo", False)[0], rel=1e-4, abs=1e-6)

    def test_the_hook_says_that_it_divides_by_all_ranks(self, everywhere: Ranks) -> None:
        said = everywhere.run(told_of_join, False)
        assert [text.partition(" is of no effect with a hook")[0] for text in said[0]] == [
            "join(divide_by_initial_world_size=False)"
        ]
        assert said[1] == []
        assert everywhere.run(told_of_join, True) == [[], []]

    def test_futures_of_complete_works_are_complete(self, everywhere: Ranks) -> None:
        assert everywhere.run(futures_of_complete_works) == [[True] * 6] * 2

    def test_that_say_they_are_complete_have_written_the_result(self, everywhere: Ranks) -> None:
        assert everywhere.run(polled) == [[1.0, 2.0, 1.0]] * 2


# ---------------------------------------------------------------- torch.compile


def compiled(rank: Rank, backend: str, hooked: bool) -> list[float]:
    with rank.group(backend):
        ddp = model(hooked=hooked)
        step = torch.compile(ddp, backend="aot_eager")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        losses = []
        for index in range(3):
            optimizer.zero_grad()
            loss = step(torch.full((4, 20), float(rank.rank + index))).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("hooked", [False, True], ids=["group", "hook"])
def test_compiled_models_train(everywhere: Ranks, hooked: bool) -> None:
    expected = everywhere.run(compiled, "gloo", False)
    for got, gloo in zip(
        everywhere.run(compiled, "gloo" if hooked else "ina", hooked), expected, strict=True
    ):
        assert got == pytest.approx(gloo, rel=1e-4)


# ---------------------------------------------------------------- init, destroy, init again


def reborn(rank: Rank, port: int) -> int:
    for _ in range(12):
        dist.init_process_group(
            "ina",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank.rank,
            world_size=rank.world,
            timeout=timedelta(seconds=20),
        )
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert tensor[0].item() == rank.world
        dist.destroy_process_group()
    return 12


def test_groups_on_one_port_follow_each_other(everywhere: Ranks) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert everywhere.run(reborn, port) == [12, 12]


# ---------------------------------------------------------------- views


def views(rank: Rank, kind: str) -> list[str]:
    """Collectives on columns, every other element, and what lies between must stay."""
    dtype = getattr(torch, kind)
    wrong = []

    def check(name: str, whole: torch.Tensor, view: torch.Tensor, expected: Any) -> None:
        want = torch.as_tensor(expected, dtype=dtype).expand(view.shape)
        if not torch.equal(view, want):
            wrong.append(f"{name}: {view.tolist()}")
        view.fill_(-1)
        if not torch.equal(whole, torch.full_like(whole, -1)):
            wrong.append(f"{name} wrote beside its view")

    def inside(value: float) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Matrices of -1, and views into them that hold a value."""
        shapes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "column": lambda whole: whole[:, 1],
            "steps": lambda whole: whole[::2, ::3],
            "as_strided": lambda whole: whole.as_strided((2, 2), (7, 3), 1),
        }
        made = []
        for name, cut in shapes.items():
            whole = torch.full((4, 6), -1, dtype=dtype)
            view = cut(whole)
            view.fill_(value)
            made.append((name, whole, view))
        return made

    me, n = rank.rank, rank.world
    with rank.group("ina"):
        for name, whole, view in inside(me + 1):
            dist.all_reduce(view)
            check(f"all_reduce {name}", whole, view, n * (n + 1) // 2)
        for name, whole, view in inside(me + 1):
            dist.broadcast(view, 1)
            check(f"broadcast {name}", whole, view, 2)
        for name, whole, view in inside(me + 1):
            dist.reduce(view, 0)
            if me == 0:
                check(f"reduce {name}", whole, view, n * (n + 1) // 2)
        for name, whole, view in inside(0):
            dist.scatter(view, [torch.full_like(view, peer + 5) for peer in range(n)] if me == 0 else None)
            check(f"scatter {name}", whole, view, me + 5)
        for name, whole, view in inside(0):
            parts = [torch.full_like(view, peer + 1) for peer in range(n)]
            dist.reduce_scatter(view, parts)
            check(f"reduce_scatter {name}", whole, view, n * (me + 1))
        whole = torch.full((n, 3), -1, dtype=dtype)
        dist.all_to_all_single(whole[:, 1], torch.arange(n).to(dtype) + 10 * me)
        check("all_to_all_single", whole, whole[:, 1], [me + 10 * peer for peer in range(n)])
        whole = torch.full((n, 3), -1, dtype=dtype)
        wide = torch.arange(3 * n).view(n, 3).to(dtype)
        # inputs that are views, too
        dist.all_to_all_single(whole[:, 2], wide[:, 1])
        check("all_to_all_single of a column", whole, whole[:, 2], [3 * me + 1] * n)
        for name, whole, view in inside(me + 1):
            if me == 0:
                dist.send(view, 1)
            elif me == 1:
                dist.recv(view, 0)
                check(f"recv {name}", whole, view, 1)
        gathered = [torch.zeros(2, dtype=dtype) for _ in range(n)]
        dist.all_gather(gathered, torch.full((2, 2), me, dtype=dtype)[:, 1])
        if [part.tolist() for part in gathered] != [[peer] * 2 for peer in range(n)]:
            wrong.append(f"all_gather {gathered}")
    return wrong


def overlapping(rank: Rank) -> list[str]:
    said = []
    with rank.group("ina"):
        for collective in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
            try:
                collective(torch.ones(1).expand(4))
            except ValueError as error:
                said.append(str(error))
    return said


class TestViews:
    @pytest.mark.parametrize("kind", ["float32", "float64"])
    def test_hold_the_result_and_nothing_beside_them_changes(self, everywhere: Ranks, kind: str) -> None:
        assert everywhere.run(views, kind) == [[], []]

    def test_whose_elements_share_memory_are_refused(self, everywhere: Ranks) -> None:
        for said in everywhere.run(overlapping):
            assert len(said) == 2
            assert all("shape [4] and stride [0]: some of its elements share memory" in text for text in said)

    @pytest.mark.parametrize(
        ("shape", "stride", "refused"),
        [
            ((2, 2), (1, 1), True),
            ((3, 2), (2, 3), False),
            ((3, 3), (2, 3), False),
            ((4, 3), (2, 3), True),
            ((5, 1), (1, 0), False),
            ((0, 4), (0, 0), False),
            ((2, 3), (0, 1), True),
        ],
    )
    def test_are_judged_by_the_memory_that_they_touch(
        self, shape: tuple[int, ...], stride: tuple[int, ...], refused: bool
    ) -> None:
        tensor = torch.zeros(64).as_strided(shape, stride)
        if not refused:
            check_writable(tensor, "test")
            return
        with pytest.raises(ValueError, match="share memory"):
            check_writable(tensor, "test")


# ---------------------------------------------------------------- integers


def overflowing(rank: Rank) -> list[list[int]]:
    with rank.group("ina"):
        narrow = torch.tensor([2**31 - 1, 7], dtype=torch.int32)
        wide = torch.tensor([2**63 - 1, -(2**63)])
        for tensor in (narrow, wide):
            dist.all_reduce(tensor)
        return [narrow.tolist(), wide.tolist()]


def test_integer_sums_wrap_round(everywhere: Ranks) -> None:
    assert everywhere.run(overflowing) == [[[-2, 14], [-2, 0]]] * 2


# ---------------------------------------------------------------- pickling


def pickled(rank: Rank) -> list[bool]:
    """Copies of a model with the hook: one that goes on by itself, and one from a file."""
    with rank.group():
        ddp = model(hooked=True)
        data = torch.full((4, 20), float(rank.rank))
        ddp(data).square().mean().backward()
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        copies = [copy.deepcopy(ddp), torch.load(file, weights_only=False)]
        ddp.zero_grad()
        ddp(data).square().mean().backward()
        right = []
        for each in copies:
            [(_, state)] = each._comm_hooks
            again = DistributedDataParallel(each.module)
            again.register_comm_hook(state, inanet.torch.GradientHook.reduce)
            again.zero_grad()
            again(data).square().mean().backward()
            right.append(torch.allclose(gradients(again), gradients(ddp), rtol=1e-5))
            right.append(state.verdict.use_ina == uses_ina(rank))
            state.close()
        return right


def test_models_with_the_hook_are_copied_and_saved(everywhere: Ranks) -> None:
    assert everywhere.run(pickled) == [[True] * 4] * 2


# ---------------------------------------------------------------- profilers


def profiled(rank: Rank, trace: Path) -> list[tuple[str, Any, bool]]:
    with rank.group("ina"):
        ddp = model(hooked=False)
        ddp(torch.ones(4, 20)).sum().backward()
        with profile(record_shapes=True) as seen:
            dist.all_reduce(torch.ones(3, 4))
        seen.export_chrome_trace(str(trace / f"{rank.rank}.json"))
        with torch.autograd.profiler.profile(record_shapes=True) as legacy:
            dist.all_reduce(torch.ones(5))
            ddp(torch.ones(4, 20)).sum().backward()
        events = [*seen.events(), *legacy.function_events]
        return [(e.name, e.input_shapes, e.is_async) for e in events if e.name.endswith(":all_reduce")]


def profiled_hook(rank: Rank) -> list[tuple[str, Any, bool]]:
    with rank.group():
        ddp = model(hooked=True)
        for _ in range(2):
            with profile(record_shapes=True) as seen:
                ddp(torch.ones(4, 20)).sum().backward()
        return [(e.name, e.input_shapes, e.is_async) for e in seen.events() if e.name.endswith(":all_reduce")]


class TestProfilers:
    def test_see_the_all_reduces_of_the_group(self, everywhere: Ranks, tmp_path: Path) -> None:
        for events in everywhere.run(profiled, tmp_path):
            assert [shapes for _, shapes, _ in events] == [[[3, 4]], [[5]], [[785]]]
            assert len({name for name, _, _ in events}) == 1
            assert all(is_async for _, _, is_async in events)
            assert events[0][0] in ("ina:all_reduce", "gloo:all_reduce")
        assert ":all_reduce" in (tmp_path / "0.json").read_text()

    def test_see_the_all_reduces_of_the_hook(self, everywhere: Ranks) -> None:
        for events in everywhere.run(profiled_hook):
            assert [(shapes, is_async) for _, shapes, is_async in events] == [([[785]], True)]


# ---------------------------------------------------------------- what is told


def explained(rank: Rank) -> str:
    with rank.group("ina"):
        for _ in range(3):
            dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (4,)))
        dist.broadcast(torch.ones(3), 0)
    return inanet.torch.explain()


def test_explain_says_what_went_where_and_why(everywhere: Ranks, request: pytest.FixtureRequest) -> None:
    way = request.node.callspec.params["everywhere"]
    for text in everywhere.run(explained):
        lines = [line.split() for line in text.splitlines()]
        first = next(line for line in lines[1:] if line[3] == "float32" and line[2] == "allreduce")
        carrier = {"fabric": "fabric", "one host": "shared"}.get(way, "Gloo")
        assert first[4] == carrier
        # where everything goes by Gloo, the sparse tensor of 4 elements counts in the same row
        assert ("1.188 KiB" if carrier == "Gloo" else "1.172 KiB") in text
        if way in ("fabric", "one host"):
            assert "the fabric sums dense tensors, and this one is torch.sparse_coo" in text
            assert "and no torch.float64" in text
        elif way == "by Gloo":
            assert "4 MiB took 2000.0 ms through the fabric and 1000.0 ms" in text
        else:
            assert "has no agent" in text
        assert "broadcast" in text


def test_the_ways_are_all_there_are() -> None:
    assert set(WAYS) == {"fabric", "one host", "by Gloo", "no agent"}
