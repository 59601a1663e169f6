"""The server against processes that do not keep to the conversation."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import inanet
from inanet.agent import session as local_session
from inanet.messages.session import MOST_AHEAD, PROTOCOL, pack
from tests.client.agent import PATIENCE, Agent, error_from
from tests.client.raw import HELLO, REDUCE, Raw
from tests.open_files import open_files


@pytest.fixture
def raw(agent: Agent) -> Iterator[Raw]:
    """Connected, and silent."""
    process = Raw(agent.path)
    yield process
    process.socket.close()


@pytest.fixture
def joined(raw: Raw) -> Raw:
    """The only rank of a job."""
    raw.say("hello", **HELLO)
    raw.hear("welcome")
    return raw


def leaves_the_server_intact(agent: Agent) -> None:
    """Nothing of the bad process remains, and a good one is served."""
    agent.until(lambda: not agent.server._sessions and not agent.server._groups)
    with agent.connect() as job:
        job.barrier()


class TestBrokenProtocol:
    """Whatever a process says, it alone suffers, and is told why."""

    @pytest.mark.parametrize(
        ("data", "sentence"),
        [
            (b"\xff\xff\xff\xff", "4294967295 B exceeds 65536"),
            (b"\x00\x00\x00\x03abc", "not msgpack"),
            (b"GET / HTTP/1.1\r\n\r\n", "exceeds"),
            (pack("dance"), "dance before hello"),
            (pack("reduce", **REDUCE), "reduce before hello"),
            (pack("hello", **HELLO | {"rank": "0"}), "hello.rank is '0', not int"),
            (pack("hello", **HELLO | {"rank": 1}), "hello.rank = 1 is not between 0 and 0"),
            (pack("hello", **HELLO | {"world": 1 << 40}), "hello.world"),
            (pack("hello", **HELLO | {"local_world": 2}), "hello.local_world"),
            (pack("hello", **HELLO | {"protocol": 99}), f"speaks protocol 99, the agent {PROTOCOL}"),
            (pack("hello", **HELLO) * 2, "unexpected hello"),
        ],
    )
    def test_strangers(self, agent: Agent, raw: Raw, data: bytes, sentence: str) -> None:
        raw.socket.sendall(data)
        assert sentence in raw.end()
        leaves_the_server_intact(agent)

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ({"seq": 2}, "collective 2 does not follow 0"),
            ({"seq": 0}, "collective 0 does not follow 0"),
            ({"dtype": "f64"}, "dtype 'f64' is not one of"),
            ({"op": "avg"}, "op 'avg' is not one of"),
            ({"mode": "none"}, "impossible mode 'none'"),
            ({"mode": "fixed"}, "factor: positive with mode FIXED"),
            ({"mode": "fixed", "factor": float("nan")}, "factor"),
            ({"factor": 1}, "reduce.factor is 1, not float"),
            ({"propagate": 1}, "reduce.propagate is 1, not bool"),
            ({"name": "a\nb"}, "name"),
            ({"shape": [4.0]}, "shape"),
            ({"shape": [True]}, "shape"),
            ({"shape": [-4]}, "extents"),
            ({"shape": [1 << 48]}, "extents"),
            ({"shape": [1 << 30, 1 << 30]}, "2^40 elements"),
            ({"shape": [1] * 100}, "dimensions"),
            ({"shape": [1025]}, "1025 f32 at 0 do not lie inside memory 1"),
            ({"offset": 4084}, "4 f32 at 4084 do not lie inside"),
            ({"offset": 2}, "4 f32 at 2 do not lie inside"),
            ({"offset": -4}, "reduce.offset = -4"),
            ({"offset": 1 << 63}, "do not lie inside"),
            ({"memory": 2}, "inside memory 2"),
        ],
    )
    def test_impossible_collectives(
        self, agent: Agent, joined: Raw, wrong: dict[str, Any], sentence: str
    ) -> None:
        joined.share()
        joined.say("reduce", **REDUCE | wrong)
        assert sentence in joined.end()
        assert agent.backend.rounds == []
        leaves_the_server_intact(agent)

    @pytest.mark.parametrize("missing", REDUCE)
    def test_incomplete_collectives(self, joined: Raw, missing: str) -> None:
        joined.share()
        joined.say("reduce", **{name: value for name, value in REDUCE.items() if name != missing})
        assert missing in joined.end()

    def test_collectives_up_to_the_edge_of_memory(self, agent: Agent, joined: Raw) -> None:
        joined.share()
        for seq, (shape, offset) in enumerate([([1024], 0), ([4], 4080), ([0], 4096), ([], 4092)], start=1):
            joined.say("reduce", **REDUCE | {"seq": seq, "shape": shape, "offset": offset})
            assert joined.hear("result") == {"t": "result", "seq": seq}

    def test_collectives_before_the_welcome(self, agent: Agent, raw: Raw) -> None:
        raw.say("hello", **HELLO | {"world": 2, "local_world": 2})
        raw.share()
        raw.say("reduce", **REDUCE)
        assert "before the job was joined" in raw.hear("result")["message"]

    def test_too_many_collectives_at_once(self, agent: Agent, joined: Raw) -> None:
        agent.backend.held = True
        joined.share()
        for seq in range(1, MOST_AHEAD + 2):
            joined.say("reduce", **REDUCE | {"seq": seq})
        assert f"more than {MOST_AHEAD} collectives" in joined.end()

    @pytest.mark.parametrize(
        ("fields", "sentence"),
        [
            ({"size": 4097}, "has 4096 B, not the 4097 B announced"),
            ({"size": 0}, "memory.size = 0"),
            ({"size": 1 << 60}, "memory.size"),
            ({"id": 0}, "memory.id = 0"),
            ({"id": "1"}, "memory.id is '1'"),
        ],
    )
    def test_memory_that_is_not_what_it_is_said_to_be(
        self, agent: Agent, joined: Raw, fields: dict[str, Any], sentence: str
    ) -> None:
        joined.share(**fields)
        assert sentence in joined.end()
        leaves_the_server_intact(agent)

    def test_memory_that_could_shrink(self, agent: Agent, joined: Raw) -> None:
        fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        joined.say("memory", fd, id=1, size=4096)
        os.close(fd)
        assert "not sealed against shrinking" in joined.end()
        leaves_the_server_intact(agent)

    def test_memory_without_a_descriptor(self, joined: Raw) -> None:
        joined.say("memory", id=1, size=4096)
        assert "without a file descriptor" in joined.end()

    def test_memory_with_a_number_that_is_taken(self, joined: Raw) -> None:
        joined.share()
        joined.share()
        assert "memory 1 exists" in joined.end()

    def test_more_memory_than_allowed(self, joined: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_session, "MOST_SEGMENTS", 2)
        for number in (1, 2, 3):
            joined.share(id=number)
        assert "more than 2 pieces" in joined.end()

    def test_released_memory_is_gone(self, agent: Agent, joined: Raw) -> None:
        joined.share()
        joined.say("release", id=1)
        joined.say("release", id=77)
        joined.say("reduce", **REDUCE)
        assert "do not lie inside memory 1" in joined.end()

    def test_a_collective_again(self, agent: Agent, joined: Raw) -> None:
        joined.share()
        joined.say("reduce", **REDUCE | {"id": 7})
        joined.say("again", seq=2, id=7)
        # the id now means another
        joined.say("reduce", **REDUCE | {"seq": 3, "id": 7, "shape": [2]})
        joined.say("again", seq=4, id=7)
        assert [joined.hear("result")["seq"] for _ in range(4)] == [1, 2, 3, 4]
        assert [spec.shape for _, _, spec in agent.backend.rounds] == [(4,), (4,), (2,), (2,)]

    @pytest.mark.parametrize(
        ("frames", "sentence"),
        [
            ([("again", {"seq": 1, "id": 7})], "collective 7 cannot be called again"),
            ([("reduce", REDUCE), ("again", {"seq": 2, "id": 0})], "collective 0 cannot be called again"),
            ([("reduce", REDUCE | {"id": 4096})], "reduce.id = 4096"),
            ([("reduce", REDUCE | {"id": -1})], "reduce.id = -1"),
            ([("reduce", REDUCE | {"id": 1}), ("again", {"seq": 1, "id": 1})], "1 does not follow 1"),
            ([("reduce", REDUCE | {"id": 1}), ("again", {"seq": 2})], "again.id is None"),
            (
                [("reduce", REDUCE | {"id": 1}), ("release", {"id": 1}), ("again", {"seq": 2, "id": 1})],
                "collective 1 cannot be called again",
            ),
        ],
    )
    def test_a_collective_that_cannot_be_called_again(
        self, joined: Raw, frames: list[tuple[str, dict[str, Any]]], sentence: str
    ) -> None:
        joined.share()
        for kind, fields in frames:
            joined.say(kind, **fields)
        assert sentence in joined.end()

    def test_descriptors_that_nobody_asked_for(self, agent: Agent, joined: Raw) -> None:
        (session,) = agent.server._sessions
        connection = session._socket.fileno()
        before = open_files()
        # the server may close before the last of them
        with contextlib.suppress(BrokenPipeError):
            for _ in range(6):
                joined.say("stats", *[0] * 4)
        assert "without a message that needs them" in joined.end()
        agent.until(lambda: not agent.server._sessions)
        # this process is both sides: the server has closed what came, and the connection
        assert open_files() <= {file for file in before if file[0] != connection}

    def test_more_descriptors_than_a_message_may_have(self, agent: Agent, joined: Raw) -> None:
        joined.say("stats", *[0] * 20)
        assert "file descriptors" in joined.end()
        leaves_the_server_intact(agent)

    def test_a_frame_in_many_pieces(self, agent: Agent, joined: Raw) -> None:
        joined.share()
        frame = pack("reduce", **REDUCE)
        for index in range(len(frame)):
            joined.socket.sendall(frame[index : index + 1])
        assert joined.hear("result")["seq"] == 1

    def test_one_that_does_not_read(self, agent: Agent, joined: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_session, "_OUT_LIMIT", 1 << 14)
        with contextlib.suppress(OSError):
            for _ in range(200_000):
                joined.say("stats")
        agent.until(lambda: not agent.server._sessions)
        assert "does not read" in agent.backend.left.get(timeout=PATIENCE)[1]

    def test_one_that_says_nothing(self, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_session, "_HELLO_SECONDS", 0.01)
        silent = Raw(agent.path)
        assert silent.socket.recv(1) == b""
        silent.socket.close()


class TestVictims:
    """A process that breaks the protocol ends the job for its ranks, not in silence."""

    def test_other_local_ranks_are_told(self, agent: Agent) -> None:
        bad = Raw(agent.path)
        bad.say("hello", **HELLO | {"rank": 1, "world": 2, "local_world": 2})
        with agent.connect("train", 0, 2) as good:
            handle = good.all_reduce_async(np.ones(1, np.float32))
            bad.socket.sendall(b"\xff" * 4)
            error = error_from(handle.wait)
        bad.socket.close()
        assert isinstance(error, inanet.WorkerLostError)
        assert error.ranks == (1,)
        assert f"rank 1 is gone: process {os.getpid()} broke the protocol" in error.reason
