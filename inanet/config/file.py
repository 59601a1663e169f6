"""Strict reading of TOML files into pydantic models: all errors at once, each saying what is wrong and what
is allowed.

Knows nothing of any daemon; :mod:`inanet.config.daemons` has the models.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from inanet.service.exits import Exit, Failure

#: Where a configuration file given by its bare name is looked for after the current directory.
SYSTEM_DIRECTORY = Path("/etc/inanet")

#: What pydantic's type errors mean in TOML.
_WORDS = {
    "int_type": "a whole number",
    "string_type": "a string in quotes",
    "tuple_type": "an array in brackets",
}

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file. ``key`` is dotted (``node.listen``), empty for the file as a whole."""

    key: str
    what: str
    allowed: str = ""

    def __str__(self) -> str:
        text = f"{self.key}: {self.what}" if self.key else self.what
        return f"{text}; {self.allowed}" if self.allowed else text


class SeveralErrors(ValueError):
    """Raised by a validator that found several things wrong; every sentence becomes a problem of its own."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__(" / ".join(sentences))
        self.sentences = tuple(sentences)


class ConfigError(Failure):
    """A configuration that cannot be used; the message has one line for every problem, each starting with the
    file.
    """

    code = Exit.USAGE

    def __init__(self, file: Path, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(f"{file}: {problem}" for problem in problems))
        self.file = file
        self.problems = tuple(problems)


def find_file(name: str | Path) -> Path:
    """The configuration file ``name`` means: a path as it is, a bare name in ``.`` and then in
    ``/etc/inanet``.

    Raises :class:`ConfigError` naming every path that was tried.
    """
    path = Path(name)
    bare = path.name == str(path)
    tried = [Path.cwd() / path, SYSTEM_DIRECTORY / path] if bare else [path.absolute()]
    for candidate in tried:
        if candidate.exists():
            return candidate
    raise ConfigError(path, [Problem("", f"no such file; searched {', '.join(map(str, tried))}")])


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises :class:`ConfigError` with line and column if it is none.

    ``PermissionError`` is left alone: it is not the file's content that is at fault.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [Problem("", f"not valid TOML: {error}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, [Problem("", f"not UTF-8 text (byte {error.start})")]) from None
    except IsADirectoryError:
        raise ConfigError(path, [Problem("", "is a directory; give the file itself")]) from None


def validate(
    model: type[M],
    data: Mapping[str, Any],
    file: Path,
    foreign: Mapping[str, Iterable[str]] | None = None,
    variables: Mapping[str, str] | None = None,
) -> M:
    """``data`` as a ``model``. Raises :class:`ConfigError` with every problem found.

    ``foreign`` maps names of sections that ``model`` lacks to the programs whose files have them. Validators
    find the file's directory in ``info.context["directory"]``, for paths relative to it, and ``variables``, for
    paths with variables that the environment does not have.
    """
    context = {"directory": file.absolute().parent, "variables": variables or {}}
    try:
        return model.model_validate(data, context=context)
    except ValidationError as error:
        problems = [
            problem
            for item in error.errors(include_url=False)
            for problem in _problems(item, model, foreign or {})
        ]
        raise ConfigError(file, problems) from None


def _problems(item: Any, model: type[BaseModel], foreign: Mapping[str, Iterable[str]]) -> list[Problem]:
    cause = item.get("ctx", {}).get("error")
    if not isinstance(cause, SeveralErrors):
        return [_problem(item, model, foreign)]
    key = _dotted(item["loc"])
    return [
        Problem(key, what, allowed) for what, _, allowed in (text.partition("; ") for text in cause.sentences)
    ]


def _problem(item: Any, model: type[BaseModel], foreign: Mapping[str, Iterable[str]]) -> Problem:
    """A pydantic error in the words of somebody who edits a file."""
    location = item["loc"]
    key = _dotted(location)
    context = item.get("ctx", {})
    kind = item["type"]
    owner = _model_at(model, location[:-1])
    field = owner.model_fields.get(str(location[-1])) if owner else None
    if kind == "extra_forbidden":
        return Problem(key, *_unknown(location, model, foreign))
    if kind == "missing":
        return Problem(
            key, "missing", f"required: {field.description}" if field and field.description else "required"
        )
    if kind == "value_error":
        what, _, allowed = str(context["error"]).partition("; ")
        return Problem(key, what, allowed)
    if kind == "literal_error":
        near = _near(
            str(item["input"]),
            [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")],
        )
        return Problem(key, f"{item['input']!r} is unknown{near}", f"allowed: {context['expected']}")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(key, f"{item['input']!r} is not a table", f"write [{key}]")
    message = _WORDS.get(kind, item["msg"].removeprefix("Input should be "))
    # a secret of the wrong type is not repeated: messages end up in logs
    secret = field is not None and SecretStr in (field.annotation, *get_args(field.annotation))
    shown = "the value" if secret else repr(item["input"])
    return Problem(key, f"{shown} is not allowed", f"allowed: {message}")


def _dotted(location: Sequence[int | str]) -> str:
    """``("topology", "workers", 2, "name")`` as ``topology.workers[2].name``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _unknown(
    location: Sequence[int | str], model: type[BaseModel], foreign: Mapping[str, Iterable[str]]
) -> tuple[str, str]:
    """What to say about a key that does not exist here: a near name, another home, and the names that do
    exist.
    """
    name = str(location[-1])
    owner = _model_at(model, location[:-1])
    known = list(owner.model_fields) if owner else []
    near = _near(name, known)
    top = len(location) == 1
    if not near and top and name in foreign:
        homes = list(foreign[name])
        near = f" (only {' and '.join(homes)} {'has' if len(homes) == 1 else 'have'} it)"
    if not near:
        homes = [
            section
            for section in model.model_fields
            if (inner := _model_at(model, [section])) is not None and name in inner.model_fields
        ]
        near = f" (it belongs in [{'] or ['.join(homes)}])" if homes else ""
    return f"unknown {'section' if top else 'key'}{near}", f"allowed: {', '.join(known)}"


def _near(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """The model that a location within ``model`` leads to."""
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part) if current else None
        current = _model_in(field.annotation) if field else None
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside ``Model``, ``Model | None`` or ``tuple[Model, ...]``."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, BaseModel) else None
    if get_origin(annotation) in (Union, UnionType, tuple):
        for argument in get_args(annotation):
            if (found := _model_in(argument)) is not None:
                return found
    return None


def write_toml(config: BaseModel) -> str:
    """The configuration as a file that reads back as the same configuration; secrets are left out."""
    lines: list[str] = []
    for section, fields in config.model_dump(mode="json").items():
        if fields is None:
            lines += [f"# there is no [{section}]", ""]
            continue
        lines += [f"[{section}]"]
        for key, value in fields.items():
            if value is None:
                lines.append(f"# {key} is not set")
            elif isinstance(getattr(getattr(config, section), key), SecretStr):
                lines.append(f"# {key} is set and not shown")
            else:
                lines.append(f"{key} = {toml_value(value)}")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML: strings, numbers, booleans, arrays and inline tables."""
    if isinstance(value, str):
        # JSON's escapes are TOML's, but JSON leaves DEL as it is and TOML does not allow that
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        items = [toml_value(item) for item in value]
        if any(isinstance(item, dict) for item in value):
            return "[\n" + "".join(f"    {item},\n" for item in items) + "]"
        return f"[{', '.join(items)}]"
    if isinstance(value, dict):
        if not value:
            return "{}"
        return (
            "{ "
            + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items() if item is not None)
            + " }"
        )
    return json.dumps(value)
