"""The matrix of docs/pytorch.md: what of torch.distributed works, with values beside Gloo's."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

import torch

from inanet.launch.fabric import Fabric
from tests.torch.ranks import Ranks

# torch compiles its own optimizers with what it calls deprecated
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.torch import matrix

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

DOCUMENT = Path(__file__).parents[2] / "docs/pytorch.md"


@pytest.fixture(scope="module")
def found(torch_fabric: Fabric, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sockets = [torch_fabric.worker_socket(host) for host in range(matrix.WORLD)]
    return matrix.worlds(Ranks(sockets, tmp_path_factory.mktemp("matrix")))


@pytest.mark.parametrize("name", matrix.ROWS)
def test_values_are_those_of_gloo(found: dict[str, Any], name: str) -> None:
    for rank in range(matrix.WORLD):
        gloo = found["gloo"][rank][name]
        for world in ("ina", "hook"):
            if name in found[world][rank]:
                assert matrix.differs(found[world][rank][name], gloo) == ""


def test_the_table_in_the_docs_is_the_one_that_was_found(found: dict[str, Any]) -> None:
    text = DOCUMENT.read_text()
    written = re.search(r"^<!-- matrix -->\n+(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert written is not None, "docs/pytorch.md has no table after <!-- matrix -->"
    rows, documented = matrix.table(found).splitlines(), written[1].splitlines()
    if torch.__version__ < (2, 14):
        # which refuses more over Gloo than the torch of the docs
        rows, documented = ([row for row in each if "bf16" not in row] for each in (rows, documented))
    assert documented == rows, "write it anew: python -m tests.torch.matrix"
