"""Fixtures of the lab tests: every lab has a name of its own and is gone after the test, whatever happens."""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inanet.lab import build, namespaces, remains
from inanet.lab.model import Topology, load

#: Two workers and a PS; a parser's view of it is in test_model.
PAIR = """
name = "pair"
summary = "for tests"

[link]
rate = "400 Mbit/s"
burst = "150 kB"

[[switch]]
name = "s0"

[[host]]
name = "ps"
role = "ps"
switch = "s0"
link = { rate = "800 Mbit/s", latency = "10 ms" }

[[host]]
name = "w"
count = 2
switch = "s0"
"""


def lacking(reason: str) -> None:
    """Skip for want of a privilege; fail instead where the run promises to have it."""
    if os.environ.get("INA_REQUIRE_PRIVILEGED") == "1":
        pytest.fail(f"INA_REQUIRE_PRIVILEGED=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[str], Topology]:
    """Reads a topology from text."""

    def read(text: str) -> Topology:
        file = tmp_path / "topology.toml"
        file.write_text(text)
        return load(file)

    return read


@pytest.fixture
def pair(parse: Callable[[str], Topology]) -> Topology:
    """The topology :data:`PAIR`."""
    return parse(PAIR)


@pytest.fixture
def root() -> None:
    """Skips without the privileges that a lab needs."""
    try:
        namespaces.require_privileges()
    except namespaces.Unprivileged as error:
        lacking(str(error))


@pytest.fixture
def name(root: None) -> Iterator[str]:
    """A name for a lab that no other has; whatever is left of the lab is removed after the test."""
    chosen = f"test-{secrets.token_hex(4)}"
    yield chosen
    remains.dismantle(namespaces.labs().get(chosen, []), 0.0)
    assert chosen not in namespaces.labs()


@pytest.fixture
def built(pair: Topology, name: str) -> str:
    """The name of a lab of :data:`PAIR` that is up."""
    build.build(pair, name)
    return name
