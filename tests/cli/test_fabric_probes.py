"""What ``ina doctor`` finds out about the clock and about the fabric."""

from pathlib import Path

import pytest

from inanet.cli import coordinators, fabric_probes
from inanet.cli.findings import Finding
from inanet.control.exits import Failure
from inanet.control.standing import JobState, NodeState, Overview


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
    (well,) = asked(monkeypatch, tmp_path, Overview(epoch=1, nodes=(node,)))
    assert well == Finding("fabric", "OK", "127.0.0.1:7400 knows 1 nodes and 0 jobs")
    job = JobState(name="train", state="forming", ranks={}, missing=("rank 1",))
    late = node.model_copy(update={"age": 60.0})
    (ill,) = asked(monkeypatch, tmp_path, Overview(epoch=1, nodes=(late,), jobs=(job,), missing=("a1",)))
    assert ill.status == "WARN"
    assert ill.detail.endswith("missing: a1; silent: a0; job train waits for rank 1")
