"""Changes of single keys in a TOML file's text. Everything else, comments among it, stays as it was written.

The files in ``configs/`` show keys with their defaults behind ``# ``: a key that is set takes such a line's place.
"""

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from inanet.config.file import toml_value

_HEADER = re.compile(r"(# )?\[(\[?[A-Za-z0-9_.]+\]?)\]\s*(#.*)?")


def _bounds(lines: list[str], section: str) -> tuple[int, int] | None:
    """First line and end of a section, header included: the one in force, else the one behind ``# ``."""
    headers = [(number, match) for number, line in enumerate(lines) if (match := _HEADER.fullmatch(line))]
    for hidden in (None, "# "):
        for position, (number, match) in enumerate(headers):
            if match[1] == hidden and match[2] == section:
                after = headers[position + 1 :]
                return number, after[0][0] if after else len(lines)
    return None


def _key_bounds(lines: list[str], key: str, first: int, end: int) -> tuple[int, int] | None:
    """First line and end of a key's value, which may be an array on several lines."""
    for number in range(first, end):
        if re.match(rf"{re.escape(key)}\s*=", lines[number]):
            for last in range(number + 1, end + 1):
                try:
                    tomllib.loads("\n".join(lines[number:last]))
                except tomllib.TOMLDecodeError:
                    continue
                return number, last
    for number in range(first, end):
        if re.match(rf"# {re.escape(key)}\s*=", lines[number]):
            return number, number + 1
    return None


def set_keys(text: str, section: str, values: Mapping[str, Any]) -> str:
    """The text of a file with these keys of a section; a value of None puts a key that is set behind ``# ``.

    Raises ``ValueError`` if the text cannot be changed line by line, as when a section is an inline table.
    """
    lines = text.splitlines()
    for key, value in values.items():
        found = _bounds(lines, section)
        if found is None:
            if value is None:
                continue
            lines += ["", f"[{section}]"]
            found = len(lines) - 1, len(lines)
        first, end = found
        where = _key_bounds(lines, key, first + 1, end)
        if value is None:
            if where is not None and not lines[where[0]].startswith("#"):
                lines[where[0] : where[1]] = [f"# {line}" for line in lines[where[0] : where[1]]]
            continue
        lines[first] = lines[first].removeprefix("# ")
        begin, last = where or (first + 1, first + 1)
        lines[begin:last] = f"{key} = {toml_value(value)}".splitlines()
    changed = "\n".join(lines) + "\n"
    try:
        present = tomllib.loads(changed).get(section, {})
    except tomllib.TOMLDecodeError:
        present = {}
    for key, value in values.items():
        if present.get(key) != value:
            wanted = "leave it out" if value is None else f"write {key} = {toml_value(value)} there"
            raise ValueError(f"cannot change {section}.{key} in this file: {wanted}")
    return changed


def drop_section(text: str, section: str) -> str:
    """The text with a section put behind ``# ``."""
    lines = text.splitlines()
    found = _bounds(lines, section)
    if found is not None and not lines[found[0]].startswith("#"):
        for number in range(*found):
            if lines[number] and not lines[number].startswith("#"):
                lines[number] = f"# {lines[number]}"
    return "\n".join(lines) + "\n"
