"""What an operator may choose about the coordinator; all times in seconds."""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Literal

from inanet.config.control import CoordinatorControl
from inanet.config.fields import GROUP_PORT, GROUP_RANGE
from inanet.coordinator.layouts import FormatFacts
from inanet.planning.rates import LOSS_THRESHOLD
from inanet.planning.topology import TreeFabric
from inanet.proto.common.plan import TensorSpec


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one coordinator. ``token`` is the secret every node of the fabric must know."""

    topology: TreeFabric
    token: str
    #: a node that answers no ping for so long is lost; pings are sent every third of it
    silence: float = 10.0
    #: a node its neighbours cannot reach is given so long to answer a ping
    probe: float = 3.0
    #: a connection must say Hello within this
    hello: float = 10.0
    #: a job must have all its members this long after the first one joined
    join: float = 120.0
    #: how often waiting members are told who is missing
    waiting: float = 3.0
    #: a round must be complete this long after the first host began it
    round: float = 60.0
    #: after a restart, the members of a running job must be back within this
    resume: float = 15.0
    #: survivors of a lost worker may take this long to fetch results that are complete
    grace: float = 5.0
    #: hosts may be held back for so long while an aggregator returns; then it is tried again ten times later
    hold: float = 3.0
    #: different tensors of one job that have slots at the same time
    most_tensors: int = 1024
    #: rounds one host may be ahead of another
    most_ahead: int = 4096
    #: how results go down: once for all children that hear a group, or one by one; ``auto``: by multicast to those that
    #: have answered a probe
    downlink: Literal["multicast", "unicast", "auto"] = "unicast"
    #: where groups are taken from, and their port
    group_range: IPv4Network = GROUP_RANGE
    group_port: int = GROUP_PORT
    #: switches that jobs may use, in order of preference
    switches: tuple[str, ...] = ()
    #: and others that come
    any_switch: bool = False
    #: pairs of nodes that are plugged into each other, where jobs are summed in several switches
    links: tuple[tuple[str, str], ...] = ()
    #: packets that a worker may have in flight towards a switch, and slots that it gets where they are its job's own
    switch_window: int = 512
    #: nodes are told how fast they may send; a worker whose loss in a period exceeds the share is given less
    negotiate: bool = False
    #: workers are asked how they fared in their first step, and the fabric may arrange the trees anew with that
    evaluate: bool = False
    #: nodes that an overview counts as missing until they have registered
    expected: tuple[str, ...] = ()
    #: how often registered nodes report
    heartbeat: float = 1.0
    loss_threshold: float = LOSS_THRESHOLD
    #: jobs go on without workers that are lost (elastic rounds); those on switches do not
    elastic: bool = False
    #: it may listen beyond this machine without TLS
    insecure: bool = False


def settings_of(
    control: CoordinatorControl,
    fabric: TreeFabric,
    *,
    negotiate: bool,
    evaluate: bool = False,
    expected: tuple[str, ...] = (),
    switches: tuple[str, ...] = (),
    any_switch: bool = False,
    links: tuple[tuple[str, str], ...] = (),
) -> Settings:
    """The settings that a ``[control]`` section means. Raises ``OSError`` if its token file has vanished."""
    return Settings(
        topology=fabric,
        token=control.secret(),
        silence=10 * control.heartbeat,
        probe=3 * control.heartbeat,
        join=control.join_timeout,
        round=control.round_timeout,
        downlink=control.downlink,
        group_range=control.group_range,
        group_port=control.group_port,
        negotiate=negotiate,
        loss_threshold=control.loss_threshold,
        evaluate=evaluate,
        expected=expected,
        switches=switches,
        any_switch=any_switch,
        links=links,
        heartbeat=control.heartbeat,
        elastic=control.elastic,
        insecure=control.insecure,
    )


#: Facts about a tensor's number format for n ranks; ``ValueError`` with a sentence if there is none for it.
FormatOf = Callable[[TensorSpec, int], FormatFacts]
