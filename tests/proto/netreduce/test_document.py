"""The example of docs/netreduce.md, as it stands there."""

import re
from pathlib import Path

import numpy as np

DOCUMENT = Path(__file__).parents[3] / "docs" / "netreduce.md"


def test_the_example_runs():
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    for array in names["arrays"]:
        assert (array == np.float32(6)).all()
