"""The topologies that come with the program."""

import tomllib
from pathlib import Path

import pytest

from inanet.config.file import ConfigError
from inanet.lab import library
from inanet.lab.credentials import prepare
from inanet.lab.fabric import configurations, daemons

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "goat-testbed",
    "leaf-spine",
    "ring-detour",
    "ring-racks",
    "ring4",
    "ring8",
    "star2",
    "star4",
    "star4-fast-aggregator",
    "star4-four-aggregators",
    "star4-slow-workers",
    "star4-two-aggregators",
    "star8",
    "star8-fast-aggregator",
    "two-rack",
    "xagg-fig1",
    "xagg-fig1-push",
    "xagg-fig12",
    "xagg-tree",
}


def test_all_are_there_under_their_own_names() -> None:
    assert set(library.known()) == EXPECTED
    for name in library.known():
        assert library.topology(name).name == name


#: RoCE hosts around ina-switches, without daemons of trees; see test_switches
RINGS = {"ring-detour", "ring-racks", "ring4", "ring8"}


@pytest.mark.parametrize("name", sorted(EXPECTED - RINGS))
def test_the_daemons_accept_what_the_lab_writes_for_them(name: str, tmp_path: Path) -> None:
    topology = library.topology(name)
    insecure = {"control": {"insecure": True}}
    prepare(tmp_path, {}, insecure=True)
    texts = configurations(topology, tmp_path, insecure)
    assert set(texts) == {host.name for host in topology.hosts() if host.role != "idle"}
    coordinators = [host for host, text in texts.items() if "topology" in tomllib.loads(text)]
    assert coordinators == [topology.roots()[0]]


def test_settings_replace_keys_of_all_daemons_and_wrong_ones_are_named(tmp_path: Path) -> None:
    topology = library.topology("star2")
    prepare(tmp_path, {name: place.role for name, place in daemons(topology).items()})
    texts = configurations(topology, tmp_path, {"node": {"memory": "64 MiB"}})
    assert {tomllib.loads(text)["node"]["memory"] for text in texts.values()} == {"64 MiB"}
    texts = configurations(topology, tmp_path, {"control": {"downlink": "auto", "heartbeat": "2 s"}})
    found = {host: tomllib.loads(text)["control"] for host, text in texts.items()}
    assert {control["heartbeat"] for control in found.values()} == {"2 s"}
    # the others have no such key
    assert [host for host, control in found.items() if "downlink" in control] == ["ps"]
    # control connections are TLS unless somebody says that they need not be
    assert {Path(control["key_file"]).name for control in found.values()} == {f"{host}.pem" for host in found}
    assert not any("token_file" in control or control["insecure"] for control in found.values())
    with pytest.raises(ConfigError, match=r"node\.memry: unknown key \(did you mean 'memory'\?\)"):
        configurations(topology, tmp_path, {"node": {"memry": "64 MiB"}})


def test_the_wheel_carries_them_where_they_are_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    target = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]["configs/lab"]
    assert ROOT / target == library.PLACES[0]
    assert library.PLACES[1] == ROOT / "configs" / "lab"


def test_an_installed_file_comes_before_one_of_a_source_tree(tmp_path: Path) -> None:
    places = (tmp_path / "installed", tmp_path / "tree")
    for place, names in zip(places, (("a",), ("a", "b")), strict=True):
        place.mkdir()
        for name in names:
            (place / f"{name}.toml").touch()
    assert library.known(places) == {"a": places[0] / "a.toml", "b": places[1] / "b.toml"}
    assert library.known((tmp_path / "nowhere",)) == {}


def test_unknown_names_and_paths_are_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no topology of this name \(did you mean 'star4'\?\)"):
        library.find("sta4")
    with pytest.raises(ConfigError, match="no such file"):
        library.find(tmp_path / "none.toml")
