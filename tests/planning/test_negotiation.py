"""Rates in messages: between workers and the coordinator, every one through the codec, in virtual time."""

import math

import pytest

from inanet.messages.control import RateDone, RateGrant, RateLoss, RateReady
from inanet.planning.negotiation import PERIOD, RECOVERY, Negotiation, RateRequests, granted
from inanet.planning.rates import Grant
from inanet.wire.endpoint import endpoint
from tests.coordinator.nodes import JOB, Nodes, spec, two_level

GBPS = 10**9


def grants(nodes: Nodes, name: str) -> list[RateGrant]:
    """What a node was granted since the last call."""
    found = [message for message in nodes.inbox[name] if isinstance(message, RateGrant)]
    nodes.inbox[name] = [message for message in nodes.inbox[name] if not isinstance(message, RateGrant)]
    return found


def started(workers: int = 2, aggregators: int = 0, **settings: object) -> Nodes:
    nodes = Nodes(two_level(workers, aggregators), negotiate=True, **settings)  # type: ignore[arg-type]
    names = [*nodes.topology.roots, *nodes.topology.aggregators, *nodes.topology.workers]
    nodes.join(*names, send_bps=GBPS, receive_bps=GBPS)
    return nodes


def test_a_ready_worker_is_granted_its_share() -> None:
    nodes = started()
    nodes.begin(1, spec())
    nodes.say("w0", RateReady(job=JOB, sequence=1))
    (first,) = grants(nodes, "w0")
    assert (first.up, first.down) == (GBPS, 0)
    nodes.say("w1", RateReady(job=JOB, sequence=1, maximum=GBPS // 4))
    assert [grant.up for grant in grants(nodes, "w1")] == [GBPS // 4]
    assert [grant.up for grant in grants(nodes, "w0")] == [GBPS * 3 // 4]
    # results go to both as fast as the slower one's gradient comes
    assert grants(nodes, "ps")[-1].down == GBPS // 2
    nodes.say("w1", RateDone(job=JOB, sequence=2))
    assert [grant.up for grant in grants(nodes, "w0")] == [GBPS]
    nodes.say("w0", RateLoss(job=JOB, sequence=2, sent=1000, lost=500))
    assert [grant.up for grant in grants(nodes, "w0")] == [GBPS // 2]


def test_a_grant_to_a_worker_below_an_aggregator_follows_the_whole_path() -> None:
    nodes = started(4, 2)
    nodes.begin(1, spec())
    for name in ("w0", "w1", "w2", "w3"):
        nodes.say(name, RateReady(job=JOB, sequence=1))
    # into an aggregator come two gradients and the result, out of it go the sum and two results
    for name, up, down in (("w0", GBPS // 3, 0), ("a0", GBPS // 3, GBPS * 2 // 3), ("ps", 0, GBPS * 2 // 3)):
        last = grants(nodes, name)[-1]
        assert (last.up, last.down) == (up, down)


def test_who_is_refused_says_nothing_about_links() -> None:
    nodes = started()
    nodes.begin(1, spec())
    nodes.ids.pop("ps")
    nodes.join("ps", token="wrong", send_bps=1, receive_bps=1)
    nodes.say("w0", RateReady(job=JOB, sequence=1))
    assert [grant.up for grant in grants(nodes, "w0")] == [GBPS]


def test_nobody_is_granted_anything_unless_asked_for() -> None:
    nodes = Nodes(two_level(2, 0))
    nodes.join("ps", "w0", "w1", send_bps=GBPS)
    nodes.say("w0", RateReady(job=JOB, sequence=1))
    assert grants(nodes, "w0") == []


def test_a_job_that_is_over_leaves_its_share() -> None:
    nodes = started()
    nodes.begin(1, spec())
    nodes.say("w0", RateReady(job=JOB, sequence=1))
    nodes.say("w0", RateReady(job=JOB + 1, sequence=2))
    assert len(grants(nodes, "w0")) == 1


def test_whole_bits_and_no_limit_travel() -> None:
    negotiation = Negotiation(multicast=False)
    assert negotiation.grants() == []
    assert granted(RateGrant(job=1, sequence=2, up=None, down=7)) == Grant(1, 2, math.inf, 7.0)


def test_nodes_at_one_address_share_a_link_and_on_the_loopback_have_their_own() -> None:
    nodes = Nodes(two_level(2, 0), negotiate=True)  # type: ignore[arg-type]
    nodes.join("ps", send_bps=10 * GBPS, receive_bps=10 * GBPS, endpoint=endpoint("10.0.0.9", 1))
    for port, name in enumerate(("w0", "w1"), 1):
        nodes.join(name, send_bps=GBPS, receive_bps=GBPS, endpoint=endpoint("10.0.0.1", port))
    nodes.begin(1, spec())
    for name in ("w0", "w1"):
        nodes.say(name, RateReady(job=JOB, sequence=1))
    assert [grants(nodes, name)[-1].up for name in ("w0", "w1")] == [GBPS // 2] * 2


class Counters:
    """A node as :class:`RateRequests` sees it."""

    def __init__(self) -> None:
        self.sends = False
        self.sent = self.lost = 0

    def asking(self) -> RateRequests:
        return RateRequests(3, lambda: self.sends, lambda: (self.sent, self.lost), 5 * GBPS)


def test_a_worker_says_when_it_begins_and_ends() -> None:
    node = Counters()
    asking = node.asking()
    assert asking.look(0.0) == []
    node.sends = True
    assert asking.look(1.0) == [RateReady(job=3, sequence=1, maximum=5 * GBPS)]
    assert asking.look(1.0) == []
    node.sends = False
    assert asking.look(1.1) == [RateDone(job=3, sequence=2)]
    assert not asking.active


def test_loss_is_reported_by_the_period_and_recovery_after_it() -> None:
    node = Counters()
    asking = node.asking()
    node.sends = True
    asking.look(0.0)
    node.sent = 100
    # nothing lost, nothing to say
    assert asking.look(PERIOD) == []
    node.sent, node.lost = 300, 50
    assert asking.look(1.5 * PERIOD) == []
    assert asking.look(2 * PERIOD) == [RateLoss(job=3, sequence=2, sent=200, lost=50)]
    node.sent = 400
    assert asking.look(3.001 * PERIOD) == [RateLoss(job=3, sequence=3, sent=100, lost=0)]
    said = 0
    for period in range(4, 4 + 2 * RECOVERY):
        node.sent += 100
        said += len(asking.look(period * PERIOD * 1.01))
    assert said == RECOVERY - 2


def test_a_coordinator_that_starts_again_is_told_anew() -> None:
    node = Counters()
    asking = node.asking()
    node.sends = True
    asking.look(0.0)
    asking.again()
    assert asking.look(0.1) == [RateReady(job=3, sequence=2, maximum=5 * GBPS)]


@pytest.mark.parametrize("field", ["sequence", "up"])
def test_negative_rates_are_no_messages(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RateGrant(**({"job": 1, "sequence": 1, "up": 1, "down": 1} | {field: -1}))  # type: ignore[arg-type]
