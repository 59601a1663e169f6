"""What a worker's host gives back when its ranks leave a job."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from inanet.agent.backend import FabricBackend, _Membership
from inanet.aio.station import Station, open_device
from inanet.aio.uplink import Uplink
from inanet.config.daemons import MODELS
from inanet.config.file import validate
from inanet.errors import JoinRefused
from inanet.member.identity import Failed
from inanet.proto.common.plan import NodePlan, Parent, Placement
from inanet.proto.slots.systems import TREES
from inanet.wire.endpoint import endpoint
from tests.aio.test_driver import free_group


class Leaving:
    """A member, and its connection, of a job that the node has."""

    def __init__(self, station: Station) -> None:
        self.station = station

    async def leave(self, reason: str) -> None:
        """Nobody has to be told."""

    def abandon(self, error: Any) -> None:
        self.station.node.drop_job(0)


async def test_who_leaves_a_job_leaves_its_group() -> None:
    config = validate(
        MODELS["agg"], {"node": {"name": "x"}, "control": {"coordinator": "unix:/run/c"}}, Path("x.toml")
    )
    station = Station("worker", config, await open_device(config, time.monotonic), lambda: None)
    backend = FabricBackend(station, "unix:/run/c", join=1.0, lost=lambda job, error: None)
    try:
        up = Parent("ps", endpoint("127.0.0.1", 9), 1, 64, free_group())
        station.node.apply(NodePlan(0, 1, 1, 1, (Placement(0, up),), 64), station.driver.now())
        station.driver.kick()
        await asyncio.sleep(0)
        assert len(station.device._groups) == 1  # type: ignore[attr-defined]
        leaving: Any = Leaving(station)
        backend._jobs["job"] = _Membership("job", member=leaving, uplink=leaving)
        await backend.leave("job", "done")
        await asyncio.sleep(0)
        assert station.device._groups == {}  # type: ignore[attr-defined]
    finally:
        backend.close()
        station.close()


async def test_what_comes_from_the_network_is_forgotten_before_ranks_hear_of_the_end() -> None:
    """Its results would be written into arrays that are theirs again; the coordinator is told afterwards."""
    said: list[Any] = []
    member: Any = SimpleNamespace(abandon=said.append)
    backend = FabricBackend(None, "", join=1.0, lost=lambda job, error: None)  # type: ignore[arg-type]
    try:
        backend._jobs["job"] = _Membership("job", member=member)
        await backend.quieten("job", "rank 1 is gone")
        await backend.quieten("left before", "rank 1 is gone")
    finally:
        backend.close()
    assert said == [Failed("worker_lost", "rank 1 is gone")]


async def test_a_job_of_one_host_that_chooses_a_switch_is_told_that_none_is_used() -> None:
    backend = FabricBackend(None, "", join=1.0, lost=lambda job, error: None)  # type: ignore[arg-type]
    try:
        with structlog.testing.capture_logs() as said:
            await backend.join("trees", (0,), 1, TREES, lambda text: None)
            await backend.join("job", (0,), 1, "atp", lambda text: None)
    finally:
        backend.close()
    (line,) = said
    assert (line["job"], line["system"], line["log_level"]) == ("job", "atp", "warning")
    assert "no switch is used" in line["event"]


async def test_an_agent_without_a_coordinator_refuses_jobs_of_several_hosts() -> None:
    backend = FabricBackend(None, None, join=1.0, lost=lambda job, error: None)  # type: ignore[arg-type]
    try:
        await backend.join("here", (0, 1), 2, TREES, lambda text: None)
        with pytest.raises(JoinRefused, match=r"1 of 2 ranks .* set coordinator in the \[control\] section"):
            await backend.join("elsewhere", (0,), 2, TREES, lambda text: None)
    finally:
        backend.close()


async def test_who_waits_hears_that_the_coordinator_is_away() -> None:
    backend = FabricBackend(None, "", join=1.0, lost=lambda job, error: None)  # type: ignore[arg-type]
    try:
        member: Any = SimpleNamespace(joined=False, welcomed=False)
        uplink = Uplink(member, "10.0.0.1:7400", join=1.0, resume=1.0, wake=lambda: None, keys=None)
        backend._jobs["job"] = _Membership("job", member=member, uplink=uplink)
        assert backend.awaited("job").startswith("no welcome from the coordinator at 10.0.0.1:7400 yet; ")
        member.joined = True
        assert backend.awaited("job") == (
            "no connection to the coordinator at 10.0.0.1:7400, waiting for it to come back"
        )
        channel: Any = object()
        uplink._channel = channel
        assert backend.awaited("job") == "waiting for other hosts"
    finally:
        backend.close()
