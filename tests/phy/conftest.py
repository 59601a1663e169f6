"""Fixtures of the device tests: everything they open is closed, whatever happens."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from inanet.phy.rawip import RawIpDevice
from inanet.phy.udp import UdpDevice

CLONE_NEWNET = 0x40000000


def lacking(reason: str) -> None:
    """Skip for want of a privilege; fail instead where the run promises to have it."""
    if os.environ.get("INA_REQUIRE_PRIVILEGED") == "1":
        pytest.fail(f"INA_REQUIRE_PRIVILEGED=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what is pushed on it."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def open_udp(stack: ExitStack) -> Callable[..., UdpDevice]:
    """Opens UDP devices and closes them after the test."""

    def open_device(*arguments: object, **options: object) -> UdpDevice:
        device = UdpDevice(*arguments, **options)  # type: ignore[arg-type]
        stack.callback(device.close)
        return device

    return open_device


@pytest.fixture
def open_raw(stack: ExitStack) -> Callable[..., RawIpDevice]:
    """Opens raw IPv4 devices and closes them after the test; skips without CAP_NET_RAW."""
    try:
        RawIpDevice().close()
    except PermissionError as error:
        lacking(str(error))

    def open_device(*arguments: object, **options: object) -> RawIpDevice:
        device = RawIpDevice(*arguments, **options)  # type: ignore[arg-type]
        stack.callback(device.close)
        return device

    return open_device


@pytest.fixture
def in_namespace() -> Callable[[Callable[[], None]], None]:
    """Runs a function in a thread with a network namespace of its own, which ends with its last socket."""
    libc = ctypes.CDLL(None, use_errno=True)

    def run(inside: Callable[[], None]) -> None:
        outcome: list[BaseException | int] = []

        def body() -> None:
            if libc.unshare(CLONE_NEWNET) != 0:
                outcome.append(ctypes.get_errno())
                return
            try:
                inside()
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        for result in outcome:
            if isinstance(result, BaseException):
                raise result
            lacking(f"making a network namespace needs CAP_SYS_ADMIN ({os.strerror(result)})")

    return run
