"""'ina report' has what a bug report needs, and no secret of the fabric."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from inanet.cli.main import main
from inanet.trust import authority

TOKEN = "0123456789abcdef0123456789abcdef"
OTHER = "another secret of twenty-odd letters"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose logs quote a token and a key."""
    etc = tmp_path / "etc"
    etc.mkdir()
    for module in ("inanet.cli.report", "inanet.cli.coordinators", "inanet.config.daemons"):
        monkeypatch.setattr(f"{module}.SYSTEM_DIRECTORY", etc)
    authority.initialise(etc, 1)
    key = authority.issue(etc, "w0", roles=("worker",), days=1).read_text()
    (etc / "token").write_text(TOKEN + "\n")
    (etc / "worker.toml").write_text(
        '[node]\nname = "w0"\n[control]\ncoordinator = "127.0.0.1:1"\n'
        'token_file = "$CREDENTIALS_DIRECTORY/token"\n[local]\nsocket = "/run/w.sock"\n'
    )
    (etc / "agg.toml").write_text(f'[control]\ncoordinator = "127.0.0.1:1"\ntoken = "{OTHER}"  # mine\n')
    tools = tmp_path / "tools"
    tools.mkdir()
    (tmp_path / "said").write_text(f"w0 ina-worker: refused: token {TOKEN}\n{OTHER}\n{key}\n")
    for name in ("journalctl", "systemctl"):
        (tools / name).write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr("inanet.cli.report.PROBES", ())
    return tmp_path


def test_a_report_has_everything_but_secrets(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(host / "r.tar.gz")]) == 0
    assert "look at it before you send it" in capsys.readouterr().out
    assert (host / "r.tar.gz").stat().st_mode & 0o777 == 0o600
    with tarfile.open(host / "r.tar.gz") as archive:
        parts = {
            member.name.removeprefix("inanet-report/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
        }
    assert {
        "versions.json",
        "config/worker.toml",
        "doctor.json",
        "fabric.json",
        "journal.txt",
        "units.txt",
    } <= set(parts)
    everything = "\n".join(parts.values())
    for secret in (TOKEN, OTHER, "PRIVATE KEY"):
        assert secret not in everything
    assert 'token = "<removed>"' in parts["config/agg.toml"]
    assert 'name = "w0"' in parts["config/worker.toml"]
    assert "w0 ina-worker: refused: token <removed>" in parts["journal.txt"]
    assert "numpy" in json.loads(parts["versions.json"])["packages"]
    assert parts["fabric.json"].startswith("not there: no answer from the coordinator")


def test_a_file_that_cannot_be_written_is_told(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(host / "nowhere" / "r.tar.gz")]) == 1
    assert "cannot write" in capsys.readouterr().err
