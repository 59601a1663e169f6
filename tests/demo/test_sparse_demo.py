"""Zebra's demo on a few made-up samples: impaired, repeated, compared."""

import json

import numpy as np
import pytest

from inanet.demo.sparse_demo import Options, line, run, table
from inanet.demo.sparse_training import Step

from .test_sparse_training import made_up


def test_an_impaired_training_is_the_clean_one() -> None:
    steps: list[Step] = []
    result = run(Options(workers=2, steps=10, impair=0.02, model="lr"), steps.append, samples=made_up(1200))
    json.dumps(result, allow_nan=False)
    assert result["ok"], result
    assert result["identical_without_impairments"]
    assert result["repeated"] > 0
    assert result["drops"]["duplicate"] > 0
    assert len(steps) == 10
    assert sum(step.hot for step in steps) == result["hot_pairs"]
    assert 0.0 < result["in_network_share"] < 1.0
    assert "bit for bit" in table(result)[-1]
    assert line(steps[0]).startswith("step    1  loss 0.69")


def test_steps_beyond_the_data_go_through_it_again_and_an_interrupt_ends_it() -> None:
    taken: list[int] = []

    def enough() -> None:
        if len(taken) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Options(workers=1, steps=50, model="lr"), lambda s: taken.append(s.number), enough, made_up(200))
    assert taken == np.arange(3).tolist()
