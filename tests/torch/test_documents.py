"""The examples of the README and of docs/pytorch.md, as they stand there, under torchrun's engine."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

from inanet.launch.fabric import Fabric
from tests.torch.launch import output, torchrun
from tests.torch.ranks import Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


def example(document: str, marker: str, path: Path) -> Path:
    """The fenced block right after ``<!-- marker -->``, as a file."""
    text = (ROOT / document).read_text()
    found = re.search(rf"^<!-- {marker} -->\n+```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{document} has no example after <!-- {marker} -->"
    path.write_text(found[1])
    return path


@pytest.fixture
def engine(torch_fabric: Fabric, tmp_path: Path) -> Ranks:
    """One process beside an agent, for the launcher."""
    return Ranks([torch_fabric.worker_socket(0)], tmp_path)


def test_the_example_of_the_readme(engine: Ranks, tmp_path: Path) -> None:
    script = example("README.md", "torch", tmp_path / "train.py")
    engine.run(torchrun, script, 2, 0, {"INA_REQUIRE": "1"}, None)
    lines = re.findall(r"^rank (\d) of 2: loss (\S+)$", output(script), re.MULTILINE)
    assert sorted(rank for rank, _ in lines) == ["0", "1"]
    assert all(float(loss) < 0.1 for _, loss in lines)


def test_a_killed_rank_the_restart_and_the_checkpoint(engine: Ranks, tmp_path: Path) -> None:
    results = []
    for name, killed_at in (("whole", None), ("killed", 25)):
        directory = tmp_path / name
        directory.mkdir()
        script = example("docs/pytorch.md", "resume", directory / "resume.py")
        environment = {"INA_REQUIRE": "1", "CHECKPOINT": str(directory / "checkpoint.pt")}
        engine.run(torchrun, script, 3, 1, environment, killed_at)
        results.append(
            re.findall(r"^rank (\d) began at step (\d+), weights (\S+)$", output(script), re.MULTILINE)
        )
    whole, killed = results
    assert sorted((rank, step) for rank, step, _ in whole) == [("0", "0"), ("1", "0"), ("2", "0")]
    # the last checkpoint before step 25 was that of step 20
    assert sorted((rank, step) for rank, step, _ in killed) == [("0", "20"), ("1", "20"), ("2", "20")]
    # exponents are agreed anew in every round, so not even the restart shows in the bits
    assert {weights for _, _, weights in whole + killed} == {whole[0][2]}
