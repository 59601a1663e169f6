"""Where topologies are found: those that come with the program, by name, and files anywhere, by path."""

import difflib
import os
from pathlib import Path

from inanet.config.file import ConfigError, Problem
from inanet.lab.model import Topology, load

#: In a wheel they lie beside this file, in a source tree among the other configuration files.
PLACES = (Path(__file__).with_name("topologies"), Path(__file__).resolve().parents[2] / "configs" / "lab")


def known(places: tuple[Path, ...] = PLACES) -> dict[str, Path]:
    """Topologies that come with the program, by name; the first place that has a name counts."""
    found: dict[str, Path] = {}
    for place in places:
        for file in sorted(place.glob("*.toml")):
            found.setdefault(file.stem, file)
    return dict(sorted(found.items()))


def named(text: str) -> bool:
    """Whether ``text`` is to be found here: the path of a file, be it there or not, or a known name."""
    return _is_path(text) or text in known()


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith(".toml")


def find(text: str | os.PathLike[str]) -> Path:
    """The file that ``text`` means: a path if it looks like one (a ``/`` or ``.toml``), else a known name.

    Raises :class:`inanet.config.file.ConfigError`.
    """
    name = os.fspath(text)
    if _is_path(name):
        if not Path(name).exists():
            raise ConfigError(
                Path(name), [Problem("", "no such file", "give a path, or a name of 'ina lab list'")]
            )
        return Path(name)
    files = known()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        allowed = f"allowed: {', '.join(files) or 'none found'}, or the path of a TOML file"
        raise ConfigError(Path(name), [Problem("", f"there is no topology of this name{hint}", allowed)])
    return files[name]


def topology(text: str | os.PathLike[str]) -> Topology:
    """The topology that ``text`` names. Raises :class:`inanet.config.file.ConfigError`."""
    return load(find(text))
