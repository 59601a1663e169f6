"""The journal gets entries with fields, and a message for people."""

import io
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from inanet.service import journal
from inanet.service.logs import configure


def decoded(data: bytes) -> dict[str, str]:
    """Fields of an entry in the native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL)."""
    found = {}
    while data:
        line, _, data = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            length = int.from_bytes(data[:8], "little")
            value, data = data[8 : 8 + length], data[8 + length :]
            assert data[:1] == b"\n"
            data = data[1:]
        found[name.decode()] = value.decode()
    return found


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What listens instead of journald, and takes one entry after the other."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "socket"))
        end.setblocking(False)
        monkeypatch.setattr(
            journal.JournalEntries.__init__, "__defaults__", (str(tmp_path / "socket"), "ina-agg")
        )
        yield end


def logging_to(stream: io.TextIOWrapper) -> None:
    """As a service whose stderr is read by the journal."""
    status = os.fstat(stream.fileno())
    configure("info", stream=stream, environ={"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})


def test_an_event_is_an_entry_with_its_keys_as_fields(tmp_path: Path, journald: socket.socket) -> None:
    with (tmp_path / "stderr").open("w+") as stream:
        logging_to(stream)
        log = structlog.get_logger().bind(role="agg", node="a0")
        log.warning("packets dropped", reason="bad_tag", job="train", peer="10.0.0.7", **{"2nd-key": 3})
        try:
            _ = 1 // 0
        except ZeroDivisionError as error:
            log.error("broke", exc_info=error)
        assert stream.tell() == 0
    first, second = decoded(journald.recv(4096)), decoded(journald.recv(4096))
    assert first == {
        "MESSAGE": "packets dropped: bad_tag (job train, peer 10.0.0.7, 2nd-key 3)",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "ina-agg",
        "EVENT": "packets dropped",
        "ROLE": "agg",
        "NODE": "a0",
        "JOB": "train",
        "PEER": "10.0.0.7",
        "REASON": "bad_tag",
        "ND_KEY": "3",
    }
    assert second["MESSAGE"].startswith("broke\nTraceback (most recent call last):\n")
    assert second["PRIORITY"] == "3"


def test_what_the_journal_does_not_take_goes_to_stderr_with_its_priority(
    tmp_path: Path, journald: socket.socket
) -> None:
    journald.close()
    with (tmp_path / "stderr").open("w+") as stream:
        logging_to(stream)
        structlog.get_logger().error("ended by an error", reason="no port")
        stream.seek(0)
        assert stream.read() == '<3>level=error event="ended by an error" reason="no port"\n'


def test_every_line_of_a_text_has_the_priority() -> None:
    assert journal.prioritised("one\ntwo", "error") == "<3>one\n<3>two"
