"""The sections of ``ina-manager``: who is expected to register, and how it plans."""

import os
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from inanet.config.control import CoordinatorControl
from inanet.config.fields import AbsolutePath, Bytes, Name, Rate, between
from inanet.config.file import SeveralErrors
from inanet.config.sections import Log, Metrics, Section
from inanet.config.topology import Topology


class ManagerNode(Section):
    """``[node]`` of a manager, which carries no data."""

    name: Name = Field(
        default_factory=lambda: f"{os.uname().nodename}-manager", description="the manager's name, for logs"
    )
    #: follow the rates that the manager works out; set it, and each link's rate, on all nodes
    rate_negotiation: bool = False
    #: where the epoch of the last job is kept, so that it grows over restarts; not set: it starts at 1 each time
    state_file: AbsolutePath | None = None


class ManagedFabric(Section):
    """``[fabric]``: who belongs to it."""

    #: nodes that must have registered before the manager is ready; it gives up after ``control.join_timeout``
    expect: Annotated[tuple[Name, ...], Field(strict=False)] = ()

    @field_validator("expect")
    @classmethod
    def _once(cls, expect: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({name for name in expect if expect.count(name) > 1})
        if repeated:
            raise SeveralErrors([f"{name!r} stands there twice; names are used once" for name in repeated])
        return expect


class Planning(Section):
    """``[planning]``: how the trees of a job are chosen among the nodes that have registered."""

    #: the cheapest of all plans, or of a kind
    plan: Literal["auto", "ps", "sharded", "tree", "sharded-tree"] = "auto"
    #: the size of a tensor that the planner reckons with
    tensor: Annotated[Bytes, between(1, 1 << 40)] = 100 << 20
    #: of links whose rate nobody knows, for the planner
    rate: Rate = 10 * 10**9
    #: the first step of a job goes to the PS directly; then trees are built by how its workers fared (XAgg, section V)
    evaluate: bool = False
    #: running jobs take in aggregators that come, and leave out those that something else keeps busy
    dynamic: bool = False


class ManagerConfig(Section):
    """``ina-manager``."""

    node: ManagerNode = Field(default_factory=ManagerNode)
    log: Log = Field(default_factory=Log)
    metrics: Metrics = Field(default_factory=Metrics)
    control: CoordinatorControl = Field(default_factory=CoordinatorControl)
    fabric: ManagedFabric = Field(default_factory=ManagedFabric)
    planning: Planning = Field(default_factory=Planning)
    #: trees as they stand, as in the PS's file, instead of planned ones
    topology: Topology | None = None

    @field_validator("topology")
    @classmethod
    def _sound(cls, topology: Topology | None, info: ValidationInfo) -> Topology | None:
        if topology is not None:
            if not topology.roots:
                raise SeveralErrors(["no roots; allowed: roots = ['ps'], the names of parameter servers"])
            topology.fabric(topology.roots[0])
        return topology
