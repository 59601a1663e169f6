"""A daemon that compiles kernels says so, once in its log and again and again to whoever waits for it."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import structlog
from numba.core import event
from structlog.testing import capture_logs

from daemons._lifecycle import Context
from inanet.service import compilation as compiling
from inanet.service import kernel_cache
from inanet.service.sd_notify import Notifier


def compile_something() -> None:
    """What numba broadcasts when it compiles a function."""
    with event.trigger_event("numba:compile", data={}):
        pass


def test_compiles_are_told_with_their_number_but_not_all_at_once() -> None:
    times = iter([0.0, 0.4, 1.1, 1.9, 2.2])
    told: list[int] = []
    end = compiling.listen(told.append, lambda: next(times))
    for _ in range(5):
        compile_something()
    end()
    end()
    compile_something()
    assert told == [1, 3, 5]


async def test_until_a_daemon_is_ready_its_waiters_hear_of_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "ensure", lambda: "kept elsewhere")
    config: Any = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, capture_logs() as logged:
        channel.bind(str(tmp_path / "n"))
        channel.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "n")})
        context = Context("agg", config, notifier, structlog.get_logger())
        context.prepare_kernels()
        await asyncio.to_thread(compile_something)
        context.ready("serving")
        compile_something()
        assert channel.recv(4096) == b"STATUS=compiling kernel 1\nEXTEND_TIMEOUT_USEC=180000000"
        assert channel.recv(4096).startswith(b"READY=1")
        with pytest.raises(BlockingIOError):
            channel.recv(4096)
    assert [(entry["log_level"], entry["event"]) for entry in logged] == [
        ("warning", "kernel cache"),
        ("info", "compiling kernels"),
        ("info", "ready"),
    ]
