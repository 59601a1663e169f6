from functools import partial

import pytest

from inanet.papers import netreduce, netreduce_machines
from inanet.papers.entries import ENTRIES
from inanet.papers.registry import find


def test_figure_7_says_what_holds_and_why_not(monkeypatch):
    # half of the messages
    monkeypatch.setattr(netreduce, "several", partial(netreduce_machines.several, 12))
    outcome = netreduce.fig7()
    by_name = {claim.name: claim for claim in outcome.claims}
    assert {claim.name for claim in outcome.claims if not claim.holds} == {
        "GB/s within a machine from which parallel NetReduce is always fastest",
        "ms that steps of 100 us add to parallel NetReduce",
    }
    assert all(claim.reason for claim in outcome.claims if not claim.holds)
    # bytes alone allow a third and three sevenths
    for hosts, most in ((4, 100 / 3), (8, 300 / 7)):
        claim = by_name[f"time below ring all-reduce's with {hosts} hosts, per cent"]
        assert claim.holds
        assert claim.ours < most
    packets, several = outcome.tables[-2:]
    for _, _, found, expected in packets.rows:
        # headers are 7.4 % of a frame, and a window has to fill
        assert 1.07 < found / expected < 1.15
    times = {name: (found, expected) for name, found, expected in several.rows}
    assert all(1.07 < found / expected < 1.31 for found, expected in times.values())
    assert min(times, key=lambda name: times[name]) == "parallel-netreduce"


def test_table_6_in_virtual_time():
    throughput, goodput = netreduce._netreduce()
    assert throughput > 92.5
    # values of a message over its packets on the wire, and over the acknowledgements of the predecessor's
    share = (170 * 1024 - 24) / (170 * (1024 + 44 + 38) + 16 + 4 + 48 + 38)
    assert goodput / throughput == pytest.approx(share, rel=1e-3)


def test_both_are_listed():
    assert {"netreduce-fig7", "netreduce-table6"} <= set(ENTRIES)
    assert find("netreduce-table6").function() is netreduce.table6
