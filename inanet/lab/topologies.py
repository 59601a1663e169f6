"""Finding topology files: by path, or by the name of one that ships with the project.

They live in ``configs/lab`` of a checkout. A wheel carries them inside this package (``topologies/``, put there by
the build), because an installed program has no checkout beside it.
"""

from importlib.resources import files
from pathlib import Path

from inanet.lab.model import Topology, TopologyError, load


def directory(package: Path | None = None) -> Path:
    """Where the shipped topologies are. ``package`` is the folder of this package, other than itself in tests.

    Raises :class:`FileNotFoundError` naming both places if neither exists.
    """
    package = package or Path(str(files("inanet.lab")))
    places = (package / "topologies", package.parents[1] / "configs" / "lab")
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"no topologies in {places[0]} or {places[1]}: reinstall inanet")


def shipped() -> dict[str, Path]:
    """Name and path of every shipped topology, sorted by name."""
    return {path.stem: path for path in sorted(directory().glob("*.toml"))}


def find(name: str) -> Topology:
    """The topology in a file, or the shipped one of that name. Raises :class:`TopologyError`."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return load(path)
    known = shipped()
    if name not in known:
        raise TopologyError(name, [f"is neither a file nor one of the shipped topologies ({', '.join(known)})"])
    return load(known[name])
