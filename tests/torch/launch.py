"""Scripts under torchrun's engine, with torch imported once: the agent and its ranks are forked."""

import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.torch.ranks import Rank


def torchrun(
    _: Rank, script: Path, ranks: int, restarts: int, environment: dict[str, str], killed_at: int | None
) -> None:
    """What ``torchrun --standalone --nproc-per-node RANKS --max-restarts RESTARTS SCRIPT`` does.

    Output of the ranks goes to ``script.parent/logs``. If ``killed_at`` is given, rank 1 is killed in that
    step (call of ``SGD.step``) of its first life.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(environment)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(script.parent / "logs"), redirects=Std.ALL),
    )
    elastic_launch(config, _rank)(str(script), killed_at)


def _rank(script: str, killed_at: int | None) -> None:
    import torch

    torch.set_num_threads(1)
    if (
        killed_at is not None
        and os.environ["RANK"] == "1"
        and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    ):
        torch.optim.SGD.step = _killing(torch.optim.SGD.step, killed_at)  # type: ignore[method-assign]
    # the script's model lives on: what torch does at the end of a process is not what is tested
    _kept.append(runpy.run_path(script, run_name="__main__"))


_kept: list[dict[str, Any]] = []


def _killing(step: Callable[..., Any], killed_at: int) -> Callable[..., Any]:
    calls = 0

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments, **keywords)

    return counted


def output(script: Path) -> str:
    """What the ranks have printed."""
    return "".join(file.read_text() for file in sorted((script.parent / "logs").rglob("stdout.log")))
