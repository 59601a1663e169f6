"""The demo and its fabric with the real daemons."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from inanet.demo import report
from inanet.demo.fabric import Fabric, python, python_environment
from inanet.demo.interrupts import Interrupted, Interrupts
from inanet.demo.run import Options, Session, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 40


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    """Neither a directory nor shared memory of a fabric outlives the test that started it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(Path("/dev/shm").iterdir())
    yield
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/dev/shm").iterdir()) <= before


class Watch:
    """Progress that nobody sees; ``at(step, action)`` runs an action once all workers have got that far."""

    def __init__(self):
        self.actions = []

    def at(self, step, action):
        self.actions.append((step, action))

    def stage(self, text):
        pass

    def step(self, step, steps, loss):
        while self.actions and step >= self.actions[0][0]:
            self.actions.pop(0)[1]()


@pytest.fixture(scope="module")
def undisturbed():
    """A run on a fabric that loses nothing."""
    return run(Options(steps=STEPS), Watch(), lambda: None)


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
    assert answer["accuracy"] > 0.8
    assert abs(answer["accuracy"] - answer["baseline_accuracy"]) < 0.01
    assert answer["max_weight_difference"] <= answer["bound"]
    assert answer["in_network_share"] == pytest.approx(0.5)
    assert answer["bytes_into_ps"] < 0.7 * answer["bytes_without_ina"]
    assert answer["loss"] == undisturbed.verdict.loss


@pytest.mark.parametrize("seed", [1, 2])
def test_impairments_on_every_hop_change_no_bit(undisturbed, seed):
    watch = Watch()
    options = Options(steps=STEPS)
    with Fabric(4, 2, impair=0.05, seed=seed) as fabric:
        session = Session(fabric, options, watch, lambda: None)
        session.prepare()
        digests, _ = session.train()
        assert fabric.shutdown() == []
        drops = {reason for counters in fabric.stats().values() for reason in counters.drops}
        resent = sum(counters.retransmissions for counters in fabric.stats().values())
    assert set(digests) == {undisturbed.verdict.weights}
    assert resent > 0
    assert {"injected", "bad_checksum"} <= drops


@pytest.mark.parametrize(
    "nodes",
    [
        [("ps", None), *((f"worker{k}", "ps") for k in range(4))],
        [
            ("ps", None),
            ("agg0", "ps"),
            ("agg1", "agg0"),
            ("agg2", "agg1"),
            ("worker0", "agg2"),
            ("worker1", "agg2"),
            ("worker2", "agg1"),
            ("worker3", "ps"),
        ],
    ],
    ids=["no aggregators", "three levels"],
)
def test_the_tree_changes_no_bit(undisturbed, nodes):
    with Fabric(topology=nodes) as fabric:
        session = Session(fabric, Options(steps=STEPS), Watch(), lambda: None)
        session.prepare()
        digests, _ = session.train()
    assert set(digests) == {undisturbed.verdict.weights}


def test_a_killed_aggregator_changes_no_bit(undisturbed):
    watch = Watch()
    with Fabric(4, 2) as fabric:
        watch.at(STEPS // 4, fabric.processes["agg0"].kill)
        session = Session(fabric, Options(steps=STEPS), watch, lambda: None)
        session.prepare()
        digests, _ = session.train()
        assert fabric.processes["agg0"].poll() == -signal.SIGKILL
    assert set(digests) == {undisturbed.verdict.weights}


def test_a_killed_and_restarted_ps_changes_no_bit(undisturbed):
    watch = Watch()
    with Fabric(4, 2) as fabric:

        def crash():
            fabric.processes["ps"].kill()
            fabric.restart("ps")

        watch.at(STEPS // 4, crash)
        session = Session(fabric, Options(steps=STEPS), watch, lambda: None)
        session.prepare()
        digests, _ = session.train()
        assert watch.actions == []
    assert set(digests) == {undisturbed.verdict.weights}


def test_an_interrupt_while_training_leaves_nothing():
    watch = Watch()
    with Interrupts() as interrupts:
        watch.at(5, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted, match="SIGINT"):
            run(Options(steps=2000), watch, interrupts.check)
