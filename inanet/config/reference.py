"""All keys of all daemons' files as a page, made of the models: ``python -m inanet.config.reference > docs/configuration.md``."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from inanet.config import fields, rings, switch
from inanet.config.daemons import MODELS, PROGRAMS, Role
from inanet.config.file import toml_value

_HEAD = """\
# Configuration

One TOML file for each daemon, `/etc/inanet/ROLE.toml` for its service; `ina check FILE` validates it. Files with all keys in
place are in [configs/](../configs). This page is made from the models that read the files, by
`python -m inanet.config.reference`.

| written | as |
|---|---|
| size | `"64 MiB"`, `"64 MB"`, or a number of bytes |
| rate | `"1 Gbit/s"`; bits per second, with a unit |
| duration | `"200 ms"`, `"5 s"`, `"2 min"`; with a unit |
| share | `0.05` or `"5 %"`, less than 1 |
| address | an IPv4 address, host name or interface; `:port` may follow |
| path | relative to the file; `$VARIABLES` of the environment are filled in |

Without a port in `[node] listen` the kernel chooses one at each start; `ina install` writes one there. All ports that a
firewall must let through are in [deploy](deploy.md#firewall).
"""

#: What a value is called, by what it is read with.
_KINDS: Mapping[int, str] = {
    id(marker): word
    for alias, word in (
        (fields.Bytes, "size"),
        (fields.Rate, "rate"),
        (fields.Span, "duration"),
        (fields.Duration, "duration"),
        (fields.Probability, "share"),
        (fields.Name, "name"),
        (fields.Parents, "name, or several"),
        (fields.FileMode, "permission bits"),
        (fields.AbsolutePath, "path"),
        (fields.DataAddress, "address"),
        (fields.ServiceAddress, "address with port"),
        (fields.CoordinatorAddress, "address, or `unix:/path`"),
        (fields.GroupRange, "network"),
        (fields.SystemName, "system"),
        (rings.Address, "IPv4 address"),
        (switch.Hardware, "hardware address"),
        (switch.Network, "network"),
        (switch.Member, "endpoint"),
        (switch.PortRange, "range of ports"),
    )
    for marker in get_args(alias)[1:2]
}
_PLAIN = {str: "text", int: "number", float: "number", bool: "`true` or `false`", SecretStr: "text"}


def _notes(model: type[BaseModel]) -> dict[str, str]:
    """What the comments ``#:`` before fields say, those of bases among them."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        source = textwrap.dedent(inspect.getsource(owner))
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            said: list[str] = []
            at = node.lineno - 2
            while at >= 0 and (match := re.match(r"\s*#: ?(.*)", lines[at])):
                said.insert(0, match[1])
                at -= 1
            if said:
                found[node.target.id] = " ".join(said)
    return found


def _kind(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    for marker in metadata:
        if id(marker) in _KINDS:
            return _KINDS[id(marker)]
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *markers = get_args(annotation)
        return _kind(inner, tuple(markers))
    if origin in (Union, UnionType):
        return " or ".join(_kind(one) for one in get_args(annotation) if one is not type(None))
    if origin is Literal:
        return ", ".join(f"`{toml_value(one)}`" for one in get_args(annotation))
    if origin is tuple:
        return f"array: {_kind(get_args(annotation)[0])}"
    if origin is dict:
        return f"table: {_kind(get_args(annotation)[1])} by name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"table {', '.join(f'`{name}`' for name in annotation.model_fields)}"
    return _PLAIN.get(annotation, "text")


def _default(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        made = field.default_factory()  # type: ignore[call-arg]
        # differs from host to host
        return "host name" if isinstance(made, str) else f"`{toml_value(made)}`"
    value = field.default
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, str) and field.validate_default:
        return f"`{toml_value(value)}`"
    shown = model.model_construct(**{name: value}).model_dump(mode="json", include={name}, warnings=False)[
        name
    ]
    return f"`{toml_value(shown)}`"


def _rows(model: type[BaseModel]) -> Iterator[str]:
    notes = _notes(model)
    for name, field in model.model_fields.items():
        note = notes.get(name) or field.description or ""
        note = re.sub(r"``(.+?)``", r"`\1`", note).replace("|", "\\|")
        kind = _kind(field.annotation, tuple(field.metadata)).replace("|", "\\|")
        yield f"| `{name}` | {kind} | {_default(model, name, field)} | {note} |"


def _model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model of a section, and whether there may be several."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return (annotation if issubclass(annotation, BaseModel) else None), False
    for one in get_args(annotation):
        found, several = _model(one)
        if found is not None:
            return found, several or get_origin(annotation) is tuple
    return None, False


def _sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(header, model) of all sections and of arrays of tables below them."""
    for name, field in model.model_fields.items():
        inner, several = _model(field.annotation)
        if inner is None:
            continue
        where = f"{path}.{name}" if path else name
        yield (f"[[{where}]]" if several else f"[{where}]"), inner
        yield from _sections(inner, where)


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    roles: dict[Role, type[BaseModel]] = dict(MODELS)
    seen: dict[tuple[str, type[BaseModel]], str] = {}
    for role, model in roles.items():
        lines += [f"## {PROGRAMS[role]}", ""]
        for header, section in _sections(model):
            if (header, section) in seen:
                lines += [f"`{header}`: as for [{seen[header, section]}](#{seen[header, section]}).", ""]
                continue
            seen[header, section] = PROGRAMS[role]
            lines += [
                f"### `{header}` of {PROGRAMS[role]}",
                "",
                "| key | value | default | |",
                "|---|---|---|---|",
            ]
            lines += [*_rows(section), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
