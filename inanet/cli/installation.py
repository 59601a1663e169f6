"""What 'ina install' and 'ina uninstall' do to a host, as steps that can be shown before they are taken.

Units and configuration files come from the package. The units run the environment that this program runs in; users and directories of
the daemons are made by the units themselves (``DynamicUser``, ``RuntimeDirectory``), so there is nothing for sysusers or tmpfiles.
"""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inanet.cli import manual
from inanet.cli.main import cli
from inanet.config.certificate import problems as certificate_problems
from inanet.config.daemons import MODELS, PROGRAMS, Role, unit_variables
from inanet.config.edit import drop_section, set_keys
from inanet.config.fields import COORDINATOR_PORT
from inanet.config.file import ConfigError, read_toml, validate
from inanet.service.addresses import AddressError, HostPort, is_loopback, parse_host_port, resolve
from inanet.service.exits import Exit, Failure, pip_install
from inanet.units import show_count

#: In a wheel they lie beside this file, in a source tree at its top.
_HERE, _TREE = Path(__file__).parent, Path(__file__).resolve().parents[2]
#: Where data packets arrive, by role: fixed, so that firewalls can be told. A switch's ports are those of its systems.
DATA_PORTS: Mapping[Role, int] = {"worker": 7420, "agg": 7421, "ps": 7422}
#: Where the units look.
CONFIG, UNITS, LINKS = Path("etc/inanet"), Path("etc/systemd/system"), Path("usr/local/bin")
#: Where manual pages and completion of shells go.
SHARE = Path("usr/local/share")
#: What the units hide from a daemon (ProtectHome=, PrivateTmp=).
_HIDDEN = {
    "/home": "under /home, which units cannot see (ProtectHome=yes)",
    "/root": "under /root, which units cannot see (ProtectHome=yes)",
    "/run/user": "under /run/user, which units cannot see (ProtectHome=yes)",
    "/tmp": "under /tmp, of which units have their own (PrivateTmp=yes)",
    "/var/tmp": "under /var/tmp, of which units have their own (PrivateTmp=yes)",
}
#: The environment that docs/deploy.md makes.
_ENVIRONMENT = "/usr/local/lib/inanet"


class InstallError(Failure):
    """Nothing was changed; the message has a line for every reason."""

    def __init__(self, reasons: Sequence[str], code: Exit = Exit.USAGE) -> None:
        super().__init__("\n".join(reasons))
        self.code = code


@dataclass(frozen=True, slots=True)
class Answers:
    """What files are filled in with. ``aggregators`` and ``workers`` are NAME or NAME:PARENT, for a PS that coordinates."""

    name: str | None = None
    listen: str | None = None
    coordinator: str | None = None
    aggregators: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    keys: Path | None = None
    token_file: Path | None = None
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class Environment:
    """Where this program lies: folder of its programs, interpreter, and all that a unit must be able to read."""

    programs: Path
    interpreter: Path
    parts: tuple[Path, ...]

    @classmethod
    def own(cls) -> "Environment":
        """Of this process."""
        interpreter = Path(sys.executable)
        packages = {Path(__file__).resolve().parents[1]}
        parts = (interpreter, interpreter.resolve(), Path(sys.prefix), Path(sys.base_prefix), *packages)
        return cls(interpreter.parent, interpreter, tuple(dict.fromkeys(parts)))

    def obstacles(self) -> Iterator[str]:
        """Why a unit could not run it, one sentence for each part."""
        for part in self.parts:
            if reason := unreachable(part):
                yield (
                    f"{part} is {reason}: make an environment with an interpreter of the system, 'python3 -m venv "
                    f"{_ENVIRONMENT}', install inanet there, and run {_ENVIRONMENT}/bin/ina install"
                )
                return
        if not os.access(self.programs / "ina", os.X_OK):
            yield (
                f"{self.programs} has no ina: inanet runs from a source tree; install it there first "
                f"({pip_install('.')})"
            )


def unreachable(path: Path) -> str | None:
    """Why a service with ``DynamicUser`` and ``ProtectHome`` cannot use this file or folder; ``None`` if it can."""
    for folder, reason in _HIDDEN.items():
        if path.is_relative_to(folder):
            return reason
    if not path.exists():
        return "missing"
    for one in (path, *path.parents):
        mode = one.stat().st_mode
        if (not mode & stat.S_IROTH and one == path) or (stat.S_ISDIR(mode) and not mode & stat.S_IXOTH):
            return f"closed to other users (mode {stat.S_IMODE(mode):04o} of {one})"
    return None


@dataclass(frozen=True, slots=True)
class Write:
    """A file with this content. ``secret``: only root may read it, and nothing of it is shown."""

    path: Path
    content: bytes
    secret: bool = False

    @property
    def mode(self) -> int:
        """Permission bits."""
        return 0o600 if self.secret else 0o644

    def done(self) -> bool:
        """Whether the file is there as it shall be."""
        try:
            return (
                self.path.read_bytes() == self.content and stat.S_IMODE(self.path.stat().st_mode) == self.mode
            )
        except OSError:
            return False

    def show(self) -> str:
        """One line for people."""
        return f"{'change' if self.path.exists() else 'write'} {self.path} (mode {self.mode:04o})"

    def take(self) -> None:
        """Replaced as a whole: no reader sees half of it, nor does anybody see a secret meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.mode), "wb") as file:
            os.fchmod(file.fileno(), self.mode)
            file.write(self.content)
        fresh.replace(self.path)


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one kind, said in one line."""

    what: str
    place: Path
    files: tuple["Write | Remove", ...]

    def done(self) -> bool:
        """Whether all are as they shall be."""
        return all(file.done() for file in self.files)

    def show(self) -> str:
        """One line for people."""
        left = sum(not file.done() for file in self.files)
        verb = "remove" if isinstance(self.files[0], Remove) else "write"
        return f"{verb} {self.what} in {self.place} ({show_count(left, 'file')})"

    def take(self) -> None:
        """Those that are left."""
        for file in self.files:
            if not file.done():
                file.take()


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link to a program."""

    path: Path
    target: Path

    def done(self) -> bool:
        """Whether it is there."""
        return self.path.is_symlink() and self.path.readlink() == self.target

    def show(self) -> str:
        """One line for people."""
        return f"link {self.path} -> {self.target}"

    def take(self) -> None:
        """Also in place of a link to elsewhere."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink():
            self.path.unlink()
        self.path.symlink_to(self.target)


@dataclass(frozen=True, slots=True)
class Remove:
    """A file that goes."""

    path: Path

    def done(self) -> bool:
        """Whether it is gone."""
        return not self.path.exists() and not self.path.is_symlink()

    def show(self) -> str:
        """One line for people."""
        return f"remove {self.path}"

    def take(self) -> None:
        """Nothing is said of a file that somebody else has removed."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Run:
    """A command."""

    command: tuple[str, ...]
    needed: bool = True

    def done(self) -> bool:
        """Whether there is no need of it."""
        return not self.needed

    def show(self) -> str:
        """One line for people."""
        return f"run {' '.join(self.command)}"

    def take(self) -> None:
        """Raises :class:`Failure` with what it said."""
        try:
            finished = subprocess.run(self.command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError:
            raise Failure(f"{self.command[0]} is not installed: this host has no systemd") from None
        if finished.returncode:
            said = (finished.stderr or finished.stdout).strip()
            raise Failure(f"'{' '.join(self.command)}' ended with status {finished.returncode}: {said}")


Step = Write | Files | Link | Remove | Run


def template(role: Role) -> str:
    """The configuration file that comes with the program."""
    return _packaged("configs", f"{role}.toml")


def unit_text(role: Role, programs: Path) -> str:
    """The unit of a role, for programs in this folder."""
    text = _packaged("systemd", f"{PROGRAMS[role]}.service")
    return text.replace(f"/usr/local/bin/{PROGRAMS[role]} ", f"{programs}/{PROGRAMS[role]} ")


def _packaged(kind: str, name: str) -> str:
    for file in (_HERE / "host" / kind / name, _TREE / kind / name):
        if file.exists():
            return file.read_text()
    raise Failure(f"{name} is missing in this installation: {pip_install('--force-reinstall inanet')}")


def installed(root: Path) -> list[Role]:
    """Roles whose units are on this host."""
    return [role for role in PROGRAMS if (root / UNITS / f"{PROGRAMS[role]}.service").exists()]


def coordinates(role: Role, answers: Answers) -> bool:
    """Whether a daemon will be the fabric's coordinator."""
    return role == "manager" or (role == "ps" and answers.coordinator is None)


def configured(role: Role, roles: Sequence[Role], answers: Answers, present: str | None) -> str:
    """The file of a role: the one that is there, or the template, with the answers written into it.

    Raises :class:`InstallError` if an answer is missing that the file cannot do without, or cannot be used.
    """
    text = template(role) if present is None else present
    if present is None:
        text = _fresh(role, roles, answers, text)
    if answers.name is not None:
        text = set_keys(text, "node", {"name": answers.name})
    if answers.listen is not None:
        text = _listening(role, answers, text)
    if answers.coordinator is not None and role != "manager":
        if role == "ps":
            text = drop_section(set_keys(text, "control", {"listen": None}), "topology")
        text = set_keys(text, "control", {"coordinator": answers.coordinator})
    control: dict[str, Any] = {}
    if answers.keys is not None:
        control |= {
            "ca_file": "$CREDENTIALS_DIRECTORY/ca.pem",
            "key_file": f"$CREDENTIALS_DIRECTORY/{role}.pem",
        }
    if answers.token_file is not None:
        control["token_file"] = "$CREDENTIALS_DIRECTORY/token"
    if answers.insecure:
        control["insecure"] = True
    return set_keys(text, "control", control) if control else text


def _fresh(role: Role, roles: Sequence[Role], answers: Answers, text: str) -> str:
    """The template without what is an example in it."""
    beside = any(coordinates(other, answers) for other in roles)
    if answers.name is None:
        host = socket.gethostname().partition(".")[0]
        text = set_keys(text, "node", {"name": host if len(roles) == 1 else f"{host}-{role}"})
    if role == "agg" and answers.coordinator is None and not beside:
        raise InstallError(
            [
                f"{PROGRAMS[role]} needs a coordinator: give --coordinator HOST, where ina-ps or ina-manager runs"
            ]
        )
    if role == "worker" and answers.coordinator is None and not beside:
        # it serves jobs of this host alone
        text = set_keys(text, "control", {"coordinator": None})
    if role == "switch":
        text = _without_jobs(text)
    if role == "ps" and answers.coordinator is None:
        text = set_keys(text, "topology", _trees(role, roles, answers))
    return text


def _without_jobs(text: str) -> str:
    """The example jobs of the switch's template are of nobody."""
    lines, inside = [], False
    for line in text.splitlines():
        inside = inside or line == "jobs = ["
        if not inside:
            lines.append(line)
        elif line == "]":
            inside = False
    return "\n".join(lines) + "\n"


def _trees(role: Role, roles: Sequence[Role], answers: Answers) -> dict[str, Any]:
    if not answers.workers:
        raise InstallError(
            [
                "who trains? Give --worker NAME for every worker (NAME:PARENT if it sends to somebody else than the only "
                "aggregator, or the PS), and --aggregator NAME; or install ina-manager, to which nodes come by themselves, "
                "and ina-ps with --coordinator"
            ]
        )
    ps = answers.name or (socket.gethostname().partition(".")[0] + ("" if len(roles) == 1 else f"-{role}"))
    aggregators = [_split(text, ps) for text in answers.aggregators]
    parent = aggregators[0]["name"] if len(aggregators) == 1 else ps
    return {"aggregators": aggregators, "workers": [_split(text, parent) for text in answers.workers]}


def _split(text: str, parent: str) -> dict[str, str]:
    name, _, given = text.partition(":")
    return {"name": name, "parent": given or parent}


def _listening(role: Role, answers: Answers, text: str) -> str:
    """The address in all keys that have it."""
    assert answers.listen is not None
    try:
        wanted = parse_host_port(answers.listen, default_port=DATA_PORTS.get(role, 0))
        found = resolve(wanted)
    except (ValueError, AddressError) as error:
        raise InstallError([f"--listen: {error}"]) from None
    if is_loopback(found.address) and not wanted.local:
        raise InstallError(
            [
                f"--listen: {wanted.host} is {found.address} on this host, a loopback address that no other machine "
                f"reaches (see /etc/hosts): give an address or interface, as in 'ip -4 -brief address'"
            ]
        )
    if role == "switch":
        return set_keys(text, "switch", {"address": found.address})
    if role != "manager":
        text = set_keys(text, "node", {"listen": f"{wanted.host}:{wanted.port}"})
    if coordinates(role, answers):
        # others are told an address, not the interface that has it here
        text = set_keys(text, "control", {"listen": f"{found.address}:{COORDINATOR_PORT}"})
    return text


def coordinator_of(roles: Sequence[Role], answers: Answers) -> str | None:
    """Where nodes of this host find their coordinator: as said, or with one that is installed beside them."""
    if answers.coordinator is not None or answers.listen is None:
        return answers.coordinator
    if not any(coordinates(role, answers) for role in roles):
        return None
    try:
        address = resolve(parse_host_port(answers.listen, default_port=0)).address
    except (ValueError, AddressError):
        return None
    return f"{address}:{COORDINATOR_PORT}"


class Installation:
    """The steps that bring ``roles`` onto a host whose files are below ``root``."""

    def __init__(
        self,
        roles: Sequence[Role],
        answers: Answers,
        root: Path = Path("/"),
        environment: Environment | None = None,
    ) -> None:
        self.roles = tuple(roles)
        self.answers = answers
        self.root = root
        self.environment = Environment.own() if environment is None else environment
        self.refusals: list[str] = []

    def steps(self, *, start: bool = True, kernels: bool = True) -> list[Step]:
        """All steps, those that are taken already among them. Fills :attr:`refusals`: with one of them none must be taken."""
        self.refusals = list(self.environment.obstacles())
        if self.answers.name is not None and len(self.roles) > 1:
            self.refusals.append("--name is of one daemon: install roles one by one")
        if self.root == Path("/") and os.geteuid() != 0:
            self.refusals.append("this changes /etc: run it as root, or with --prefix DIRECTORY for an image")
        files = [step for role in self.roles for step in self._files(role)]
        files = list({step.path: step for step in files}.values())
        self.refusals = list(dict.fromkeys(self.refusals))
        link = Link(self.root / LINKS / "ina", self.environment.programs / "ina")
        if link.path.exists() and not link.path.is_symlink():
            self.refusals.append(f"{link.path} is a program of its own: remove it first")
        steps: list[Step] = [*files, link, self._manual()]
        if kernels:
            from inanet.service.kernels import is_prepared

            steps.append(
                Run((str(self.environment.programs / "ina"), "kernels"), needed=not is_prepared(["all"]))
            )
        return [*steps, *self._services(files, start)]

    def _manual(self) -> "Files":
        """Manual pages, and what shells complete commands with."""
        texts = {**manual.pages(cli), **manual.completions(cli)}
        files = [Write(self.root / SHARE / path, text.encode()) for path, text in texts.items()]
        return Files("manual pages and shell completion", self.root / SHARE, tuple(files))

    def _services(self, files: Sequence[Write], start: bool) -> Iterator[Step]:
        units = [f"{PROGRAMS[role]}.service" for role in self.roles]
        if self.root != Path("/"):
            yield Run(("systemctl", f"--root={self.root}", "enable", *units))
            return
        changed = {step.path for step in files if not step.done()}
        yield Run(("systemctl", "daemon-reload"), any(path.suffix == ".service" for path in changed))
        yield Run(("systemctl", "enable", *units), not all(_says("is-enabled", unit) for unit in units))
        for role, unit in zip(self.roles, units, strict=True):
            mine = {
                self.root / UNITS / unit,
                *(self.root / CONFIG / name for name in (f"{role}.toml", f"{role}.pem", "ca.pem", "token")),
            }
            if start:
                # also those that run: with a file or a program that is no longer theirs
                yield Run(
                    ("systemctl", "restart", unit), bool(mine & changed) or not _says("is-active", unit)
                )

    def _files(self, role: Role) -> Iterator[Write]:
        """Configuration, credentials and unit of a role, the files that daemons need before the one that starts them."""
        credentials = list(self._credentials(role))
        yield from credentials
        path = self.root / CONFIG / f"{role}.toml"
        answers = self.answers
        if (coordinator := coordinator_of(self.roles, answers)) and not coordinates(role, answers):
            answers = replace(answers, coordinator=coordinator)
        try:
            text = configured(role, self.roles, answers, path.read_text() if path.exists() else None)
            self._validate(role, path, text, credentials)
        except ValueError as error:
            self.refusals.append(f"{path}: {error}")
        except Failure as error:
            self.refusals += str(error).splitlines()
        else:
            yield Write(path, text.encode())
        yield Write(
            self.root / UNITS / f"{PROGRAMS[role]}.service",
            unit_text(role, self.environment.programs).encode(),
        )

    def _credentials(self, role: Role) -> Iterator[Write]:
        wanted: list[tuple[Path, str, bool]] = []
        if (directory := self.answers.keys) is not None:
            own = directory / f"{self._name(role)}.pem"
            wanted += [(directory / "ca.pem", "ca.pem", False), (own, f"{role}.pem", True)]
        if self.answers.token_file is not None:
            wanted.append((self.answers.token_file, "token", True))
        for source, name, secret in wanted:
            try:
                yield Write(self.root / CONFIG / name, source.read_bytes(), secret)
            except FileNotFoundError:
                hint = (
                    f": make it with 'ina keys issue {source.parent} {source.stem}'"
                    if name.endswith(".pem")
                    else ""
                )
                self.refusals.append(f"{source}: no such file{hint}")
            except OSError as error:
                self.refusals.append(f"{source}: {error.strerror}")

    def _name(self, role: Role) -> str:
        """The node's name: as said, as in its file, or as a new file will have it."""
        if self.answers.name is not None:
            return self.answers.name
        path = self.root / CONFIG / f"{role}.toml"
        if path.exists():
            named = read_toml(path).get("node", {}).get("name")
            if isinstance(named, str):
                return named
        host = socket.gethostname().partition(".")[0]
        return host if len(self.roles) == 1 else f"{host}-{role}"

    def _validate(self, role: Role, path: Path, text: str, credentials: Sequence[Write]) -> None:
        """As the daemon will read it. Raises :class:`ConfigError`, also for a certificate that is not the daemon's."""
        with tempfile.TemporaryDirectory() as folder:
            for step in credentials:
                Path(folder, step.path.name).write_bytes(step.content)
            for name in ("ca.pem", f"{role}.pem", "key.pem", "token"):
                there = self.root / CONFIG / name
                if there.exists() and not Path(folder, name).exists():
                    shutil.copy(there, folder)
            variables = {**unit_variables(role), "CREDENTIALS_DIRECTORY": folder}
            config = validate(MODELS[role], tomllib.loads(text), path, variables=variables)
            if wrong := certificate_problems(role, config):
                raise ConfigError(path, wrong)
        coordinator = getattr(config.control, "coordinator", None)
        if isinstance(coordinator, HostPort) and not coordinator.path:
            try:
                resolve(coordinator)
            except AddressError as error:
                raise InstallError([f"{path}: control.coordinator: {error}"]) from None


def removal(roles: Sequence[Role], root: Path, *, purge: bool) -> list[Step]:
    """The steps that take roles away again; ``purge``: with their files in /etc/inanet and what the daemons kept."""
    left = [role for role in installed(root) if role not in roles]
    units = [
        f"{PROGRAMS[role]}.service" for role in roles if (root / UNITS / f"{PROGRAMS[role]}.service").exists()
    ]
    steps: list[Step] = []
    if units and root == Path("/"):
        steps.append(Run(("systemctl", "disable", "--now", *units)))
    elif units:
        steps.append(Run(("systemctl", f"--root={root}", "disable", *units)))
    if purge and units and root == Path("/"):
        # caches and state, which systemd knows the places of
        steps.append(Run(("systemctl", "clean", "--what=all", *units)))
    steps += [Remove(root / UNITS / unit) for unit in units]
    if not left:
        steps.append(Remove(root / LINKS / "ina"))
        paths = (*manual.pages(cli), *manual.completions(cli))
        removals = tuple(Remove(root / SHARE / path) for path in paths)
        steps.append(Files("manual pages and shell completion", root / SHARE, removals))
    if purge:
        steps += [Remove(root / CONFIG / f"{role}{suffix}") for role in roles for suffix in (".toml", ".pem")]
        if not left:
            steps += [Remove(root / CONFIG / name) for name in ("ca.pem", "token")]
    if units and root == Path("/"):
        steps.append(Run(("systemctl", "daemon-reload")))
    return steps


def _says(question: str, unit: str) -> bool:
    try:
        return subprocess.run(["systemctl", "--quiet", question, unit], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
