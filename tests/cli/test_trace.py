"""``ina trace``: merging, and what is counted as hidden. No torch is needed for that."""

import json
from pathlib import Path
from typing import Any

import pytest

from inanet.cli.main import main
from inanet.cli.trace import overlap


def bucket(number: int, step: int, ready: float, sent: float, result: float, rank: int = 0) -> list[Any]:
    """Events of one bucket, microseconds."""
    where = {"pid": rank, "tid": 0, "cat": "bucket", "id": number}
    what = {"step": step, "bucket": number, "bytes": 1024, "sent": sent}
    return [
        {"ph": "b", "name": "bucket", "ts": ready, "args": what, **where},
        {"ph": "n", "name": "sent", "ts": sent, **where},
        {"ph": "e", "name": "bucket", "ts": result, **where},
    ]


def backward(step: int, start: float, end: float, rank: int = 0) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": "backward",
        "pid": rank,
        "tid": 0,
        "ts": start,
        "dur": end - start,
        "args": {"step": step},
    }


class TestOverlap:
    def test_counts_time_on_the_way_once_and_what_backward_hid(self) -> None:
        events = [
            backward(1, 0, 1000),
            # from 100 to 600 and from 500 to 1400: on the way for 1300, 900 of it before the end of backward
            *bucket(1, 1, 0, 100, 600),
            *bucket(2, 1, 400, 500, 1400),
            backward(2, 2000, 3000),
            *bucket(3, 2, 3000, 3000, 3700),
        ]
        (row,) = overlap(events)
        assert row == {
            "rank": 0,
            "steps": 2,
            "buckets": 3,
            "backward_seconds": pytest.approx(1e-3),
            "communication_seconds": pytest.approx(1e-3),
            "hidden": pytest.approx(900 / 2000),
        }

    def test_leaves_out_buckets_without_a_result(self) -> None:
        lost = bucket(1, 1, 0, 100, 600)[:2]
        assert overlap([backward(1, 0, 1000), *lost])[0]["hidden"] == 0.0
        assert overlap([]) == []


class TestCommand:
    def write(self, directory: Path) -> None:
        for rank in (0, 1):
            events = [backward(1, 0, 1000, rank), *bucket(1, 1, 0, 0, 500 * (rank + 1), rank)]
            (directory / f"ddp-rank{rank}.json").write_text(json.dumps({"traceEvents": events}))

    def test_merges_all_ranks(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        traces = tmp_path / "traces"
        traces.mkdir()
        self.write(traces)
        assert main(["trace", str(traces), "-o", str(tmp_path / "job.json"), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["schema"] == 1
        assert [(row["rank"], row["hidden"]) for row in report["ranks"]] == [(0, 1.0), (1, 1.0)]
        events = json.loads((tmp_path / "job.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1}
        assert len(events) == 8

    def test_prints_a_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.write(tmp_path)
        assert main(["trace", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("# rank")
        assert lines[1].split() == ["0", "1", "1", "1.00", "0.50", "100.0%"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [(None, "has no traces"), ("[]", "is no trace: TypeError"), ("{", "is no trace: JSONDecodeError")],
    )
    def test_says_what_is_wrong(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
    ) -> None:
        if text is not None:
            (tmp_path / "a.json").write_text(text)
        assert main(["trace", str(tmp_path)]) == 1
        assert said in capsys.readouterr().err
