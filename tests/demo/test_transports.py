"""The demo's training through real daemons over every transport but UDP: the bits are those of one process."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from inanet.data.digits import load
from inanet.demo.run import Session
from inanet.launch.configuration import NodeSpec
from inanet.launch.fabric import Fabric, daemon_command
from inanet.launch.process import python, python_environment
from inanet.training.descent import Recipe
from tests.demo.single import trained
from tests.demo.test_end_to_end import Watch
from tests.phy.conftest import lacking
from tests.phy.spaces import Space, cable, open_spaces

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
needs_root = pytest.mark.privileged("raw sockets, TUN interfaces, namespaces")
RECIPE = Recipe(parts=2, steps=8, seed=1, mode="prologue")
TREE = [("ps", None), ("agg0", "ps"), ("worker0", "agg0"), ("worker1", "agg0")]
NAMES = [name for name, _ in TREE]


@pytest.fixture(autouse=True)
def _private_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def train(
    digits: Path, transport: str, listen: Callable[[int], str], prefix: Callable[[int], list[str]]
) -> set[str]:
    """Digests of the workers' weights; node ``i`` listens at ``listen(i)``, its command line begins with
    ``prefix(i)``.
    """

    def command(node: NodeSpec, config: Path) -> list[str]:
        index = NAMES.index(node.name)
        text, changes = re.subn(
            r'^listen = "127\.0\.0\.1:0"$',
            f'listen = "{listen(index)}"\ntransport = "{transport}"',
            re.sub(r"^transport = .*\n", "", config.read_text(), flags=re.MULTILINE),
            flags=re.MULTILINE,
        )
        assert changes == 1
        config.write_text(text)
        return [*prefix(index), *daemon_command(node, config)]

    with Fabric(topology=TREE, command=command) as fabric:
        session = Session(fabric, RECIPE, Watch(), fabric.require_alive)
        session.digits = str(digits)
        digests, _ = session.train()
        assert fabric.shutdown() == []
        stats = fabric.stats()
    # the data plane carried it, and the aggregator summed
    assert all(counters.rx_bytes > 100_000 for counters in stats.values())
    return set(digests)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set, which all trainings read; skips without the privileges that all tests here need."""
    if os.geteuid() != 0:
        lacking("raw sockets, TUN interfaces and namespaces need root")
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    subprocess.run(python("inanet.data.digits", str(path)), env=python_environment(), check=True)
    return path


@pytest.fixture(scope="module")
def expected(digits: Path) -> set[str]:
    """What one process makes of the training."""
    return {trained(RECIPE, load(digits))}


@needs_root
@pytest.mark.parametrize("transport", ["rawip", "packet"])
def test_on_loopback(digits: Path, expected: set[str], transport: str) -> None:
    assert train(digits, transport, lambda index: f"127.0.1.{index + 1}:0", lambda index: []) == expected


@needs_root
def test_tun_through_a_forwarding_host(digits: Path, expected: set[str], stack: ExitStack) -> None:
    (space,) = open_spaces(stack, 1)
    space.run(lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
    assert (
        train(digits, "tun", lambda index: f"10.79.0.{index + 1}:0", lambda index: entering(space))
        == expected
    )


@needs_root
def test_packet_between_hosts(digits: Path, expected: set[str], stack: ExitStack) -> None:
    """Each node in a namespace of its own, a switch between them."""
    spaces = open_spaces(stack, len(NAMES))
    (middle,) = open_spaces(stack, 1)
    for index, space in enumerate(spaces):
        cable(middle, f"m{index}", space, "eth0", None, f"10.78.0.{index + 1}")
    middle.run(lambda: middle.bridge("br0", [f"m{index}" for index in range(len(NAMES))]))
    digests = train(
        digits, "packet", lambda index: f"10.78.0.{index + 1}:0", lambda index: entering(spaces[index])
    )
    assert digests == expected


def entering(space: Space) -> list[str]:
    """Command line prefix that runs a command in a namespace."""
    nsenter = shutil.which("nsenter")
    if nsenter is None:
        pytest.skip("nsenter (util-linux) is not installed")
    return [nsenter, f"--net=/proc/{os.getpid()}/fd/{space.fd}"]


@pytest.fixture
def stack() -> object:
    """Closes what is pushed on it."""
    with ExitStack() as opened:
        yield opened
