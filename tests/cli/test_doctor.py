"""``ina doctor``: what it finds on this machine, and on machines that lack something."""

import errno
import json
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from inanet.cli import doctor, host_probes, network_probes
from inanet.cli.findings import Finding, examine
from inanet.cli.main import main
from inanet.phy import interface
from inanet.service import addresses, kernel_cache


def only(findings: Any) -> Finding:
    """The finding, if it is one."""
    (finding,) = findings
    assert isinstance(finding, Finding)
    return finding


def test_json_has_every_probe_and_a_fix_for_what_is_not_ok(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["ok"] == (code == 0)
    names = [finding["name"] for finding in report["findings"]]
    expected = [
        "kernel",
        "python",
        "packages",
        "extras",
        "capabilities",
        "processors",
        "memfd",
        "process memory",
        "kernel cache",
    ]
    expected += ["receive buffer", "send buffer", "udp segmentation", "multicast", "addresses", "host name"]
    assert set(expected) <= set(names)
    for finding in report["findings"]:
        assert finding["status"] in ("OK", "WARN", "FAIL")
        assert (finding["status"] == "OK") == (finding["fix"] == "")
        assert "could not be found out" not in finding["detail"]


def test_the_table_has_a_line_for_each_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("a", "OK", "fine"), Finding("long name", "FAIL", "bad", "mend it")]
    monkeypatch.setattr(doctor, "PROBES", (lambda: findings,))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "OK    a          fine",
        "FAIL  long name  bad",
        "                 fix: mend it",
    ]


def test_warnings_are_no_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBES", (lambda: [Finding("a", "WARN", "slow", "mend it")],))
    assert main(["doctor"]) == 0


def test_a_probe_that_breaks_is_a_warning() -> None:
    def broken() -> list[Finding]:
        raise OSError(2, "No such file or directory", "/proc/x")

    finding = only(examine([broken]))
    assert (finding.name, finding.status) == ("broken", "WARN")
    assert "/proc/x" in finding.detail


@pytest.mark.parametrize(
    ("release", "status"), [("6.1.0-13-amd64", "OK"), ("4.19.0", "WARN"), ("weird", "FAIL")]
)
def test_kernels(monkeypatch: pytest.MonkeyPatch, release: str, status: str) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert only(host_probes.kernel()).status == status


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "msgpack":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    finding = next(iter(host_probes.packages()))
    assert (finding.status, finding.fix) == ("FAIL", f"{sys.executable} -m pip install msgpack")


def test_one_processor_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert only(host_probes.processors()).status == "WARN"


def test_the_kernel_cache_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "not" / "yet"))
    assert only(host_probes.kernel_cache()).detail == f"{tmp_path}/not/yet is writable"
    monkeypatch.setattr(kernel_cache, "writable", lambda place: place.name == "numba")
    assert only(host_probes.kernel_cache()).status == "WARN"
    monkeypatch.setattr(kernel_cache, "writable", lambda place: False)
    finding = only(host_probes.kernel_cache())
    assert finding.status == "FAIL"
    assert "NUMBA_CACHE_DIR" in finding.fix


def test_a_kernel_cache_that_will_be_cleared_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "inanet-kernels-7"))
    finding = only(host_probes.kernel_cache())
    assert finding.status == "WARN"
    assert "compiled again" in finding.detail
    assert finding.fix.startswith("export NUMBA_CACHE_DIR=")


def test_no_shared_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert only(host_probes.memfd()).status == "FAIL"


class StingySocket(socket.socket):
    """A socket whose buffers stay at what an untuned kernel grants, and which knows no segmentation."""

    def getsockopt(self, level: int, option: int, *rest: Any) -> Any:
        """The doubled 208 KiB of a kernel with default limits."""
        return 2 * 212_992

    def setsockopt(self, level: int, option: int, *rest: Any) -> None:
        """Refuse UDP_GRO and multicast."""
        if level in (17, socket.IPPROTO_IP):
            raise OSError(92, "Protocol not available")


def test_small_buffers_and_old_stacks_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", StingySocket)
    receive, send = network_probes.buffers()
    assert (receive.status, send.status) == ("WARN", "OK")
    assert receive.fix.startswith("sudo sysctl -w net.core.rmem_max=4194304")
    assert "208 KiB of 4 MiB" in receive.detail
    assert only(network_probes.segmentation()).status == "WARN"
    assert only(network_probes.multicast()).status == "WARN"


def test_an_interface_with_a_small_mtu_is_named(tmp_path: Path) -> None:
    for name, flags, size in (
        ("eth0", 0x1003, 1500),
        ("eth1", 0x1003, 1079),
        ("lo", 0x9, 1000),
        ("off", 0x1002, 68),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(f"{flags:#x}\n")
        (tmp_path / name / "mtu").write_text(f"{size}\n")
    small, fine = network_probes.mtu(tmp_path)
    assert (small.status, fine.detail) == ("WARN", "eth0 1500")
    assert "eth1 has 1079 bytes, a packet needs 1080" in small.detail


def test_addresses_chosen_by_mistake_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"lo": "127.0.0.1", "wg0": "10.9.0.2", "eth0": "10.0.0.1"}
    monkeypatch.setattr(addresses, "owners", lambda: {owned: name for name, owned in present.items()})
    monkeypatch.setattr(addresses, "_is_tunnel", lambda name: name == "wg0")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    good, tunnel, name = network_probes.own_addresses()
    assert (good.status, good.detail) == ("OK", "for node.listen: eth0 10.0.0.1")
    assert (tunnel.status, "wg0 10.9.0.2" in tunnel.detail) == ("WARN", True)
    assert (name.status, name.fix) == ("WARN", 'in the configuration: listen = "eth0"')
    monkeypatch.setattr(addresses, "owners", lambda: {"127.0.0.1": "lo"})
    alone, name = network_probes.own_addresses()
    assert (alone.status, name.status) == ("WARN", "WARN")


@pytest.mark.parametrize(
    ("code", "scope", "advice"),
    [
        (errno.EPERM, "1\n", "kernel.yama.ptrace_scope"),
        (errno.EPERM, "0\n", "SYS_PTRACE"),
        (errno.ENOSYS, "", "seccomp"),
    ],
)
def test_ranks_that_cannot_read_each_other_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, scope: str, advice: str
) -> None:
    yama = tmp_path / "ptrace_scope"
    if scope:
        yama.write_text(scope)
    monkeypatch.setattr(host_probes, "_YAMA", yama)
    monkeypatch.setattr(host_probes, "_read", lambda *_: code)
    finding = only(host_probes.process_memory())
    assert finding.status == "WARN"
    assert os.strerror(code) in finding.detail
    assert advice in finding.fix


def test_an_interface_that_does_not_merge_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"lo": (False, True), "eth0": (True, True), "eth1": (True, False), "eth2": (True, None)}
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(there, 1)))
    monkeypatch.setattr(interface, "is_hardware", lambda name: there[name][0])
    monkeypatch.setattr(interface, "merges", lambda _, name: there[name][1])
    finding = only(network_probes.merging())
    assert finding.status == "WARN"
    assert finding.fix == "sudo ethtool -K eth1 gro on"


def test_a_bridge_that_floods_multicast_is_named(tmp_path: Path) -> None:
    for name, snooping in (("br0", "0"), ("br1", "1")):
        (tmp_path / name / "bridge").mkdir(parents=True)
        (tmp_path / name / "bridge" / "multicast_snooping").write_text(f"{snooping}\n")
    (tmp_path / "eth0").mkdir()
    flooding, fine = network_probes.flooding(tmp_path)
    assert (flooding.status, fine.status) == ("WARN", "OK")
    assert flooding.detail.startswith("br0")
    assert "br0" in flooding.fix
