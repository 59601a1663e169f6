"""One fabric of two hosts for all tests of this folder, and four ranks on them."""

from collections.abc import Iterator

import pytest

from inanet.launch.fabric import Fabric
from tests.torch.ranks import Ranks

#: which host a rank is on
HOSTS = (0, 0, 1, 1)


@pytest.fixture(scope="session")
def torch_fabric() -> Iterator[Fabric]:
    """Two worker agents under one PS."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")
    with Fabric(2, 0) as fabric:
        yield fabric


@pytest.fixture(scope="session")
def ranks(torch_fabric: Fabric, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Four ranks, two on each host."""
    return Ranks([torch_fabric.worker_socket(host) for host in HOSTS], tmp_path_factory.mktemp("ranks"))
