"""Whatever a process says to its agent, nothing but its own session ends."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inanet.agent.backend import FabricBackend
from inanet.agent.server import LocalServer
from inanet.messages import segments
from inanet.messages.session import PROTOCOL, pack
from tests.client.conftest import LOOPS
from tests.client.raw import REDUCE
from tests.open_files import open_files

HELLO: dict[str, Any] = {"protocol": PROTOCOL, "job": "noise", "rank": 0, "world": 1, "local_world": 1}
MEMORY: dict[str, Any] = {"id": 1, "size": 4096}
KINDS: dict[str, dict[str, Any]] = {
    "hello": HELLO,
    "memory": MEMORY,
    "reduce": REDUCE | {"id": 1},
    "again": {"seq": 2, "id": 1},
    "release": {"id": 1},
    "stats": {},
    "bye": {},
    "welcome": {},
}
#: values that some field may have, or just not
values = st.one_of(
    st.sampled_from(
        [0, 1, -1, 2, 4096, 2**31, 2**48, 2**63, 2**64 - 1, "", "sum", "max", "mean", "f16", "i64", "bf16"]
    ),
    st.integers(-3, 5000),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.lists(st.integers(0, 2**40) | st.floats() | st.text(max_size=2), max_size=5),
    st.lists(st.just(0), min_size=60, max_size=70),
    st.binary(max_size=5),
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A message in which some fields are not what they should be."""
    kind = draw(st.sampled_from(list(KINDS)))
    fields = dict(KINDS[kind])
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True)) if fields else []:
        if draw(st.booleans()):
            fields[name] = draw(values)
        else:
            del fields[name]
    return pack(kind, **fields)


noise = st.binary(max_size=40) | st.dictionaries(st.text(max_size=3), values, max_size=3).map(
    lambda fields: len(msgpack.packb(fields)).to_bytes(4, "big") + msgpack.packb(fields)
)
conversations = st.tuples(
    st.booleans(), st.booleans(), st.lists(st.tuples(frames() | noise, st.booleans()), max_size=6)
)


async def converse(path: Path, hello: bool, share: bool, parts: list[tuple[bytes, bool]]) -> None:
    """Say all of it, some parts with a descriptor, until the agent hangs up or there is nothing more to say."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as process:
        process.setblocking(False)
        await loop.sock_connect(process, str(path))
        fd, _ = segments.create(4096)
        try:
            if hello:
                socket.send_fds(process, [pack("hello", **HELLO)], [])
            if share:
                socket.send_fds(process, [pack("memory", **MEMORY)], [fd])
            for data, with_fd in parts:
                if data:
                    socket.send_fds(process, [data], [fd] if with_fd else [])
                await asyncio.sleep(0)
            process.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(process, 1 << 16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            os.close(fd)


@pytest.mark.parametrize("loop", LOOPS)
def test_no_conversation_reaches_the_loop(tmp_path: Path, loop: str) -> None:
    """With the real backend behind it: a job of one host, whose arrays are really summed."""
    errors: list[object] = []
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: errors.append(context))
        # jobs of one host use neither the station nor the coordinator
        backend = FabricBackend(None, "", join=1.0, lost=lambda job, error: None)  # type: ignore[arg-type]
        backend.stats = dict  # type: ignore[method-assign]
        server = LocalServer(tmp_path / "worker.sock", backend)
        runner.run(server.start())
        before = open_files()

        @settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
        @given(conversations)
        def check(said: tuple[bool, bool, list[tuple[bytes, bool]]]) -> None:
            runner.run(converse(server.path, *said))
            runner.run(forgotten(server))
            assert errors == []

        check()
        assert open_files() <= before
        runner.run(server.close())
        backend.close()
    assert errors == []


async def forgotten(server: LocalServer) -> None:
    """Return when the server knows nobody any more."""
    while server._sessions or server._groups or server._leaving:  # noqa: ASYNC110 - every turn counts
        await asyncio.sleep(0)
