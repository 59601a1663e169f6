"""Ranks of a sparse job in a fabric: what is wrong with a file, an address or a coordinator is said before anything is sent."""

import socket
from pathlib import Path
from typing import Any

import pytest

import inanet
from inanet.config.control import Control
from inanet.config.file import ConfigError
from inanet.errors import FabricError
from inanet.service.addresses import AddressError

COORDINATOR = 'coordinator = "unix:/nowhere/nobody.sock"'


def write(folder: Path, job: str = "", control: str = COORDINATOR, more: str = "") -> Path:
    path = folder / "job.toml"
    path.write_text(
        f'[job]\nsystem = "zebra"\nname = "clicks"\nworld = 2\n{job}\n[control]\n{control}\n{more}\n'
    )
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"job": "width = 256"}, "job.width"),
        ({"job": 'optimiser = "adam"'}, "job.optimiser"),
        ({"job": 'secret = "00112233445566ff"'}, "job.secret"),
        ({"job": 'hot = "hot.txt"'}, "cannot read .*hot.txt: No such file or directory"),
        ({"job": 'hot = "twice.txt"'}, "a key is hot twice"),
        ({"job": 'hot = "words.txt"'}, "words.txt has something else than keys, one to a line"),
        ({"job": "shards = 17"}, "job.shards"),
        ({"control": 'token = "short"'}, "control.coordinator"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_key(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    (tmp_path / "twice.txt").write_text("4\n5\n4\n")
    (tmp_path / "words.txt").write_text("four\n")
    with pytest.raises(ConfigError, match=says):
        inanet.join_sparse(write(tmp_path, **changes), 0)


@pytest.mark.parametrize(
    "line", ["-1", "+5", "1.0", "1_000", "0x7", "4 5", "18446744073709551616", "9" * 5000, "\u0664"]
)
def test_a_line_that_is_no_key_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "hot.txt").write_text(f"18446744073709551615\n\n{line}\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"hot.txt has something else than keys.*: line 3 is '.*', not an integer"
    ):
        inanet.join_sparse(write(tmp_path, job='hot = "hot.txt"'), 0)


def test_a_rank_that_the_job_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ranks 0 to 1, not 2"):
        inanet.join_sparse(write(tmp_path), 2)


def test_an_address_that_the_others_cannot_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    control = 'coordinator = "192.0.2.1:7400"\ntoken_file = "token"\ninsecure = true'
    path = write(tmp_path, control=control)
    with pytest.raises(AddressError, match=r"would advertise 127\.0\.0\.1"):
        inanet.join_sparse(path, 0)


def test_a_coordinator_that_is_not_there_is_an_error_with_its_address_and_frees_the_socket(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    control = f'{COORDINATOR}\njoin_timeout = "50 ms"'
    path = write(tmp_path, control=control, more=f'[node]\nlisten = "127.0.0.1:{port}"')
    with pytest.raises(FabricError, match=r"connecting to unix:.*nobody.sock"):
        inanet.join_sparse(path, 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize("gone", ["secret", "tls_keys"])
def test_a_file_that_has_vanished_since_it_was_looked_at_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    def vanished(_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "token")

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(Control, gone, vanished)
    with pytest.raises(FileNotFoundError) as caught:
        inanet.join_sparse(write(tmp_path, more=f'[node]\nlisten = "127.0.0.1:{port}"'), 0)
    # the error is still held, and with it whatever it has passed
    assert caught.value.filename == "token"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", port))
