"""The manager's configuration file, and that of a PS that follows a manager."""

from pathlib import Path

import pytest

from daemons.manager import expected_nodes, fabric
from inanet.config.daemons import PsConfig, load
from inanet.config.file import ConfigError, write_toml
from inanet.config.manager import ManagerConfig
from inanet.coordinator.managed_fabric import ManagedFabric
from inanet.coordinator.registry import Registry
from inanet.planning.topology import Topology

TREES = """
[topology]
roots = ["ps"]
aggregators = [{ name = "a0", parent = "ps" }]
workers = [{ name = "w0", parent = "a0" }]
"""


def read(directory: Path, text: str) -> ManagerConfig | PsConfig:
    file = directory / "node.toml"
    file.write_text(text)
    config = load(file)
    assert isinstance(config, ManagerConfig | PsConfig)
    # what --check prints is a file for the same daemon
    file.write_text(write_toml(config))
    assert load(file) == config
    return config


def test_nodes_of_the_trees_are_expected_as_those_of_the_list_are(tmp_path: Path) -> None:
    listed = read(tmp_path, '[fabric]\nexpect = ["a0", "x"]\n')
    assert isinstance(listed, ManagerConfig)
    assert expected_nodes(listed) == ("a0", "x")
    switched = TREES + 'switches = ["s0", "a0"]\n'
    both = read(tmp_path, f'[fabric]\nexpect = ["w0", "x"]\n{switched}')
    assert isinstance(both, ManagerConfig)
    assert expected_nodes(both) == ("w0", "x", "ps", "a0", "s0")


def test_trees_are_planned_unless_they_are_in_the_file(tmp_path: Path) -> None:
    planned = read(tmp_path, '[fabric]\nexpect = ["a0"]\n[planning]\nplan = "tree"\ndynamic = true\n')
    assert isinstance(planned, ManagerConfig)
    assert isinstance(fabric(planned, Registry()), ManagedFabric)
    assert (planned.fabric.expect, planned.planning.dynamic, planned.planning.evaluate) == (
        ("a0",),
        True,
        False,
    )
    fixed = read(tmp_path, f"[fabric]\n{TREES}")
    assert isinstance(fixed, ManagerConfig)
    found = fabric(fixed, Registry())
    assert isinstance(found, Topology)
    assert found.aggregators == {"a0": "ps"}


def test_a_ps_has_trees_or_a_manager(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x" * 32)
    follower = read(
        tmp_path,
        '[control]\nlisten = "lo"\ncoordinator = "10.0.0.1"\n'.replace(
            "[control]\n", '[control]\ninsecure = true\ntoken_file = "token"\n'
        ),
    )
    assert isinstance(follower, PsConfig)
    assert follower.topology is None
    assert str(follower.control.coordinator) == "10.0.0.1:7400"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"[fabric]\n{TREES.replace('roots', '# roots')}", "topology: no roots; allowed: roots = ['ps']"),
        ('[fabric]\nexpect = ["a", "b", "a"]\n', "fabric.expect: 'a' stands there twice"),
        ('[fabric]\nexpected = ["a"]\n', "did you mean 'expect'?"),
        ('[planning]\nplan = "ring"\n', "planning.plan: 'ring' is unknown"),
        (
            '[control]\nlisten = "lo"\n',
            "topology: missing; required: the section with the fabric's nodes, or control",
        ),
        (
            f'[control]\nlisten = "lo"\ncoordinator = "lo"\n{TREES}',
            "control.coordinator is set, which has the trees",
        ),
        ('[fabric]\n[control]\nlisten = "lo"\nca_file = "ca.pem"\n', "ca_file is set and key_file is not"),
        ('[fabric]\n[control]\nlisten = "lo"\nkey_file = "k.pem"\n', "ca_file is not set"),
        ('[fabric]\n[control]\nca_file = "c"\nkey_file = "k"\n', "make it with 'ina keys'"),
        (
            f'[fabric]\n[control]\nlisten = "10.0.0.1"\ntoken = "{"x" * 32}"\n',
            "control connections would not be encrypted; allowed: ca_file and key_file, which 'ina keys' makes",
        ),
        (
            '[fabric]\n[control]\nlisten = "10.0.0.1"\ninsecure = true\n',
            "no token is set; allowed: the same token_file (or token) on all",
        ),
        (
            '[fabric]\n[control]\nlisten = "10.0.0.1"\nrevoked_file = "revoked.txt"\n',
            "revoked_file: there are no certificates without ca_file and key_file",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert says in str(refused.value)
