"""``ina check``: what a daemon's ``--check`` does, for any daemon's file, also as JSON; and the files of networks and sparse jobs."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from inanet.config.certificate import problems as certificate_problems
from inanet.config.daemons import MODELS, PROGRAMS, Role, load, possible_roles
from inanet.config.file import ConfigError, Problem, find_file, read_toml, validate
from inanet.config.sparse import FabricSparseConfig, SparseConfig
from inanet.lab.model import load as load_network
from inanet.service.exits import explain

SCHEMA = 1


def _is_network(data: Mapping[str, Any]) -> bool:
    """Whether a file describes a network: daemons have no hosts or trunks, and at most one ``[switch]``."""
    return "host" in data or "trunk" in data or isinstance(data.get("switch"), list)


def _roles(data: Mapping[str, Any], file: Path) -> tuple[Role, ...]:
    """Whose file it may be by its sections, or by its name where they leave a choice."""
    possible = possible_roles(data) or tuple(role for role in MODELS if _is_valid(file, role))
    # "worker.toml", and "a0.toml" as node names often are
    named = tuple(role for role in possible if re.fullmatch(rf"{role}\d*|{role[0]}\d+", file.stem))
    return named if len(named) == 1 else possible


def _is_valid(file: Path, role: Role) -> bool:
    try:
        load(file, role, from_outside=True)
    except ConfigError:
        return False
    return True


def _certified(config: str, role: Role) -> bool:
    """Whether it is the file of a daemon in this role, with a certificate for that."""
    try:
        return not certificate_problems(role, load(config, role, from_outside=True))
    except ConfigError:
        return False


def _daemon(config: str, roles: tuple[Role, ...]) -> BaseModel:
    """The file of a daemon. Raises :class:`ConfigError`, also if its certificate is for none of what the daemon may be."""
    effective = load(config, roles[0] if roles else None, from_outside=True)
    wrong = certificate_problems(roles[0], effective)
    if wrong and not any(_certified(config, other) for other in roles[1:]):
        raise ConfigError(find_file(config), wrong)
    return effective


@click.command()
@click.argument("config", metavar="CONFIG")
@click.option(
    "--role",
    type=click.Choice(list(MODELS)),
    help="Whose file it is. Default: told from its sections, and its name.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def check(context: click.Context, config: str, role: Role | None, as_json: bool) -> None:
    """Validate a configuration file of a daemon, of a network for 'ina lab' and 'ina plan', or of a sparse job, all errors at
    once. Exit code 0 if it can be used, 2 if not.

    Opens nothing but the files that it names, keys among them; what it cannot know (interfaces, other nodes) shows when the
    daemon starts.
    """
    report: dict[str, Any] = {"schema": SCHEMA, "ok": True, "file": config, "role": role, "errors": []}
    try:
        report["file"] = str(find_file(config))
        file = find_file(config)
        data = read_toml(file)
        network = role is None and _is_network(data)
        sparse = role is None and "job" in data
        roles = (role,) if role is not None else _roles(data, file)
        chosen = roles[0] if roles else None
        report["role"] = "network" if network else "job" if sparse else chosen
        effective: BaseModel
        if sparse:
            effective = validate(FabricSparseConfig if "control" in data else SparseConfig, data, file)
        else:
            effective = load_network(file) if network else _daemon(config, roles)
    except (ConfigError, OSError) as error:
        code, message = explain(error)
        problems = error.problems if isinstance(error, ConfigError) else [Problem("", message)]
        report["ok"] = False
        report["errors"] = [asdict(problem) for problem in problems]
        click.echo(json.dumps(report, indent=2) if as_json else message, err=not as_json)
        context.exit(code)
    if as_json:
        # whoever knows the secret of a sparse job can take part in it
        report["config"] = effective.model_dump(mode="json", exclude={"job": {"secret"}} if sparse else None)
        click.echo(json.dumps(report, indent=2))
    else:
        programs = " or ".join(PROGRAMS[one] for one in roles)
        purpose = "network for ina lab and ina plan" if network else f"configuration for {programs}"
        if sparse:
            purpose = "sparse job for inanet.join_sparse"
            roles = ()
        click.echo(f"{report['file']}: a valid {purpose}{': give --role' if len(roles) > 1 else ''}")
