"""``ina bench xdp``: small runs of every part, and how marks are judged."""

import pytest

from inanet.bench import hop, xdp, xdp_results
from inanet.bench.veth import Cable
from inanet.cli.main import main
from inanet.proto.tree.engine import Count
from inanet.service.exits import Exit, Failure
from inanet.wire.xagg import decode
from inanet.xdp.attach import why_not
from inanet.xdp.build import compiler_release
from inanet.xdp.memory import KernelCount, Mode
from tests.xdp.conftest import lacking

FRAGMENTS = 310


@pytest.fixture
def privileged() -> None:
    """Skips where BPF programs cannot be loaded, or namespaces not made."""
    reason = why_not()
    if reason is not None:
        lacking(reason)


def test_contributions_are_packets_of_the_framing() -> None:
    rows = hop.contributions(2, 5)
    for fragment, row in enumerate(rows):
        packet = decode(row.tobytes(), hop.KEY)
        assert (packet.host, packet.gradient, packet.round) == (4, fragment, hop.ROUND)


@pytest.mark.privileged("makes network namespaces, loads BPF programs")
@pytest.mark.parametrize("mode", ["native", "generic"])
def test_a_hop_in_the_kernel(privileged: None, mode: Mode) -> None:
    with Cable() as cable, xdp.in_kernel(cable, FRAGMENTS, mode) as (memory, row):
        children = xdp.Children(cable, FRAGMENTS)
        try:
            assert children.round() > 0
            hop.reopen(memory, row)
            latency = xdp._latencies(children, 3)
            assert 0 < latency["p50"] <= latency["p99"]
            hop.reopen(memory, row)
            memory.tables["routes"][0, 0]["up_limit"] = 0
            assert children.add(memory, row) > 0
        finally:
            children.close()
        counts = memory.kernel_counts()
        assert counts[KernelCount.FORWARDED] == FRAGMENTS + 3
        assert counts[Count.COMPLETED] == 2 * FRAGMENTS + 3
        assert counts[KernelCount.PASSED] == 0


@pytest.mark.privileged("makes network namespaces")
def test_a_hop_as_a_process(privileged: None) -> None:
    with Cable() as cable, xdp.as_process(cable, FRAGMENTS, "udp"):
        children = xdp.Children(cable, FRAGMENTS)
        try:
            for _ in range(2):
                assert children.round() > 0
        finally:
            children.close()


@pytest.mark.privileged("makes network namespaces")
def test_a_hop_over_tcp(privileged: None) -> None:
    with Cable() as cable, xdp.as_process(cable, FRAGMENTS, "tcp"):
        tcp = xdp.TcpHop(cable, FRAGMENTS)
        try:
            assert tcp.round() > 0
            assert tcp.round(1) > 0
        finally:
            tcp.close()


@pytest.mark.privileged("makes network namespaces, loads BPF programs")
@pytest.mark.parametrize("path", xdp_results.PATHS)
def test_results_of_every_path_arrive(privileged: None, path: str) -> None:
    found = xdp_results.results_path(path, FRAGMENTS, 0.01, merged=path != "udp")
    assert found["gbps"] > 0
    assert found["cpu_s_per_gb"] >= 0


@pytest.mark.privileged("loads BPF programs")
def test_the_program_alone(privileged: None) -> None:
    if compiler_release() is None:
        with pytest.raises(xdp.NotMeasured, match="clang is not installed"):
            xdp.program_alone(100, 1, (32,))
        return
    found = xdp.program_alone(100, 1, (320,))
    assert list(found) == ["320"]
    assert found["320"] > 0


def test_marks() -> None:
    result = {
        "ns_per_packet": {"256": 149.0},
        "gbps": {"native": 7.0},
        "cpu_s_per_gb": {"native": 0.5, "generic": 0.4, "tcp_agg_1k": 2.0},
        "latency_us": {"native": {"p50": 5.0, "p99": 9.0}, "tcp_agg_1k": {"p50": 10.0, "p99": 10.0}},
        "deploy_seconds": {"precompiled": 0.2, "compiled": None},
    }
    met = {mark["name"]: mark["met"] for mark in xdp.judge(result)}
    assert met["ns per packet, 256 values"] is True
    assert met["Gbps native"] is False
    assert met["Gbps generic"] is None
    assert met["seconds to deploy, compiled"] is None
    assert met["CPU of TCP-Agg over native"] is True
    assert met["CPU of generic over the lowest of the others"] is True
    result["cpu_s_per_gb"]["udp"] = 0.3
    assert {mark["name"]: mark["met"] for mark in xdp.judge(result)}[
        "CPU of generic over the lowest of the others"
    ] is False
    assert met["latency p50, native over TCP-Agg"] is True
    assert met["latency p99, native over TCP-Agg"] is False
    assert met["latency p99, generic over TCP-Agg"] is None


def test_without_the_privilege(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise xdp.Unavailable("permission: without CAP_BPF")

    monkeypatch.setattr(xdp, "load", refuse)
    monkeypatch.setattr(xdp, "_background", lambda: 0.0)
    with pytest.raises(Failure, match="XDP cannot be used here: permission") as refused:
        xdp.run(1, 0.01, 2, 1)
    assert refused.value.code == Exit.PERMISSION
    assert main(["bench", "xdp"]) == 4

    def lacks(*_: object) -> None:
        raise xdp.Unavailable("no libbpf: it is not installed")

    monkeypatch.setattr(xdp, "load", lacks)
    with pytest.raises(Failure, match="no libbpf") as lacking_it:
        xdp.available()
    assert lacking_it.value.code == Exit.FAILED
