"""Table 1's ends and its entry; no figure is asserted."""

import threading

import pytest

from inanet.papers import netreduce_transports
from inanet.papers.netreduce_ends import MESSAGE, open_end
from inanet.papers.netreduce_transports import Found, measure, table1

COUNT = 7


@pytest.mark.parametrize("way", ["tcp", "udp", "roce-udp"])
def test_two_ends_stream_and_bounce(way: str) -> None:
    near = open_end(way, 1)
    far = open_end(way, 1, near.port)
    try:
        if way != "tcp":
            near.join(far.port)

        def answer() -> None:
            far.take(COUNT)
            far.give_back(3)

        far_side = threading.Thread(target=answer)
        far_side.start()
        if way == "tcp":
            near.join(far.port)
        near.stream(COUNT)
        sent = near.sent
        assert len(near.bounce(3)) == 3
        far_side.join(20.0)
        assert not far_side.is_alive()
        # headers of packets and the messages themselves, no more than once
        assert COUNT * MESSAGE <= sent < 1.15 * COUNT * MESSAGE
    finally:
        near.close()
        far.close()


def test_the_far_end_is_another_process_and_ends() -> None:
    found, skipped = measure(("tcp",), messages=4, bounces=4, repetitions=1)
    assert not skipped
    assert found["tcp"].goodput > 0
    assert found["tcp"].rtt > 0


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="there are roce-raw, roce-udp, tcp, udp"):
        open_end("carrier-pigeon", 1)


def test_claims_say_why_they_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "roce-udp": Found(2.2e9, 2e9, 1.0, 50e-6),
        "tcp": Found(20e9, 20e9, 1.0, 25e-6),
        "udp": Found(1.0e9, 0.9e9, 1.0, 25e-6),
    }
    missing = "roce-raw was not measured: raw IPv4 needs CAP_NET_RAW."
    monkeypatch.setattr(netreduce_transports, "measure", lambda **_: (found, [missing]))
    outcome = table1()
    assert missing in outcome.notes
    claims = {claim.name.partition(",")[0]: claim for claim in outcome.claims}
    held = claims["throughput of roce-udp over packets by system call (paper: over parallel DMA)"]
    assert held.ours == pytest.approx(2.2)
    assert (held.holds, held.reason) == (True, "")
    lost = claims["round trip of 1 KB"]
    assert (lost.ours, lost.holds) == (2.0, False)
    assert "wait in the kernel" in lost.reason
