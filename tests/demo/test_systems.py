"""The demo with a system that sums in a switch: another fabric, the same bits, the same report."""

import json
import subprocess

import pytest

from inanet.data.digits import fetch
from inanet.demo import report
from inanet.launch.process import python, python_environment
from inanet.training.descent import Recipe
from tests.demo.single import trained

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WORKERS, STEPS, SEED = 2, 5, 3


@pytest.mark.parametrize(
    ("system", "impair"), [("switchml", 0.0), ("a2tp", 0.01), ("goat", 0.0), ("netreduce", 0.0)]
)
def test_the_command_with_a_switch(system, impair):
    arguments = {"system": system, "workers": WORKERS, "steps": STEPS, "seed": SEED, "impair": impair}
    options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        python("inanet.cli.main", "demo", "--json", *options),
        env=python_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(report.KEYS) <= set(answer)
    assert answer["system"] == system
    assert answer["weights"] == trained(Recipe(parts=WORKERS, steps=STEPS, seed=SEED), fetch())
    assert answer["slot_collisions"] == 0
    if impair:
        # the PS hears of every fragment, and of more where contributions were lost
        assert 0 < answer["in_network_share"] <= 0.5
        assert answer["drops"]["injected"] > 0
    elif system == "goat":
        # three switches share the gradient's sub-models, and the PS has what they have no memory for
        assert set(answer["sums_by_switch"]) == {"switch0", "switch1", "switch2"}
        assert all(answer["sums_by_switch"].values())
        assert 0 < answer["in_network_share"] < 1
    else:
        # only exponents go beyond the switch
        assert answer["in_network_share"] == 1.0
        assert answer["bytes_into_ps"] < 0.1 * answer["bytes_without_ina"]
