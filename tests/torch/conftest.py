"""One fabric of two hosts for all tests of this folder, and four ranks on them."""

from collections.abc import Iterator

import pytest

from inanet.launch.fabric import Fabric
from tests.torch.ranks import GLOO_IS_FASTER, Ranks

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


#: by way: the hosts of two ranks (None: no agent), and what their environment says
WAYS: dict[str, tuple[tuple[int, int] | None, dict[str, str]]] = {
    "fabric": ((0, 1), {"INA_REQUIRE": "1"}),
    "one host": ((0, 0), {"INA_REQUIRE": "1"}),
    "by Gloo": ((0, 1), {GLOO_IS_FASTER: "1"}),
    "no agent": (None, {}),
}


@pytest.fixture(params=WAYS)
def everywhere(
    request: pytest.FixtureRequest, torch_fabric: Fabric, tmp_path_factory: pytest.TempPathFactory
) -> Ranks:
    """Two ranks, once for every way in which their all-reduces may go."""
    hosts, environment = WAYS[request.param]
    directory = tmp_path_factory.mktemp("pair")
    if hosts is None:
        return Ranks([directory / "nobody"] * 2, directory, environment)
    return Ranks([torch_fabric.worker_socket(host) for host in hosts], directory, environment)
