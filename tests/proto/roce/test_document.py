"""The example in docs/roce.md does what it says."""

import re
from pathlib import Path

import numpy as np

from inanet.proto.roce import Completion, Received, Status

DOCUMENT = Path(__file__).parents[3] / "docs" / "roce.md"


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)
    key = names["region"].key  # type: ignore[attr-defined]
    assert names["events"] == [Received(42, 64, 400_000, key, 5), Completion(3, Status.SUCCESS)]
    written = names["buffer"][64:400_064].view(np.float32)  # type: ignore[index]
    assert (written == np.arange(100_000, dtype=np.float32)).all()
