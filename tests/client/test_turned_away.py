"""Ranks that an agent turns away: those that wait for them on the same host hear of it, and why."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from tests.client.agent import Agent
from tests.client.raw import HELLO, Raw

PAIR = HELLO | {"world": 2, "local_world": 2}


@pytest.fixture
def hello(agent: Agent, stack: ExitStack) -> Callable[..., Raw]:
    """A process that introduces itself as one of two on this host, or with these fields instead."""

    def said(**fields: Any) -> Raw:
        rank = Raw(agent.path)
        stack.callback(rank.socket.close)
        rank.say("hello", **PAIR | fields)
        return rank

    return said


def test_who_waits_hears_at_once_who_was_turned_away(hello: Callable[..., Raw]) -> None:
    waits = hello()
    assert waits.hear("waiting")["text"] == "joined 1 of 2 ranks of this host, missing: rank 1"
    refused = hello(rank=1, world=3).end()
    assert refused.startswith("rank 1 says that the job has 3 ranks")
    heard = waits.hear("waiting")
    assert heard["text"] == (
        f"joined 1 of 2 ranks of this host, missing: rank 1; rank 1 was turned away: {refused}"
    )
    assert heard["ranks"] == [1]


def test_who_comes_later_hears_it_too_until_the_other_is_let_in(
    agent: Agent, hello: Callable[..., Raw]
) -> None:
    agent.backend.closed = True
    sentence = hello(rank=1, system="nope").end()
    waits = hello()
    assert waits.hear("waiting")["text"].endswith(f"; rank 1 was turned away: {sentence}")
    # another job is none of its business
    assert "turned away" not in hello(job="other").hear("waiting")["text"]
    second = hello(rank=1)
    agent.until(lambda: bool(agent.backend.joined))
    agent.do(lambda: agent.backend.progress("joined 2 of 4, missing: ranks 2 and 3"))
    assert second.hear("waiting")["text"] == "joined 2 of 4, missing: ranks 2 and 3"


def test_one_too_many_is_told_of_while_other_hosts_are_waited_for(
    agent: Agent, hello: Callable[..., Raw]
) -> None:
    """It says that it is alone on its host, as the first did: on the other hosts it is missing."""
    agent.backend.closed = True
    waits = hello(local_world=1)
    agent.until(lambda: bool(agent.backend.joined))
    agent.do(lambda: agent.backend.progress("joined 1 of 2, missing: rank 1"))
    assert waits.hear("waiting")["text"] == "joined 1 of 2, missing: rank 1"
    sentence = hello(rank=1, local_world=1).end()
    assert "LOCAL_WORLD_SIZE" in sentence
    assert waits.hear("waiting")["text"] == (
        f"joined 1 of 2, missing: rank 1; rank 1 was turned away: {sentence}"
    )


def test_who_joins_hears_what_for_before_anybody_has_said_who_is_missing(
    agent: Agent, hello: Callable[..., Raw]
) -> None:
    """A coordinator that is not there says nothing."""
    agent.backend.closed = True
    waits = hello(local_world=1)
    agent.until(lambda: bool(agent.backend.joined))
    sentence = hello(rank=1, local_world=1).end()
    assert waits.hear("waiting")["text"] == (
        f"the other hosts of {PAIR['job']}; rank 1 was turned away: {sentence}"
    )


def test_who_was_turned_away_is_not_of_the_next_job_of_that_name(
    agent: Agent, hello: Callable[..., Raw]
) -> None:
    """Whether the others of its host had all come or not."""
    waits = hello()
    hello(rank=1, world=3).end()
    waits.hear("waiting")
    assert "turned away" in waits.hear("waiting")["text"]
    waits.socket.close()
    agent.until(lambda: not agent.server._groups)
    missing = "joined 1 of 2 ranks of this host, missing: rank 1"
    second = hello()
    assert second.hear("waiting")["text"] == missing
    pair = [second, hello(rank=1)]
    agent.until(lambda: bool(agent.backend.joined))
    hello(rank=1).end()
    for rank in pair:
        rank.socket.close()
    agent.until(lambda: not agent.server._groups)
    assert hello().hear("waiting")["text"] == missing
