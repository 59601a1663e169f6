"""What the links of a topology allow: against the arithmetic by hand."""

import pytest

from inanet.bench import bounds
from inanet.lab.library import topology

FRAGMENTS = 1024 * 1000
#: bits that a shaper counts for them
WIRE = 1000 * 1094 * 8
SEGMENTS = 1448 * 1000
TCP = 1000 * 1514 * 8


def test_overheads_are_those_of_the_framings() -> None:
    assert pytest.approx(1094) == bounds.FRAGMENT * 1024
    assert pytest.approx(1514) == bounds.SEGMENT * 1448


@pytest.mark.parametrize(
    ("name", "links"),
    [
        # four workers into a link four times as fast: as long as one worker needs
        ("star4-fast-aggregator", 1),
        # equal links: the server's is the busiest
        ("star4", 4),
        # four roots share the tensor
        ("star4-four-aggregators", 1),
        # three workers' tensors and the sum into S1
        ("xagg-fig1", 4),
    ],
)
def test_a_tree_takes_as_long_as_its_busiest_link(name: str, links: int) -> None:
    assert bounds.tree(topology(name), FRAGMENTS) == pytest.approx(links * WIRE / 1e9)


def test_one_server_takes_every_tensor() -> None:
    assert bounds.server(topology("star4"), SEGMENTS) == pytest.approx(4 * TCP / 1e9)
    assert bounds.server(topology("star4-fast-aggregator"), SEGMENTS) == pytest.approx(TCP / 1e9)


def test_a_ring_counts_headers_and_the_slowest_worker() -> None:
    assert bounds.ring(topology("star4"), SEGMENTS) == pytest.approx(1.5 * TCP / 1e9)
    late = 2 * 1.448e6 * bounds.FRAGMENT * 8 / 1e9
    # after the late worker came: its own 2(n-1)/n at 1 Gbit/s, or the second half of the slow one's at 500 Mbit/s
    assert bounds.ring(topology("xagg-fig1"), SEGMENTS) == pytest.approx(late + 1.5 * TCP / 1e9)


def test_fig_1_is_four_for_a_ps_and_a_switch_and_three_for_a_tree() -> None:
    fig1 = topology("xagg-fig1-push")
    unit = WIRE / 5e8
    assert bounds.lateness(fig1, FRAGMENTS) == pytest.approx([0, 0, 2 * unit, 0])
    assert bounds.tree(fig1, FRAGMENTS) == pytest.approx(3 * unit)
    segments = FRAGMENTS * bounds.SEGMENT * 8 / 5e8
    assert bounds.server(fig1, FRAGMENTS) == pytest.approx(4 * segments)
    assert bounds.synchronous(fig1, FRAGMENTS) == pytest.approx(2 * unit + 2 * segments)


def test_without_limits_there_is_no_bound() -> None:
    fig1 = topology("xagg-fig1-push")
    free = fig1.model_copy(
        update={"host": tuple(host.model_copy(update={"link": type(host.link)()}) for host in fig1.host)}
    )
    for bound in (bounds.tree, bounds.server, bounds.ring, bounds.synchronous):
        assert bound(free, FRAGMENTS) == 0
