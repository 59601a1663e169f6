"""Processes that ask without end and do not read what they are told: others of the host have their turn all the same."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from inanet.agent import session
from inanet.agent.session import Session
from inanet.messages.session import pack
from tests.client.agent import Agent
from tests.client.raw import HELLO, REDUCE, Raw

REQUESTS = 14_300
ASKS: dict[str, dict[str, Any]] = {
    "stats": {},
    "late": {"seq": 1, "text": "nobody", "ranks": []},
}


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Session, str]]:
    """Every message acted on, by whom it was sent."""
    seen: list[tuple[Session, str]] = []
    act = Session._act

    def watched(self: Session, message: dict[str, Any]) -> None:
        seen.append((self, message["t"]))
        act(self, message)

    monkeypatch.setattr(Session, "_act", watched)
    return seen


@pytest.mark.parametrize("kind", ASKS)
def test_who_asks_and_does_not_read_is_answered_as_far_as_it_reads(
    start: Callable[..., Agent], kind: str, acted: list[tuple[Session, str]]
) -> None:
    agent = start()
    greedy = Raw(agent.path)
    greedy.say("hello", **HELLO)
    greedy.hear("welcome")
    greedy.socket.setblocking(False)
    ask, sent = pack(kind, **ASKS[kind]), 0
    while sent < REQUESTS:
        try:
            greedy.socket.sendall(ask * 10)
            sent += 10
        except BlockingIOError:
            break
    with agent.connect(job="other") as job:
        # in a turn of its own, however many wait
        assert job.stats() is not None
    answered = sum(what == kind for _, what in acted)
    assert answered < sent
    assert answered < 4000
    greedy.socket.close()


def test_what_came_is_acted_on_in_order_over_many_turns(
    start: Callable[..., Agent], acted: list[tuple[Session, str]]
) -> None:
    agent = start()
    process = Raw(agent.path)
    process.say("hello", **HELLO)
    process.share()
    frames = b"".join(
        pack("reduce", **{**REDUCE, "seq": seq}) + (pack("stats") if seq % 10 == 0 else b"")
        for seq in range(1, 201)
    )
    process.hear("welcome")
    process.socket.sendall(frames)
    answers = [process.hear("result", "stats") for _ in range(220)]
    assert [answer["seq"] for answer in answers if answer["t"] == "result"] == list(range(1, 201))
    kinds = [kind for _, kind in acted if kind in ("reduce", "stats")]
    assert kinds == (["reduce"] * 10 + ["stats"]) * 20
    process.socket.close()


async def test_a_turn_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    class Server:
        calls = 0

        def hello(self, one: Session, message: dict[str, Any]) -> None:
            one.enter(self, 0)  # type: ignore[arg-type]

        def figures(self) -> dict[str, int]:
            self.calls += 1
            return {}

        def gone(self, one: Session, why: str) -> None:
            pass

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    server = Server()
    one = Session(server, ours, 1)
    theirs.sendall(pack("hello") + pack("stats") * 50 + pack("release", id=1) * 500)
    most = 0
    deadline = time.monotonic() + 20
    while one._queue or server.calls < 50:
        before = server.calls, len(one._queue)
        await asyncio.sleep(0)
        most = max(most, server.calls - before[0])
        assert before[1] - len(one._queue) <= session._MOST_IN_TURN
        assert time.monotonic() < deadline
    assert most <= 1
    one.close("")
    theirs.close()


def test_what_a_process_said_before_it_left_counts_though_it_reads_no_answer(
    start: Callable[..., Agent],
) -> None:
    """It was late, had its result all the same and left: nobody hears that it waited too long."""
    agent = start()
    both = {"world": 2, "local_world": 2}
    first, second = (Raw(agent.path) for _ in range(2))
    for rank, process in enumerate((first, second)):
        process.say("hello", **HELLO | both | {"rank": rank})
    for process in (first, second):
        process.hear("welcome")
    second.share()
    second.say("reduce", **REDUCE)
    last_words = pack("late", seq=1, text="", ranks=[]) + pack("late", seq=0, text="", ranks=[]) + pack("bye")

    def leave() -> None:
        # in the agent's own thread: it acts on nothing in between
        first.socket.sendall(last_words)
        first.socket.close()

    agent.do(leave)
    assert "rank 0 is gone" in second.hear("failed")["message"]
    second.socket.close()
