"""Agents on both kinds of event loops, and jobs that are closed whatever happens."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

import inanet
from tests.client.agent import Agent

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what is pushed on it."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture(params=LOOPS)
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes event loops of asyncio's own kind, and then of uvloop's."""
    return LOOPS[request.param]


@pytest.fixture
def start(
    stack: ExitStack, tmp_path: Path, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> Callable[..., Agent]:
    """Starts an agent, with options for its server."""

    def started(**options: Any) -> Agent:
        return stack.enter_context(Agent(tmp_path / "worker.sock", loop_factory, **options))

    return started


@pytest.fixture
def agent(start: Callable[..., Agent]) -> Agent:
    """A running agent."""
    return start()


@pytest.fixture
def job(agent: Agent, stack: ExitStack) -> inanet.Job:
    """The job of a single process."""
    return stack.enter_context(agent.connect())


@pytest.fixture
def pair(agent: Agent, stack: ExitStack) -> list[inanet.Job]:
    """Both ranks of a job of two processes of this host."""
    return [stack.enter_context(joined) for joined in agent.connect_all(2)]
