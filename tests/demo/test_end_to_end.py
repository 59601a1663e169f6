"""The demo and its fabric with the real daemons."""

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inanet.data.digits import fetch
from inanet.demo import report
from inanet.demo.run import Options, Session, judge, run
from inanet.launch.counters import total
from inanet.launch.fabric import Fabric
from inanet.launch.interrupts import Interrupted, Interrupts
from inanet.launch.process import python, python_environment
from inanet.training.descent import Recipe
from tests.demo.single import MODES, trained

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 30


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    """No directory of a fabric outlives the test that started it; shared memory has no name anywhere."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []
    assert not [path for path in Path("/dev/shm").iterdir() if "inanet" in path.name]


class Watch:
    """Progress that nobody sees; an action set for a step happens once all workers have got that far."""

    def __init__(self, step=None, action=None):
        self.due = step
        self.action = action
        self.acted_at = None

    def stage(self, text):
        pass

    def step(self, step, steps, loss):
        if self.acted_at is None and self.due is not None and step >= self.due:
            self.acted_at = step
            self.action()


def recipe(mode):
    """Of every training here."""
    return Recipe(parts=4, steps=STEPS, seed=Options().seed, mode=mode)


def train(fabric, mode, watch=None, audited=False):
    """The digests of the workers' weights after a training run through ``fabric``."""
    session = Session(fabric, recipe(mode), watch or Watch(), fabric.require_alive)
    if not Path(session.digits).exists():
        session.prepare()
    digests, _ = session.train()
    if audited:
        verdict, stubborn = session.audit()
        assert judge(verdict, digests) == []
        assert stubborn == []
    return set(digests)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    """Complete before and after every test: whoever kills a daemon starts it again."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("fabric")
        patch.setattr("tempfile.tempdir", str(directory))
        with Fabric(4, 2) as running:
            yield running
        assert list(directory.iterdir()) == []


@pytest.fixture(scope="module")
def undisturbed():
    """What one process makes of the training, by exponent mode."""
    digits = fetch()
    return {mode: {trained(recipe(mode), digits)} for mode in MODES}


def test_the_command(undisturbed):
    done = subprocess.run(
        python("inanet.cli.main", "demo", "--json", "--steps", str(STEPS)),
        env=python_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(report.KEYS) <= set(answer)
    assert answer["ok"] is True
    assert answer["identical_weights"] is True
    assert {answer["weights"]} == undisturbed["prologue"]
    assert answer["accuracy"] > 0.7
    assert abs(answer["accuracy"] - answer["baseline_accuracy"]) < 0.01
    assert 0 < answer["max_weight_difference"] <= answer["bound"]
    assert answer["in_network_share"] == 0.5
    assert 0.5 < answer["bytes_into_ps"] / answer["bytes_without_ina"] < 0.6


def test_neither_the_tree_nor_impairments_on_every_hop_change_a_bit(undisturbed):
    parents = {"agg0": "ps", "agg1": "agg0", "agg2": "agg1"}
    parents |= {"worker0": "agg2", "worker1": "agg2", "worker2": "agg1", "worker3": "ps"}

    def impaired(mode):
        with Fabric(topology=[("ps", None), *parents.items()], impair=0.05, seed=1) as fabric:
            # ends the daemons in good order, too
            return train(fabric, mode, audited=True), fabric.stats()

    # side by side: most of the time is waiting for what was lost
    with ThreadPoolExecutor(len(MODES)) as pool:
        trainings = dict(zip(MODES, pool.map(impaired, MODES), strict=True))
    for mode, (digests, stats) in trainings.items():
        assert digests == undisturbed[mode]
        assert set(stats) == {"ps", *parents}
        for counters in stats.values():
            assert counters.drops["injected"] > 0
            assert counters.drops["duplicate"] > 0
        found = total(stats.values())
        assert found.retransmissions > 0
        assert found.drops["bad_tag"] > 0
        assert found.drops["bad_checksum"] > 0


def test_a_killed_aggregator_changes_no_bit(fabric, undisturbed):
    killed = fabric.processes["agg0"]
    watch = Watch(STEPS // 4, killed.kill)
    assert train(fabric, "prologue", watch) == undisturbed["prologue"]
    assert watch.acted_at < STEPS
    assert killed.poll() == -signal.SIGKILL
    fabric.restart("agg0")


def test_a_killed_and_restarted_ps_changes_no_bit(fabric, undisturbed):
    def crash():
        fabric.processes["ps"].kill()
        fabric.restart("ps")

    watch = Watch(STEPS // 4, crash)
    assert train(fabric, "prologue", watch) == undisturbed["prologue"]
    assert watch.acted_at < STEPS


def test_the_example_of_the_readme(fabric):
    readme = Path(__file__).parents[2] / "README.md"
    section = readme.read_text().split("\n## In your training script\n")[1]
    found = re.search(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert found is not None
    example = found[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", example],
            env=python_environment()
            | {"RANK": str(rank), "WORLD_SIZE": "2", "INA_SOCKET": str(fabric.worker_socket(rank))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert printed[0] == printed[1]
    assert float(printed[0].removeprefix("largest error ")) < 0.01


def test_an_interrupt_while_training_leaves_nothing():
    watch = Watch(5, lambda: signal.raise_signal(signal.SIGINT))
    with Interrupts() as interrupts, pytest.raises(Interrupted, match="SIGINT"):
        run(Options(workers=2, steps=2000), watch, interrupts.check)
    assert watch.acted_at is not None
