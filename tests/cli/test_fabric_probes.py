"""What ``ina doctor`` finds out about the clock and about the fabric."""

import subprocess
from pathlib import Path

import pytest

from inanet.aio.reachability import Reach
from inanet.cli import address_probes, certificate_probe, coordinators, fabric_probes, peer_probes
from inanet.cli.findings import Finding
from inanet.messages.registration import JobState, NodeState, Overview
from inanet.service import addresses
from inanet.service.exits import Failure
from inanet.trust import authority
from inanet.trust.certificates import Keys


@pytest.mark.parametrize(
    ("source", "state", "status", "fix"),
    [("tsc", 0, "OK", ""), ("tsc", 5, "WARN", "set-ntp"), ("hpet", 0, "WARN", "clocksource=tsc")],
)
def test_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, state: int, status: str, fix: str
) -> None:
    (tmp_path / "source").write_text(f"{source}\n")
    monkeypatch.setattr(fabric_probes, "CLOCK_SOURCE", tmp_path / "source")
    monkeypatch.setattr(fabric_probes, "_clock_state", lambda: state)
    (found,) = fabric_probes.clock()
    assert (found.name, found.status) == ("clock", status)
    assert source in found.detail
    assert fix in found.fix


def test_the_clock_of_this_machine_can_be_asked() -> None:
    (found,) = fabric_probes.clock()
    assert found.status in ("OK", "WARN")


def asked(monkeypatch: pytest.MonkeyPatch, directory: Path, answer: Overview | None) -> list[Finding]:
    """What the probe says if the coordinator of a file in ``directory`` gives this answer, or none."""

    def ask(self: coordinators.Target, seconds: float) -> Overview:
        assert self.address == "127.0.0.1:7400"
        if answer is None:
            raise Failure("no answer from the coordinator: connecting to 127.0.0.1:7400: nothing within 2 s")
        return answer

    monkeypatch.setattr(coordinators, "SYSTEM_DIRECTORY", directory)
    monkeypatch.setattr(coordinators.Target, "ask", ask)
    here = Reach("127.0.0.1", "unicast", "239.195.255.255:7401", heard=True)
    monkeypatch.setattr(coordinators.Target, "reach", lambda self, seconds: here)
    return list(fabric_probes.fabric())


def test_the_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, tmp_path, None) == []
    (tmp_path / "agg.toml").write_text("[control]\n")
    (broken,) = asked(monkeypatch, tmp_path, None)
    assert (broken.status, "cannot tell which daemon" in broken.detail) == ("FAIL", True)
    (tmp_path / "agg.toml").write_text('[control]\ncoordinator = "127.0.0.1:7400"\n')
    (silent,) = asked(monkeypatch, tmp_path, None)
    assert (silent.status, "start ina-manager" in silent.fix) == ("WARN", True)
    node = NodeState(name="a0", role="aggregator", registered=True, serves=True, counters={})
    well, names, path = asked(monkeypatch, tmp_path, Overview(epoch=1, nodes=(node,)))
    assert (names.status, path.status) == ("OK", "OK")
    assert path.detail == "127.0.0.1:7400 is on this machine: no network between"
    assert well == Finding("fabric", "OK", "127.0.0.1:7400 knows 1 nodes and 0 jobs")
    job = JobState(name="train", state="forming", ranks={}, missing=("rank 1",))
    late = node.model_copy(update={"age": 60.0})
    ill, _, _ = asked(monkeypatch, tmp_path, Overview(epoch=1, nodes=(late,), jobs=(job,), missing=("a1",)))
    assert ill.status == "WARN"
    assert ill.detail.endswith("missing: a1; silent: a0; job train waits for rank 1")


def test_the_fabric_of_a_switch_and_of_a_file_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "switch.toml"
    head, tail = (
        '[node]\nname = "s0"\n[control]\n',
        '[switch]\ntransport = "udp"\naddress = "127.0.0.1"\n',
    )
    file.write_text(head + tail)
    assert asked(monkeypatch, tmp_path, Overview(epoch=1)) == []
    file.write_text(f'{head}coordinator = "127.0.0.1:7400"\n{tail}')
    assert coordinators.target().name == "s0"
    well, *_ = asked(monkeypatch, tmp_path, Overview(epoch=1))
    assert (well.name, well.status) == ("fabric", "OK")
    other = tmp_path / "else" / "w3.toml"
    other.parent.mkdir()
    other.write_text(
        '[node]\nname = "w3"\n[control]\ncoordinator = "127.0.0.1:7400"\n[local]\nsocket = "w3.sock"\n'
    )
    with coordinators.given(str(other)):
        assert coordinators.target().name == "w3"
        assert coordinators.files() == [other]
    assert coordinators.files() == [file]


def test_names_and_ranks_are_used_once() -> None:
    def node(name: str, address: str) -> NodeState:
        return NodeState(
            name=name, role="worker", registered=True, serves=False, address=address, counters={}
        )

    nodes = (node("w0", "10.0.0.1:5"), node("w1", "10.0.0.2:5"))
    job = JobState(name="train", state="running", ranks={"w0": (0, 1), "w1": (2,)})
    (well,) = peer_probes.names(Overview(epoch=1, nodes=nodes, jobs=(job,)), "w0", "10.0.0.1")
    assert well == Finding("names and ranks", "OK", "2 names, 3 ranks, each once")
    twice = job.model_copy(update={"ranks": {"w0": (0, 1), "w1": (1,)}})
    nodes = (*nodes, node("w2", "10.0.0.2:5"))
    seen = Overview(
        epoch=1, nodes=nodes, jobs=(twice,), refused=("rank 1 of job 'x' is on host 'w0' already",)
    )
    away, ill = peer_probes.names(seen, "w0", "10.0.0.9")
    assert (away.name, away.status, away.detail) == (
        "turned away",
        "FAIL",
        "rank 1 of job 'x' is on host 'w0' already",
    )
    assert (ill.status, "RANK" in ill.fix) == ("FAIL", True)
    assert ill.detail == (
        "'w0' is registered at 10.0.0.1:5, and this machine's file "
        "has it at 10.0.0.9; 'w1' and 'w2' both receive at 10.0.0.2:5; rank 1 of job train is on w0 and on w1"
    )


@pytest.mark.parametrize(
    ("downlink", "heard", "status"),
    [("multicast", True, "OK"), ("multicast", False, "FAIL"), ("auto", False, "OK")],
)
def test_the_path_of_multicast(
    monkeypatch: pytest.MonkeyPatch, downlink: str, heard: bool, status: str
) -> None:
    found = Reach("10.0.0.7", downlink, "239.195.255.255:7401", heard)
    monkeypatch.setattr(coordinators.Target, "reach", lambda self, seconds: found)
    monkeypatch.setattr(peer_probes, "owners", lambda: {"127.0.0.1": "lo", "10.0.0.7": "eth7"})
    (finding,) = peer_probes.path(coordinators.Target("10.0.0.1:7400"))
    assert finding.status == status
    assert "from 10.0.0.1:7400 to eth7 (10.0.0.7), group 239.195.255.255:7401" in finding.detail
    assert ("iifname eth7 udp dport 7401" in finding.fix) == (status == "FAIL")

    def silent(self: coordinators.Target, seconds: float) -> Reach:
        raise Failure("no answer")

    monkeypatch.setattr(coordinators.Target, "reach", silent)
    (finding,) = peer_probes.path(coordinators.Target("10.0.0.1:7400"))
    assert (finding.status, finding.detail) == ("WARN", "could not be tried: no answer")


@pytest.mark.parametrize(
    ("listen", "status", "says"),
    [
        (
            "127.0.0.1",
            "FAIL",
            "node.listen is 127.0.0.1:0, which no other machine can reach, and the coordinator is",
        ),
        ("tun3", "WARN", "node.listen is tun3:0, which belongs to tun3, a tunnel or VPN"),
        ("eth1", "WARN", "packets to the coordinator at 10.0.0.1:7400 leave by eth0 (10.0.0.7)"),
        ("eth0", "OK", "can be reached"),
        ("10.0.0.8", "OK", "can be reached"),
    ],
)
def test_addresses_that_were_chosen_by_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str, status: str, says: str
) -> None:
    present = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "192.168.7.7", "tun3": "10.9.0.7"}
    monkeypatch.setattr(coordinators, "SYSTEM_DIRECTORY", tmp_path)
    monkeypatch.setattr(
        addresses, "owners", lambda: {"10.0.0.8": "eth0"} | {owned: name for name, owned in present.items()}
    )
    monkeypatch.setattr(addresses, "_is_tunnel", lambda name: name.startswith("tun"))
    monkeypatch.setattr(address_probes, "_leaving", lambda there: "10.0.0.7")
    (tmp_path / "agg.toml").write_text(
        f'[node]\nlisten = "{listen}"\n'
        '[control]\ninsecure = true\ntoken = "0123456789abcdef"\ncoordinator = "10.0.0.1:7400"\n'
    )
    (found,) = address_probes.chosen()
    assert (found.name, found.status) == ("chosen addresses", status)
    assert says in found.detail
    if status != "OK":
        command = found.fix.partition("   #")[0].removeprefix("sudo ")
        subprocess.run(command, shell=True, check=True)
        (mended,) = address_probes.chosen()
        assert mended.status == "OK", mended


@pytest.mark.parametrize(
    ("listen", "status", "says"),
    [
        ("10.0.0.9:7400", "FAIL", "control.listen is 10.0.0.9:7400, no address of this machine"),
        ("tun3:7400", "WARN", "a tunnel or VPN"),
        ("10.0.0.7:7400", "OK", "can be reached"),
        ("10.0.0.8:7400", "OK", "can be reached"),
        ("127.0.0.1:7400", "OK", "can be reached"),
    ],
)
def test_where_a_coordinator_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str, status: str, says: str
) -> None:
    present = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "tun3": "10.9.0.7"}
    monkeypatch.setattr(coordinators, "SYSTEM_DIRECTORY", tmp_path)
    monkeypatch.setattr(
        addresses, "owners", lambda: {"10.0.0.8": "eth0"} | {owned: name for name, owned in present.items()}
    )
    monkeypatch.setattr(addresses, "_is_tunnel", lambda name: name.startswith("tun"))
    secret = 'insecure = true\ntoken = "0123456789abcdef"'
    (tmp_path / "manager.toml").write_text(f'[fabric]\n[control]\n{secret}\nlisten = "{listen}"\n')
    (found,) = address_probes.chosen()
    assert (found.status, says in found.detail) == (status, True)
    (tmp_path / "manager.toml").write_text("[fabric]\n[control]\nlisen = 1\n")
    (broken,) = address_probes.chosen()
    assert (broken.status, "did you mean 'listen'" in broken.detail) == ("FAIL", True)


@pytest.mark.parametrize(
    ("own", "roles", "days", "status", "detail"),
    [
        ("w0", ("worker", "status"), 99, "OK", "of w0, to be worker, status, until 20"),
        ("w0", ("worker",), 7, "WARN", ": 6 days"),
        ("w0", ("worker",), 0, "FAIL", "it has expired"),
        ("w1", ("worker",), 99, "FAIL", "this node is 'w1'"),
        ("", ("ps",), 99, "OK", "to be ps"),
    ],
)
def test_the_certificate(
    own: str, roles: tuple[str, ...], days: int, status: str, detail: str, tmp_path: Path
) -> None:
    authority.initialise(tmp_path, 100)
    file = authority.issue(tmp_path, "w0", roles=roles, days=days)
    (found,) = certificate_probe.certificate(
        coordinators.Target("x", keys=Keys(str(tmp_path / "ca.pem"), str(file)), name=own)
    )
    assert (found.name, found.status) == ("certificate", status)
    assert detail in found.detail
    assert bool(found.fix) is (status != "OK")


def test_a_certificate_that_is_not_there_or_not_used(tmp_path: Path) -> None:
    assert list(certificate_probe.certificate(coordinators.Target("x"))) == []
    (found,) = certificate_probe.certificate(
        coordinators.Target("x", keys=Keys("ca", str(tmp_path / "no.pem")))
    )
    assert (found.status, "there is no " in found.detail) == ("FAIL", True)
