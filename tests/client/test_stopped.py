"""A training process that was stopped for longer than it would wait does not blame others for that."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from inanet.client import conversation
from tests.client.agent import PATIENCE, Agent


@pytest.mark.parametrize("seconds", [30.0, 3600.0, 1e6])
def test_what_came_while_it_did_not_run_is_read(
    start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    missed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + missed[0])
    monkeypatch.setattr(conversation, "time", clock)
    agent = start()
    agent.backend.held = True
    with agent.connect() as job:
        handle = job.all_reduce_async(np.ones(4, np.float32))
        outcome: list[BaseException | None] = []

        def wait() -> None:
            try:
                handle.wait()
            except BaseException as error:
                outcome.append(error)
            else:
                outcome.append(None)

        waiting = threading.Thread(target=wait)
        waiting.start()
        deadline = time.monotonic() + PATIENCE
        while not agent.backend.rounds:
            assert time.monotonic() < deadline
        missed[0] = seconds
        agent.do(lambda: agent.backend.finish(1, agent.backend.rounds[0][2], agent.backend.arrays))
        waiting.join(PATIENCE)
        assert outcome == [None]
