"""A daemon that compiles kernels says so, once in its log and again and again to whoever waits for it."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from daemons._lifecycle import Context, kernel_sets
from inanet.service import kernel_cache, kernels
from inanet.service.sd_notify import Notifier

UDP: Any = SimpleNamespace(node=SimpleNamespace(transport="udp", xdp="off"))


def test_until_a_daemon_is_ready_its_waiters_hear_of_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(sets: Sequence[str], tell: Callable[[int, int], None]) -> None:
        assert sets == ["agg"]
        for done in (7, 8):
            tell(done, 8)

    monkeypatch.setattr(kernel_cache, "ensure", lambda: "kept elsewhere")
    monkeypatch.setattr(kernels, "prepare", prepare)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, capture_logs() as logged:
        channel.bind(str(tmp_path / "n"))
        channel.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "n")})
        context = Context("agg", UDP, notifier, structlog.get_logger())
        context.prepare_kernels()
        context.ready("serving")
        for done in (7, 8):
            said = f"STATUS=compiling kernels: {done} / 8\nEXTEND_TIMEOUT_USEC=180000000"
            assert channel.recv(4096) == said.encode()
        assert channel.recv(4096).startswith(b"READY=1")
        with pytest.raises(BlockingIOError):
            channel.recv(4096)
    assert [(entry["log_level"], entry["event"]) for entry in logged] == [
        ("warning", "kernel cache"),
        ("info", "compiling kernels"),
        ("info", "ready"),
    ]


def test_a_daemon_whose_kernels_somebody_has_compiled_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.AHEAD_VARIABLE, "done")
    monkeypatch.setattr(kernels, "prepare", lambda *given: pytest.fail("asked"))
    Context("agg", UDP, Notifier({}), structlog.get_logger()).prepare_kernels()


def test_kernels_follow_from_the_configuration() -> None:
    assert kernel_sets("agg", UDP) == ["agg"]
    node = SimpleNamespace(transport="packet", xdp="auto")
    assert kernel_sets("worker", SimpleNamespace(node=node)) == [
        "worker",
        "inanet.phy.packet",
        "inanet.xdp.gate",
        "inanet.xdp.inbox",
    ]
    programs = [SimpleNamespace(system="atp"), SimpleNamespace(system="zebra")]
    switch = SimpleNamespace(programs=programs, rings=(), transport="tun")
    assert kernel_sets("switch", SimpleNamespace(switch=switch)) == [
        "switch",
        "program:atp",
        "program:zebra",
        "frames",
    ]
    for sets in (
        ["worker"],
        ["program:atp"],
        ["servers"],
        ["frames"],
        ["all"],
        [f"demo:{name}" for name in kernels.DEMO],
    ):
        assert kernels.kernels(sets)
