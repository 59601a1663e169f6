"""Tensors on a GPU, where there is one: the same as on the CPU, in both ways in."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import inanet.torch
from tests.torch.ranks import Rank, Ranks

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]


def reduced(rank: Rank) -> list[bool]:
    """All ranks share one GPU. The streams must order what comes before and after a reduction."""
    right = []
    with rank.group("ina", pg_options=inanet.torch.Options(require_ina=True)):
        for _ in range(5):
            tensor = torch.zeros(1 << 20, device="cuda")
            # still being computed when the reduction is asked for
            for _part in range(20):
                tensor += (rank.rank + 1) / 20
            work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
            on_host = torch.full((100,), float(rank.rank))
            dist.all_reduce(on_host)
            work.wait()
            doubled = tensor * 2
            right.append(bool(torch.allclose(doubled, torch.full_like(doubled, 5.0), rtol=1e-5)))
            right.append(bool((on_host == 6.0).all()))
            future = dist.all_reduce(tensor, async_op=True).get_future()
            tripled = future.then(lambda done: done.value()[0] * 3).wait()
            right.append(bool(torch.allclose(tripled, torch.full_like(tripled, 30.0), rtol=1e-5)))
    return right


def hooked(rank: Rank) -> tuple[bytes, bool]:
    """Gradients of a model on the GPU, and whether they are those of the same model on the CPU."""
    gradients = []
    with rank.group():
        for device in ("cuda", "cpu"):
            torch.manual_seed(1)
            ddp = DistributedDataParallel(
                nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 5)).to(device), bucket_cap_mb=0.001
            )
            state, reduce = inanet.torch.hook(require_ina=True)
            ddp.register_comm_hook(state, reduce)
            for _ in range(3):
                ddp.zero_grad()
                data = torch.full((8, 20), float(rank.rank), device=device)
                ddp(data).square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten().cpu() for p in ddp.parameters()]))
            state.close()
    return gradients[0].numpy().tobytes(), bool(torch.allclose(*gradients, rtol=1e-3, atol=1e-4))


def test_all_reduce(ranks: Ranks) -> None:
    assert all(all(right) for right in ranks.run(reduced))


def test_gradients(ranks: Ranks) -> None:
    results = ranks.run(hooked)
    assert len({data for data, _ in results}) == 1
    assert all(close for _, close in results)
